"""Perplexity of SmolLM2-135M on Wikipedia for every shorthand, weights alone and as the shorthand runs.

    python bench/accuracy.py           dense model: one row a shorthand
    python bench/accuracy.py --moe     the same weights as mixtures of experts (bench/moe.py)

MiniLM, whose weights were never quantized before, is beside it: the mean cosine of its sentence embeddings to fp32.
"""

import argparse
import copy
import statistics
import time

import torch
import transformers

from torchq import SHORTHANDS, QuantSpec, quantize_
from torchq.zoo import minilm, smollm2, texts
from torchq.zoo.measure import perplexity

WINDOWS = 16
LINEAR = [name for name, pair in SHORTHANDS.items() if pair.linear is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moe", action="store_true", help="experts of real weights in the layouts of MoE models")
    if parser.parse_args().moe:
        from moe import moe_table

        print(moe_table())
    else:
        print(dense_table())


def dense_table() -> str:
    """Return the table: perplexity, SQNR and size, with the shorthand's activations and with 16-bit ones."""
    transformers.utils.logging.disable_progress_bar()
    dense, tokenizer = smollm2.load()
    tokens = tokenizer(texts.wikipedia()[:60000], return_tensors="pt")["input_ids"]
    encoder, words = minilm.load()
    sentences = [line for line in texts.wikipedia().splitlines() if len(line) > 200][:32]
    embedded = minilm.embed(encoder, words, sentences)
    reference = perplexity(dense, tokens, windows=WINDOWS)
    lines = [
        f"SmolLM2-135M, {WINDOWS * 511} tokens of Wikipedia, dense perplexity {reference:.3f}; MiniLM on "
        f"{len(sentences)} paragraphs",
        "",
        "| shorthand | SQNR dB | size | perplexity | change | weight-only | change | MiniLM cosine | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = []
    for name in LINEAR:
        start = time.perf_counter()
        report, ppl = _quantized(dense, name, tokens)
        _, weight_only = _quantized(dense, {"linear": QuantSpec(SHORTHANDS[name].linear.weight, None)}, tokens)
        small = copy.deepcopy(encoder)
        quantize_(small, name)
        cosine = (minilm.embed(small, words, sentences) * embedded).sum(1).mean().item()
        sqnr = statistics.median(row.sqnr for row in report.quantized)
        size = f"{report.bytes_before / 1e6:.0f} -> {report.bytes_after / 1e6:.0f} MB"
        cells = [name, f"{sqnr:.1f}", size, f"{ppl:.3f}", _change(ppl, reference), f"{weight_only:.3f}"]
        cells += [_change(weight_only, reference), f"{cosine:.5f}", f"{time.perf_counter() - start:.0f}"]
        rows.append((sqnr, f"| {' | '.join(cells)} |"))
    return "\n".join(lines + [row for _, row in sorted(rows, reverse=True)])


def _quantized(dense, config, tokens):
    model = copy.deepcopy(dense)
    report = quantize_(model, config)
    return report, perplexity(model, tokens, windows=WINDOWS)


def _change(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.2f} %"


if __name__ == "__main__":
    with torch.no_grad():
        main()
