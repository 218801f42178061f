// The operators, on LibTorch's stable ABI: shapes and pointers here, arithmetic in the headers. Arguments were checked
// by torchq.kernels.cpu_backend. TORCHQ_LIBRARY names the operators of one instruction set.
//
//   vec.h                     vectors of W lanes, one source for every instruction set; dtypes of values
//   format.h code.h scale.h   what codes and scales mean; encode and decode W of them
//   quantize.h dequantize.h   rows of values to codes and scales, and back
//   dot.h int8.h              a step of a dot product; codes that are int8
//   few.h bf16.h              products of a few rows of x: codes are decoded in registers
//   packed.h repack.h         products of many: weights and x are repacked, so that lanes run along the rows of weights
//   prepare.h linear.h        which arithmetic a pair of formats gets, x made ready for it, and panel after panel
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <mutex>
#include <optional>
#include <vector>

#include "linear.h"

namespace torchq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Dtype dtype_of(const Tensor& t) {
  ScalarType s = t.scalar_type();
  return s == ScalarType::BFloat16 ? BF16 : s == ScalarType::Half ? F16 : F32;
}

char* bytes(const Tensor& t) { return static_cast<char*>(t.data_ptr()); }

float* floats(const std::optional<Tensor>& t) { return t ? static_cast<float*>(t->data_ptr()) : nullptr; }

// How many items of `work` values make a thread worth waking.
int64_t grain(int64_t work) { return work >= 32768 ? 1 : 32768 / (work ? work : 1); }

void quantize_all(const Matrices& in, Target out, double* error) {
  const Format& f = out.format;
  std::vector<float> multipliers;
  const bool whole = f.group_rows == 0, shared_global = f.global == PER_TENSOR && out.own_global;
  if (whole || shared_global) {
    std::vector<int32_t> amax(in.batch * in.rows);
    torch::stable::parallel_for(0, in.batch * in.rows, grain(in.columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) amax[r] = amax_bits(in.row(r), in.dtype, in.columns, shared_global);
    });
    for (int64_t b = 0; b < in.batch; b++) {
      int32_t best = 0;
      for (int64_t r = b * in.rows; r < (b + 1) * in.rows; r++) best = amax[r] > best ? amax[r] : best;
      if (shared_global) out.global[b] = global_from_amax(best);
      if (whole) multipliers.push_back(put_scale(best, f, out.rounding, 0, out.scale + b * f.scale_size()));
    }
    if (whole) out.multiplier = multipliers.data();
  }

  const int64_t block_rows = f.group_rows ? f.group_rows : 1;
  const int64_t blocks = in.batch * ((in.rows + block_rows - 1) / block_rows);
  std::mutex adding;
  torch::stable::parallel_for(0, blocks, grain(block_rows * in.columns), [&](int64_t begin, int64_t end) {
    double sums[2] = {0, 0};
    Target part = out;
    part.error = error ? sums : nullptr;
    quantize_blocks(in, part, begin, end);
    if (error) {
      std::lock_guard<std::mutex> lock(adding);
      error[0] += sums[0];
      error[1] += sums[1];
    }
  });
}

void quantize(Tensor x, Tensor data, Tensor scale, std::optional<Tensor> global, std::optional<Tensor> error,
              int64_t batch, int64_t rows, int64_t columns, int64_t format, int64_t rounding, bool own_global) {
  Target out{Format::unpack(format), Rounding(rounding), bytes(data), bytes(scale), floats(global), own_global};
  quantize_all({bytes(x), dtype_of(x), batch, rows, columns}, out,
               error ? static_cast<double*>(error->data_ptr()) : nullptr);
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

template <class F>
void for_each(int64_t count, int64_t work, F f) {
  torch::stable::parallel_for(0, count, grain(work), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) f(i);
  });
}

// x for the products, quantized first where the layer has an activation format.
Prepared prepare(const Matrices& x, const Arithmetic& in, const Format* activation) {
  Prepared p{in, x.x, x.rows, padded_pitch(x.columns, in)};
  const Dtype native = in.kind == Arithmetic::IN_BF16 ? BF16 : F32;
  if (!activation && x.dtype == native && p.pitch == x.columns) return p;
  p.own = Kept<char>(x.rows * p.pitch * in.size() + 64);
  p.x = p.own.data();
  if (!activation) {
    for_each(x.rows, x.columns, [&](int64_t i) { prepare_row(x, p, i); });
    return p;
  }
  const Format& f = *activation;
  Kept<char> data(x.rows * f.row_bytes(x.columns));
  Kept<char> scale(f.scale_rows(x.rows) * f.scale_columns(x.columns) * f.scale_size());
  Kept<float> global(f.global == PER_TOKEN ? x.rows : 1);
  global[0] = 1;  // what a format without one has
  Rounding rounding = f.element == E2M1 ? EVEN : CEIL;
  quantize_all(x, {f, rounding, data.data(), scale.data(), global.data(), true}, nullptr);
  const bool factors = in.span && f.group_columns && (in.kind == Arithmetic::IN_I8 || f.scale == SCALE_F32);
  Quantized q{f,
              data.data(),
              scale.data(),
              global.data(),
              x.rows,
              x.columns,
              factors                         ? NO_FACTORS
              : in.kind == Arithmetic::IN_F32 ? ALL
                                              : ALL_BUT_OUTER};
  if (factors) p.span_factor = Kept<float>(x.rows * p.spans());
  if (in.kind != Arithmetic::IN_F32) p.row_factor = Kept<float>(x.rows);
  if (in.kind == Arithmetic::IN_I8) p.row_sum = Kept<int32_t>(x.rows * (in.span ? p.spans() : 1));
  for_each(x.rows, x.columns, [&](int64_t i) { prepare_row(q, p, i); });
  return p;
}

// x in shuffled rows for every share that has a few of them, and in blocks for the others.
PackedRows pack(const Prepared& x, Element weight, std::vector<Share>& shares) {
  std::vector<Block> all;
  for (Share& s : shares)
    if (s.rows > x.in.few) {
      const size_t before = all.size();
      add_blocks(s.from, s.rows, x.in, all);
      s.blocks.assign(all.begin() + before, all.end());
    }
  PackedRows out{x.pitch * x.in.packed_size() / 4};
  out.few_pitch = (out.dwords + 63) / 64 * 64;
#if TORCHQ_BF16_DOT
  for (const Share& s : shares) {
    if (!s.blocks.empty() || x.in.kind != Arithmetic::IN_BF16) continue;
    if (!out.few.size()) out.few = Kept<uint32_t>(x.rows * out.few_pitch);
    for (int64_t i = s.from; i < s.from + s.rows; i++)
      with_element(weight, [&]<Element E>() {
        shuffle_pairs<E>((const uint32_t*)x.row(i), out.dwords, &out.few[i * out.few_pitch], out.few_pitch);
      });
  }
#endif
  if (all.empty()) return out;
  const int64_t rows = all.back().at + all.back().pitch;
  out.x = Kept<uint32_t>(rows * out.dwords);
  out.factor = Kept<float>(rows * x.spans());
  if (x.row_sum.size()) out.start = Kept<int32_t>(rows * x.spans());
  for_each(all.size(), all[0].pitch * x.pitch, [&](int64_t i) {
    if (x.in.kind == Arithmetic::IN_F32) pack_block<DotF32>(x, all[i], out);
    if (x.in.kind == Arithmetic::IN_I8) pack_block<DotI8>(x, all[i], out);
#if TORCHQ_BF16_DOT
    if (x.in.kind == Arithmetic::IN_BF16) pack_block<DotBF16>(x, all[i], out);
#endif
  });
  return out;
}

// x [T, K]; expert e has rows bounds[e] .. bounds[e + 1]; w (E, N, K), bias (E, N); out [T, N].
void run_linear(const Tensor& x, const std::vector<int64_t>& bounds, const Tensor& data, const Tensor& scale,
                const std::optional<Tensor>& global, const std::optional<Tensor>& bias, const Tensor& out, int64_t rows,
                int64_t columns, int64_t format, int64_t activation) {
  std::vector<Share> shares;
  for (size_t e = 0; e + 1 < bounds.size(); e++)
    if (bounds[e + 1] > bounds[e]) shares.push_back({int64_t(e), bounds[e], bounds[e + 1] - bounds[e]});
  if (shares.empty()) return;
  const Matrices in{bytes(x), dtype_of(x), 1, x.numel() / columns, columns};
  const Format weight = Format::unpack(format), active = Format::unpack(activation);
  const Format* quantized = activation < 0 ? nullptr : &active;
  const bool many = in.rows > 4 * int64_t(shares.size());
  const Prepared prepared = prepare(in, arithmetic_of(weight, quantized, in.dtype, many), quantized);
  const PackedRows packed = pack(prepared, weight.element, shares);
  const Linear l{{weight, bytes(data), bytes(scale), floats(global), rows, columns, ALL_BUT_OUTER},
                 prepared,
                 packed,
                 bias ? bytes(*bias) : nullptr,
                 bias ? dtype_of(*bias) : F32,
                 bytes(out),
                 dtype_of(out)};
  const int64_t panels = l.panels(), work = in.rows * PANEL * columns / int64_t(shares.size()) / 4;
  for_each(shares.size() * panels, work, [&](int64_t i) {
    const Share& share = shares[i / panels];
    const int64_t first = i % panels * PANEL;
    linear_panel(l, {share.matrix, first, std::min(PANEL, rows - first)}, share);
  });
}

void linear(Tensor x, Tensor data, Tensor scale, std::optional<Tensor> global, std::optional<Tensor> bias, Tensor out,
            int64_t rows, int64_t columns, int64_t format, int64_t activation) {
  run_linear(x, {0, x.numel() / columns}, data, scale, global, bias, out, rows, columns, format, activation);
}

void grouped_linear(Tensor x, Tensor offsets, Tensor data, Tensor scale, std::optional<Tensor> global,
                    std::optional<Tensor> bias, Tensor out, int64_t rows, int64_t columns, int64_t format,
                    int64_t activation) {
  const int64_t* first = static_cast<const int64_t*>(offsets.data_ptr());
  std::vector<int64_t> bounds(first, first + offsets.numel());
  // Rows of no expert, before the first one's and after the last one's, are zeros.
  const int64_t row = rows * size_of(dtype_of(out)), tokens = x.numel() / columns;
  memset(bytes(out), 0, bounds.front() * row);
  memset(bytes(out) + bounds.back() * row, 0, (tokens - bounds.back()) * row);
  run_linear(x, bounds, data, scale, global, bias, out, rows, columns, format, activation);
}

}  // namespace

STABLE_TORCH_LIBRARY(TORCHQ_LIBRARY, m) {
  m.def(
      "quantize(Tensor x, Tensor(a!) data, Tensor(b!) scale, Tensor(c!)? global_scale, Tensor(d!)? error, int batch, "
      "int rows, int columns, int format, int rounding, bool own_global) -> ()");
  m.def(
      "dequantize(Tensor data, Tensor scale, Tensor? global_scale, Tensor(a!) out, int batch, int rows, int columns, "
      "int format) -> ()");
  m.def(
      "linear(Tensor x, Tensor data, Tensor scale, Tensor? global_scale, Tensor? bias, Tensor(a!) out, int rows, "
      "int columns, int format, int activation) -> ()");
  m.def(
      "grouped_linear(Tensor x, Tensor offsets, Tensor data, Tensor scale, Tensor? global_scale, Tensor? bias, "
      "Tensor(a!) out, int rows, int columns, int format, int activation) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCHQ_LIBRARY, CPU, m) {
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("grouped_linear", TORCH_BOX(&grouped_linear));
}

}  // namespace torchq
