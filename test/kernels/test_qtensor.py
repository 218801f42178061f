"""QuantizedTensor: views of experts and of rows, sizes, and that it is a plain value."""

import copy
import pickle

import pytest
import torch

from torchq.kernels import QuantizedTensor, quantize, twin
from torchq.keys import QUANT_KEYS, QuantKey, key_names, stored_nbytes

WEIGHTS = key_names("weight")
PARTS = ("data", "scale", "global_scale")


def quantized(name, *shape, role="weight", **options):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return x, quantize(x, QuantKey.from_name(name, role), backend="torch", **options)


def stored(q):
    return [None if t is None else t.contiguous().view(-1).view(torch.uint8).tolist() for t in parts_of(q)]


def parts_of(q):
    return [getattr(q, p) for p in PARTS]


@pytest.mark.parametrize("name", WEIGHTS)
def test_an_expert_is_the_matrix_quantized_alone(name):
    x, q = quantized(name, 3, 130, 70)
    for e in range(3):
        alone = quantize(x[e], name, backend="torch")
        assert stored(q[e]) == stored(alone) and q[e].shape == alone.shape == (130, 70)
        assert [None if t is None else (t.shape, t.dtype) for t in parts_of(q[e])] == [
            None if t is None else (t.shape, t.dtype) for t in parts_of(alone)
        ]
    assert torch.equal(twin.dequantize(q), torch.stack([twin.dequantize(q[e]) for e in range(3)]))
    assert stored(q[-1]) == stored(q[2])


@pytest.mark.parametrize("name", WEIGHTS)
def test_an_expert_is_a_view(name):
    _, q = quantized(name, 3, 130, 70)
    for whole, part in zip(parts_of(q), parts_of(q[1]), strict=True):
        assert whole is part is None or part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("start, stop", [(0, 256), (0, 128), (128, 256), (128, 260), (256, 260), (128, 128)])
def test_rows_are_those_rows(name, start, stop):
    _, q = quantized(name, 260, 70)
    part = q.rows(start, stop)
    assert part.shape == (stop - start, 70) and part.key == q.key
    assert torch.equal(twin.dequantize(part), twin.dequantize(q)[start:stop])


def test_rows_within_one_group_and_rows_across_groups():
    _, q = quantized("fp8_per_block_static", 260, 70)
    for start, stop in ((3, 9), (130, 131), (250, 256)):
        assert torch.equal(twin.dequantize(q.rows(start, stop)), twin.dequantize(q)[start:stop])
    with pytest.raises(AssertionError, match="start=100"):
        q.rows(100, 150)


def test_rows_of_a_scale_per_token():
    x, q = quantized("nvfp4_per_token", 9, 32, role="activation")
    assert q.global_scale.shape == (9, 1)
    assert stored(q.rows(2, 5)) == stored(quantize(x[2:5], "nvfp4_per_token", backend="torch"))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("shape", [(6, 33), (2, 5, 64)])
def test_nbytes_and_device(name, shape):
    _, q = quantized(name, *shape)
    assert q.nbytes == stored_nbytes(shape, QUANT_KEYS[name]) == sum(len(s) for s in stored(q) if s is not None)
    assert q.device == torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", WEIGHTS)
def test_dequantize_rounds_once(name, dtype):
    x, q = quantized(name, 6, 40)
    y = q.dequantize(dtype)
    assert y.dtype == dtype and y.shape == x.shape and torch.equal(y, twin.dequantize(q).to(dtype))
    assert q.dequantize().dtype == torch.float32


def test_it_is_frozen_and_copies_share_nothing():
    _, q = quantized("nvfp4", 6, 32)
    with pytest.raises(AttributeError):
        q.data = q.data
    assert q != copy.deepcopy(q) and q == q  # compared by identity: tensors have no truth value
    other = copy.deepcopy(q)
    other.data.zero_()
    assert q.data.any()
    _, q = quantized("mxfp4", 6, 32, scale_rounding="floor")
    again = pickle.loads(pickle.dumps(q))
    assert stored(again) == stored(q) and (again.key, again.shape, again.scale_rounding) == (q.key, q.shape, "floor")


def test_scale_rounding_is_remembered_where_there_is_one():
    found = {name: quantized(name, 4, 32)[1].scale_rounding for name in WEIGHTS}
    assert {name: rule for name, rule in found.items() if rule} == {"mxfp8": "ceil", "mxfp4": "even"}


def test_it_reads_any_bytes():
    # Every byte of codes and of scales, as a checkpoint may have them: what decodes to NaN is NaN, nothing raises.
    key = QUANT_KEYS["mxfp4"]
    data = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(256, 16)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    values = twin.dequantize(QuantizedTensor(data, scale, None, key, torch.Size((256, 32)), None))
    assert values[255].isnan().all() and values[:255].isnan().sum() == 0
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    want = torch.tensor([[e2m1[b & 15], e2m1[b >> 4]] * 16 for b in range(255)], dtype=torch.float64)
    want = want * torch.tensor([2.0 ** (b - 127) for b in range(255)], dtype=torch.float64)[:, None]
    assert torch.equal(values[:255], want.float())
