"""torchq.resolution: what a layer of a given name and kind gets."""

import pickle
import textwrap

import pytest
from expecttest import assert_expected_inline

from torchq.config import as_config
from torchq.errors import ConfigError, UnsupportedError
from torchq.keys import QuantKey
from torchq.resolution import Hits, Resolution, Resolver, summary_line

NAME = "model.layers.0.self_attn.o_proj"


def resolver(config, fused_mapping=None):
    return Resolver(as_config(config), fused_mapping)


def wrapped(lines):
    return "\n".join(textwrap.fill(line, 110, subsequent_indent="    ") for line in lines)


def message(error, call, *args):
    with pytest.raises(error) as caught:
        call(*args)
    return str(caught.value)


def shown(r):
    if r is None:
        return None
    explicit = " (explicit)" if r.activation_explicit else ""
    hadamard = f" H{r.hadamard_size}" if r.hadamard_size else ""
    return f"{r} -> {r.weight} x {r.activation}{explicit}{hadamard}"


@pytest.mark.parametrize(
    "config, kind, expected",
    [
        ("mxfp4", "linear", "linear: mxfp4 -> mxfp4 x mxfp4"),
        ("mxfp4", "moe", "moe: mxfp4 -> mxfp4 x mxfp4"),
        ("fp8_per_tensor", "linear", "linear: fp8_per_tensor -> fp8_per_tensor_static x fp8_per_token"),
        (
            "fp8_per_block_static",
            "linear",
            "linear: fp8_per_block_static -> fp8_per_block_static x fp8_per_block_dynamic",
        ),
        ("int4_per_group_32", "linear", "linear: int4_per_group_32 -> int4_per_group_32 x None"),
        ("nvfp4_per_token", "linear", None),
        ("nvfp4_per_token", "moe", "moe: nvfp4_per_token -> nvfp4 x nvfp4_per_token"),
        ("int8_per_channel_weight_only", "moe", "moe: int8_per_channel_weight_only -> int8_per_channel_static x None"),
        ({"moe": "mxfp4"}, "linear", None),
        ({}, "linear", None),
        ({"linear": {"weight": None}}, "linear", None),
        ({"linear": {}}, "linear", None),
        ({"linear": {"weight": "mxfp4"}}, "linear", 'linear: {"weight":"mxfp4"} -> mxfp4 x mxfp4'),
        (
            {"linear": {"weight": "mxfp8", "activation": None}},
            "linear",
            'linear: {"weight":"mxfp8","activation":null} -> mxfp8 x None (explicit)',
        ),
        (
            {"linear": {"weight": "mxfp4", "activation": "mxfp8"}},
            "linear",
            'linear: {"weight":"mxfp4","activation":"mxfp8"} -> mxfp4 x mxfp8 (explicit)',
        ),
        (
            {"linear": {"weight": "mxfp4", "hadamard_size": 32}},
            "linear",
            'linear: {"weight":"mxfp4","hadamard_size":32} -> mxfp4 x mxfp4 H32',
        ),
        (
            {"linear": {"weight": "mxfp4", "activation": "e4m3/f32/1x64/dynamic"}},
            "linear",
            'linear: {"weight":"mxfp4","activation":"e4m3/f32/1x64/dynamic"} '
            "-> mxfp4 x e4m3/f32/1x64/dynamic (explicit)",
        ),
        ({"linear": "mxfp4", "ignore": ["*o_proj"]}, "linear", None),
        ({"linear": "mxfp4", "ignore": ["*q_proj"]}, "linear", "linear: mxfp4 -> mxfp4 x mxfp4"),
        ({"targets": {"*o_proj": "mxfp4"}}, "linear", "targets: *o_proj, mxfp4 -> mxfp4 x mxfp4"),
        ({"targets": {"*o_proj": "mxfp4"}}, "moe", "targets: *o_proj, mxfp4 -> mxfp4 x mxfp4"),
        ({"targets": {"*q_proj": "mxfp4"}}, "linear", None),
        ({"targets": {"*o_proj": {"weight": None}}}, "linear", None),
        (
            {"targets": {"*o_proj": "nvfp4_per_token"}},
            "moe",
            "targets: *o_proj, nvfp4_per_token -> nvfp4 x nvfp4_per_token",
        ),
        ({"targets": {"*q_proj": "mxfp4"}, "ignore": ["*o_proj"]}, "linear", None),
        ({"targets": {}}, "linear", None),
    ],
)
def test_resolve(config, kind, expected):
    assert shown(resolver(config).resolve(NAME, kind)) == expected


def test_resolution_is_a_value():
    found = resolver("mxfp4").resolve(NAME, "linear")
    mxfp4 = QuantKey.from_name("mxfp4"), QuantKey.from_name("mxfp4", "activation")
    assert found == Resolution("linear", None, "mxfp4", *mxfp4, False, None)
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(AttributeError):
        found.label = "x"


@pytest.mark.parametrize(
    "config, kind, error, text",
    [
        (
            {"targets": {"*o_proj": "mxfp4"}, "ignore": ["model.*"]},
            "linear",
            ConfigError,
            f"Layer {NAME} matches both quantization_config.ignore ('model.*') and quantization_config.targets "
            "('*o_proj'); remove it from one of them",
        ),
        (
            {"targets": {"*o_proj": {"weight": None}}, "ignore": ["model.*"]},
            "linear",
            ConfigError,
            "matches both quantization_config.ignore",
        ),
        (
            {"targets": {"*o_proj": "nvfp4_per_token"}},
            "linear",
            ConfigError,
            "targets pattern '*o_proj' = nvfp4_per_token does not define a QuantSpec for linear layers "
            f"(matched at {NAME})",
        ),
        (
            {"linear": {"weight": "int4/f32/1x64/static"}},
            "linear",
            UnsupportedError,
            f"{NAME}: quantization_config.linear: quantization of linear layers with weight int4/f32/1x64/static "
            "is not supported; supported weight keys: fp8_per_tensor_static, ",
        ),
        (
            {"linear": {"weight": "mxfp4", "activation": "fp8_per_tensor_static"}},
            "linear",
            UnsupportedError,
            "activation 'fp8_per_tensor_static' needs a calibrated scale, which torchq does not make; "
            "type 'fp8_per_tensor_dynamic' (or 'fp8_per_token') instead",
        ),
        (
            {"linear": {"weight": "mxfp4", "activation": "int8/f32/1x64/static"}},
            "linear",
            UnsupportedError,
            "type 'int8/f32/1x64/dynamic'",
        ),
        (
            {"targets": {"*o_proj": "mxfp4", "model.*": "mxfp4"}},
            "linear",
            ConfigError,
            f"Found multiple quantization_config.targets matches for {NAME}",
        ),
        ("mxfp4", "expert", ConfigError, f"{NAME}: kind 'expert' is not known; type 'linear' or 'moe'"),
    ],
)
def test_resolve_says_what_to_type(config, kind, error, text):
    asked = resolver(config)
    for _ in range(2):  # the second answer is not a remembered one
        assert text in message(error, asked.resolve, NAME, kind)


ATTENTION = ["a.q_proj", "a.k_proj", "a.v_proj"]


@pytest.mark.parametrize(
    "config, name, pattern",
    [
        # a fused layer, by the built-in mapping
        ({"targets": {"*.[qkv]_proj": "mxfp4"}}, "a.qkv_proj", "*.[qkv]_proj"),
        ({"targets": {"*.qkv_proj": "mxfp4"}}, "a.qkv_proj", "*.qkv_proj"),
        # a model that keeps the shards apart
        ({"targets": {"*.qkv_proj": "mxfp4"}}, "a.q_proj", "*.qkv_proj"),
        ({"targets": {"a.gate_up_proj": "mxfp4"}}, "a.up_proj", "a.gate_up_proj"),
        ({"targets": {"re:.*qkv_proj$": "mxfp4"}}, "a.v_proj", "re:.*qkv_proj$"),
        ({"targets": {"*.qkv_proj": "mxfp4", "*.q_proj": "mxfp8"}}, "a.q_proj", "*.q_proj"),  # direct first
        ({"targets": {"*.qkv_proj": "mxfp4", "*.q_proj": "mxfp8"}}, "a.k_proj", "*.qkv_proj"),
        ({"targets": {"*.qkv_proj": "mxfp4"}}, "a.o_proj", None),
        # a pattern that names one shard, and "qkv_proj" by accident, means the shard where there is one
        ({"targets": {"*v_proj": "mxfp4"}}, "a.v_proj", "*v_proj"),
        ({"targets": {"*v_proj": "mxfp4"}}, "a.q_proj", None),
        ({"targets": {"re:.*up_proj": "mxfp4"}}, "a.gate_proj", None),
        ({"targets": {"*v_proj": "mxfp4"}}, "a.qkv_proj", "*v_proj"),
    ],
)
def test_targets_of_fused_and_unfused_models(config, name, pattern):
    found = resolver(config).resolve(name, "linear")
    assert (found and found.pattern) == pattern


@pytest.mark.parametrize(
    "ignore, name, ignored",
    [
        ("*.qkv_proj", "a.q_proj", True),
        ("*.qkv_proj", "a.o_proj", False),
        ("*.q_proj", "a.q_proj", True),
        ("*.q_proj", "a.k_proj", False),
        ("*v_proj", "a.q_proj", False),
        ("*.[qkv]_proj", "a.qkv_proj", True),
    ],
)
def test_ignore_of_fused_and_unfused_models(ignore, name, ignored):
    asked = resolver({"linear": "mxfp4", "ignore": ignore})
    assert asked.is_ignored(name) is ignored
    assert (asked.resolve(name, "linear") is None) is ignored


def test_ignore_of_some_shards_of_a_fused_layer():
    asked = resolver({"linear": "mxfp4", "ignore": "*.q_proj"})
    text = message(ConfigError, asked.resolve, "a.qkv_proj", "linear")
    assert "Found different quantization schemes for the shards of a.qkv_proj" in text


def test_target_through_two_fused_names():
    mapping = {"qkv_proj": ["q_proj"], "qg_proj": ["q_proj"]}
    asked = resolver({"targets": {"*.qkv_proj": "mxfp4", "*.qg_proj": "mxfp4"}}, mapping)
    assert "Found multiple quantization_config.targets matches for a.q_proj" in message(
        ConfigError, asked.target_of, "a.q_proj"
    )


def test_callers_mapping_goes_first():
    config = {"targets": {"*.wq": "mxfp4"}}
    assert resolver(config, {"qkv_proj": ["wq"]}).target_of("a.qkv_proj") == "*.wq"
    assert resolver(config).target_of("a.qkv_proj") is None
    assert resolver({"targets": {"*.gate_proj": "mxfp4"}}, {"gate_up_proj": []}).target_of("a.gate_up_proj") is None
    with pytest.raises(ConfigError, match="fused_mapping is a dict like"):
        resolver(config, 3)


@pytest.mark.parametrize(
    "config, shards, agree",
    [
        ({"targets": {"*.qkv_proj": "mxfp4"}}, ATTENTION, True),
        ({"targets": {"*.qkv_proj": "mxfp4", "*.q_proj": "mxfp8"}}, ATTENTION, False),
        ({"targets": {"*.qkv_proj": "mxfp4", "*.q_proj": "mxfp8"}}, ["a.q_proj"], True),  # no sibling exists
        ({"targets": {"*.qkv_proj": "fp8_per_tensor", "*.q_proj": "fp8_per_tensor_static"}}, ATTENTION, True),
        ({"targets": {"*.qkv_proj": "mxfp4", "*.q_proj": {"weight": None}}}, ATTENTION, False),
        ({"targets": {"*.k_proj": "mxfp4", "*.q_proj": "mxfp8"}}, ATTENTION, True),  # no rule on the fused name
        ({"linear": "mxfp4", "ignore": ["*.qkv_proj"]}, ATTENTION, True),
        ({"linear": "mxfp4", "ignore": ["*.q_proj"]}, ATTENTION, True),
        ({"linear": "mxfp4"}, ATTENTION, True),
    ],
)
def test_check_group(config, shards, agree):
    asked = resolver(config)
    if agree:
        asked.check_group("a.qkv_proj", shards, "linear")
    else:
        text = message(ConfigError, asked.check_group, "a.qkv_proj", shards, "linear")
        assert "Found different quantization schemes for the shards of a.qkv_proj" in text


def test_direct_target_under_an_ignored_fused_name():
    asked = resolver({"targets": {"*.q_proj": "mxfp4"}, "ignore": ["*.qkv_proj"]})
    assert "Layer a.q_proj matches both" in message(ConfigError, asked.resolve, "a.q_proj", "linear")


def test_messages():
    group = resolver({"targets": {"*.qkv_proj": "mxfp4", "*.q_proj": {"weight": None}}})
    one_sided = resolver({"targets": {"*": "int8_per_channel_weight_only"}})
    lines = [
        message(ConfigError, group.check_group, "a.qkv_proj", ATTENTION, "linear"),
        message(ConfigError, one_sided.resolve, "a.q_proj", "linear"),
        resolver({"targets": {"re:.*v_proj": "mxfp4"}}).hint("a.qkv_proj"),
    ]
    assert_expected_inline(
        wrapped(lines),
        """\
Found different quantization schemes for the shards of a.qkv_proj: a.q_proj (not quantized), a.k_proj
    (targets: *.qkv_proj, mxfp4), a.v_proj (targets: *.qkv_proj, mxfp4); a rule on the fused name decides for
    a.k_proj, a.v_proj; give all shards one spec, or each shard a rule of its own
targets pattern '*' = int8_per_channel_weight_only does not define a QuantSpec for linear layers (matched at
    a.q_proj); narrow the pattern, or type {"weight":"int8_per_channel_static","activation":null}
're:.*v_proj' matches the shard a.v_proj, but takes all of the fused layer a.qkv_proj; type '*.qkv_proj' if
    that is meant""",
    )


@pytest.mark.parametrize(
    "config, name, noted",
    [
        ({"targets": {"re:.*v_proj": "mxfp4"}}, "a.qkv_proj", True),
        ({"targets": {"*up_proj": "mxfp4"}}, "a.gate_up_proj", True),
        ({"linear": "mxfp4", "ignore": ["*up_proj"]}, "a.gate_up_proj", True),
        ({"targets": {"re:.*v_proj": "mxfp4"}}, "a.v_proj", False),
        ({"targets": {"*qkv_proj": "mxfp4"}}, "a.qkv_proj", False),
        ({"targets": {"*_proj": "mxfp4"}}, "a.qkv_proj", False),
        ({"targets": {"*.[qkv]_proj": "mxfp4"}}, "a.qkv_proj", False),
    ],
)
def test_hint(config, name, noted):
    assert (resolver(config).hint(name) is not None) is noted


def test_patterns_that_hit():
    asked = resolver(
        {"targets": {"*.q_proj": "mxfp4", "*.qkv_proj": "mxfp4", "lm_haed": "mxfp4"}, "ignore": ["re:.*gate"]}
    )
    assert asked.targets.patterns == ("*.q_proj", "*.qkv_proj", "lm_haed")
    assert asked.ignore.patterns == ("re:.*gate",)
    hits = [asked.hits(name) for name in ("a.q_proj", "a.k_proj", "a.gate", "lm_head")]
    assert hits == [
        Hits(frozenset({"*.q_proj"}), frozenset()),
        Hits(frozenset({"*.qkv_proj"}), frozenset()),
        Hits(frozenset(), frozenset({"re:.*gate"})),
        Hits(frozenset(), frozenset()),
    ]


def line(config, names, kind="linear"):
    asked = resolver(config)
    return summary_line([(name, asked.resolve(name, kind)) for name in names])


def test_summary_line():
    blocks = [f"model.layers.{i}" for i in range(40)]
    experts = {"targets": {"*experts*": {"weight": "mxfp4", "activation": None}}}
    mixed = {"targets": {"*.o_proj": "mxfp8", "re:.*layers\\.[01]\\..*down_proj": "mxfp4", "*.3?.*down_proj": "mxfp8"}}
    down = [f"{b}.mlp.down_proj" for b in (*blocks[:2], *blocks[30:])]
    lines = [
        line(experts, [f"{b}.mlp.experts" for b in blocks], "moe"),
        line("fp8_per_tensor", [*(f"{b}.self_attn.q_proj" for b in blocks), "lm_head", "model.layers.0.experts.7"]),
        line(mixed, [*down, *(f"{b}.self_attn.o_proj" for b in blocks)]),
    ]
    assert_expected_inline(
        wrapped(lines),
        """\
Quantized 40 layers of types: mlp.experts: 40 (from targets: *experts*, {"weight":"mxfp4","activation":null})
Quantized 42 layers of types: experts.7: 1 (from linear: fp8_per_tensor); lm_head: 1 (from linear:
    fp8_per_tensor); self_attn.q_proj: 40 (from linear: fp8_per_tensor)
Quantized 52 layers of types: mlp.down_proj: 10 (from targets: *.3?.*down_proj, mxfp8); mlp.down_proj: 2 (from
    targets: re:.*layers\\.[01]\\..*down_proj, mxfp4); self_attn.o_proj: 40 (from targets: *.o_proj, mxfp8)""",
    )
