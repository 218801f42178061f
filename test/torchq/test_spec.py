"""torchq.spec: QuantSpec and the tables that fill it in."""

import copy
import json
import pickle

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from torchq.errors import ConfigError
from torchq.keys import DEFAULT_ACTIVATION, QUANT_KEYS, QuantKey, key_names
from torchq.spec import KINDS, SHORTHANDS, UNSET, QuantSpec, meaning, meanings, parse_value

weights = st.sampled_from([None, *key_names("weight")])
activations = st.sampled_from([UNSET, None, *key_names("activation")])
sizes = st.sampled_from([UNSET, None, 2, 64, 1024])
specs = st.builds(QuantSpec, weights | st.just(UNSET), activations, sizes)


def test_unset_is_one_object():
    assert repr(UNSET) == "UNSET"
    assert copy.deepcopy(UNSET) is copy.copy(UNSET) is pickle.loads(pickle.dumps(UNSET)) is UNSET


@pytest.mark.parametrize(
    "spec, written, text",
    [
        (QuantSpec(), set(), "{}"),
        (QuantSpec(weight="mxfp4"), {"weight"}, '{"weight":"mxfp4"}'),
        (QuantSpec(weight=None), {"weight"}, '{"weight":null}'),
        (QuantSpec(activation=None), {"activation"}, '{"activation":null}'),
        (QuantSpec("mxfp4", None), {"weight", "activation"}, '{"weight":"mxfp4","activation":null}'),
        (QuantSpec("mxfp4", UNSET, 64), {"weight", "hadamard_size"}, '{"weight":"mxfp4","hadamard_size":64}'),
        (
            QuantSpec(hadamard_size=None, weight="mxfp8"),
            {"weight", "hadamard_size"},
            '{"weight":"mxfp8","hadamard_size":null}',
        ),
        (QuantSpec("int4/f32/1x64/static"), {"weight"}, '{"weight":"int4/f32/1x64/static"}'),
    ],
)
def test_only_the_fields_that_were_given_show(spec, written, text):
    assert spec.fields_set == written
    assert str(spec) == text


@pytest.mark.parametrize(
    "one, other, equal",
    [
        (QuantSpec("mxfp4"), QuantSpec(weight="mxfp4"), True),
        (QuantSpec("mxfp4"), QuantSpec(QUANT_KEYS["mxfp4"]), True),
        (QuantSpec("mxfp4"), QuantSpec("mxfp4", None), False),  # unset is not null
        (QuantSpec("mxfp4"), QuantSpec("mxfp4", "mxfp4"), False),  # nor the default spelled out
        (QuantSpec("mxfp4"), QuantSpec("mxfp4", hadamard_size=None), True),
        (QuantSpec("mxfp4"), QuantSpec("mxfp4", hadamard_size=32), False),
        (QuantSpec("mxfp4"), "mxfp4", False),
    ],
)
def test_equality(one, other, equal):
    assert (one == other) is equal
    assert not equal or hash(one) == hash(other)


def test_unset_reads_as_unset_only_for_the_activation():
    spec = QuantSpec()
    assert (spec.weight, spec.activation, spec.hadamard_size) == (None, UNSET, None)


def test_key_object_means_its_name_in_the_role():
    spec = QuantSpec(QUANT_KEYS["mxfp4"], QUANT_KEYS["mxfp4"])
    assert spec == QuantSpec("mxfp4", "mxfp4")
    assert spec.activation.dynamic and not spec.weight.dynamic


@given(specs)
def test_round_trips(spec):
    for other in (
        QuantSpec.from_dict(json.loads(str(spec))),
        pickle.loads(pickle.dumps(spec)),
        copy.deepcopy(spec),
        eval(repr(spec)),
    ):
        assert other == spec and hash(other) == hash(spec) and other.fields_set == spec.fields_set


def test_immutable():
    spec = QuantSpec("mxfp4")
    with pytest.raises(AttributeError):
        spec.weight = None
    with pytest.raises(AttributeError):
        spec.fields_set.add("activation")
    with pytest.raises(TypeError):
        SHORTHANDS["mxfp4"] = None
    with pytest.raises(AttributeError):
        SHORTHANDS["mxfp4"].linear = None
    with pytest.raises(TypeError):
        DEFAULT_ACTIVATION[QUANT_KEYS["mxfp4"]] = None


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"wieght": "mxfp4"}, "QuantSpec has no field 'wieght' (did you mean 'weight'?); its fields are weight, "),
        ({1: "mxfp4"}, "QuantSpec has no field 1"),
        (["mxfp4"], "QuantSpec is a dict with the fields weight, activation, hadamard_size, not ['mxfp4']"),
        ({"weight": "mxfp5"}, "unknown weight key 'mxfp5' (did you mean"),
        ({"weight": 4}, "the weight key is a name, a QuantKey or null, not 4"),
        ({"weight": {"element": "e4m3"}}, "the weight key is a name, a QuantKey or null, not {'element': 'e4m3'}"),
        ({"weight": "fp8_per_token"}, "weight 'fp8_per_token' is not supported; supported weight keys: fp8_per_tensor"),
        ({"weight": "fp8_per_token"}, "the weight key nearest to it is 'fp8_per_channel_static'"),
        ({"weight": "fp8_per_block_dynamic"}, "(did you mean 'fp8_per_block_static'?)"),
        ({"weight": QUANT_KEYS["int8_per_token"]}, "weight 'int8_per_token' is not supported; supported weight keys: "),
        ({"weight": "e4m3/f32/1x*/dynamic"}, "weight 'fp8_per_token' is not supported"),
        (
            {"weight": "fp8_per_channel"},
            'the shorthand \'fp8_per_channel\', spelled out, is {"weight":"fp8_per_channel_static"}',
        ),
        ({"weight": "nvfp4_per_token"}, 'is {"weight":"nvfp4","activation":"nvfp4_per_token"}'),
        ({"activation": "int8_per_channel_static"}, "the activation key nearest to it is 'int8_per_token'"),
        (
            {"activation": "fp8_per_channel_static"},
            "activation 'fp8_per_channel_static' is not supported; supported act",
        ),
        ({"activation": 8}, "the activation key is a name, a QuantKey or null, not 8"),
        *(
            ({"hadamard_size": n}, f"hadamard_size {n!r} is not a power of two")
            for n in (0, 1, 3, -2, True, 16.0, "16")
        ),
    ],
)
def test_bad_spec_says_what_to_type(fields, text):
    with pytest.raises(ConfigError) as error:
        QuantSpec.from_dict(fields)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "value, kind, parsed",
    [
        ("mxfp4", "linear", "mxfp4"),
        ("nvfp4_per_token", "moe", "nvfp4_per_token"),
        ("nvfp4_per_token", None, "nvfp4_per_token"),  # a target does not know its kind yet
        ("fp8_per_tensor_static", "linear", "fp8_per_tensor_static"),
        ("int4/f32/1x64/static", "linear", "int4/f32/1x64/static"),
        ({"weight": "mxfp4"}, "linear", QuantSpec("mxfp4")),
        (QUANT_KEYS["mxfp4"], "linear", QuantSpec("mxfp4")),
        (QuantSpec("mxfp4"), "linear", QuantSpec("mxfp4")),
    ],
)
def test_parse_value(value, kind, parsed):
    assert parse_value(value, kind) == parsed


@pytest.mark.parametrize(
    "value, text",
    [
        ("nvfp4_per_token", 'shorthand \'nvfp4_per_token\' does not define a linear spec; type {"weight":"nvfp4",'),
        ("fp8", "unknown quantization name 'fp8'"),
        ("fp8", "shorthands: fp8_per_tensor, fp8_per_block, fp8_per_channel, mxfp8, "),
        (
            "fp8",
            "weight keys: fp8_per_tensor_static, fp8_per_channel_static, fp8_per_block_static, int8_per_channel_static",
        ),
        ("fp8_per_chanel", "(did you mean 'fp8_per_channel'"),
        ("fp8_per_token", "weight 'fp8_per_token' is not supported; supported weight keys: "),
        ("online", "'online' is only a value of --quantization"),
        ("MXFP4", "unknown quantization name 'MXFP4'"),
        ("", "unknown quantization name ''"),
        (["mxfp4"], "['mxfp4'] is neither a name nor a spec"),
        (4, "4 is neither a name nor a spec; type a name or"),
    ],
)
def test_bad_value_says_what_to_type(value, text):
    with pytest.raises(ConfigError) as error:
        parse_value(value, "linear")
    assert text in str(error.value)


def test_every_weight_key_has_a_default_activation():
    assert set(DEFAULT_ACTIVATION) == {QuantKey.from_name(name) for name in key_names("weight")}


def test_no_shorthand_sets_an_activation():
    assert all(spec.fields_set == {"weight"} for s in SHORTHANDS.values() for spec in (s.linear, s.moe) if spec)


def test_names_and_what_they_mean():
    names = [*SHORTHANDS, *(name for name in key_names("weight") if name not in SHORTHANDS)]
    lines = []
    for name in names:
        found = [meaning(name, kind) for kind in KINDS]
        lines.append(f"{name:<29}" + " | ".join(f"{m.weight} x {m.activation}" if m else "-" for m in found))
    assert_expected_inline(
        "\n".join(lines),
        """\
fp8_per_tensor               fp8_per_tensor_static x fp8_per_token | fp8_per_tensor_static x fp8_per_token
fp8_per_block                fp8_per_block_static x fp8_per_block_dynamic | fp8_per_block_static x fp8_per_block_dynamic
fp8_per_channel              fp8_per_channel_static x fp8_per_token | fp8_per_channel_static x fp8_per_token
mxfp8                        mxfp8 x mxfp8 | mxfp8 x mxfp8
mxfp4                        mxfp4 x mxfp4 | mxfp4 x mxfp4
nvfp4                        nvfp4 x nvfp4 | nvfp4 x nvfp4
int8_per_channel             int8_per_channel_static x int8_per_token | int8_per_channel_static x int8_per_token
int4_per_group_32            int4_per_group_32 x None | int4_per_group_32 x None
int8_per_channel_weight_only - | int8_per_channel_static x None
nvfp4_per_token              - | nvfp4 x nvfp4_per_token
fp8_per_tensor_static        fp8_per_tensor_static x fp8_per_token | fp8_per_tensor_static x fp8_per_token
fp8_per_channel_static       fp8_per_channel_static x fp8_per_token | fp8_per_channel_static x fp8_per_token
fp8_per_block_static         fp8_per_block_static x fp8_per_block_dynamic | fp8_per_block_static x fp8_per_block_dynamic
int8_per_channel_static      int8_per_channel_static x int8_per_token | int8_per_channel_static x int8_per_token""",
    )


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("fp8_per_tensor", "fp8_per_tensor_static", True),
        ("fp8_per_tensor", QuantSpec("fp8_per_tensor_static"), True),
        ("mxfp4", QuantSpec("mxfp4", "mxfp4"), False),  # explicit, though the same key
        ("mxfp4", QuantSpec("mxfp4", None), False),
        ("mxfp4", QuantSpec("mxfp4", hadamard_size=32), False),
        ("int8_per_channel", "int8_per_channel_weight_only", False),  # its one side counts for both kinds
        ("nvfp4_per_token", "nvfp4", False),
        ("nvfp4_per_token", QuantSpec("nvfp4", "nvfp4_per_token"), False),
        ("nvfp4_per_token", "nvfp4_per_token", True),
    ],
)
def test_same_meaning(one, other, same):
    assert (meanings(one) == meanings(other)) is same
