"""torchq.config: a config from every form, back to JSON, and merged with a shorthand."""

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchq.config import QuantizationConfig, as_config, resolve_config
from torchq.errors import ConfigError
from torchq.keys import QUANT_KEYS, key_names
from torchq.spec import SHORTHANDS, UNSET, QuantSpec

C = QuantizationConfig

activations = st.sampled_from([UNSET, None, *key_names("activation")])
specs = st.builds(
    QuantSpec, st.sampled_from([UNSET, None, *key_names("weight")]), activations, st.sampled_from([UNSET, None, 16])
)
values = specs | st.sampled_from(["mxfp4", "fp8_per_tensor", "int8_per_channel_static"])
patterns = st.text(max_size=8).map(lambda text: text.replace("re:", "")) | st.sampled_from(["re:.*q_proj", "*", "a[b"])
configs = st.builds(
    C, linear=st.none() | values, moe=st.none() | values, ignore=st.lists(patterns, max_size=3)
) | st.builds(C, targets=st.dictionaries(patterns, values, max_size=3), ignore=st.lists(patterns, max_size=3))


@given(configs)
def test_round_trips(config):
    text = json.dumps(config.to_dict())
    others = (as_config(text), C.from_dict(config.to_dict()), pickle.loads(pickle.dumps(config)), copy.deepcopy(config))
    for other in others:
        assert other == config and hash(other) == hash(config)
        assert json.dumps(other.to_dict()) == text  # also what was not given


@pytest.mark.parametrize(
    "config, plain",
    [
        (C(), {}),
        (C(linear="mxfp4"), {"linear": "mxfp4"}),
        (C(linear={"weight": "mxfp4", "activation": None}), {"linear": {"weight": "mxfp4", "activation": None}}),
        (C(linear={"weight": "mxfp4"}), {"linear": {"weight": "mxfp4"}}),
        (C(linear={"weight": None}, moe={}), {"linear": {"weight": None}, "moe": {}}),
        (C(linear=QUANT_KEYS["mxfp4"]), {"linear": {"weight": "mxfp4"}}),
        (C(targets={}), {"targets": {}}),
        (C(targets={"*q": "mxfp4"}, ignore="lm_head"), {"targets": {"*q": "mxfp4"}, "ignore": ["lm_head"]}),
        (C(ignore=["a", "b"]), {"ignore": ["a", "b"]}),
    ],
)
def test_to_dict(config, plain):
    assert config.to_dict() == plain


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"linaer": "mxfp4"}, "quantization_config has no field 'linaer' (did you mean 'linear'?)"),
        ({"quant_method": "fp8"}, "its fields are linear, moe, targets, ignore"),
        ("mxfp4", "quantization_config is a dict with the fields linear, moe, targets, ignore, not 'mxfp4'"),
        (None, "quantization_config is a dict"),
        ({"linear": 4}, "quantization_config.linear: 4 is neither a name nor a spec"),
        ({"linear": ["mxfp4"]}, "quantization_config.linear: ['mxfp4'] is neither"),
        ({"moe": "mxfp5"}, "quantization_config.moe: unknown quantization name 'mxfp5' (did you mean"),
        (
            {"linear": "int8_per_channel_weight_only"},
            "quantization_config.linear: shorthand 'int8_per_channel_weight_only' does not define a linear spec",
        ),
        (
            {"moe": {"weight": "fp8_per_token"}},
            "quantization_config.moe: weight 'fp8_per_token' is not supported; supported weight",
        ),
        ({"moe": {"bias": 1}}, "quantization_config.moe: QuantSpec has no field 'bias'"),
        ({"targets": {}, "linear": "mxfp4"}, "quantization_config.targets is mutually exclusive with"),
        ({"targets": {"*": "mxfp4"}, "moe": "mxfp4"}, 'got {"moe":"mxfp4","targets":{"*":"mxfp4"}}'),
        ({"targets": ["*"]}, "quantization_config.targets is a dict like"),
        ({"targets": "mxfp4"}, "not 'mxfp4'; a spec for all layers goes to linear and moe"),
        ({"targets": {"*q": 4}}, "quantization_config.targets['*q']: 4 is neither a name nor a spec"),
        ({"targets": {"*q": None}}, "quantization_config.targets['*q']: null is not a spec; to leave layers alone"),
        ({"targets": {"*q": "mxfp5"}}, "quantization_config.targets['*q']: unknown quantization name 'mxfp5'"),
        ({"targets": {1: "mxfp4"}}, "quantization_config.targets: pattern 1 is not a string"),
        (
            {"targets": {"re:(": "mxfp4"}},
            "quantization_config.targets: pattern 're:(' does not compile: missing ) at position 1",
        ),
        ({"ignore": ["re:("]}, "quantization_config.ignore: pattern 're:(' does not compile: missing ) at position 1"),
        ({"ignore": [1]}, "quantization_config.ignore: pattern 1 is not a string"),
        ({"ignore": None}, "quantization_config.ignore is a list of patterns like"),
        ({"ignore": {"lm_head": True}}, "quantization_config.ignore is a list of patterns like"),
    ],
)
def test_bad_config_says_what_to_type(fields, text):
    with pytest.raises(ConfigError) as error:
        C.from_dict(fields)
    assert text in str(error.value)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda x: (
            st.lists(x, max_size=2)
            | st.dictionaries(st.sampled_from(["linear", "targets", "ignore", "weight", "x"]), x, max_size=2)
        ),
    )
)
def test_garbage_is_a_config_error(garbage):
    for read in (C.from_dict, as_config, lambda g: resolve_config("mxfp4", g), lambda g: resolve_config(g, {})):
        try:
            read(garbage)
        except ConfigError:
            pass


def test_immutable():
    targets, ignore = {"*q": {"weight": "mxfp4"}}, ["lm_head"]
    config = C(targets=targets, ignore=ignore)
    targets["*k"] = "mxfp4"
    targets["*q"]["weight"] = None
    ignore.append("x")
    assert config.to_dict() == {"targets": {"*q": {"weight": "mxfp4"}}, "ignore": ["lm_head"]}
    with pytest.raises(TypeError):
        config.targets["*k"] = "mxfp4"
    with pytest.raises(AttributeError):
        config.linear = "mxfp4"
    config.to_dict()["ignore"].append("y")
    assert config.ignore == ("lm_head",)


@pytest.mark.parametrize(
    "config, expected",
    [
        ("mxfp4", C(linear="mxfp4", moe="mxfp4")),
        ("nvfp4_per_token", C(moe="nvfp4_per_token")),
        ("int8_per_channel_weight_only", C(moe="int8_per_channel_weight_only")),
        ("fp8_per_block_static", C(linear="fp8_per_block_static", moe="fp8_per_block_static")),
        ({"moe": "mxfp4"}, C(moe="mxfp4")),
        (' {"moe": "mxfp4"}', C(moe="mxfp4")),
        (C(moe="mxfp4"), C(moe="mxfp4")),
    ],
)
def test_as_config(config, expected):
    assert as_config(config) == expected


@pytest.mark.parametrize(
    "config, text",
    [
        (QuantSpec("mxfp4"), "a spec goes to QuantizationConfig(linear=..., moe=...)"),
        (None, "config is a name, a dict or a QuantizationConfig, not None"),
        ("mxfp", "unknown quantization name 'mxfp' (did you mean 'mxfp8' or 'mxfp4'?)"),
        ("online", "'online' is only a value of --quantization"),
        ('{"moe": ', "is not JSON: Expecting value: line 1 column 9"),
        ('{"moe": "mxfp4", "moe": "mxfp8"}', "quantization_config holds 'moe' twice in one object"),
        ('{"targets": {"*": "mxfp4", "*": "mxfp8"}}', "quantization_config holds '*' twice in one object"),
    ],
)
def test_as_config_says_what_to_type(config, text):
    with pytest.raises(ConfigError) as error:
        as_config(config)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "quantization, config, merged",
    [
        (None, None, None),
        ("mxfp4", None, C(linear="mxfp4", moe="mxfp4")),
        ("online", {"moe": "mxfp4"}, C(moe="mxfp4")),
        ("online", {"targets": {"*": "mxfp4"}}, C(targets={"*": "mxfp4"})),
        (None, {"moe": "mxfp4"}, C(moe="mxfp4")),  # a config without a shorthand is used
        (None, '{"moe": "mxfp4"}', C(moe="mxfp4")),
        (None, C(moe="mxfp4"), C(moe="mxfp4")),
        # what a merge does not touch keeps its name, which is its label
        ("mxfp4", {}, C(linear="mxfp4", moe="mxfp4")),
        ("mxfp4", {"linear": {}}, C(linear="mxfp4", moe="mxfp4")),
        ("mxfp4", {"linear": None}, C(linear="mxfp4", moe="mxfp4")),
        ("mxfp4", {"ignore": ["lm_head"]}, C(linear="mxfp4", moe="mxfp4", ignore=["lm_head"])),
        # field by field
        (
            "fp8_per_tensor",
            {"linear": {"activation": "fp8_per_token"}},
            C(linear=QuantSpec("fp8_per_tensor_static", "fp8_per_token"), moe="fp8_per_tensor"),
        ),
        ("mxfp4", {"linear": {"activation": None}}, C(linear=QuantSpec("mxfp4", None), moe="mxfp4")),
        ("mxfp4", {"linear": {"weight": None}}, C(linear=QuantSpec(None), moe="mxfp4")),
        ("mxfp4", {"linear": {"weight": "mxfp8"}}, C(linear=QuantSpec("mxfp8"), moe="mxfp4")),
        ("mxfp4", {"linear": {"hadamard_size": 32}}, C(linear=QuantSpec("mxfp4", hadamard_size=32), moe="mxfp4")),
        (
            "fp8_per_block_static",
            {"moe": {"activation": None}},
            C(linear="fp8_per_block_static", moe=QuantSpec("fp8_per_block_static", None)),
        ),
        # a name replaces the whole
        ("mxfp4", {"linear": "mxfp8"}, C(linear="mxfp8", moe="mxfp4")),
        # a shorthand that leaves linear layers alone
        ("nvfp4_per_token", {"linear": "mxfp8"}, C(linear="mxfp8", moe="nvfp4_per_token")),
        ("nvfp4_per_token", {"linear": {"activation": None}}, C(linear={"activation": None}, moe="nvfp4_per_token")),
        # its own default activation survives a merge that leaves the weight
        ("nvfp4_per_token", {"moe": {"hadamard_size": 16}}, C(moe=QuantSpec("nvfp4", "nvfp4_per_token", 16))),
        ("nvfp4_per_token", {"moe": {"weight": "nvfp4"}}, C(moe=QuantSpec("nvfp4", "nvfp4_per_token"))),
        ("nvfp4_per_token", {"moe": {"weight": "mxfp4"}}, C(moe=QuantSpec("mxfp4"))),
        (
            "int8_per_channel_weight_only",
            {"moe": {"hadamard_size": 16}},
            C(moe=QuantSpec("int8_per_channel_static", None, 16)),
        ),
        (
            "int8_per_channel_weight_only",
            {"moe": {"activation": "int8_per_token"}},
            C(moe=QuantSpec("int8_per_channel_static", "int8_per_token")),
        ),
    ],
)
def test_resolve_config(quantization, config, merged):
    assert resolve_config(quantization, config) == merged


def test_merged_spec_shows_only_what_was_given():
    merged = resolve_config("fp8_per_tensor", {"linear": {"activation": None}, "moe": {"weight": "mxfp4"}})
    assert merged.to_dict() == {
        "linear": {"weight": "fp8_per_tensor_static", "activation": None},
        "moe": {"weight": "mxfp4"},
    }


@pytest.mark.parametrize(
    "quantization, config, text",
    [
        ("mxfp4", {"targets": {"*": "mxfp8"}}, "mutually exclusive with them; type 'online' as quantization"),
        ("mxfp4", {"targets": {}}, "type 'online' as quantization"),
        ("online", None, "quantization 'online' reads quantization_config, and there is none"),
        ("gptq", {"linear": "mxfp4"}, "quantization: unknown quantization name 'gptq'"),
        ("fp8_per_token", None, "quantization: weight 'fp8_per_token' is not supported"),
        (4, None, "quantization is a name or 'online', not 4"),
        ('{"moe": "mxfp4"}', None, "a config goes to quantization_config"),
        (
            "mxfp4",
            "mxfp8",
            "quantization_config 'mxfp8' is not JSON: Expecting value: line 1 column 1 (char 0); a name goes to quanti",
        ),
        ("mxfp4", "[1]", "quantization_config is a dict with the fields linear, moe, targets, ignore, not [1]"),
        ("mxfp4", 4, "config is a name, a dict or a QuantizationConfig, not 4"),
    ],
)
def test_resolve_config_says_what_to_type(quantization, config, text):
    with pytest.raises(ConfigError) as error:
        resolve_config(quantization, config)
    assert text in str(error.value)


@pytest.mark.parametrize("name", SHORTHANDS)
def test_empty_merge_is_the_shorthand(name):
    assert resolve_config(name, {}) == resolve_config(name, None) == as_config(name)
