"""The metrics on models and tensors whose answers are known."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchq.zoo.measure import allocated_peak, logits_sqnr, perplexity


class Copycat(nn.Module):
    """Predicts that a token repeats, with the given logit against zeros for the other seven."""

    def __init__(self, logit):
        super().__init__()
        self.logit = logit

    def forward(self, ids):
        return SimpleNamespace(logits=nn.functional.one_hot(ids, 8) * self.logit)


def test_perplexity_of_a_uniform_model_is_the_vocabulary():
    assert perplexity(Copycat(0.0), torch.arange(12) % 8, window=4, windows=3) == pytest.approx(8)


def test_perplexity_counts_only_within_windows():
    ids = torch.tensor([[3, 3, 3, 5, 5, 5]])  # a repeat everywhere but across the two windows
    assert perplexity(Copycat(100.0), ids, window=3, windows=2) == pytest.approx(1)
    assert perplexity(Copycat(2.0), ids, window=3, windows=2) == pytest.approx(1 + 7 * math.exp(-2))


def test_perplexity_refuses_too_few_ids():
    with pytest.raises(ValueError, match="4 windows of 512 tokens need 2048 ids, got 100"):
        perplexity(Copycat(0.0), torch.zeros(1, 100, dtype=torch.int64))


def test_sqnr():
    reference = torch.tensor([3.0, 4.0])
    assert logits_sqnr(reference, reference) == math.inf
    assert logits_sqnr(reference, reference * 0.9) == pytest.approx(20, abs=1e-4)
    assert logits_sqnr(reference.bfloat16(), torch.zeros(2)) == pytest.approx(0)


def test_allocated_peak_sees_what_is_held_at_once():
    value, peak = allocated_peak(lambda: sum(torch.ones(4 << 20, dtype=torch.uint8) for _ in range(3)))
    assert value[0] == 3 and 8 << 20 <= peak <= 24 << 20
