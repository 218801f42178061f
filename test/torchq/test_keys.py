"""torchq.keys: the names of formats in their two roles, and the shapes that follow from a key."""

import copy
import pickle

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from torchq.errors import ConfigError, did_you_mean
from torchq.keys import QUANT_KEYS, SCALE_DTYPES, WHOLE, QuantKey, key_names, stored_shapes

ROLES = ("weight", "activation")
NAMED = [(name, role) for role in ROLES for name in key_names(role)]


@pytest.mark.parametrize("name, role", NAMED)
def test_named_key_round_trips(name, role):
    key = QuantKey.from_name(name, role)
    assert str(key) == name
    assert QuantKey.from_name(str(key), role) == key
    assert QuantKey.from_name(key.spelled_out()) == key


def test_table_is_the_specification():
    lines = []
    for name in QUANT_KEYS:
        keys = [QuantKey.from_name(name, role).spelled_out() if name in key_names(role) else "-" for role in ROLES]
        lines.append(f"{name:<25}{keys[0]:<30}{keys[1]}")
    assert_expected_inline(
        "\n".join(lines),
        """\
fp8_per_tensor_static    e4m3/f32/*x*/static           e4m3/f32/*x*/static
fp8_per_tensor_dynamic   -                             e4m3/f32/*x*/dynamic
fp8_per_token            -                             e4m3/f32/1x*/dynamic
fp8_per_channel_static   e4m3/f32/1x*/static           -
fp8_per_block_static     e4m3/f32/128x128/static       -
fp8_per_block_dynamic    -                             e4m3/f32/1x128/dynamic
mxfp8                    e4m3/e8m0/1x32/static         e4m3/e8m0/1x32/dynamic
mxfp4                    e2m1/e8m0/1x32/static         e2m1/e8m0/1x32/dynamic
nvfp4                    e2m1/e4m3/1x16/tensor/static  e2m1/e4m3/1x16/tensor/dynamic
nvfp4_per_token          -                             e2m1/e4m3/1x16/token/dynamic
int8_per_channel_static  int8/f32/1x*/static           -
int8_per_token           -                             int8/f32/1x*/dynamic
int8_per_group_32        -                             int8/f32/1x32/dynamic
int4_per_group_32        int4/f32/1x32/static          -""",
    )


@pytest.mark.parametrize(
    "name, weight, activation",
    [
        ("mxfp4", "static", "dynamic"),
        ("mxfp8", "static", "dynamic"),
        ("nvfp4", "static", "dynamic"),
        ("fp8_per_tensor_static", "static", "static"),  # calibrated: static in both roles
        ("fp8_per_token", None, "dynamic"),
        ("int4_per_group_32", "static", None),
    ],
)
def test_role_decides_what_a_name_means(name, weight, activation):
    for role, when in zip(ROLES, (weight, activation), strict=True):
        if when:
            assert QuantKey.from_name(name, role).dynamic == (when == "dynamic")
        else:
            with pytest.raises(ConfigError, match=f"supported {role} keys: "):
                QuantKey.from_name(name, role)


@pytest.mark.parametrize(
    "name, text",
    [
        ("mxfp5", "unknown weight key 'mxfp5' (did you mean 'mxfp8' or 'mxfp4'?)"),
        ("fp8_per_token", "'fp8_per_token' exists only as an activation; supported weight keys: "),
        (8, "the weight key is a name, a QuantKey or null, not 8"),
        ("e4m3/f32", "'e4m3/f32' can't be read; write element/scale/rowsxcolumns"),
        ("e4m3/f32/1x64/sometimes", "can't be read"),
        ("e4m3/f32/1x64/token/tensor/static", "can't be read"),
        ("e9m9/f32/1x64/static", "QuantKey element 'e9m9' is not known; known: e4m3, e2m1, int8, int4"),
        ("e4m3/f32/0x64/static", "is not a pair of positive sizes"),
        ("e2m1/f32/1x32/static", "e2m1 goes with an e8m0 or e4m3 scale"),
        ("int8/e8m0/1x32/static", "int8 goes with an f32 scale"),
        ("e4m3/e8m0/1x*/static", "groups of fixed size"),
        ("e4m3/f32/1x64/tensor/static", "no global scale"),
        ("int4/f32/1x33/static", "an even number of columns"),
        ("e4m3/f32/*x64/static", "QuantKey group (-1, 64) is not known; a row is (1, -1), a matrix (-1, -1)"),
        ("int8/f32/32x*/static", "QuantKey group (32, -1) is not known"),
        ("e4m3/f32/4x64/dynamic", "'e4m3/f32/4x64/dynamic' shares scales among 4 tokens; write 1x64 or *x*"),
    ],
)
def test_bad_name_says_what_to_type(name, text):
    with pytest.raises(ConfigError) as error:
        QuantKey.from_name(name)
    assert text in str(error.value)


def test_bad_role_says_what_to_type():
    with pytest.raises(ConfigError, match="role 'bias' is not known; say 'weight' or 'activation'"):
        QuantKey.from_name("mxfp4", "bias")


@given(
    st.sampled_from(["e4m3", "int8"]),
    st.tuples(st.integers(1, 300), st.integers(1, 300)) | st.sampled_from([(1, WHOLE), (WHOLE, WHOLE)]),
    st.booleans(),
)
def test_key_without_a_name_spells_its_parts(element, group, dynamic):
    group = (1, group[1]) if dynamic and group[0] > 1 else group
    key = QuantKey(element, "f32", group, dynamic=dynamic)
    assert QuantKey.from_name(str(key), "activation" if dynamic else "weight") == key


def test_keys_are_values():
    key = QUANT_KEYS["nvfp4"]
    assert pickle.loads(pickle.dumps(key)) == copy.deepcopy(key) == key
    assert len({key, copy.copy(key), key.as_role("weight")}) == 1
    assert key.as_role("activation") == QuantKey.from_name("nvfp4", "activation") != key
    with pytest.raises(AttributeError):
        key.element = "int8"
    with pytest.raises(TypeError):
        QUANT_KEYS["mine"] = key


@pytest.mark.parametrize(
    "name, role, shape, data, scale, global_scale",
    [
        ("fp8_per_tensor_static", "weight", (6, 33), (6, 33), (), None),
        ("fp8_per_tensor_static", "weight", (4, 6, 33), (4, 6, 33), (4,), None),
        ("fp8_per_channel_static", "weight", (6, 33), (6, 33), (6, 1), None),
        ("fp8_per_block_static", "weight", (129, 257), (129, 257), (2, 3), None),
        ("fp8_per_block_dynamic", "activation", (2, 5, 257), (2, 5, 257), (2, 5, 3), None),
        ("mxfp8", "weight", (6, 33), (6, 64), (6, 2), None),
        ("mxfp4", "weight", (4, 6, 33), (4, 6, 32), (4, 6, 2), None),
        ("nvfp4", "weight", (4, 6, 33), (4, 6, 24), (4, 6, 3), (4,)),
        ("nvfp4_per_token", "activation", (2, 5, 32), (2, 5, 16), (2, 5, 2), (2, 5, 1)),
        ("int4_per_group_32", "weight", (6, 64), (6, 32), (6, 2), None),
    ],
)
def test_stored_shapes(name, role, shape, data, scale, global_scale):
    key = QuantKey.from_name(name, role)
    shapes = stored_shapes(shape, key)
    assert shapes["data"][0] == data
    assert shapes["scale"] == (scale, SCALE_DTYPES[key.scale])
    assert shapes.get("global_scale") == (None if global_scale is None else (global_scale, torch.float32))


def test_scale_rounding_is_fixed_by_the_key():
    assert {name: key.scale_rounding for name, key in QUANT_KEYS.items() if key.scale_rounding} == {
        "mxfp8": "ceil",
        "mxfp4": "even",
    }


@pytest.mark.parametrize(
    "name, text", [("lineer", " (did you mean 'linear'?)"), ("zzz", ""), ("mo", " (did you mean 'moe'?)")]
)
def test_did_you_mean(name, text):
    assert did_you_mean(name, ["linear", "moe"]) == text
