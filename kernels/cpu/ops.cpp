// The operators, on LibTorch's stable ABI: shapes and pointers here, arithmetic in the headers. Arguments were checked
// by torchq.kernels.cpu_backend. TORCHQ_LIBRARY names the operators of one instruction set.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <mutex>
#include <optional>
#include <vector>

#include "dequantize.h"
#include "quantize.h"

namespace torchq {
namespace {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

Dtype dtype_of(const Tensor& t) {
  ScalarType s = t.scalar_type();
  return s == ScalarType::BFloat16 ? BF16 : s == ScalarType::Half ? F16 : F32;
}

char* bytes(const Tensor& t) { return static_cast<char*>(t.data_ptr()); }

float* floats(const std::optional<Tensor>& t) { return t ? static_cast<float*>(t->data_ptr()) : nullptr; }

// How many items of `work` values make a thread worth waking.
int64_t grain(int64_t work) { return work >= 32768 ? 1 : 32768 / (work ? work : 1); }

void quantize(Tensor x, Tensor data, Tensor scale, std::optional<Tensor> global, std::optional<Tensor> error,
              int64_t batch, int64_t rows, int64_t columns, int64_t format, int64_t rounding, bool own_global) {
  Matrices in{bytes(x), dtype_of(x), batch, rows, columns};
  Target out{Format::unpack(format), Rounding(rounding), bytes(data), bytes(scale), floats(global), own_global};
  const Format& f = out.format;

  std::vector<float> multipliers;
  const bool whole = f.group_rows == 0, shared_global = f.global == PER_TENSOR && own_global;
  if (whole || shared_global) {
    std::vector<int32_t> amax(batch * rows);
    torch::stable::parallel_for(0, batch * rows, grain(columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) amax[r] = amax_bits(in.row(r), in.dtype, columns, shared_global);
    });
    for (int64_t b = 0; b < batch; b++) {
      int32_t best = 0;
      for (int64_t r = b * rows; r < (b + 1) * rows; r++) best = amax[r] > best ? amax[r] : best;
      if (shared_global) out.global[b] = global_from_amax(best);
      if (whole) multipliers.push_back(put_scale(best, f, out.rounding, 0, out.scale + b * f.scale_size()));
    }
    if (whole) out.multiplier = multipliers.data();
  }

  const int64_t block_rows = f.group_rows ? f.group_rows : 1;
  std::mutex adding;
  torch::stable::parallel_for(
      0, batch * ((rows + block_rows - 1) / block_rows), grain(block_rows * columns), [&](int64_t begin, int64_t end) {
        double sums[2] = {0, 0};
        Target part = out;
        part.error = error ? sums : nullptr;
        quantize_blocks(in, part, begin, end);
        if (error) {
          std::lock_guard<std::mutex> lock(adding);
          double* total = static_cast<double*>(error->data_ptr());
          total[0] += sums[0];
          total[1] += sums[1];
        }
      });
}

void dequantize(Tensor data, Tensor scale, std::optional<Tensor> global, Tensor out, int64_t batch, int64_t rows,
                int64_t columns, int64_t format) {
  Quantized q{Format::unpack(format), bytes(data), bytes(scale), floats(global), rows, columns};
  const Dtype dtype = dtype_of(out);
  char* target = bytes(out);
  torch::stable::parallel_for(0, batch * rows, grain(columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      dequantize_row(q, r / rows, r % rows, dtype, target + r * columns * size_of(dtype));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY(TORCHQ_LIBRARY, m) {
  m.def(
      "quantize(Tensor x, Tensor(a!) data, Tensor(b!) scale, Tensor(c!)? global_scale, Tensor(d!)? error, int batch, "
      "int rows, int columns, int format, int rounding, bool own_global) -> ()");
  m.def(
      "dequantize(Tensor data, Tensor scale, Tensor? global_scale, Tensor(a!) out, int batch, int rows, int columns, "
      "int format) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCHQ_LIBRARY, CPU, m) {
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("dequantize", TORCH_BOX(&dequantize));
}

}  // namespace torchq
