"""Whisper is converted right: a forward is repeatable, reads the audio, and predicts speech-like tokens."""

import torch

from torchq.zoo import whisper as zoo_whisper


@torch.no_grad()
def test_logits_are_finite_repeatable_and_depend_on_the_audio(whisper):
    model, extractor = whisper
    inputs = zoo_whisper.inputs(extractor)
    logits = model(**inputs).logits
    assert logits.shape == (1, 10, 51864)
    assert logits.isfinite().all()
    assert torch.equal(logits, model(**zoo_whisper.inputs(extractor)).logits)
    silence = model(input_features=torch.zeros_like(inputs["input_features"]), **_decoder(inputs)).logits
    assert (logits - silence).abs().max() > 1


@torch.no_grad()
def test_decoder_is_a_language_model(whisper):
    """Whatever it hears, " want" is followed by " to" rather than by most of 51864 tokens."""
    model, extractor = whisper
    inputs = zoo_whisper.inputs(extractor)
    inputs["decoder_input_ids"] = torch.tensor([[50257, 50362, 314, 765]])  # " I want"
    ranks = model(**inputs).logits[0, -1].argsort(descending=True).tolist()
    assert ranks.index(284) < 5  # " to"


def _decoder(inputs):
    return {"decoder_input_ids": inputs["decoder_input_ids"]}
