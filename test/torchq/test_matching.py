"""torchq.matching: names against patterns, for plain and fused layers."""

import fnmatch
import pickle
import textwrap

import pytest
import regex
from expecttest import assert_expected_inline
from hypothesis import assume, given
from hypothesis import strategies as st

from torchq.errors import ConfigError
from torchq.matching import (
    FUSED_MAPPING,
    Fusion,
    PatternSet,
    find_matching_patterns,
    find_matching_target,
    is_ignored,
    layer_type,
)
from torchq.spec import QuantSpec

QKV = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
LAYER = "model.layers.0.self_attn.qkv_proj"


@pytest.mark.parametrize(
    "pattern, name, hit",
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", False),  # whole name
        ("*lm_head", "model.lm_head", True),
        ("*.lm_head", "lm_head", False),
        ("model.*.q_proj", "model.layers.0.q_proj", True),  # * crosses dots
        ("model.*", "model.layers.0", True),
        ("*experts*", "mlp.experts", True),
        ("*experts*", "mlp.expert", False),
        ("*", "", True),
        ("", "", True),
        ("", "x", False),
        ("layers.?.q", "layers.1.q", True),
        ("layers.?.q", "layers.10.q", False),
        ("layers.[01].q", "layers.1.q", True),
        ("layers.[!01].q", "layers.1.q", False),
        ("a[0]", "a[0]", True),  # equality first
        ("a[0]", "a0", True),
        ("a[0", "a[0", True),
        ("*[0", "a[0", True),
        ("*Q_proj", "q_proj", False),  # case-sensitive
        ("re:.*q_proj", "model.q_proj", True),
        ("re:.*q_proj", "model.q_proj.weight", True),  # anchored at the start only
        ("re:q_proj", "model.q_proj", False),
        ("re:.*q_proj$", "model.q_proj.weight", False),
        ("re:", "anything", True),
        (r"re:.*\p{Lu}", "aB", True),  # the regex package, not re
        ("re:.*Q_proj", "q_proj", False),
        ("re:(?i).*Q_proj", "q_proj", True),
        ("RE:x", "x", False),  # a literal
        ("RE:x", "RE:x", True),
        ("re:x", "re:x", False),  # a regex never equals
        ("Linear", "model.q_proj", False),  # class names are not patterns
    ],
)
def test_one_pattern(pattern, name, hit):
    assert PatternSet([pattern]).matches(name) == ({pattern} if hit else set())


def naive(pattern, name):
    if pattern.startswith("re:"):
        return regex.match(pattern[3:], name) is not None
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


NAMES = st.lists(st.sampled_from(["a", "b", "q_proj", "0", "12", "a*", "[b]", "!", "?", "\n", "B"]), max_size=4).map(
    ".".join
)
GLOBS = st.text("ab*?[]!-.0q", max_size=6) | st.tuples(
    st.sampled_from(["", "*", "**"]), NAMES, st.sampled_from(["", "*", "**"])
).map("".join)
REGEXES = st.sampled_from(
    [r"re:.*q_proj", r"re:a", "re:", r"re:.*\.\d+$", r"re:(?i)b\b", r"re:[^.]*$", r"re:.*b\Z", "RE:a"]
)


@given(st.lists(GLOBS | NAMES | REGEXES, max_size=8), st.lists(NAMES | st.text("ab.0\n", max_size=5), max_size=6))
def test_pattern_set_is_the_naive_definition(patterns, names):
    compiled = PatternSet(patterns)
    for name in [*names, *patterns]:
        assert compiled.matches(name) == {pattern for pattern in patterns if naive(pattern, name)}


def test_pattern_set_keeps_order_once_and_pickles():
    compiled = PatternSet(["*b", "a", "*b", "re:a", "a*", "*c*", "a?"])
    assert compiled.patterns == ("*b", "a", "re:a", "a*", "*c*", "a?")
    assert pickle.loads(pickle.dumps(compiled)).matches("ac") == {"re:a", "a*", "*c*", "a?"}


@pytest.mark.parametrize(
    "pattern, text",
    [
        ("re:(", "pattern 're:(' does not compile: missing ) at position 1; correct the regex, or leave 're:' out"),
        ("re:*a", "nothing to repeat at position 0"),
        ("re:(?au)x", "does not compile: ASCII, LOCALE and UNICODE flags are mutually incompatible"),
        (1, "pattern 1 is not a string; type a layer name, a glob or 're:' and a regex"),
        (None, "pattern None is not a string"),
    ],
)
def test_bad_pattern_says_what_to_type(pattern, text):
    for use in (PatternSet, lambda p: find_matching_patterns("a", p), lambda p: is_ignored("a", p)):
        with pytest.raises(ConfigError) as error:
            use(["a", pattern])
        assert text in str(error.value)


@pytest.mark.parametrize(
    "name, patterns, mapping, expected",
    [
        ("a.q_proj", ["*q_proj", "a.*", "b"], {}, [{"*q_proj", "a.*"}]),
        ("a.q_proj", [], {}, [set()]),
        (LAYER, ["*qkv_proj", "*.q_proj"], QKV, [{"*qkv_proj"}]),  # own name first, shards not looked at
        (LAYER, ["*.q_proj", "re:.*[qk]_proj"], QKV, [{"*.q_proj", "re:.*[qk]_proj"}, {"re:.*[qk]_proj"}, set()]),
        (LAYER, ["*.q_proj"], {}, [set()]),  # not fused without a mapping
        ("qkv_proj", ["q_proj"], QKV, [{"q_proj"}, set(), set()]),
        ("my_qkv_proj", ["*q_proj"], QKV, [set()]),  # a whole component
        ("qkv_proj.blocks.0.qkv_proj", ["qkv_proj.blocks.0.q_proj"], QKV, [{"qkv_proj.blocks.0.q_proj"}, set(), set()]),
        ("a.attn.qkv", ["a.attn.k"], {"attn.qkv": ["attn.q", "attn.k"]}, [set(), {"a.attn.k"}]),
        ("a.mlp.qkv", ["a.attn.k"], {"attn.qkv": ["attn.q", "attn.k"]}, [set()]),
        ("a.attn.qkv", ["a.x"], {"attn.qkv": ["x"], "qkv": ["y"]}, [{"a.x"}]),  # the first key
        ("a.attn.qkv", ["a.attn.y"], {"qkv": ["y"], "attn.qkv": ["x"]}, [{"a.attn.y"}]),
        ("a.qkv_proj", ["a.qkv_proj.x"], {"qkv_proj": ["qkv_proj"]}, [set()]),
        (LAYER, "abc", QKV, [set(), set(), set()]),
    ],
)
def test_find_matching_patterns(name, patterns, mapping, expected):
    assert find_matching_patterns(name, patterns, mapping) == expected


def test_sets_are_the_callers_own():
    find_matching_patterns("a", ["a"])[0].add("b")
    find_matching_patterns("x", ["a"])[0].add("b")
    assert find_matching_patterns("a", ["a"]) == [{"a"}]
    assert find_matching_patterns("x", ["a"]) == [set()]


@pytest.mark.parametrize(
    "name, ignore, ignored",
    [
        ("lm_head", ["lm_head"], True),
        ("lm_head", "lm_head", True),  # a bare string is one pattern
        ("l", "lm_head", False),
        ("lm_head", [], False),
        (LAYER, ["*.q_proj", "*.k_proj", "*.v_proj"], True),
        (LAYER, ["*.qkv_proj"], True),
        (LAYER, ["*.o_proj"], False),
    ],
)
def test_is_ignored(name, ignore, ignored):
    assert is_ignored(name, ignore, QKV) is ignored


@pytest.mark.parametrize(
    "name, targets, pattern",
    [
        (LAYER, {}, None),
        (LAYER, {"*.o_proj": "mxfp4"}, None),
        (LAYER, {"*.qkv_proj": "mxfp4", "*.q_proj": "mxfp8"}, "*.qkv_proj"),
        (LAYER, {"*.q_proj": "mxfp4", "*.k_proj": "mxfp4", "*.v_proj": "mxfp4"}, "*.q_proj"),
        (LAYER, {"*.k_proj": "mxfp4", "*.v_proj": "mxfp4", "*.q_proj": "mxfp4"}, "*.q_proj"),  # the first shard's
        (LAYER, {"*.[qkv]_proj": {"weight": "mxfp4"}}, "*.[qkv]_proj"),
        (
            LAYER,
            {"*.q_proj": "fp8_per_tensor", "*.[kv]_proj": QuantSpec("fp8_per_tensor_static")},
            "*.q_proj",
        ),  # same value
        ("a.o_proj", {"*.o_proj": "mxfp4"}, "*.o_proj"),
    ],
)
def test_find_matching_target(name, targets, pattern):
    assert find_matching_target(name, targets, QKV) == pattern


@pytest.mark.parametrize(
    "targets, text",
    [
        ({"*.q_proj": "mxfp4"}, f"Found unmatched shards for {LAYER}: "),
        ({"*.q_proj": "mxfp4", "*q_proj": "mxfp4"}, "Found unmatched shards for"),  # before "multiple"
        (
            {"*.[qkv]_proj": "mxfp4", "*.k_proj": "mxfp4"},  # even when their values agree
            f"Found multiple quantization_config.targets matches for the shards of {LAYER}: ",
        ),
        ({"*.[qkv]_proj": "mxfp4", "*.k_proj": "mxfp8"}, "Found multiple quantization_config.targets matches"),
        (
            {"*qkv_proj": "mxfp4", "model.*": "mxfp4"},
            f"Found multiple quantization_config.targets matches for {LAYER}: ",
        ),
        (
            {"*.q_proj": "mxfp4", "*.[kv]_proj": "mxfp8"},
            f"Found different quantization_config.targets values for the shards of {LAYER}: ",
        ),
        (
            {"*.q_proj": "mxfp4", "*.[kv]_proj": {"weight": "mxfp4", "activation": None}},
            "Found different quantization_config.targets values",
        ),
        (
            {"*.q_proj": "mxfp4", "*.[kv]_proj": {"weight": "mxfp4", "hadamard_size": 32}},
            "Found different quantization_config.targets values",
        ),
        ({"*.q_proj": "nvfp4", "*.[kv]_proj": "nvfp4_per_token"}, "Found different quantization_config.targets values"),
        ({"*.qkv_proj": "mxfp5"}, "unknown quantization name 'mxfp5'"),
    ],
)
def test_targets_in_conflict(targets, text):
    with pytest.raises(ConfigError) as error:
        find_matching_target(LAYER, targets, QKV)
    assert text in str(error.value)


def wrapped(lines):
    return "\n".join(textwrap.fill(line, 110, subsequent_indent="    ") for line in lines)


def message(call, *args):
    with pytest.raises(ConfigError) as error:
        call(*args)
    return str(error.value)


def test_conflict_messages():
    lines = [
        message(is_ignored, "a.qkv_proj", ["*.q_proj", "re:.*[q]_proj"], QKV),
        message(find_matching_target, "a.qkv_proj", {"*.q_proj": "mxfp4"}, QKV),
        message(find_matching_target, "a.o_proj", {"*.o_proj": "mxfp4", "a.*": "mxfp4"}, QKV),
        message(find_matching_target, "a.qkv_proj", {"*.q_proj": "mxfp4", "*.[kv]_proj": {"weight": "mxfp8"}}, QKV),
    ]
    assert_expected_inline(
        wrapped(lines),
        """\
Found different quantization schemes for the shards of a.qkv_proj: quantization_config.ignore matches some of
    them: a.q_proj ('*.q_proj', 're:.*[q]_proj'), a.k_proj (none), a.v_proj (none); ignore all of its shards,
    or the layer itself: 'a.qkv_proj'
Found unmatched shards for a.qkv_proj: a.q_proj ('*.q_proj'), a.k_proj (none), a.v_proj (none); target all of
    its shards, or the layer itself: 'a.qkv_proj'
Found multiple quantization_config.targets matches for a.o_proj: a.o_proj ('*.o_proj', 'a.*'); narrow the
    patterns until each has one
Found different quantization_config.targets values for the shards of a.qkv_proj: a.q_proj ('*.q_proj' =
    mxfp4), a.k_proj ('*.[kv]_proj' = {"weight":"mxfp8"}), a.v_proj ('*.[kv]_proj' = {"weight":"mxfp8"}); give
    the patterns the same value""",
    )


@pytest.mark.parametrize(
    "mapping, text",
    [
        (["qkv_proj"], "fused_mapping is a dict like"),
        ({"qkv_proj": "q_proj"}, "fused_mapping['qkv_proj'] is a list of shard names, not 'q_proj'"),
        ({"qkv_proj": None}, "fused_mapping['qkv_proj'] is a list of shard names, not None"),
        ({"qkv_proj": [1]}, "fused_mapping['qkv_proj'] is a list of shard names, not [1]"),
        ({1: ["q_proj"]}, "fused_mapping[1] is a list of shard names"),
    ],
)
def test_bad_fused_mapping_says_what_to_type(mapping, text):
    with pytest.raises(ConfigError) as error:
        is_ignored("a", [], mapping)
    assert text in str(error.value)


def test_fusion_goes_both_ways():
    fusion = Fusion({"qkv": ["q", "k"], "qkv_proj": ["q_proj"]}, FUSED_MAPPING)
    assert fusion.shards("a.qkv") == ["a.q", "a.k"]
    assert fusion.shards("a.qkv_proj") == ["a.q_proj"]  # the first mapping decides
    assert fusion.fused("a.q_proj") == ["a.qkv_proj"]
    assert fusion.fused("v_proj") == []
    assert fusion.fused("a.gate_proj") == ["a.gate_up_proj"]
    assert fusion.shards("a.q") == fusion.fused("a.qkv") == []


@given(st.sampled_from(list(FUSED_MAPPING)), NAMES)
def test_every_shard_knows_its_fused_name(fused, prefix):
    fusion = Fusion(FUSED_MAPPING)
    name = f"{prefix}.{fused}"
    assert [shard.rpartition(".")[2] for shard in fusion.shards(name)] == list(FUSED_MAPPING[fused])
    assert all(name in fusion.fused(shard) for shard in fusion.shards(name))


@pytest.mark.parametrize(
    "name, kind",
    [
        ("model.layers.0.self_attn.q_proj", "self_attn.q_proj"),
        ("model.layers.0.mlp.experts.3.up_proj", "up_proj"),  # the last one
        ("model.layers.0.mlp.experts", "mlp.experts"),
        ("lm_head", "lm_head"),
        ("model.lm_head", "model.lm_head"),
        ("a.experts.7", "experts.7"),
        ("a.3.7", "3.7"),
        ("7", "7"),
        ("", ""),
        ("layers.0a.q", "layers.0a.q"),
        ("layers.²3.q", "layers.²3.q"),  # isdigit, but not ASCII
        ("layers.٣.q", "layers.٣.q"),
    ],
)
def test_layer_type(name, kind):
    assert layer_type(name) == kind


@given(NAMES)
def test_layer_type_is_an_end_of_the_name(name):
    parts = layer_type(name).split(".")
    assert name.split(".")[-len(parts) :] == parts
    assert len(parts) <= 2 if parts[-1].isdigit() else not any(part.isdigit() for part in parts)


@given(NAMES, st.integers(0, 999))
def test_layer_type_is_the_same_in_every_block(tail, block):
    assume(not tail.split(".")[0].isdigit())
    assert layer_type(f"model.layers.{block}.{tail}") == layer_type(f"model.layers.0.{tail}")
