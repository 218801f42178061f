"""Real weights: a language model, a sentence encoder, a speech model, and one that shares a physical layer."""

import copy

import pytest
import torch

from torchq import QuantSpec, quantize_
from torchq.zoo import albert as zoo_albert
from torchq.zoo import minilm as zoo_minilm
from torchq.zoo import whisper as zoo_whisper
from torchq.zoo.measure import logits_sqnr, perplexity

# From the least error to the most; the weights alone, so that the order is that of the formats.
BY_ERROR = ("int8_per_channel_static", "fp8_per_channel_static", "mxfp8", "nvfp4", "mxfp4")
SENTENCES = ["A man is eating food.", "The weather is lovely today.", "He drove to the stadium.", "Prices rose again."]


def weight_only(key):
    return {"linear": QuantSpec(weight=key, activation=None)}


def test_minilm_keeps_its_embeddings_in_the_order_of_the_formats(minilm):
    model, tokenizer = minilm
    reference = zoo_minilm.embed(model, tokenizer, SENTENCES)
    cosines, noise = [], []
    for key in BY_ERROR:
        quantized = copy.deepcopy(model)
        report = quantize_(quantized, weight_only(key))
        assert len(report.quantized) == 37
        noise.append(sum(row.sqnr for row in report.quantized) / 37)
        cosines.append((zoo_minilm.embed(quantized, tokenizer, SENTENCES) * reference).sum(1).mean().item())
    assert noise == sorted(noise, reverse=True) and cosines == sorted(cosines, reverse=True)
    assert cosines[0] > 0.999 and cosines[-1] > 0.93


def test_whisper_runs_with_its_head_tied(whisper):
    model, extractor = whisper
    inputs = zoo_whisper.inputs(extractor)
    with torch.no_grad():
        reference = model(**inputs).logits
        quantized = copy.deepcopy(model)
        report = quantize_(quantized, "mxfp8")
        logits = quantized(**inputs).logits
    assert [row.name for row in report.skipped] == ["proj_out"]
    assert logits_sqnr(reference, logits) > 15
    first, second = reference.topk(2).values.unbind(-1)
    decided = first - second > 0.7  # the tokens are no sentence, and many of its choices are near ties
    assert decided.sum() >= 4 and (logits.argmax(-1) == reference.argmax(-1))[decided].all()


def test_albert_quantizes_the_layer_it_calls_twelve_times_once(albert):
    model, tokenizer = albert
    quantized = copy.deepcopy(model)
    report = quantize_(quantized, "mxfp8")
    shared = [row for row in report.quantized if "albert_layer_groups.0.albert_layers.0" in row.name]
    assert len(shared) == 6
    assert zoo_albert.masked_accuracy(quantized, tokenizer) >= zoo_albert.masked_accuracy(model, tokenizer) - 2 / 21


def test_smollm2_stays_the_language_model_that_it_was(smollm2, wikipedia):
    model, tokenizer = smollm2
    tokens = tokenizer(wikipedia[:6000], return_tensors="pt")["input_ids"]
    reference = perplexity(model, tokens, windows=2)
    found = {}
    for key in ("fp8_per_channel_static", "mxfp8", "mxfp4"):
        quantized = copy.deepcopy(model)
        assert len(quantize_(quantized, weight_only(key)).quantized) == 210
        found[key] = perplexity(quantized, tokens, windows=2) / reference
    assert found["fp8_per_channel_static"] < 1.02 and found["mxfp8"] < 1.04
    assert max(found["fp8_per_channel_static"], found["mxfp8"]) < found["mxfp4"] < 1.7


@pytest.mark.parametrize("config", ["mxfp8", "int8_per_channel"])
def test_bf16_models_generate(smollm2, config):
    model, tokenizer = smollm2
    quantized = copy.deepcopy(model).to(torch.bfloat16)
    quantize_(quantized, config)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        answer = quantized.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
