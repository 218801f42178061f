// The linear layer: prepares x once, then computes panels of output columns for every expert.
#pragma once
#include <vector>

#include "bf16.h"
#include "quantize.h"

namespace torchq {

// x as one of the dot products takes it: rows of `pitch` elements, zeros after the last column.
struct Prepared {
  enum Kind { AS_F32, AS_BF16, AS_I8 } kind;
  const char* x;
  int64_t rows, pitch;
  std::vector<char> own;            // x, where it is not the caller's memory
  std::vector<float> row_factor;    // empty: all ones
  std::vector<int32_t> row_sum;     // AS_I8: sums of the codes

  int size() const { return kind == AS_F32 ? 4 : kind == AS_BF16 ? 2 : 1; }
  const char* row(int64_t i) const { return x + i * pitch * size(); }
};

inline bool whole_row_int8(const Format& f) { return f.element == INT8 && f.group_columns == 0; }

// Which arithmetic computes the pair: integers where both sides are int8; bf16 where its values are exact and this CPU
// multiplies them; else f32.
inline Prepared::Kind kind_of(const Format& weight, const Format* activation, Dtype dtype) {
  if (activation && whole_row_int8(weight) && whole_row_int8(*activation)) return Prepared::AS_I8;
#if TORCHQ_BF16_DOT
  bool exact = activation ? activation->group_columns == 0 || activation->scale != SCALE_F32 : dtype == BF16;
  if (exact && has_bf16_kernel(weight)) return Prepared::AS_BF16;
#endif
  return Prepared::AS_F32;
}

inline int64_t padded_pitch(int64_t columns, Prepared::Kind kind) {
  int64_t unit = kind == Prepared::AS_F32 ? W : 64;
  return (columns + unit - 1) / unit * unit;
}

// Row i of x, not quantized.
inline void prepare_row(const Matrices& x, Prepared& p, int64_t i) {
  char* out = p.own.data() + i * p.pitch * p.size();
  if (p.kind == Prepared::AS_BF16) {
    memcpy(out, x.row(i), x.columns * 2);
    memset(out + x.columns * 2, 0, (p.pitch - x.columns) * 2);
  } else {
    with_dtype(x.dtype, [&]<Dtype D>() { widen<D>(x.row(i), x.columns, (float*)out, p.pitch); });
  }
}

// Row i of the quantized x, which leaves out what `row_factor` takes.
inline void prepare_row(const Quantized& q, Prepared& p, int64_t i) {
  char* out = p.own.data() + i * p.pitch * p.size();
  if (p.kind != Prepared::AS_F32) p.row_factor[i] = q.outer(0, i);
  if (p.kind == Prepared::AS_I8) {
    memcpy(out, q.row_data(i), q.columns);
    memset(out + q.columns, 0, p.pitch - q.columns);
    int32_t sum = 0;
    for (int64_t k = 0; k < q.columns; k++) sum += int8_t(out[k]);
    p.row_sum[i] = sum;
    return;
  }
  std::vector<float> values(q.format.padded(q.columns) + q.format.group_columns + W);
  with_element(q.format.element, [&]<Element E>() { decode_columns<E>(q, 0, i, 0, q.columns, values.data()); });
  int64_t size = p.size();
  if (p.kind == Prepared::AS_F32)
    memcpy(out, values.data(), q.columns * 4);
  else
    narrow<BF16>(values.data(), q.columns, out);
  memset(out + q.columns * size, 0, (p.pitch - q.columns) * size);
}

struct Linear {
  Quantized w;
  const Prepared& x;
  const char* bias;  // per matrix and row of w, or nullptr
  Dtype bias_dtype;
  char* out;  // [rows of x, rows of w]
  Dtype out_dtype;

  static constexpr int64_t panel = 16;  // rows of w
  int64_t panels() const { return (w.rows + panel - 1) / panel; }
};

// Memory of one thread, kept between calls.
template <class T>
inline T* scratch(int64_t n, int which) {
  thread_local std::unique_ptr<T[]> memory[4];
  thread_local int64_t room[4];
  if (room[which] < n) memory[which].reset(new T[room[which] = n]);
  return memory[which].get();
}

inline float value_at(const char* p, Dtype d, int64_t i) {
  if (d == F32) return ((const float*)p)[i];
  uint16_t h = ((const uint16_t*)p)[i];
  return d == F16 ? f16_to_float(h) : bit_cast<float>(uint32_t(h) << 16);
}

// Sums [m][panel] of rows first.. of matrix `matrix` times the outer factors, plus bias, to the output.
template <class S>
inline void finish(const Linear& l, int64_t matrix, int64_t first, int64_t n_rows, int64_t from, int64_t m_rows,
                   const S* sums) {
  float factor[Linear::panel], bias[Linear::panel] = {};
  const bool inner_only = l.x.kind != Prepared::AS_F32;
  for (int64_t n = 0; n < Linear::panel; n++) {
    bool real = n < n_rows;
    factor[n] = real && inner_only ? l.w.outer(matrix, first + n) : 1.f;
    if (real && l.bias) bias[n] = value_at(l.bias, l.bias_dtype, matrix * l.w.rows + first + n);
  }
  for (int64_t m = 0; m < m_rows; m++) {
    float values[Linear::panel];
    float row = l.x.row_factor.empty() ? 1.f : l.x.row_factor[from + m];
    for (int64_t n = 0; n < Linear::panel; n++) values[n] = float(sums[m * Linear::panel + n]) * factor[n] * row + bias[n];
    char* out = l.out + ((from + m) * l.w.rows + first) * size_of(l.out_dtype);
    with_dtype(l.out_dtype, [&]<Dtype D>() { narrow<D>(values, n_rows, out); });
  }
}

#if TORCHQ_BF16_DOT
// Bytes that what a row's kernel prepares of its scales may take.
inline int64_t scale_room(const Quantized& w) { return ((w.columns + 1024 + 63) / 64 * 2 + w.format.group_columns) * 4; }

// Most rows of x that decoding in registers takes: more repay a tile, later where a tile's sums need scales.
constexpr int64_t stream_m(Scaling s) { return s == PER_32 ? 8 : 4; }

template <Element E, Scaling S>
inline void stream_panel(const Linear& l, int64_t matrix, int64_t first, int64_t n_rows, int64_t from, int64_t m_rows,
                         float* sums) {
  const uint16_t* x = (const uint16_t*)l.x.row(from);
  char* space = scratch<char>(scale_room(l.w), 0);
  auto stream = [&]<Scaling T, int MB>(int64_t n, int64_t m) {
    stream_row<E, T, MB>(l.w, matrix, first + n, x + m * l.x.pitch, l.x.pitch, m_rows - m, sums + m * Linear::panel + n,
                         Linear::panel, space);
  };
  for (int64_t n = 0; n < n_rows; n++) {
    if (S == POWERS && !exponents_per_32(l.w, matrix, first + n, (int16_t*)space)) {
      for (int64_t m = 0; m < m_rows; m += 2) stream.template operator()<PER_32, 2>(n, m);
    } else if constexpr (S == POWERS || S == BLOCKS) {
      stream.template operator()<S, 4>(n, 0);
    } else {
      if constexpr (S == PER_32)
        if (m_rows > 4) {
          stream.template operator()<S, 8>(n, 0);
          continue;
        }
      m_rows > 2   ? stream.template operator()<S, 4>(n, 0)
      : m_rows > 1 ? stream.template operator()<S, 2>(n, 0)
                   : stream.template operator()<S, 1>(n, 0);
    }
  }
}

template <Element E, Scaling S>
inline void tile_panel(const Linear& l, int64_t matrix, int64_t first, int64_t n_rows, int64_t from, int64_t m_rows,
                       float* sums) {
  const int64_t pitch = l.x.pitch, room = scale_room(l.w);
  uint16_t* tile = scratch<uint16_t>(Linear::panel * pitch, 0);
  char* space = scratch<char>(Linear::panel * room, 1);
  const uint16_t* x = (const uint16_t*)l.x.row(from);
  const float* scales[Linear::panel];
  for (int64_t n = 0; n < Linear::panel; n++) {
    scales[n] = (const float*)(space + n * room);
    if (n >= n_rows) continue;
    decode_row<E, S>(l.w, matrix, first + n, space + n * room, tile + n * pitch);
    if constexpr (S == PER_32) scales[n] = scales_per_32(l.w, matrix, first + n, (float*)(space + n * room));
  }
  if constexpr (S != PER_32) {
    dot_rows<DotBF16>({tile, pitch, n_rows}, x, pitch, m_rows, pitch, sums, Linear::panel);
  } else {
    for (int64_t n = 0; n < n_rows; n += 2)  // an odd last row takes a stale one along
      for_blocks_of_m<BLOCK_M>(m_rows, [&]<int MB>(int64_t m) {
        scaled_block<MB>(tile + n * pitch, pitch, scales + n, l.w.format.group_columns, x + m * pitch, pitch, pitch,
                         sums + m * Linear::panel + n, Linear::panel);
      });
  }
}

template <Element E>
inline void bf16_panel(const Linear& l, int64_t matrix, int64_t first, int64_t n_rows, int64_t from, int64_t m_rows,
                       float* sums) {
  const Scaling on_sums = of_sums(l.w.format), on_weights = of_weights(l.w.format);
  const Scaling scaling = m_rows <= 2 ? on_sums : on_weights;
  auto run = [&]<Scaling S>() {
    if (m_rows <= stream_m(S)) return stream_panel<E, S>(l, matrix, first, n_rows, from, m_rows, sums);
    if constexpr (S != PER_16) tile_panel<E, S>(l, matrix, first, n_rows, from, m_rows, sums);
  };
  // Only the pairs that formats have are compiled.
  if constexpr (E == E2M1) {
    if (scaling == PER_16) return run.template operator()<PER_16>();
    if (scaling == BLOCKS) return run.template operator()<BLOCKS>();
  } else if constexpr (E != INT4) {
    if (scaling == PLAIN) return run.template operator()<PLAIN>();
  }
  if constexpr (E == E2M1 || E == E4M3)
    if (scaling == POWERS) return run.template operator()<POWERS>();
  if constexpr (E != INT8) run.template operator()<PER_32>();
}
#endif

template <Element E>
inline void f32_panel(const Linear& l, int64_t matrix, int64_t first, int64_t n_rows, int64_t from, int64_t m_rows,
                      float* sums) {
  const int64_t unit = l.w.format.group_columns ? l.w.format.group_columns : W, pitch = l.x.pitch;
  int64_t chunk = 2048 / unit * unit;
  chunk = chunk ? chunk : unit;
  float* tile = scratch<float>(Linear::panel * (chunk + W), 2);
  for (int64_t k = 0; k < l.w.columns; k += chunk) {
    int64_t n = l.w.columns - k < chunk ? l.w.columns - k : chunk, whole = (n + W - 1) / W * W;
    for (int64_t r = 0; r < n_rows; r++) {
      float* row = tile + r * (chunk + W);
      decode_columns<E>(l.w, matrix, first + r, k, n, row);
      for (int64_t i = n; i < whole; i++) row[i] = 0;
    }
    dot_rows<DotF32>({tile, chunk + W, n_rows}, (const float*)l.x.row(from) + k, pitch, m_rows, whole, sums,
                     Linear::panel);
  }
}

inline void i8_panel(const Linear& l, int64_t matrix, int64_t first, int64_t n_rows, int64_t from, int64_t m_rows,
                     int64_t* sums) {
  // Sums of 2^15 products of bytes fit 32 bits; longer rows add up in 64.
  constexpr int64_t chunk = 1 << 15;
  const int64_t columns = l.w.columns, step = DotI8::step;
  const int8_t* w = (const int8_t*)l.w.row_data(matrix * l.w.rows + first);
  for (int64_t m = 0; m < m_rows; m++)
    for (int64_t n = 0; n < n_rows; n++)
      sums[m * Linear::panel + n] = -int64_t(DotI8::offset) * l.x.row_sum[from + m];
  for (int64_t k = 0; k < columns; k += chunk) {
    int64_t n = columns - k < chunk ? columns - k : chunk, whole = n / step * step;
    const int8_t* x = (const int8_t*)l.x.row(from) + k;
    dot_rows<DotI8>({w + k, columns, n_rows}, x, l.x.pitch, m_rows, whole, sums, Linear::panel);
    if (whole == n) continue;
    alignas(64) int8_t tail[Linear::panel * DotI8::step] = {};  // meets zeros of x
    for (int64_t r = 0; r < n_rows; r++) memcpy(tail + r * step, w + r * columns + k + whole, n - whole);
    dot_rows<DotI8>({tail, step, n_rows}, x + whole, l.x.pitch, m_rows, step, sums, Linear::panel);
  }
}

// Panel `index` of matrix `matrix` for rows from..from + count of x.
inline void linear_panel(const Linear& l, int64_t matrix, int64_t index, int64_t from, int64_t count) {
  const int64_t first = index * Linear::panel, left = l.w.rows - first, n_rows = left < Linear::panel ? left : Linear::panel;
  if (l.x.kind == Prepared::AS_I8) {
    int64_t* sums = scratch<int64_t>(count * Linear::panel, 0);
    i8_panel(l, matrix, first, n_rows, from, count, sums);
    return finish(l, matrix, first, n_rows, from, count, sums);
  }
  const int64_t room = (count + 7) / 8 * 8 * Linear::panel;  // blocks of rows may pass the last one
  float* sums = scratch<float>(room, 3);
  memset(sums, 0, room * sizeof(float));
  with_element(l.w.format.element, [&]<Element E>() {
#if TORCHQ_BF16_DOT
    if (l.x.kind == Prepared::AS_BF16) return bf16_panel<E>(l, matrix, first, n_rows, from, count, sums);
#endif
    f32_panel<E>(l, matrix, first, n_rows, from, count, sums);
  });
  finish(l, matrix, first, n_rows, from, count, sums);
}

}  // namespace torchq
