"""Perplexity of mixtures of experts with real weights, beside that of the dense model that they are made from.

    python bench/moe.py        the same as bench/accuracy.py --moe; a quarter of an hour on one core

Before quantization every model computes what SmolLM2-135M computes (zoo/experts.py). The routed and the shared experts
get the format that the MLPs of the dense model get, first with its activations, then its weights alone.

With the weights alone, experts in an MX format are the dense MLP; a format with one scale a row gives each expert's row
of down_proj a scale of its own, which helps int8. With quantized activations each block still is the dense MLP, to
90 dB and more (test/torchq/test_moe_real.py), but attention that sums in another order puts some activations on the
other side of a rounding boundary: in mxfp4, changing one matrix of the dense model by 1e-6 moves its perplexity by 1 %.
"""

import copy
import logging
from collections.abc import Iterator

import torch
import transformers
from tqdm import tqdm

from torchq import SHORTHANDS, quantize_
from torchq.zoo import experts, smollm2, texts
from torchq.zoo.measure import perplexity

WINDOWS = 8
FORMATS = ("mxfp4", "mxfp8", "fp8_per_channel", "int8_per_channel_weight_only")
WITHIN = 0.02
MLP = "*.mlp.*_proj"
EXPERTS = r"re:.*\.(experts|shared_experts?\.\w+_proj)$"


def moe_table() -> str:
    """Return Markdown: a row a model, a column a format; perplexity, its change to dense, and what is beyond 2 %."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torchao").setLevel(logging.ERROR)
    dense, tokenizer = smollm2.load()
    tokens = tokenizer(texts.wikipedia()[:30000], return_tensors="pt")["input_ids"]
    columns = {name: SHORTHANDS[name].moe for name in FORMATS}
    columns |= {
        f"{name} weights": {"weight": SHORTHANDS[name].moe.weight, "activation": None}
        for name in FORMATS
        if "weight_only" not in name
    }
    found: dict[str, dict[str, float]] = {}
    with tqdm(total=(1 + len(experts.KINDS)) * len(columns), unit="model") as progress:
        for name in ("dense", *experts.KINDS):
            model = dense if name == "dense" else experts.build(dense, name)
            found[name] = {}
            for column, spec in columns.items():
                progress.set_description(f"{name}, {column}")
                quantized = copy.deepcopy(model)
                quantize_(quantized, {"targets": {MLP if name == "dense" else EXPERTS: spec}}, sqnr=False)
                found[name][column] = perplexity(quantized, tokens, windows=WINDOWS)
                progress.update()
    reference = found["dense"]
    far = [
        f"{name} {column}"
        for name, row in found.items()
        for column, value in row.items()
        if abs(value / reference[column] - 1) > WITHIN
    ]
    lines = [
        f"SmolLM2-135M, {WINDOWS * 511} tokens of Wikipedia; perplexity before quantization "
        f"{perplexity(dense, tokens, windows=WINDOWS):.3f}",
        "",
        f"| model | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(f"| {name} | {' | '.join(_cells(row, reference))} |" for name, row in found.items()),
        "",
        f"Further than {WITHIN:.0%} from dense: {', '.join(far) or 'none'}.",
    ]
    return "\n".join(lines)


def _cells(row: dict[str, float], reference: dict[str, float]) -> Iterator[str]:
    for column, value in row.items():
        yield f"{value:.3f}" if row is reference else f"{value:.3f} {value / reference[column] - 1:+.2%}"


if __name__ == "__main__":
    with torch.no_grad():
        print(moe_table())
