"""The native CPU kernels beside their rivals: torch's bf16, and the fastest that torchao has for the same format.

    python bench/cpu.py                            every section
    python bench/cpu.py linear prefill --plot bench/cpu.png
    python bench/cpu.py --quick                    few runs: to see that it works

Each row is measured against its rival in the same process, in interleaved runs whose medians make the ratio; weights
are cold, as in a model. A ratio that misses its bar is printed with the limit: bytes over the bandwidth measured here,
or operations over the rate measured here.
"""

import argparse
import copy
import functools
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import _torchao
import torch
import torch.nn.functional as F
from _timing import Check, Machine, Timer, busy_cores, copies, heading, rotating, show
from torch import Tensor, nn

from torchq import QuantKey, kernels, quantize_
from torchq.kernels import cpu
from torchq.keys import DEFAULT_ACTIVATION, stored_nbytes
from torchq.nn import QuantLinear

FORMATS = {
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "int4 group 32": "int4_per_group_32",
    "mxfp8": "mxfp8",
    "fp8 channel": "fp8_per_channel_static",
    "int8 channel": "int8_per_channel_static",
    "fp8 block": "fp8_per_block_static",
}
N, K = 4096, 4096
ROWS = (2, 4, 8, 16, 32, 64, 128, 512)
REST, REST_HEAD = "no linears", "no linears and no lm_head"  # the language model with linear layers that cost nothing


@dataclass
class Bench:
    """What the sections share: how to measure, this machine's limits, and the checks that the picture is drawn from."""

    timer: Timer
    machine: Machine
    quick: bool
    drawn: dict[str, list[Check]] = field(default_factory=dict)


def main() -> None:
    arguments = _arguments()
    logging.disable(logging.CRITICAL)  # torchao's and inductor's, of what they lack for this machine
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    reason = kernels.load("cpu").unusable("linear", _key("mxfp4"), None, "cpu")
    if reason:
        raise SystemExit(f"nothing to measure: the cpu backend is off, {reason}")
    timer = Timer(3, 0.004, 0.5) if arguments.quick else Timer()
    machine = Machine.measured(timer)
    print(heading(machine, os.environ.get("TORCHQ_CPU_ISA") or cpu.best_level()), flush=True)
    bench = Bench(timer, machine, arguments.quick)
    for name in arguments.sections or SECTIONS:
        SECTIONS[name](bench)
    if arguments.plot:
        plot(bench.drawn, arguments.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"default: all of {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="few and short runs")
    parser.add_argument("--plot", metavar="PATH", help="draw the ratios of the sections linear and prefill")
    arguments = parser.parse_args()
    unknown = set(arguments.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}")
    if arguments.plot and arguments.sections and not {"linear", "prefill"} <= set(arguments.sections):
        parser.error("--plot needs the sections linear and prefill")
    return arguments


def quantizing(bench: Bench) -> None:
    """Quantize a 4096x4096 bf16 weight: against copying it, and against torchao."""
    weight, rows, checks = _random(N, K), [], []
    rivals = ("copy", "ours", "torchao", "torchao compiled")
    count = copies(weight.nbytes, len(rivals) + 1)
    sources = {name: [weight.clone() for _ in range(count)] for name in rivals}
    targets = [weight.clone() for _ in range(count)]
    pairs = zip(targets, sources["copy"], strict=True)
    copying = rotating([functools.partial(target.copy_, source) for target, source in pairs])
    for name, ways in _torchao.quantizers().items():
        key = _key(FORMATS[name])
        calls = {"copy": copying, "ours": _on_each(functools.partial(kernels.quantize, key=key), sources["ours"])}
        for rule, way in ways.items():
            calls[f"torchao eager{rule}"] = _on_each(way, sources["torchao"])
            if (compiled := _torchao.compiled(way, weight)) is not None:
                calls[f"torchao compiled{rule}"] = _on_each(compiled, sources["torchao compiled"])
        row, found = _quantizing_row(name, key, weight.nbytes, bench.timer.medians(calls))
        rows.append(row)
        checks += found
    header = ["format", "ms", "time over copy", "bar", "limit", "torchao ms", "over torchao", "bar", "limit"]
    note = (
        "torchao: the faster of eager and torch.compile, where inductor can. Time over copy: of `dst.copy_(src)`. "
        "torchao's own rule for the scales of mxfp4 is even, as ours; with RCEIL it compiles."
    )
    show(f"Quantize {N}x{K} bf16", header, rows, checks, (note,))


def _quantizing_row(name: str, key: QuantKey, nbytes: int, found: dict[str, float]) -> tuple[list[str], list[Check]]:
    extra = name in ("int4 group 32", "fp8 block")
    best = min((n for n in found if n.startswith("torchao")), key=found.get)
    reads = 2 if key.global_scale else 1  # a scale of the whole matrix has to be known before the first code
    moved = reads * nbytes + stored_nbytes((N, K), key)
    least = found["copy"] * moved / (2 * nbytes)
    why = f"moves {moved / 1e6:.1f} MB, copying {2 * nbytes / 1e6:.1f} MB in {found['copy'] * 1e3:.2f} ms"
    bar = None if extra else 2 if key.scale == "e8m0" else 4
    to_copy = found["ours"] / found["copy"]
    checks = [
        Check(f"{name} over copy", to_copy, bar, least / found["copy"], why, at_most=True),
        Check(f"{name} over torchao", found[best] / found["ours"], None if extra else 50, found[best] / least, why),
    ]
    torchao = f"{found[best] * 1e3:.1f} ({best.removeprefix('torchao ')})"
    return [name, f"{found['ours'] * 1e3:.2f}", *checks[0].cells, torchao, *checks[1].cells], checks


def _on_each(function: Callable, tensors: list[Tensor]) -> Callable:
    return rotating([functools.partial(function, tensor) for tensor in tensors])


def one_row(bench: Bench) -> None:
    """Multiply one row, weight-only: against bf16 F.linear, and against the bandwidth of the memory."""
    rows, checks = [], []
    for n, k in ((4096, 4096), (14336, 4096)):
        dense, x = _dense(n, k, 2), _random(1, k)
        for name, key in _weight_keys():
            calls = {"bf16": _bf16(dense, x), "ours": _ours(dense[0], key, None, x, 2)}
            found = bench.timer.medians(calls)
            bar = None if name == "fp8 block" else 6 if key.bits == 4 else 3.5
            limit = bench.machine.reading(stored_nbytes((n, k), key))
            ratio = found["bf16"] / found["ours"]
            check = Check(f"{name} {n}x{k}", ratio, bar, found["bf16"] / limit.seconds, limit.why)
            speed = stored_nbytes((n, k), key) / found["ours"]
            cells = [f"{found['ours'] * 1e6:.0f}", f"{found['bf16'] * 1e6:.0f}", f"{speed / 1e9:.1f}"]
            rows.append([name, f"{n}x{k}", *cells, f"{100 * speed / bench.machine.read:.0f} %", *check.cells])
            checks.append(check)
    bench.drawn["linear"] = checks
    header = ["weight", "shape", "us", "bf16 us", "GB/s", "of ceiling", "over bf16", "bar", "limit"]
    note = "Limit: the same format read at the whole ceiling. GB/s: bytes of codes and scales over the time."
    show("Linear, one row (M=1), weight-only, against bf16 F.linear", header, rows, checks, (note,))


def many_rows(bench: Bench) -> None:
    """Multiply 2 to 512 rows, weight-only and with the default activation: against bf16 F.linear."""
    dense, rows, checks = _dense(N, K, 3), [], []
    counts = ROWS[::4] if bench.quick else ROWS
    for name, key in _weight_keys():
        activations = {"weight-only": None, "dynamic": DEFAULT_ACTIVATION[key]}
        if activations["dynamic"] is None:
            del activations["dynamic"]
        modules = {kind: _modules(dense[0], key, activation, 3) for kind, activation in activations.items()}
        found = {kind: [] for kind in modules}
        for m in counts:
            x = _random(m, K)
            calls = {kind: _rotating_modules(of_kind, x) for kind, of_kind in modules.items()}
            medians = bench.timer.medians({"bf16": _bf16(dense, x), **calls})
            for kind in modules:
                found[kind].append(_many_rows_check(bench.machine, name, kind, key, m, medians["bf16"], medians[kind]))
        rows += [[name, kind, *(check.cell for check in line)] for kind, line in found.items()]
        checks += [check for line in found.values() for check in line]
    bench.drawn["prefill"] = [check for check in checks if check.name.endswith(f"M={counts[-1]}")]
    bars = "Bars: >= 1x" + ("" if _has_bf16_units() else ", >= 1.5x from M=64 on, for this CPU has no bf16 units")
    title = f"Linear, {N}x{K}: times faster than bf16 F.linear"
    header = ["weight", "activation", *(f"M={m}" for m in counts)]
    show(title, header, rows, checks, (f"{bars}; int8 dynamic >= 4x from M=64 on.",))


def _many_rows_check(machine: Machine, name: str, kind: str, key: QuantKey, m: int, bf16: float, ours: float) -> Check:
    integer = kind == "dynamic" and (key.element == "int8" or str(key) == "mxfp4")
    limit = machine.limit(stored_nbytes((N, K), key), 2 * m * N * K, integer)
    bar = 1
    if m >= 64:
        bar = 4 if kind == "dynamic" and key.element == "int8" else 1 if _has_bf16_units() else 1.5
    return Check(f"{name} {kind} M={m}", bf16 / ours, bar, bf16 / limit.seconds, limit.why)


def against_torchao(bench: Bench) -> None:
    """Multiply 1, 32 and 512 rows: against torchao's configurations for the CPU, eager and compiled."""
    weight, rows, checks, notes = _random(N, K), [], [], _torchao.refusals()
    for name, (config, key, activation) in _torchao.configurations().items():
        for m in (1, 32, 512):
            x = _random(m, K)
            calls, at_once = _torchao.linears(weight, config, x, freeze=key.element == "int8")
            calls["ours"] = _ours(weight, key, activation, x, 4)
            found = bench.timer.medians(calls)
            found |= {n: found[n] / at_once for n in found if n == "frozen"}
            ours = found.pop("ours")
            best = min(found, key=found.get)
            limit = bench.machine.limit(stored_nbytes((N, K), key), 2 * m * N * K, integer=activation is not None)
            bar = 2 if m == 1 else 1
            check = Check(f"{name} M={m}", found[best] / ours, bar, found[best] / limit.seconds, limit.why)
            rows.append([name, str(m), f"{ours * 1e3:.2f}", f"{found[best] * 1e3:.2f} ({best})", *check.cells])
            checks.append(check)
    header = ["torchao configuration", "M", "ms", "torchao ms", "over torchao", "bar", "limit"]
    notes += (
        "torchao: the fastest of eager, torch.compile and, for int8, torch.compile with freezing; its int4 is one op, "
        "which there is nothing to freeze around.",
    )
    show(f"Linear, {N}x{K}, against torchao", header, rows, checks, notes)


def language_model(bench: Bench) -> None:
    """SmolLM2-135M in bf16: greedy decoding and a prompt of 512 tokens, against the model before quantize_."""
    models, ids = _language_models()
    tokens, prompt = 8 if bench.quick else 64, ids.shape[1]
    decoding = bench.timer.medians({n: functools.partial(_decode, m, ids[:, :16], tokens) for n, m in models.items()})
    prefill = bench.timer.medians({n: functools.partial(m, ids, logits_to_keep=1) for n, m in models.items()})
    names = [name for name in models if name.startswith("mxfp4")]
    checks = [_decoding_check(bench.machine, name, models[name], decoding, tokens) for name in names]
    checks += [_prefill_check(bench.machine, name, models["bf16"], prefill, prompt) for name in names]
    cells = [[f"{tokens / decoding[n]:.1f} tokens/s" for n in (name, "bf16")] for name in names]
    cells += [[f"{prefill[n] * 1e3:.0f} ms" for n in (name, "bf16")] for name in names]
    rows = [[*check.name.split(": "), *pair, *check.cells] for check, pair in zip(checks, cells, strict=True)]
    header = ["SmolLM2-135M", "linear layers", "quantized", "bf16", "over bf16", "bar", "limit"]
    note = (
        "Eager transformers, greedy; prefill computes the logits of the last token. The limit: what the model takes "
        f"with linear layers that cost nothing, {decoding[REST] / tokens * 1e3:.1f} ms a token and "
        f"{prefill[REST] * 1e3:.0f} ms a prompt, and the linear layers at the limits of this machine."
    )
    show("Language model", header, rows, checks, (note,))


def _language_models() -> tuple[dict[str, nn.Module], Tensor]:
    """The model as it is, quantized, and with linear layers that cost nothing; and a prompt of 512 tokens."""
    import transformers

    from torchq.zoo import smollm2, texts

    transformers.utils.logging.disable_progress_bar()
    dense, tokenizer = smollm2.load(torch.bfloat16)
    spec = {"weight": "mxfp4", "activation": None}
    configs = {
        "mxfp4 weight-only": {"linear": spec},
        "mxfp4 x mxfp4": "mxfp4",
        "mxfp4 weight-only, lm_head too": {"targets": {"*_proj": spec, "lm_head": spec}},
    }
    models = {"bf16": dense, REST: _without_linears(dense), REST_HEAD: _without_linears(dense, head=True)}
    for name, config in configs.items():
        models[name] = copy.deepcopy(dense)
        quantize_(models[name], config, sqnr=False)
    return models, tokenizer(texts.wikipedia()[:4000], return_tensors="pt")["input_ids"][:, :512]


def _decode(model: nn.Module, ids: Tensor, tokens: int) -> Tensor:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )


def _decoding_check(machine: Machine, name: str, model: nn.Module, found: dict[str, float], tokens: int) -> Check:
    limit = machine.reading(sum(m.quantized.nbytes for m in model.modules() if isinstance(m, QuantLinear)))
    rest = found[REST_HEAD if "lm_head" in name else REST]
    least = rest + tokens * limit.seconds
    why = f"{rest / tokens * 1e3:.1f} ms a token for the rest + {limit.why}"
    return Check(f"decode {tokens} tokens: {name}", found["bf16"] / found[name], 2, found["bf16"] / least, why)


def _prefill_check(machine: Machine, name: str, dense: nn.Module, found: dict[str, float], tokens: int) -> Check:
    parameters = sum(m.weight.numel() for m in _linears(dense, head=False).values())
    limit = machine.multiplying(2 * tokens * parameters, integer="x" in name.split())
    least = found[REST] + limit.seconds
    why = f"{found[REST] * 1e3:.0f} ms for the rest + {limit.why}"
    return Check(f"prefill {tokens} tokens: {name}", found["bf16"] / found[name], 2, found["bf16"] / least, why)


class _NoLinear(nn.Module):
    """A linear layer that costs nothing: zeros."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(1).expand(*x.shape[:-1], self.features)


def _linears(model: nn.Module, head: bool) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and (head or n != "lm_head")}


def _without_linears(model: nn.Module, head: bool = False) -> nn.Module:
    model = copy.deepcopy(model)
    for name, linear in _linears(model, head).items():
        model.set_submodule(name, _NoLinear(linear.out_features))
    return model


def experts(bench: Bench) -> None:
    """64 experts, top-8, of 2048 x 1024: against the fastest way that transformers has to run them in bf16."""
    hidden, inner, count, top = 2048, 1024, 64, 8
    module, quantized = _experts(hidden, inner, count, top)
    rows, checks = [], []
    for tokens, bar in ((1, 3), (256, 1.3)):
        routings = _routings(tokens, hidden, count, top)
        ways = ["eager", "grouped_mm", *(["batched_mm"] if tokens == 1 else [])]
        calls = {way: rotating([functools.partial(_run, module, way, *r) for r in routings]) for way in ways}
        calls["ours"] = rotating([functools.partial(quantized, *routing) for routing in routings])
        found = bench.timer.medians(calls)
        best = min(ways, key=found.get)
        parameters = 3 * hidden * inner
        nbytes = stored_nbytes((1, parameters), _key("mxfp4")) * min(count, tokens * top)
        limit = bench.machine.limit(nbytes, 2 * tokens * top * parameters, integer=False)
        ratio = found[best] / found["ours"]
        check = Check(f"experts, tokens={tokens}", ratio, bar, found[best] / limit.seconds, limit.why)
        rows.append([str(tokens), f"{found['ours'] * 1e3:.2f}", f"{found[best] * 1e3:.2f} ({best})", *check.cells])
        checks.append(check)
    header = ["tokens", "ms", "bf16 ms", "over bf16", "bar", "limit"]
    note = "The bf16 time is the fastest of eager, grouped_mm and, for 1 token, batched_mm, which copies each weight."
    show(f"QuantMoE, mxfp4 weight-only, {count} experts of {hidden}x{inner}, top-{top}", header, rows, checks, (note,))


def _experts(hidden: int, inner: int, count: int, top: int) -> tuple[nn.Module, nn.Module]:
    """Qwen3's experts with random weights in bf16, and a QuantMoE of the same."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": count, "num_experts_per_tok": top}
    config = Qwen3MoeConfig(**sizes)
    with torch.device("meta"):
        module, other = Qwen3MoeExperts(config), Qwen3MoeExperts(config)
    for name, parameter in list(module.named_parameters()):
        weight = _random(*parameter.shape[1:]).expand(parameter.shape).contiguous()
        for each in (module, other):
            setattr(each, name, nn.Parameter(weight, requires_grad=False))
    model = nn.ModuleDict({"experts": other})
    quantize_(model, {"moe": {"weight": "mxfp4", "activation": None}}, sqnr=False)
    return module, model["experts"]


def _routings(tokens: int, hidden: int, experts: int, top: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs that go to other experts each: one token's choices do not meet in eight routings."""
    order = torch.randperm(experts).view(-1, top)  # [experts / top, top]
    turns = [order.roll(turn, 0) for turn in range(len(order))]
    return [
        (
            _random(tokens, hidden),
            turn.repeat(-(-tokens // len(turn)), 1)[:tokens].contiguous(),
            torch.rand(tokens, top),
        )
        for turn in turns
    ]


def _run(module: nn.Module, way: str, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    module.config._experts_implementation = way
    return module(x, index, weights.to(x.dtype))


def end_to_end(bench: Bench) -> None:
    """quantize_ on a 1 GB bf16 model of linear layers: against copying its tensors."""
    weight = _random(N, K)
    weights = [nn.Parameter(weight.clone(), requires_grad=False) for _ in range(6 if bench.quick else 30)]
    targets = [weight.clone() for _ in weights]
    calls = {
        "copy": lambda: [target.copy_(source) for target, source in zip(targets, weights, strict=True)],
        "SQNR off": lambda: quantize_(_model_of(weights), "mxfp4", sqnr=False),
        "default": lambda: quantize_(_model_of(weights), "mxfp4"),
    }
    found = bench.timer.medians(calls)
    nbytes = sum(w.nbytes for w in weights)
    moved = nbytes + len(weights) * stored_nbytes((N, K), _key("mxfp4"))
    why = f"moves {moved / 1e9:.2f} GB, copying {2 * nbytes / 1e9:.2f} GB in {found['copy']:.2f} s"
    rows, checks = [["copy", f"{found['copy']:.3f}", "1x", "", "", f"{busy_cores(calls['copy']):.2f}"]], []
    for name, bar in (("SQNR off", 2.5), ("default", 4)):
        ratio = found[name] / found["copy"]
        checks.append(Check(f"quantize_, {name}", ratio, bar, moved / (2 * nbytes), why, at_most=True))
        rows.append([name, f"{found[name]:.3f}", *checks[-1].cells, f"{busy_cores(calls[name]):.2f}"])
    title = f"quantize_ to mxfp4, {len(weights)} layers of {N}x{K}, {nbytes / 1e9:.2f} GB of bf16"
    show(title, ["quantize_", "s", "time over copy", "bar", "limit", "busy cores"], rows, checks)


def _model_of(weights: list[nn.Parameter]) -> nn.Module:
    layers = [nn.Linear(*weight.shape[::-1], bias=False, device="meta") for weight in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = weight
    return nn.Sequential(*layers)


def plot(drawn: dict[str, list[Check]], path: str) -> None:
    """Draw the ratios of one row and of many rows, a bar a format, with the bars of each as ticks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    panels = (("one row (decode), weight-only", drawn["linear"]), ("many rows (prefill)", drawn["prefill"]))
    for axis, (title, checks) in zip(axes, panels, strict=True):
        _bars(axis, checks)
        axis.set_title(title)
    axes[0].set_ylabel("times faster than bf16 F.linear")
    figure.savefig(path, dpi=150)


def _bars(axis, checks: list[Check]) -> None:
    """Group the checks by format (the start of the name), a colour for each of the other words of the name."""
    series: dict[str, dict[str, Check]] = {}
    for check in checks:
        name = next(name for name in FORMATS if check.name.startswith(name))
        series.setdefault(check.name.removeprefix(name).strip(), {})[name] = check
    width, names = 0.8 / len(series), list(FORMATS)
    for i, (label, found) in enumerate(series.items()):
        at = [names.index(name) + (i - (len(series) - 1) / 2) * width for name in found]
        drawn = axis.bar(
            at, [check.ratio for check in found.values()], width, label=label, color=("#2b6cb0", "#90cdf4")[i]
        )
        axis.bar_label(drawn, [f"{check.ratio:.2g}" for check in found.values()], fontsize=8)
        for x, check in zip(at, found.values(), strict=True):
            if check.bar is not None:
                axis.hlines(check.bar, x - width / 2, x + width / 2, color="#c05621", linewidth=2)
    axis.hlines([], 0, 0, color="#c05621", linewidth=2, label="the bar it is held to")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names], fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)


def _key(name: str) -> QuantKey:
    return QuantKey.from_name(name)


def _weight_keys() -> list[tuple[str, QuantKey]]:
    return [(name, _key(key)) for name, key in FORMATS.items()]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()


def _dense(n: int, k: int, rivals: int) -> list[Tensor]:
    weight = _random(n, k)
    return [weight.clone() for _ in range(copies(weight.nbytes, rivals))]


def _bf16(weights: list[Tensor], x: Tensor) -> Callable:
    return rotating([functools.partial(F.linear, x, weight) for weight in weights])


def _modules(weight: Tensor, key: QuantKey, activation: QuantKey | None, rivals: int) -> list[QuantLinear]:
    chosen = kernels.select("linear", key, activation, "cpu").name
    assert chosen == "cpu", f"{chosen=} for {key} x {activation}"
    count = copies(stored_nbytes(tuple(weight.shape), key), rivals)
    return [QuantLinear(kernels.quantize(weight, key), activation=activation, dtype=weight.dtype) for _ in range(count)]


def _rotating_modules(modules: list[QuantLinear], x: Tensor) -> Callable:
    return rotating([functools.partial(module, x) for module in modules])


def _ours(weight: Tensor, key: QuantKey, activation: QuantKey | None, x: Tensor, rivals: int) -> Callable:
    return _rotating_modules(_modules(weight, key, activation, rivals), x)


def _has_bf16_units() -> bool:
    level = os.environ.get("TORCHQ_CPU_ISA") or cpu.best_level()
    return level == "avx512" and not cpu.cpu_flags().isdisjoint(("avx512_bf16", "amx_bf16"))


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "quantize": quantizing,
    "linear": one_row,
    "prefill": many_rows,
    "torchao": against_torchao,
    "model": language_model,
    "moe": experts,
    "end_to_end": end_to_end,
}

if __name__ == "__main__":
    with torch.no_grad():
        main()
