"""Tiny models without experts: the plain ones, and those a swap of every nn.Linear breaks."""

from torch import Tensor, nn

from torchq.zoo.tiny.entry import HIDDEN, LLAMA, QWEN3, SIZE, SPECIAL, T5, TOKENS, VOCAB, Tiny, floats, hf, two_sides


class SelfAttention(nn.Module):
    """torch's own attention module, whose out_proj is a subclass of nn.Linear that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, src: Tensor) -> Tensor:
        return self.head(self.attention(src, src, src, need_weights=False)[0])


class Encoder(nn.Module):
    """torch's own encoder layer, whose fast path reads the weights of its linears without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(HIDDEN, 4, dim_feedforward=128, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, src: Tensor) -> Tensor:
        return self.head(self.layer(src))


_MAMBA = {**SIZE, **SPECIAL, "state_size": 16}

DENSE = {
    "llama": hf("LlamaForCausalLM", "LlamaConfig", **LLAMA),
    "qwen2": hf("Qwen2ForCausalLM", "Qwen2Config", **LLAMA),
    "qwen3": hf("Qwen3ForCausalLM", "Qwen3Config", **QWEN3),
}

# Models in which replacing every nn.Linear, or every nn.Linear by type, goes wrong in some way.
AWKWARD = {
    # Conv1D instead of nn.Linear
    "gpt2": hf("GPT2LMHeadModel", "GPT2Config", **SPECIAL, vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4),
    "openai_gpt": hf("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4),
    # a subclass of nn.Linear
    "falcon": hf("FalconForCausalLM", "FalconConfig", **SIZE, **SPECIAL, num_attention_heads=4),
    # read .weight of a linear
    "t5": hf("T5ForConditionalGeneration", "T5Config", two_sides, **T5, d_ff=128),
    "mamba": hf("MambaForCausalLM", "MambaConfig", **_MAMBA, time_step_rank=64),
    "mamba2": hf("Mamba2ForCausalLM", "Mamba2Config", **_MAMBA, num_heads=8, head_dim=16, n_groups=1, chunk_size=8),
    "falcon_mamba": hf("FalconMambaForCausalLM", "FalconMambaConfig", **_MAMBA, time_step_rank=64),
    "rwkv": hf("RwkvForCausalLM", "RwkvConfig", **SIZE, **SPECIAL, attention_hidden_size=HIDDEN, context_length=128),
    "mobilebert": hf(
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        **SIZE | {"hidden_size": 128},
        embedding_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        intra_bottleneck_size=64,
        true_hidden_size=64,
    ),
    "wavlm": hf(
        "WavLMModel",
        "WavLMConfig",
        floats("input_values", 1, 4000),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(64, 64),
        conv_kernel=(10, 8),
        conv_stride=(8, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    ),
    # weights under several names: layers, or decoder and embedding
    "albert": hf(
        "AlbertForMaskedLM",
        "AlbertConfig",
        **SIZE,
        embedding_size=64,
        intermediate_size=128,
        num_attention_heads=4,
    ),
    "bert": hf("BertForMaskedLM", "BertConfig", **SIZE, intermediate_size=128, num_attention_heads=4),
    # torch's own
    "multihead_attention": Tiny(SelfAttention, floats("src", *TOKENS, HIDDEN)),
    "encoder_layer": Tiny(Encoder, floats("src", *TOKENS, HIDDEN)),
}
