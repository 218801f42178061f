// Codes and scales of a row to f32 values: code * multiplier, exactly as the torch twin rounds it.
#pragma once
#include <algorithm>
#include <memory>

#include "scale.h"

namespace torchq {

// Which scales decoded values include. OUTER ones are what all of a row shares (a whole row's f32 scale, a global
// scale): the product's sums may be multiplied by them instead.
enum Factors { ALL, ALL_BUT_OUTER, NO_FACTORS };

// A batch of quantized matrices, read only. Whatever takes a division is computed once.
struct Quantized {
  const Format format;
  const char *const data, *const scale;
  const float* const global;
  const int64_t rows, columns;  // of one matrix
  const Factors factors = ALL;
  const int64_t row_bytes = format.row_bytes(columns);
  const int64_t scale_columns = format.scale_columns(columns), scale_rows = format.scale_rows(rows);

  const char* row_data(int64_t row) const { return data + row * row_bytes; }
  // The scales of row `row` of matrix `matrix`.
  const char* row_scale(int64_t matrix, int64_t row) const {
    int64_t line = format.group_rows == 1 ? row : format.group_rows ? row / format.group_rows : 0;
    return scale + (matrix * scale_rows + line) * scale_columns * format.scale_size();
  }
  float row_global(int64_t matrix, int64_t row) const {
    return format.global == NO_GLOBAL ? 1.f : global[format.global == PER_TOKEN ? matrix * rows + row : matrix];
  }
  float outer(int64_t matrix, int64_t row) const {
    return format.group_columns ? row_global(matrix, row) : multiplier(format, row_scale(matrix, row), 0, 1.f);
  }
};

template <Element E>
inline void decode_run(const char* codes, int64_t n, float multiplier, float* out) {
  constexpr int bytes = packs_two(E) ? W / 2 : W;
  for (int64_t i = 0; i < n; i += W, codes += bytes) store(out + i, decode<E>(load_codes<E>(codes)) * multiplier);
}

// Columns c..c + n of a row to f32. c is a multiple of the group's width; out has room for n rounded up to W and to
// whole groups. Reads no byte outside the row.
template <Element E>
inline void decode_columns(const Quantized& q, int64_t matrix, int64_t row, int64_t c, int64_t n, float* out) {
  constexpr int per_byte = packs_two(E) ? 2 : 1;
  const int64_t row_bytes = q.row_bytes, width = q.format.group_columns ? q.format.group_columns : n;
  const char *codes = q.row_data(matrix * q.rows + row), *scale = q.row_scale(matrix, row);
  const float outer = q.factors == ALL ? q.outer(matrix, row) : 1.f;
  const bool groups = q.format.group_columns && q.factors != NO_FACTORS;
  for (int64_t i = 0; i < n; i += width) {
    float m = groups ? multiplier(q.format, scale, (c + i) / width, outer) : outer;
    int64_t from = (c + i) / per_byte, stored = row_bytes - from;
    int64_t whole = stored * per_byte >= width ? width / W * W : stored / W * W;
    decode_run<E>(codes + from, whole, m, out + i);
    if (whole < width && stored > whole / per_byte) {
      char tail[W] = {};
      int64_t left = stored - whole / per_byte < W ? stored - whole / per_byte : W;
      memcpy(tail, codes + from + whole / per_byte, left);
      decode_run<E>(tail, W, m, out + i + whole);
    }
  }
}

// The f32 scales of a row for every `span` columns, `count` of them and W more at most; zeros past the last group.
inline void spread_scales(const Quantized& q, int64_t matrix, int64_t row, int64_t span, int64_t count, float* out) {
  const char* scale = q.row_scale(matrix, row);
  const int64_t repeat = q.format.group_columns / span, size = q.format.scale_size();
  int64_t i = 0;
  if (repeat == 1)
    for (; i + W <= std::min(q.scale_columns, count); i += W) store(out + i, stored_scales(q.format, scale + i * size));
  for (int64_t g = i; g < q.scale_columns && i < count; g++)
    for (int64_t end = std::min(i + repeat, count); i < end; i++) out[i] = multiplier(q.format, scale, g, 1.f);
  std::fill(out + i, out + std::max(i, count), 0.f);
}

inline void dequantize_row(const Quantized& q, int64_t matrix, int64_t row, Dtype dtype, char* out) {
  constexpr int64_t most = 4096;
  int64_t width = q.format.group_columns ? q.format.group_columns : W;
  int64_t chunk = width < most ? most / width * width : width;
  thread_local std::unique_ptr<float[]> buffer;
  thread_local int64_t room = 0;
  if (room < chunk + W) buffer.reset(new float[room = chunk + W]);
  with_element(q.format.element, [&]<Element E>() {
    for (int64_t c = 0; c < q.columns; c += chunk) {
      int64_t n = q.columns - c < chunk ? q.columns - c : chunk;
      decode_columns<E>(q, matrix, row, c, n, buffer.get());
      with_dtype(dtype, [&]<Dtype D>() { narrow<D>(buffer.get(), n, out + c * size_of(D)); });
    }
  });
}

}  // namespace torchq
