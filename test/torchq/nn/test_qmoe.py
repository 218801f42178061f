"""QuantMoE as a module: its arithmetic against one token at a time, odd routings, dtypes, compile, copies and casts."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from torchq import ConfigError, QuantKey, UnsupportedError, kernels, quantize_
from torchq.keys import key_names
from torchq.nn import ExpertsLayout, Projection, QuantMoE, register_experts
from torchq.nn.qmoe import DenseProjection
from torchq.transforms.hadamard import hadamard
from torchq.zoo.measure import allocated_peak

EXPERTS, HIDDEN, INNER = 5, 64, 96
WEIGHTS, ACTIVATIONS = key_names("weight"), [name for name in key_names("activation") if "static" not in name]


class Experts(nn.Module):
    def __init__(self, inner=INNER, bias=True):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator) * 0.3)

        self.up, self.down = parameter(EXPERTS, 2 * inner, HIDDEN), parameter(EXPERTS, HIDDEN, inner)
        self.up_bias, self.down_bias = parameter(EXPERTS, 2 * inner), parameter(EXPERTS, HIDDEN)
        self.act = nn.SiLU()


register_experts(Experts, ExpertsLayout(Projection("up", "up_bias"), Projection("down", "down_bias"), act="act"))


def quant_moe(weight="mxfp8", activation=None, inner=INNER, **spec) -> QuantMoE:
    model = nn.ModuleDict({"experts": Experts(inner)})
    quantize_(model, {"moe": {"weight": weight, "activation": activation, **spec}}, backend="torch")
    return model["experts"]


def routed(tokens=7, k=2, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    index = torch.randint(0, EXPERTS, (tokens, k), generator=generator)
    return x, index, torch.rand(tokens, k, generator=generator)


def one_by_one(moe, x, index, weights):
    """Token by token, expert by expert, from the dequantized weights."""
    up, down = (matrix.float() for matrix in moe.dequantize().values())
    out = torch.zeros(x.shape, dtype=torch.float32)
    for t, k in torch.cartesian_prod(torch.arange(len(x)), torch.arange(index.shape[1])).tolist():
        if (e := index[t, k].item()) < EXPERTS:
            gate, middle = (up[e] @ x[t].float() + moe.gate_up.bias[e].float()).chunk(2)
            inner = (silu(gate) * middle).to(x.dtype).float()
            out[t] += weights[t, k].float() * (down[e] @ inner + moe.down.bias[e].float())
    return out.to(x.dtype)


@pytest.mark.parametrize("weight", WEIGHTS)
@torch.no_grad()
def test_every_weight_key_alone(weight):
    moe, inputs = quant_moe(weight), routed()
    torch.testing.assert_close(moe(*inputs), one_by_one(moe, *inputs), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weight", ["mxfp4", "fp8_per_channel_static", "nvfp4"])
@torch.no_grad()
def test_every_activation_is_quantized_once_a_projection(weight, activation):
    moe, (x, index, weights) = quant_moe(weight, activation), routed()
    key = QuantKey.from_name(activation, "activation")
    up, down = moe.dequantize().values()
    token, choice = torch.arange(len(x)).repeat_interleave(2), index.reshape(-1)
    order = choice.argsort(stable=True)
    hidden = kernels.quantize(x[token[order]], key).dequantize()
    y = torch.einsum("tk,tnk->tn", hidden, up[choice[order]]) + moe.gate_up.bias[choice[order]]
    gate, middle = y.chunk(2, dim=-1)
    inner = kernels.quantize(silu(gate) * middle, key).dequantize()
    y = torch.einsum("tk,tnk->tn", inner, down[choice[order]]) + moe.down.bias[choice[order]]
    out = torch.zeros_like(x).index_add_(0, token[order], y * weights.reshape(-1)[order, None])
    error = (moe(x, index, weights) - out).norm() / out.norm()
    assert error < 2e-3  # a sum in another order may round an activation's code the other way


@pytest.mark.parametrize(
    "pair",
    [(None, "bf16"), ("mxfp4", "fp4"), ("mxfp8", "mxfp8"), ("fp8_per_tensor_dynamic", "fp8"), ("fp8_per_token", "")],
)
def test_activation_override_reaches_the_backend_unchanged(pair):
    moe = quant_moe("mxfp4", pair[0])
    assert moe.gate_up.activation == moe.down.activation
    assert str(moe.gate_up.activation) == str(pair[0])


@pytest.mark.parametrize("backend", ["torch", "torchao"])
def test_a_backend_is_asked_for_by_name(backend):
    model = nn.ModuleDict({"experts": Experts()})
    if backend == "torch":
        assert quantize_(model, {"moe": "mxfp4"}, backend=backend).quantized[0].backend == "torch"
    else:
        with pytest.raises(UnsupportedError, match="experts: no backend for moe of weight mxfp4 .*torchao"):
            quantize_(model, {"moe": "mxfp4"}, backend=backend)


@torch.no_grad()
def test_odd_routings():
    moe = quant_moe()
    x, index, weights = routed(6, 3)
    for case in (
        torch.zeros_like(index),  # one expert, all others empty
        torch.full_like(index, EXPERTS - 1),
        index.clone().fill_diagonal_(EXPERTS),  # the sentinel of expert parallelism
        torch.full_like(index, EXPERTS),
        torch.tensor([[0, 0, 1]] * 6),  # a token twice to one expert
    ):
        torch.testing.assert_close(moe(x, case, weights), one_by_one(moe, x, case, weights), atol=1e-4, rtol=1e-5)
    assert not moe(x, torch.full_like(index, EXPERTS), weights).any()
    for tokens in (0, 1):
        inputs = routed(tokens)
        assert moe(*inputs).shape == (tokens, HIDDEN)
        torch.testing.assert_close(moe(*inputs), one_by_one(moe, *inputs), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_dtype", [torch.float32, None])
@torch.no_grad()
def test_dtypes(dtype, weights_dtype):
    moe = quant_moe().to(dtype)
    assert moe.gate_up.codes.dtype == torch.float8_e4m3fn and moe.gate_up.scale.dtype == torch.uint8
    assert moe.gate_up.bias.dtype == dtype and moe.gate_up.weight.dtype == dtype
    x, index, weights = routed(dtype=dtype)
    weights = weights.to(weights_dtype or dtype)
    out = moe(x, index, weights)
    assert out.dtype == dtype
    precision = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    expected = one_by_one(moe, x, index, weights)
    assert (out - expected).float().norm() < precision * expected.float().norm()


def test_names_of_arguments():
    moe, (x, index, weights) = quant_moe(), routed()
    expected = moe(x, index, weights)
    assert torch.equal(moe(hidden_states=x, top_k_index=index, top_k_weights=weights), expected)
    assert torch.equal(moe(x, router_indices=index, routing_weights=weights), expected)
    assert torch.equal(moe(x.view(1, 7, HIDDEN), index, weights), expected.view(1, 7, HIDDEN))


@torch.no_grad()
def test_hadamard_rotates_weights_and_inputs():
    plain, rotated, inputs = quant_moe("mxfp8"), quant_moe("mxfp8", hadamard_size=32), routed()
    codes = kernels.quantize(hadamard(Experts().up[2].detach(), 32), "mxfp8").data
    assert torch.equal(rotated.gate_up.codes[2], codes)
    assert not torch.equal(rotated.gate_up.codes, plain.gate_up.codes)
    torch.testing.assert_close(rotated(*inputs), one_by_one(rotated, *inputs), atol=1e-3, rtol=1e-4)
    with pytest.raises(ConfigError, match="hadamard_size 64 does not divide its in_features 96"):
        quant_moe("mxfp8", hadamard_size=64)


@torch.no_grad()
def test_awkward_inner_size_is_padded():
    moe, inputs = quant_moe("mxfp4", inner=41), routed()
    assert moe.down.shape == (EXPERTS, HIDDEN, 41) and moe.down.codes.shape == (EXPERTS, HIDDEN, 32)
    torch.testing.assert_close(moe(*inputs), one_by_one(moe, *inputs), atol=1e-4, rtol=1e-5)


def test_one_expert_has_one_global_scale_for_gate_and_up():
    moe = quant_moe("nvfp4")
    assert moe.gate_up.global_scale.shape == moe.down.global_scale.shape == (EXPERTS,)
    assert moe.gate_up.global_scale.unique().numel() == EXPERTS
    assert quant_moe("fp8_per_tensor_static").gate_up.scale.shape == (EXPERTS,)


@pytest.mark.parametrize("target", ["experts", "experts.down_proj"])
def test_gradients_reach_the_input_and_the_parameters(target):
    model, (x, index, weights) = nn.ModuleDict({"experts": Experts()}), routed()
    quantize_(model, {"targets": {target: {"weight": "mxfp8", "activation": None}}})
    moe = model["experts"]
    x.requires_grad_(), weights.requires_grad_()
    moe(x, index, weights).square().sum().backward()
    x2, weights2 = x.detach().requires_grad_(), weights.detach().requires_grad_()
    grads = {n: p.grad.clone() for n, p in moe.named_parameters()}
    moe.zero_grad()
    up, down = moe.gate_up.weight, moe.down.weight
    hidden = torch.einsum("th,tknh->tkn", x2, up[index]) + moe.gate_up.bias[index]
    gate, middle = hidden.chunk(2, -1)
    y = torch.einsum("tki,tkhi->tkh", silu(gate) * middle, down[index]) + moe.down.bias[index]
    (y * weights2[..., None]).sum(1).square().sum().backward()
    torch.testing.assert_close(x.grad, x2.grad, atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(weights.grad, weights2.grad, atol=1e-2, rtol=1e-3)
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", [INNER, 41])
def test_a_dense_projection_skips_tokens_of_no_expert(dtype, inner):
    model = nn.ModuleDict({"experts": Experts(inner)}).to(dtype)
    quantize_(model, {"targets": {"experts.down_proj": {"weight": "mxfp8", "activation": None}}})
    moe = model["experts"]
    assert isinstance(moe.gate_up, DenseProjection) and torch.equal(moe.gate_up.weight, Experts(inner).up.to(dtype))
    for tokens in (0, 1, 6):
        x, index, weights = routed(tokens, dtype=dtype)
        index[:1] = EXPERTS
        x.requires_grad_()
        out = moe(x, index, weights)
        expected = one_by_one(moe, x.detach(), index, weights)
        assert (out - expected).float().norm() <= 2e-2 * expected.float().norm()
        out.float().mean().backward()
        assert torch.isfinite(x.grad).all() and not x.grad[:1].any()


@torch.no_grad()
def test_a_dense_projection_reads_its_weight_where_it_lies():
    projection = DenseProjection(torch.randn(EXPERTS, INNER, HIDDEN), None)
    offsets = torch.tensor([0, 1, 1, 2, 2, 3])
    _, peak = allocated_peak(lambda: projection(torch.randn(3, HIDDEN), offsets))
    assert peak < projection.weight.nbytes / 4


@pytest.mark.parametrize("targets", [{"experts": "mxfp4"}, {"experts.down_proj": "mxfp4"}])
@torch.no_grad()
def test_compiles_once_for_every_number_of_tokens(targets):
    model = nn.ModuleDict({"experts": Experts()})
    quantize_(model, {"targets": targets})
    moe = model["experts"]
    torch._dynamo.reset()
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    counter = torch._dynamo.utils.counters["stats"]
    before = counter["unique_graphs"]
    for tokens in (7, 3, 19):
        inputs = routed(tokens)
        torch.testing.assert_close(compiled(*inputs), moe(*inputs), atol=1e-3, rtol=1e-3)
    assert counter["unique_graphs"] == before + 1


def test_copies_pickles_and_saves():
    moe, inputs = quant_moe("nvfp4", "nvfp4"), routed()
    expected = moe(*inputs)
    buffer = io.BytesIO()
    torch.save(moe, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(*inputs), expected)
        assert other._shell is not moe._shell and other._shell.act is other.act
    assert not list(moe._shell.parameters())


def test_loading_codes_of_another_format_says_so():
    with pytest.raises(RuntimeError, match=r"gate_up.codes is torch.uint8 in the state dict, but torch.float8_e4m3fn"):
        quant_moe("mxfp8").load_state_dict(quant_moe("mxfp4").state_dict())


def test_children_and_printing():
    moe = quant_moe("mxfp4")
    assert [name for name, _ in moe.named_children()] == ["gate_up", "down", "act"]
    assert "5 x 192 x 64, bias=True, weight=mxfp4, activation=None" in repr(moe)


@pytest.mark.parametrize("shape", [(3,), (2, 3, HIDDEN), (3, HIDDEN + 1)])
def test_grouped_linear_names_a_shape_that_does_not_fit(shape):
    weight = quant_moe().gate_up.quantized
    with pytest.raises(ConfigError, match="does not fit experts of shape"):
        kernels.grouped_linear(torch.zeros(shape), torch.zeros(EXPERTS + 1, dtype=torch.int64), weight)
    with pytest.raises(ConfigError, match="give E \\+ 1"):
        kernels.grouped_linear(torch.zeros(3, HIDDEN), torch.zeros(EXPERTS, dtype=torch.int64), weight)
