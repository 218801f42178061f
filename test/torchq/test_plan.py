"""The printed plan, report and log lines, to the letter."""

import logging
import re

import torch
from expecttest import assert_expected_inline as expect
from torch import nn

from torchq import Quantizer, quantize_


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(256, 256), nn.Linear(256, 128)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2000, 256)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.lm_head = nn.Linear(256, 2000)


CONFIG = {
    "targets": {
        "*self_attn*": {"weight": "mxfp4", "activation": "mxfp8"},
        r"re:.*mlp\.0": {"weight": "nvfp4", "activation": None, "hadamard_size": 128},
        "layers.0.mlp.2": "int8_per_channel",
    },
    "ignore": ["layers.2.mlp.2"],
}


def model():
    torch.manual_seed(0)
    return Model()


def test_plan():
    expect(
        str(Quantizer(CONFIG, backend="torch").plan(model())),
        """\
torchq: 10 layers to quantize, model 11.6 MB -> 7.1 MB (1.64x smaller)

layer type        layers  weight x activation                       backend    before     after
----------------  ------  ----------------------------------------  -------  --------  --------
self_attn.q_proj       3  mxfp4 x mxfp8                             torch    789.5 kB  107.5 kB
self_attn.k_proj       3  mxfp4 x mxfp8                             torch    394.8 kB   53.8 kB
mlp.0                  3  nvfp4 x 16-bit, hadamard 128              torch      3.2 MB  454.7 kB
mlp.2                  1  int8_per_channel_static x int8_per_token  torch      1.0 MB  264.2 kB
total                 10                                                       5.4 MB  880.1 kB

left alone:
  layers.1.mlp.2: not in targets
  layers.2.mlp.2: ignored
  lm_head: not in targets

large and not quantized:
  embed.weight (Embedding): 2.0 MB
  weight (2 layers) (Linear): 2.1 MB
  lm_head.weight (Linear): 2.0 MB""",
    )


def test_report():
    report = quantize_(model(), {"linear": "mxfp8"}, backend="torch")
    expect(
        re.sub(r"in [\d.]+ s", "in X s", str(report)),
        """\
torchq: 12 layers quantized in X s, model 11.6 MB -> 6.1 MB (1.92x smaller)

layer type        layers  weight x activation  backend    before     after                SQNR
----------------  ------  -------------------  -------  --------  --------  ------------------
self_attn.q_proj       3  mxfp8 x mxfp8        torch    789.5 kB  205.8 kB             32.5 dB
self_attn.k_proj       3  mxfp8 x mxfp8        torch    394.8 kB  102.9 kB  32.6 dB (min 32.5)
mlp.0                  3  mxfp8 x mxfp8        torch      3.2 MB  823.3 kB             32.5 dB
mlp.2                  3  mxfp8 x mxfp8        torch      3.1 MB  814.1 kB             32.5 dB
total                 12                                  7.5 MB    1.9 MB             32.5 dB

left alone:
  lm_head: output embedding of the model; name it in targets to quantize it

large and not quantized:
  embed.weight (Embedding): 2.0 MB
  lm_head.weight (Linear): 2.0 MB""",
    )


def test_log_lines(caplog):
    from torchq.kernels import announce

    announce.cache_clear()
    caplog.set_level(logging.INFO, logger="torchq")
    quantize_(model(), CONFIG, backend="torch")
    quantize_(model(), CONFIG, backend="torch")
    expect(
        "\n".join(caplog.messages),
        """\
Using 'torch' Mxfp4 linear backend.
Using 'torch' Nvfp4 linear backend.
Using 'torch' Int8 linear backend.
Quantized 10 layers of types: mlp.0: 3 (from targets: re:.*mlp\\.0, {"weight":"nvfp4","activation":null,"hadamard_size":128}); mlp.2: 1 (from targets: layers.0.mlp.2, int8_per_channel); self_attn.k_proj: 3 (from targets: *self_attn*, {"weight":"mxfp4","activation":"mxfp8"}); self_attn.q_proj: 3 (from targets: *self_attn*, {"weight":"mxfp4","activation":"mxfp8"})
Quantized 10 layers of types: mlp.0: 3 (from targets: re:.*mlp\\.0, {"weight":"nvfp4","activation":null,"hadamard_size":128}); mlp.2: 1 (from targets: layers.0.mlp.2, int8_per_channel); self_attn.k_proj: 3 (from targets: *self_attn*, {"weight":"mxfp4","activation":"mxfp8"}); self_attn.q_proj: 3 (from targets: *self_attn*, {"weight":"mxfp4","activation":"mxfp8"})""",
    )


def test_html_has_the_same_cells_and_escapes():
    net = nn.Sequential()
    net.add_module("a<b", nn.Linear(64, 64))
    report = quantize_(net, "mxfp8", backend="torch")
    html = report._repr_html_()
    assert "a&lt;b" in html and "a<b" not in html
    assert html.count("<td>mxfp8 x mxfp8</td>") == 1 and "<td>torch</td>" in html


def test_plot_draws_every_layer(tmp_path):
    report = quantize_(model(), "mxfp8", backend="torch")
    figure = report.plot()
    noise, weight = figure.axes
    assert sum(len(line.get_xdata()) for line in noise.lines) == len(report.quantized) == 12
    assert len(weight.patches) == 2 * 4
    figure.savefig(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_rows_carry_time_and_the_report_the_peak():
    report = quantize_(model(), "mxfp8", backend="torch")
    assert all(row.seconds > 0 for row in report.quantized) and report.seconds >= sum(
        r.seconds for r in report.quantized
    )
    assert report.peak_bytes > report.bytes_after
    assert len(report) == len(report.rows) == len(report.quantized) + len(report.skipped)
