"""kernels.linear: every pair against f64, gradients, torch.compile, opcheck, autocast, and torchao's matmul."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from torchq import kernels
from torchq.errors import UnsupportedError
from torchq.kernels import linear, twin
from torchq.keys import QUANT_KEYS, QuantKey, key_names

WEIGHTS = key_names("weight")
ACTIVATIONS = (None, *key_names("activation"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def weight_of(name, rows=24, columns=96, seed=0):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return twin.quantize(w, QUANT_KEYS[name])


def input_of(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def activation_of(name):
    return None if name is None else QuantKey.from_name(name, "activation")


def exact(x, q, bias=None, activation=None):
    """The f64 result, and for each entry the sum of |x||w| that bounds the error of its accumulation."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if activation is None else twin.dequantize(twin.quantize(rows, activation), torch.float64)
    rows, w = rows.double(), twin.dequantize(q, torch.float64)
    out, size = rows @ w.T, rows.abs() @ w.abs().T
    if bias is not None:
        out, size = out + bias.double(), size + bias.abs().double()
    shape = (*x.shape[:-1], q.shape[0])
    return out.view(shape), size.view(shape)


def assert_near(got, want, size, dtype):
    """Within the order of f32 accumulation and one rounding to dtype."""
    accumulation = 1e-12 if dtype == torch.float64 else 3e-6
    bound = accumulation * size + torch.finfo(dtype).eps / 2 * 1.01 * want.abs() + 1e-30
    worst = ((got.double() - want).abs() - bound).max().item() if got.numel() else 0.0
    assert got.dtype == dtype and got.shape == want.shape and worst <= 0, f"{worst=}"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_every_pair_is_the_product_of_dequantized_values(weight, activation):
    q, activation = weight_of(weight), activation_of(activation)
    for dtype in DTYPES:
        x, bias = input_of(5, 96, dtype=dtype), input_of(24, seed=2, dtype=dtype)
        assert_near(linear(x, q, bias, activation, backend="torch"), *exact(x, q, bias, activation), dtype)
    x = input_of(2, 3, 1, 96)
    assert_near(linear(x, q, None, activation, backend="torch"), *exact(x, q, None, activation), torch.float32)


@pytest.mark.parametrize("shape", [(1, 1), (6, 33), (33, 6), (5, 123), (3, 431)])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_awkward_shapes(weight, shape):
    q, x = weight_of(weight, *shape), input_of(3, shape[1])
    assert_near(linear(x, q, backend="torch"), *exact(x, q), torch.float32)
    wide = torch.stack((x, -x), -1).flatten(1)[:, ::2]  # not contiguous
    assert torch.equal(linear(wide, q, backend="torch"), linear(x, q, backend="torch"))
    assert torch.equal(linear(x[0], q, backend="torch"), linear(x[:1], q, backend="torch")[0])


@pytest.mark.parametrize("activation", [None, "fp8_per_token", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("grad", [False, True])
def test_no_tokens_and_no_features(activation, grad):
    q, bias = weight_of("mxfp8"), torch.ones(24)
    for shape in ((0, 96), (2, 0, 96)):
        x = torch.empty(shape, requires_grad=grad)
        assert linear(x, q, bias, activation, backend="torch").shape == (*shape[:-1], 24)
    nothing = twin.quantize(torch.empty(4, 0), QUANT_KEYS["fp8_per_channel_static"])
    assert torch.equal(linear(torch.empty(3, 0), nothing, torch.ones(4), backend="torch"), torch.ones(3, 4))


def test_the_bias_may_have_another_dtype():
    q, x = weight_of("mxfp8"), input_of(5, 96, dtype=torch.bfloat16)
    for dtype in DTYPES:
        bias = input_of(24, seed=3, dtype=dtype)
        assert_near(linear(x, q, bias, backend="torch"), *exact(x, q, bias.float()), torch.bfloat16)


@pytest.mark.parametrize("activation", [None, "fp8_per_token"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_gradients_are_those_of_the_dequantized_weight(weight, activation):
    q = weight_of(weight)
    for dtype in (torch.float32, torch.float64):
        w, tolerance = twin.dequantize(q, dtype), {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
        x, bias = input_of(2, 3, 96, dtype=dtype).requires_grad_(), input_of(24, seed=2, dtype=dtype).requires_grad_()
        upstream = input_of(2, 3, 24, seed=4, dtype=dtype)
        linear(x, q, bias, activation, backend="torch").backward(upstream)
        got = x.grad, bias.grad
        x.grad = bias.grad = None
        torch.nn.functional.linear(x, w, bias).backward(upstream)
        torch.testing.assert_close(got, (x.grad, bias.grad), **tolerance)


def test_gradcheck():
    q = weight_of("mxfp4", 3, 32)
    x, bias = input_of(2, 32, dtype=torch.float64), input_of(3, seed=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, bias: linear(x, q, bias, backend="torch"), (x.requires_grad_(), bias.requires_grad_())
    )


@pytest.mark.parametrize("x_grad, bias_grad", [(True, False), (False, True)])
def test_gradients_only_where_asked(x_grad, bias_grad):
    q = weight_of("fp8_per_channel_static")
    x, bias = input_of(4, 96).requires_grad_(x_grad), torch.zeros(24, requires_grad=bias_grad, dtype=torch.bfloat16)
    linear(x, q, bias, "fp8_per_token", backend="torch").sum().backward()
    assert (x.grad is not None, bias.grad is not None) == (x_grad, bias_grad)
    if bias_grad:
        assert bias.grad.dtype == torch.bfloat16 and (bias.grad == 4).all()
    assert not linear(x, q, bias.detach(), backend="torch").requires_grad or x_grad
    with torch.no_grad():
        assert not linear(x, q, bias, backend="torch").requires_grad


@pytest.mark.parametrize("weight", ["fp8_per_channel_static", "int8_per_channel_static", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_product_exact(weight, dtype):
    # Scaled values are no 16-bit numbers: a matmul that autocast rounds first would be far off.
    q, x = weight_of(weight), input_of(5, 96, dtype=dtype)
    want = linear(x, q, backend="torch")
    leaf = x.clone().requires_grad_()
    linear(leaf, q, backend="torch").sum().backward()
    grad, leaf.grad = leaf.grad, None
    with torch.autocast("cpu", dtype):
        assert torch.equal(linear(x, q, backend="torch"), want)
        out = linear(leaf, q, backend="torch")
        assert torch.equal(out, want)
        out.sum().backward()
    assert torch.equal(leaf.grad, grad)


@pytest.mark.parametrize("activation", [None, "mxfp8"])
def test_compiled_equals_eager_for_any_batch(activation):
    q, bias, counter = weight_of("mxfp8"), input_of(24, seed=2), CompileCounter()
    compiled = torch.compile(
        lambda x: linear(x, q, bias, activation, backend="torch").relu(), fullgraph=True, dynamic=True, backend=counter
    )
    for rows in (2, 3, 7, 50):
        x = input_of(rows, 96, seed=rows)
        assert torch.equal(compiled(x), linear(x, q, bias, activation, backend="torch").relu())
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "weight, activation", [("mxfp4", None), ("nvfp4", "nvfp4"), ("int8_per_channel_static", "int8_per_token")]
)
def test_opcheck(weight, activation):
    q = weight_of(weight)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if q.scale.dtype != torch.float8_e4m3fn:  # the schema's check multiplies its arguments, and torch has no fp8 mul
        checks.append("test_schema")
    for x, bias in (
        (input_of(2, 3, 96).requires_grad_(), torch.zeros(24, requires_grad=True)),
        (input_of(4, 96, dtype=torch.bfloat16), None),
    ):
        arguments = (x, q.data, q.scale, q.global_scale, bias, weight, activation, 96, "torch")
        torch.library.opcheck(torch.ops.torchq.linear.default, arguments, test_utils=checks)
        upstream = torch.ones(*x.shape[:-1], 24, dtype=x.dtype)
        arguments = (upstream, q.data, q.scale, q.global_scale, weight, 96)
        torch.library.opcheck(torch.ops.torchq.linear_grad.default, arguments, test_utils=checks)


def test_a_key_without_a_name_goes_through_the_op():
    q = twin.quantize(input_of(24, 96), QuantKey.from_name("e4m3/f32/1x48/static"))
    x = input_of(4, 96)
    activation = QuantKey.from_name("int8/f32/1x16/dynamic")
    want = linear(x, q, activation=activation, backend="torch")
    assert torch.equal(linear(x.clone().requires_grad_(), q, activation=activation, backend="torch"), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 96), (1, 96), (0, 96), (2, 3, 96), (96,)])
@pytest.mark.parametrize("bias", [False, True])
def test_torchao_int8_is_the_twin(dtype, shape, bias):
    q = weight_of("int8_per_channel_static")
    x, b = input_of(*shape, dtype=dtype), torch.linspace(-1, 1, 24, dtype=dtype) if bias else None
    activation = activation_of("int8_per_token")
    got = linear(x, q, b, activation, backend="torchao")
    want, size = exact(x, q, b, activation)
    if dtype == torch.float64:
        assert got.dtype == dtype and ((got - want).abs() <= 1e-6 * size).all()  # its scales multiply in f32
    else:
        assert_near(got, want, size, dtype)


def test_torchao_shows_what_is_not_finite():
    q, x = weight_of("int8_per_channel_static"), input_of(3, 96)
    x[1, 5] = torch.nan
    out = linear(x, q, activation="int8_per_token", backend="torchao")
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "weight, activation", [("fp8_per_channel_static", "fp8_per_token"), ("int8_per_channel_static", "int8_per_token")]
)
@pytest.mark.parametrize("rows", [1, 6, 33, 128])
def test_torchao_on_cuda_is_the_twin(weight, activation, rows):
    q = twin.quantize(input_of(64, 128).cuda(), QUANT_KEYS[weight])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = input_of(rows, 128, dtype=dtype).cuda()
        got = linear(x, q, activation=activation, backend="torchao")
        torch.testing.assert_close(got, linear(x, q, activation=activation, backend="torch"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "weight, activation, text",
    [
        ("mxfp4", None, "no backend for linear of weight mxfp4 with activation None on cpu: torchao: it serves int8"),
        ("fp8_per_channel_static", "fp8_per_token", "on cpu: torchao: its fp8 matmul runs on cuda, not cpu; usable"),
        ("int8_per_channel_static", None, "it serves int8_per_channel_static with int8_per_token, and fp8"),
    ],
)
def test_a_requested_backend_that_cannot_run_says_why(weight, activation, text):
    x, q = input_of(2, 96), weight_of(weight)
    for leaf in (x, x.clone().requires_grad_()):
        with pytest.raises(UnsupportedError, match=text) as error:
            kernels.linear(leaf, q, activation=activation, backend="torchao")
        assert "torch" in str(error.value).split("usable here: auto, ")[1]
