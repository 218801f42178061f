"""torchq::linear as a torch.library op: opaque to torch.compile, with gradients for the input and the bias."""

import functools

import torch
from torch import Tensor

from torchq.kernels.qtensor import QuantizedTensor
from torchq.kernels.registry import select
from torchq.keys import QuantKey


def linear(
    x: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None,
    activation: QuantKey | None,
    backend: str,
) -> Tensor:
    """Run the linear, as an op only where one is needed: a direct call saves the dispatcher's time."""
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if needs_grad or torch.compiler.is_compiling():
        name = None if activation is None else str(activation)
        columns = weight.shape[-1]
        return torch.ops.torchq.linear(
            x, weight.data, weight.scale, weight.global_scale, bias, str(weight.key), name, columns, backend
        )
    return select("linear", weight.key, activation, x.device.type, backend).linear(x, weight, bias, activation)


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
    # Straight through the activation's rounding: d(x Q(W)^T)/dx = Q(W).
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
    w = _wrap(data, scale, global_scale, weight, columns).dequantize(torch.float32)  # [N, K]
    rows = grad.reshape(-1, grad.shape[-1]).float()  # [M, N]
    return (rows @ w).to(grad.dtype).view(*grad.shape[:-1], columns)


@_linear_grad.register_fake
def _(grad, data, scale, global_scale, weight, columns):
    return grad.new_empty(*grad.shape[:-1], columns)


def _wrap(data: Tensor, scale: Tensor, global_scale: Tensor | None, weight: str, columns: int) -> QuantizedTensor:
    key = _key(weight, "weight")
    return QuantizedTensor(data, scale, global_scale, key, torch.Size((*data.shape[:-1], columns)), key.scale_rounding)


_key = functools.cache(QuantKey.from_name)
