"""Roles: the layers that a blanket rule leaves alone, with the reason; a target that names them is obeyed."""

import pytest
from torch import nn

from torchq import Quantizer


class Model(nn.Module):
    """Linear layers at the given paths, and one more."""

    def __init__(self, *paths):
        super().__init__()
        for path in (*paths, "proj"):
            parent, (*above, last) = self, path.split(".")
            for part in above:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, nn.Linear(64, 64, bias=False))


class Keeping(Model):
    _keep_in_fp32_modules = ("norm_proj",)


class Strict(Model):
    _keep_in_fp32_modules = None
    _keep_in_fp32_modules_strict = ("norm_proj",)


class Ending(Model):
    def get_output_embeddings(self):
        return self.decoder


def keeping_by_itself(path):
    model = Model(path)
    model._keep_in_fp32_modules = ("norm_proj",)
    return model


def inside(model):
    outer = nn.Module()
    outer.inner, outer.norm_proj, outer.proj = model, nn.Linear(64, 64), nn.Linear(64, 64)
    return outer


@pytest.mark.parametrize(
    ("model", "protected", "reason"),
    [
        (Keeping("block.norm_proj", "block.norm_proj_2"), {"block.norm_proj"}, "_keep_in_fp32_modules"),
        (Strict("norm_proj.a"), {"norm_proj.a"}, "_keep_in_fp32_modules"),
        (keeping_by_itself("norm_proj"), {"norm_proj"}, "_keep_in_fp32_modules"),
        (inside(Keeping("norm_proj")), {"inner.norm_proj"}, "_keep_in_fp32_modules"),  # its own modules, not others'
        (Ending("decoder"), {"decoder"}, "output embedding of the model"),
        (Model("lm_head", "lm_head_2"), {"lm_head"}, "output embedding of the model"),
        (Model("linear_attn.in_proj_a", "linear_attn.in_proj_z"), {"linear_attn.in_proj_a"}, "linear attention"),
        (Model("attn.indexer.weights_proj"), {"attn.indexer.weights_proj"}, "indexer"),
        (Model("q.lora_A.default", "q.base_layer"), {"q.lora_A.default"}, "low-rank adapter"),
    ],
)
def test_what_a_blanket_rule_leaves_alone_and_a_target_takes(model, protected, reason):
    plan = Quantizer({"linear": "mxfp8"}).plan(model)
    assert {row.name for row in plan.rows if row.skipped} == protected
    for row in plan.rows:
        assert row.skipped is None or (
            reason in row.skipped and row.skipped.endswith("name it in targets to quantize it")
        )
    named = Quantizer({"targets": dict.fromkeys(protected, "mxfp8")}).plan(model)
    assert {row.name for row in named.rows if row.skipped is None} == protected
