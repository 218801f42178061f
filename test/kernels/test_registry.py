"""The registry: order, reasons, the hint for a wrong name, caching, and one log line a choice."""

import logging
import re

import pytest
import torch

from torchq.errors import ConfigError, UnsupportedError
from torchq.kernels import BACKENDS, announce, load, quantize, registry, select, supported, twin
from torchq.keys import QUANT_KEYS, QuantKey

FP8 = QUANT_KEYS["fp8_per_channel_static"]
TOKEN = QuantKey.from_name("fp8_per_token", "activation")
INT8, INT8_TOKEN = QUANT_KEYS["int8_per_channel_static"], QUANT_KEYS["int8_per_token"]


class Fake:
    """A backend that serves one operation, and counts how often it is asked."""

    def __init__(self, name, op):
        self.name, self.op, self.asked = name, op, 0

    def unusable(self, op, weight, activation, device):
        self.asked += 1
        return None if op == self.op else f"it serves {self.op} only"

    def quantize(self, x, key, rounding, global_scale, error):
        return twin.quantize(x, key, rounding, global_scale, error)


@pytest.fixture
def fakes(monkeypatch):
    """Two backends, 'first' for quantize and 'second' for linear, in place of the real ones."""
    backends = {"first": Fake("first", "quantize"), "second": Fake("second", "linear")}
    monkeypatch.setattr(registry, "BACKENDS", dict.fromkeys(backends, "module"))
    monkeypatch.setattr(registry, "load", lambda name: backends[name])
    select.cache_clear()
    yield backends
    select.cache_clear()


def test_the_twin_is_last_and_serves_everything():
    assert list(BACKENDS)[-1] == "torch"
    for op in ("quantize", "dequantize", "linear", "moe"):
        for device in ("cpu", "cuda", "mps", "meta"):
            assert select(op, FP8, TOKEN, device, "torch").name == "torch"


def test_every_backend_has_its_name():
    assert {name: load(name).name for name in BACKENDS} == {name: name for name in BACKENDS}


def test_the_first_that_can_run_is_taken(fakes, caplog):
    caplog.set_level(logging.DEBUG, "torchq")
    assert select("quantize", FP8, None, "cpu").name == "first"
    assert not caplog.messages
    assert select("linear", FP8, TOKEN, "cpu").name == "second"
    assert caplog.messages == [
        "backend first turned down for linear of weight fp8_per_channel_static with activation fp8_per_token: "
        "it serves quantize only"
    ]


def test_the_choice_is_cached(fakes):
    chosen = [select("linear", FP8, TOKEN, "cpu") for _ in range(5)]
    assert len({id(c) for c in chosen}) == 1 and fakes["first"].asked == fakes["second"].asked == 1
    select("linear", FP8, None, "cpu")
    assert fakes["second"].asked == 2


def test_nothing_that_can_run_gives_every_reason(fakes):
    with pytest.raises(UnsupportedError) as error:
        select("moe", FP8, None, "cpu")
    assert str(error.value) == (
        "no backend for moe of weight fp8_per_channel_static with activation None on cpu: "
        "first: it serves quantize only; second: it serves linear only"
    )


def test_one_asked_for_by_name_is_not_replaced(fakes):
    assert select("linear", FP8, None, "cpu", "second").name == "second"
    with pytest.raises(UnsupportedError) as error:
        select("linear", FP8, None, "cpu", "first")
    assert str(error.value) == (
        "no backend for linear of weight fp8_per_channel_static with activation None on cpu: "
        "first: it serves quantize only; usable here: auto, second"
    )


def test_the_op_goes_to_the_backend_it_was_asked_of(fakes):
    assert torch.equal(quantize(torch.ones(2, 4), FP8).scale, twin.quantize(torch.ones(2, 4), FP8).scale)
    assert fakes["first"].asked == 1
    with pytest.raises(UnsupportedError, match="no backend for quantize of weight fp8_per_channel_static"):
        quantize(torch.ones(2, 4), FP8, backend="second")


@pytest.mark.parametrize("name, hint", [("torchoa", r" \(did you mean 'torchao' or 'torch'\?\)"), ("zzz", "")])
def test_an_unknown_name_gets_a_suggestion(name, hint):
    known = re.escape(", ".join(BACKENDS))
    with pytest.raises(ConfigError, match=f"^unknown backend '{name}'{hint}; known: auto, {known}$"):
        select("linear", FP8, None, "cpu", name)
    with pytest.raises(ConfigError, match="unknown backend"):
        load(name)


@pytest.mark.parametrize(
    "op, weight, activation, device, reason",
    [
        ("linear", INT8, INT8_TOKEN, "cpu", None),
        ("linear", INT8, None, "cpu", "it serves int8_per_channel_static with int8_per_token, and fp8_per_channel"),
        ("linear", FP8, INT8_TOKEN, "cpu", "it serves int8_per_channel_static with int8_per_token"),
        ("linear", FP8, TOKEN, "cpu", "its fp8 matmul runs on cuda, not cpu"),
        ("linear", INT8, INT8_TOKEN, "mps", "its kernels run on cpu and cuda, not mps"),
        ("quantize", INT8, None, "cpu", "it serves linear only, not quantize"),
        ("moe", INT8, INT8_TOKEN, "cpu", "it serves linear only, not moe"),
    ],
)
def test_torchao_says_what_it_cannot_do(op, weight, activation, device, reason):
    found = load("torchao").unusable(op, weight, activation, device)
    assert found is None if reason is None else found.startswith(reason)


def test_torchao_that_is_not_installed_says_how(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert load("torchao").unusable("linear", INT8, INT8_TOKEN, "cpu") == (
        "torchao is not installed (pip install torchao)"
    )


def test_a_choice_is_announced_once(caplog):
    caplog.set_level(logging.INFO, "torchq")
    announce.cache_clear()
    for _ in range(3):
        announce("torch", "linear", FP8, TOKEN)
        announce("torch", "moe", QUANT_KEYS["mxfp4"], None)
    announce("torch", "linear", QuantKey.from_name("e4m3/f32/1x64/static"), None)
    assert caplog.messages == [
        "Using 'torch' Fp8 linear backend.",
        "Using 'torch' Mxfp4 MoE backend.",
        "Using 'torch' E4m3 linear backend.",
    ]
    announce.cache_clear()


def test_supported_lists_the_twin_for_every_pair():
    rows = supported("cpu")
    assert rows and all(row.backends[-1] == "torch" and row.device == "cpu" for row in rows)
    assert all(not set(row.backends) & set(row.unusable) for row in rows)
    assert all({*row.backends, *row.unusable} == set(BACKENDS) for row in rows)
    int8 = next(r for r in rows if r.kind == "linear" and (r.weight, r.activation) == (INT8, INT8_TOKEN))
    assert "torchao" in int8.backends
