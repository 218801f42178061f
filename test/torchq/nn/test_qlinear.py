"""QuantLinear as a module: casts, devices, state dicts, copies, autocast, compile."""

import copy
import io
import pickle

import pytest
import torch
from expecttest import assert_expected_inline
from safetensors.torch import load_file, save_file
from torch import nn
from torch._dynamo.testing import CompileCounter

from torchq.kernels import linear, quantize, twin
from torchq.keys import QUANT_KEYS, QuantKey, key_names
from torchq.nn import QuantLinear
from torchq.transforms.hadamard import hadamard

WEIGHTS = key_names("weight")
BUFFERS = ("codes", "scale", "global_scale")
every_weight = pytest.mark.parametrize("name", WEIGHTS)


def layer_of(name="mxfp8", rows=8, columns=64, activation=None, bias=True, size=None, seed=0, **options):
    """A QuantLinear on the twin, of a seeded weight that is rotated with ``size``."""
    w = weight_of(rows, columns, seed)
    q = quantize(w if size is None else hadamard(w, size), name, backend="torch")
    bias = nn.Parameter(torch.linspace(-1, 1, rows)) if bias else None
    activation = None if activation is None else QuantKey.from_name(activation, "activation")
    return QuantLinear(q, bias, activation=activation, hadamard_size=size, backend="torch", **options)


def weight_of(rows=8, columns=64, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def input_of(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(layer):
    """The quantized buffers as (shape, dtype, bytes)."""
    buffers = {name: getattr(layer, name) for name in BUFFERS}
    return {
        name: (tuple(t.shape), t.dtype, t.contiguous().view(-1).view(torch.uint8).tolist())
        for name, t in buffers.items()
        if t is not None
    }


def assert_same_layer(a, b):
    assert stored(a) == stored(b) and a.weight.dtype == b.weight.dtype and repr(a) == repr(b)
    assert (a.bias is None) == (b.bias is None)
    assert a.bias is None or (torch.equal(a.bias, b.bias) and a.bias.requires_grad == b.bias.requires_grad)
    x = input_of(3, a.in_features)
    assert torch.equal(a(x.to(a.weight.dtype)), b(x.to(b.weight.dtype)))


@every_weight
@pytest.mark.parametrize("columns", [64, 33, 6, 123])
def test_it_multiplies_by_the_weight_it_shows(name, columns):
    layer, x = layer_of(name, columns=columns), input_of(2, 3, columns)
    assert layer.weight.shape == (8, columns) and (layer.out_features, layer.in_features) == (8, columns)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
    q = quantize(weight_of(columns=columns), name, backend="torch")
    assert torch.equal(layer.weight, twin.dequantize(q))


@every_weight
@pytest.mark.parametrize(
    "cast, dtype",
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.half().float(), torch.float32),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.to("cpu", torch.float16, non_blocking=True), torch.float16),
        (lambda m: nn.Sequential(m).to(torch.bfloat16)[0], torch.bfloat16),
        (lambda m: m.type(torch.float16), torch.float16),
    ],
)
def test_casts_change_what_the_weight_reads_as_and_no_code_or_scale(name, cast, dtype):
    layer = layer_of(name)
    before, values = stored(layer), layer.weight
    layer = cast(layer)
    assert stored(layer) == before
    assert layer.weight.dtype == layer.bias.dtype == dtype and torch.equal(layer.weight, values.to(dtype))
    assert layer(input_of(2, 64, dtype=dtype)).dtype == dtype


def test_to_meta_and_back_by_assignment():
    layer = layer_of("nvfp4")
    state, before = layer.state_dict(), stored(layer)
    empty = copy.deepcopy(layer).to("meta")
    assert {t.device.type for t in (*empty.parameters(), *empty.buffers())} == {"meta"}
    assert {n: (tuple(t.shape), t.dtype) for n, t in empty.state_dict().items()} == {
        n: (tuple(t.shape), t.dtype) for n, t in state.items()
    }
    empty.load_state_dict(state, assign=True)
    assert stored(empty) == before
    real = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    real.load_state_dict(state)
    assert_same_layer(real, layer)


def test_a_cast_that_fails_leaves_the_layer_as_it_was():
    layer = layer_of("nvfp4")
    before = stored(layer)

    def fail(tensor):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        layer._apply(fail)
    assert stored(layer) == before


@every_weight
def test_the_state_dict_is_codes_scales_and_bias(name):
    layer, other = layer_of(name), layer_of(name, seed=5)
    state = layer.state_dict()
    assert list(state) == ["bias", "codes", "scale", *(["global_scale"] if QUANT_KEYS[name].global_scale else [])]
    assert stored(other) != stored(layer)
    assert str(other.load_state_dict(state, strict=True)) == "<All keys matched successfully>"
    assert_same_layer(other, layer)


def bytes_of(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    "name, buffer, wrong, text",
    [
        ("mxfp8", "codes", bytes_of(8, 64), "up.codes is torch.uint8 in the state dict, but torch.float8_e4m3fn in a"),
        ("mxfp8", "scale", torch.ones(8, 2), "up.scale is torch.float32 in the state dict, but torch.uint8 in a mxfp8"),
        ("nvfp4", "scale", bytes_of(8, 4), "up.scale is torch.uint8 in the state dict, but torch.float8_e4m3fn in a"),
        ("nvfp4", "global_scale", torch.ones((), dtype=torch.bfloat16), "up.global_scale is torch.bfloat16"),
        ("mxfp4", "codes", bytes_of(8, 64), "size mismatch for up.codes.*8, 64.*8, 32"),
        ("mxfp4", "scale", bytes_of(8, 4), "size mismatch for up.scale"),
        ("mxfp4", "codes", None, 'Missing key.*"up.codes"'),
        ("nvfp4", "global_scale", None, 'Missing key.*"up.global_scale"'),
        ("mxfp4", "weight", torch.zeros(8, 64), 'Unexpected key.*"up.weight"'),
        ("mxfp4", "global_scale", torch.ones(()), 'Unexpected key.*"up.global_scale"'),
    ],
)  # fmt: skip
def test_a_state_dict_that_does_not_fit_says_so(name, buffer, wrong, text):
    model = nn.ModuleDict({"up": layer_of(name)})
    before, state = stored(model["up"]), model.state_dict()
    state.pop(f"up.{buffer}", None)
    if wrong is not None:
        state[f"up.{buffer}"] = wrong
    with pytest.raises(RuntimeError, match=f"(?s){text}"):
        model.load_state_dict(state)
    after = stored(model["up"])
    assert list(after) == list(before) and (buffer not in before or after[buffer] == before[buffer])


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: _saved_and_loaded(m),
    "share_memory": lambda m: copy.deepcopy(m).share_memory(),
}


def _saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_weight
@pytest.mark.parametrize("way", COPIES)
def test_copies(name, way):
    layer = layer_of(name, activation="mxfp8", size=32).bfloat16().eval()
    layer.bias.requires_grad_(False)
    other = COPIES[way](layer)
    assert_same_layer(other, layer)
    assert not other.training and other.codes.data_ptr() != layer.codes.data_ptr()
    assert stored(other.half()) == stored(layer)
    if way == "share_memory":
        assert other.codes.is_shared() and other.scale.is_shared()


@every_weight
def test_safetensors_and_weights_only_files(name, tmp_path):
    layer, other = layer_of(name), layer_of(name, seed=7)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert_same_layer(other, layer)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = layer_of(name, seed=8)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert_same_layer(other, layer)


@every_weight
@pytest.mark.parametrize("activation", [None, "fp8_per_token"])
def test_hadamard_layers_show_the_weight_that_is_not_rotated(name, activation):
    layer, w = layer_of(name, size=32, activation=activation), weight_of()
    assert (layer.weight - w).norm() < 0.2 * w.norm()
    torch.testing.assert_close(hadamard(layer.weight, 32), twin.dequantize(layer.quantized), rtol=1e-5, atol=1e-5)
    x = input_of(3, 64)
    want = linear(hadamard(x, 32), layer.quantized, layer.bias, layer.activation, backend="torch")
    assert torch.equal(layer(x), want)
    if activation is None:
        torch.testing.assert_close(want, nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-4)
    assert layer.bfloat16().weight.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [None, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype(dtype, size):
    layer, x = layer_of("fp8_per_channel_static", activation="fp8_per_token", size=size), input_of(3, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        out = layer(x)
    assert out.dtype == dtype and torch.equal(out, layer(x.to(dtype)))
    with torch.autocast("cpu", dtype, enabled=False):
        assert layer(x).dtype == torch.float32


def test_training_and_gradients():
    layer = layer_of(bias=True)
    assert layer.training and not layer.eval().training and layer.train().training
    x = input_of(3, 64).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, 64))
    assert torch.equal(layer.bias.grad, torch.full((8,), 3.0))
    assert [n for n, _ in layer.named_parameters()] == ["bias"] and not layer.weight.requires_grad
    layer.bias.requires_grad_(False)
    assert not layer.to(torch.bfloat16).bias.requires_grad


def test_the_weight_is_a_copy():
    layer = layer_of()
    layer.weight.zero_()
    assert layer.weight.any()
    with pytest.raises(AttributeError):
        layer.weight = torch.zeros(8, 64)


def test_repr():
    assert_expected_inline(
        repr(nn.ModuleList([layer_of(), layer_of("nvfp4", bias=False, activation="mxfp4", size=8)])),
        """\
ModuleList(
  (0): QuantLinear(in_features=64, out_features=8, bias=True, weight=mxfp8, activation=None)
  (1): QuantLinear(in_features=64, out_features=8, bias=False, weight=nvfp4, activation=mxfp4, hadamard_size=8)
)""",
    )


@pytest.mark.parametrize("size", [None, 32])
@pytest.mark.parametrize("grad", [False, True])
def test_layers_of_one_class_compile_once(size, grad):
    layers = [layer_of("mxfp8", 64, 64, "mxfp8", size=size, seed=i, dtype=torch.bfloat16) for i in range(4)]
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(lambda layer, x: layer(x), fullgraph=True, dynamic=True, backend=counter)
    with torch.set_grad_enabled(grad):
        for i, layer in enumerate(layers):
            x = input_of(i + 2, 64, seed=i)
            torch.testing.assert_close(compiled(layer, x), layer(x), rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1
