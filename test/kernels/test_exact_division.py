"""What quantize.h says of NEWTON: for any mantissa of a 16-bit x and of an f32 d, the step gives the rounded x / d."""

import subprocess

import pytest

from torchq.kernels import cpu

PROGRAM = r"""
#include <cstdio>
#include "vec.h"
using namespace torchq;

int main() {
  static_assert(EXACT_FMA);
  long different = 0;
  vi lanes;
  for (int i = 0; i < W; i++) lanes[i] = i;
  for (int m = 0; m < 2048; m++) {  // 12 significant bits: f16 has 11, bf16 8
    const vf x = splat(1 + m / 2048.f);
    for (int i = 0; i < 1 << 23; i += W) {
      const vf d = (vf)(splat(0x3f800000 + i) + lanes), inverse = 1.f / d, quotient = x / d;
      vf q = x * inverse;
      q = fma(fma(-q, d, x), inverse, q);
      different += !all((vi)q == (vi)quotient);
    }
  }
  printf("%ld", different);
}
"""


@pytest.mark.slow
def test_one_newton_step_divides_exactly(tmp_path):
    level = cpu.best_level()
    if level == "scalar":
        pytest.skip("this CPU has no fused multiply-add that the kernels use")
    source = tmp_path / "divide.cpp"
    source.write_text(PROGRAM)
    flags = [f"-m{flag}" for flag in cpu._NEEDS[level]]
    command = [cpu._compiler()[0], "-O2", "-std=c++20", "-w", "-ffp-contract=off", *flags, f"-I{cpu._SOURCES}"]
    subprocess.run([*command, str(source), "-o", str(tmp_path / "divide")], check=True)
    assert subprocess.run([tmp_path / "divide"], capture_output=True, text=True, check=True).stdout == "0"
