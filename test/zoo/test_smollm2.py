"""SmolLM2 is loaded right: it knows its capitals, and its perplexity is the known one."""

import pytest
import torch

from torchq.zoo import smollm2 as zoo_smollm2
from torchq.zoo.measure import perplexity


def test_answers_paris(smollm2):
    model, tokenizer = smollm2
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])


def test_perplexity_on_wikipedia(smollm2, wikipedia):
    model, tokenizer = smollm2
    ids = tokenizer(wikipedia[:12000], return_tensors="pt")["input_ids"]
    assert perplexity(model, ids) == pytest.approx(20.501, rel=0.001)  # 2044 predicted tokens; 18.830 for 8 windows


def test_is_an_ordinary_dense_model(smollm2, tmp_path):
    model, _ = smollm2
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")


def test_tokenizer_splits_digits_and_has_the_chat_template(smollm2):
    _, tokenizer = smollm2
    assert tokenizer.tokenize("12345") == list("12345")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert tokenizer("<|im_end|>")["input_ids"] == [2]


def test_changing_a_loaded_model_leaves_the_cache_alone(smollm2):
    changed, _ = zoo_smollm2.load(layers=1)
    with torch.no_grad():
        changed.model.norm.weight.zero_()
    again, _ = zoo_smollm2.load(layers=1)
    assert torch.equal(again.model.norm.weight, smollm2[0].model.norm.weight)


def test_first_layers_in_bfloat16(smollm2):
    model, _ = zoo_smollm2.load(torch.bfloat16, layers=2)
    assert len(model.model.layers) == model.config.num_hidden_layers == 2
    assert model.dtype == torch.bfloat16
    expected = smollm2[0].model.layers[1].mlp.up_proj.weight.bfloat16()
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, expected)
