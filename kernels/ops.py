"""torchq::linear, torchq::grouped_linear and torchq::grouped_mm as torch.library ops.

Opaque to torch.compile, with gradients for the input and the bias, straight through the activation's rounding.
"""

import functools
import itertools
import math

import torch
from torch import Tensor

from torchq.kernels.qtensor import QuantizedTensor
from torchq.kernels.registry import select
from torchq.kernels.twin import no_autocast
from torchq.keys import QuantKey


def linear(
    x: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None,
    activation: QuantKey | None,
    backend: str,
) -> Tensor:
    """Run the linear, as an op only where one is needed: a direct call saves the dispatcher's time."""
    if _needs_op(x, bias):
        name = None if activation is None else str(activation)
        columns = weight.shape[-1]
        return torch.ops.torchq.linear(
            x, weight.data, weight.scale, weight.global_scale, bias, str(weight.key), name, columns, backend
        )
    return select("linear", weight.key, activation, x.device.type, backend).linear(x, weight, bias, activation)


def grouped_linear(
    x: Tensor,
    offsets: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None,
    activation: QuantKey | None,
    backend: str,
) -> Tensor:
    """Run the grouped linear, as an op only where one is needed, as in ``linear``."""
    if _needs_op(x, bias):
        name = None if activation is None else str(activation)
        columns = weight.shape[-1]
        return torch.ops.torchq.grouped_linear(
            x, offsets, weight.data, weight.scale, weight.global_scale, bias, str(weight.key), name, columns, backend
        )
    kernels = select("moe", weight.key, activation, x.device.type, backend)
    return kernels.grouped_linear(x, offsets, weight, bias, activation)


def _needs_op(x: Tensor, bias: Tensor | None) -> bool:
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    return needs_grad or torch.compiler.is_compiling()


@torch.library.custom_op("torchq::linear", mutates_args=())
def _linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    weight: str,
    activation: str | None,
    columns: int,
    backend: str,
) -> Tensor:
    q = _wrap(data, scale, global_scale, weight, columns)
    key = None if activation is None else _key(activation, "activation")
    return select("linear", q.key, key, x.device.type, backend).linear(x, q, bias, key)


@_linear.register_fake
def _(x, data, scale, global_scale, bias, weight, activation, columns, backend):
    return x.new_empty(*x.shape[:-1], data.shape[0])


def _setup_context(ctx, inputs, output):
    _x, data, scale, global_scale, bias, ctx.weight, _activation, ctx.columns, _backend = inputs
    ctx.save_for_backward(data, scale, global_scale)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, grad):
    # d(x Q(W)^T)/dx = Q(W)
    data, scale, global_scale = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.torchq.linear_grad(grad, data, scale, global_scale, ctx.weight, ctx.columns)
    if ctx.needs_input_grad[4]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    return grad_x, None, None, None, grad_bias, None, None, None, None


_linear.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("torchq::linear_grad", mutates_args=())
def _linear_grad(
    grad: Tensor, data: Tensor, scale: Tensor, global_scale: Tensor | None, weight: str, columns: int
) -> Tensor:
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    w = _wrap(data, scale, global_scale, weight, columns).dequantize(dtype)  # [N, K]
    rows = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1]).to(dtype)  # [M, N]
    with no_autocast(grad.device.type):
        return (rows @ w).to(grad.dtype).view(*grad.shape[:-1], columns)


@_linear_grad.register_fake
def _(grad, data, scale, global_scale, weight, columns):
    return grad.new_empty(*grad.shape[:-1], columns)


@torch.library.custom_op("torchq::grouped_linear", mutates_args=())
def _grouped_linear(
    x: Tensor,
    offsets: Tensor,
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    weight: str,
    activation: str | None,
    columns: int,
    backend: str,
) -> Tensor:
    q = _wrap(data, scale, global_scale, weight, columns)
    key = None if activation is None else _key(activation, "activation")
    return select("moe", q.key, key, x.device.type, backend).grouped_linear(x, offsets, q, bias, key)


@_grouped_linear.register_fake
def _(x, offsets, data, scale, global_scale, bias, weight, activation, columns, backend):
    return x.new_empty(x.shape[0], data.shape[1])


def _grouped_setup_context(ctx, inputs, output):
    _x, offsets, data, scale, global_scale, bias, ctx.weight, _activation, ctx.columns, _backend = inputs
    ctx.save_for_backward(offsets, data, scale, global_scale)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _grouped_backward(ctx, grad):
    offsets, data, scale, global_scale = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.torchq.grouped_linear_grad(grad, offsets, data, scale, global_scale, ctx.weight, ctx.columns)
    if ctx.needs_input_grad[5]:
        experts = data.shape[0]
        rows = torch.arange(grad.shape[0], device=grad.device)
        owner = torch.searchsorted(offsets, rows, right=True) - 1  # [T], -1 or E for the rows of no expert
        owner = torch.where(owner < 0, experts, owner)
        sums = torch.zeros(experts + 1, grad.shape[1], device=grad.device).index_add(0, owner, grad.float())
        grad_bias = sums[:experts].to(ctx.bias_dtype)
    return grad_x, None, None, None, None, grad_bias, None, None, None, None


_grouped_linear.register_autograd(_grouped_backward, setup_context=_grouped_setup_context)


@torch.library.custom_op("torchq::grouped_linear_grad", mutates_args=())
def _grouped_linear_grad(
    grad: Tensor,
    offsets: Tensor,
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    weight: str,
    columns: int,
) -> Tensor:
    q = _wrap(data, scale, global_scale, weight, columns)
    out = grad.new_zeros(grad.shape[0], columns)  # [T, K]
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        if stop > start:
            with no_autocast(grad.device.type):
                out[start:stop] = grad[start:stop].float() @ q[expert].dequantize(torch.float32)
    return out


@_grouped_linear_grad.register_fake
def _(grad, offsets, data, scale, global_scale, weight, columns):
    return grad.new_empty(grad.shape[0], columns)


@torch.library.custom_op("torchq::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped_mm, which torch.compile takes for bf16 only (torch 2.13): (T, K), (E, K, N) and (E,) give (T, N).

    Also (M, T) and (T, N), cut along T, give (E, M, N): the gradient of the weight.
    """
    return torch.nn.functional.grouped_mm(x, weight, offs=ends)


@grouped_mm.register_fake
def _(x, weight, ends):
    return x.new_empty(*((ends.shape[0],) if weight.dim() == 2 else ()), x.shape[0], weight.shape[-1])


def _mm_setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _mm_backward(ctx, grad):
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grouped_mm(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    return grad_x, grouped_mm(x.T, grad, ends) if ctx.needs_input_grad[1] else None, None


grouped_mm.register_autograd(_mm_backward, setup_context=_mm_setup_context)


def _wrap(data: Tensor, scale: Tensor, global_scale: Tensor | None, weight: str, columns: int) -> QuantizedTensor:
    key = _key(weight, "weight")
    return QuantizedTensor(data, scale, global_scale, key, torch.Size((*data.shape[:-1], columns)), key.scale_rounding)


_key = functools.cache(QuantKey.from_name)
