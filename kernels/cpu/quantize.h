// Quantization of rows: amax, scale, codes, and on request the squared error, from one read of the values.
#pragma once
#include <memory>

#include "code.h"

namespace torchq {

// A batch of matrices [batch, rows, columns], contiguous; scales and codes as torchq.keys.stored_shapes lays them out.
struct Matrices {
  const char* x;
  Dtype dtype;
  int64_t batch, rows, columns;

  const char* row(int64_t i) const { return x + i * columns * size_of(dtype); }
};

struct Target {
  Format format;
  Rounding rounding;
  char *data, *scale;
  float* global;            // per matrix, or per row of PER_TOKEN; nullptr without one
  bool own_global;          // PER_TOKEN: compute it from the row
  const float* multiplier;  // per matrix: scales that were computed beforehand (whole-tensor formats)
  double* error;            // two sums, or nullptr
};

template <Dtype D>
inline int32_t amax_bits(const char* x, int64_t n, bool finite_only) {
  constexpr int size = D == F32 ? 4 : 2;
  vi best{};
  auto take = [&](vf v) {
    vi a = (vi)v & 0x7fffffff;
    if (finite_only) a = a >= INF_BITS ? vi{} : a;
    best = best > a ? best : a;
  };
  int64_t i = 0;
  for (; i + W <= n; i += W) take(load_as<D>(x + i * size));
  if (i < n) {
    char tail[W * size] = {};
    memcpy(tail, x + i * size, (n - i) * size);
    take(load_as<D>(tail));
  }
  return max_lane(best);
}

inline int32_t amax_bits(const char* x, Dtype d, int64_t n, bool finite_only) {
  return with_dtype(d, [&]<Dtype D>() { return amax_bits<D>(x, n, finite_only); });
}

inline float global_from_amax(int32_t bits) {
  float scale = bit_cast<float>(bits) / 2688.f;
  return scale == 0 ? 1.f : scale;
}

struct ErrorSums {
  vf value{}, change{};
  double total[2] = {0, 0};

  void add(vf x, vf decoded) {
    vf d = decoded - x;
    value += x * x;
    change += d * d;
  }
  void flush() {  // before f32 sums grow long
    total[0] += sum_lanes(value);
    total[1] += sum_lanes(change);
    value = change = vf{};
  }
};

// n values (a multiple of W) that share a multiplier.
template <Element E, bool WITH_ERROR>
inline void encode_run(const float* x, int64_t n, float multiplier, bool power_of_two, char* out, ErrorSums& error) {
  constexpr int bytes = packs_two(E) ? W / 2 : W;
  if (!(multiplier > 0)) {  // a zero or NaN multiplier has no codes
    for (int64_t i = 0; i < n; i += W, out += bytes) {
      store_codes<E>(out, splat(E == INT4 ? 8 : 0));
      if (WITH_ERROR) error.add(load<vf>(x + i), splat(0.f) * multiplier);
    }
    return;
  }
  auto run = [&](auto scaled) {
    for (int64_t i = 0; i < n; i += W, out += bytes) {
      vf v = load<vf>(x + i);
      vi codes = encode<E>(scaled(v));
      store_codes<E>(out, codes);
      if (WITH_ERROR) error.add(v, decode<E>(codes) * multiplier);
    }
  };
  // The reciprocal of a power of two is exact, others are not: only those may multiply.
  const vf inverse = splat(1.f / multiplier), divisor = splat(multiplier);
  power_of_two ? run([&](vf v) { return v * inverse; }) : run([&](vf v) { return v / divisor; });
}

template <Element E, bool WITH_ERROR>
class RowQuantizer {
 public:
  RowQuantizer(const Matrices& in, const Target& out)
      : in_(in),
        out_(out),
        f_(out.format),
        block_rows_(f_.group_rows ? f_.group_rows : 1),
        row_bytes_(f_.row_bytes(in.columns)),
        scale_columns_(f_.scale_columns(in.columns)) {
    int64_t unit = f_.group_columns ? f_.group_columns : W;
    chunk_ = 4096 / block_rows_ / unit * unit;
    chunk_ = chunk_ < unit ? unit : chunk_;
    buffer_.reset(new float[block_rows_ * chunk_]);
  }

  ~RowQuantizer() {
    sums_.flush();
    if (WITH_ERROR) {
      out_.error[0] += sums_.total[0];
      out_.error[1] += sums_.total[1];
    }
  }

  // A block is `group_rows` rows of one matrix that share scales.
  void block(int64_t matrix, int64_t index) {
    int64_t first = index * block_rows_, last = first + block_rows_ < in_.rows ? first + block_rows_ : in_.rows;
    first += matrix * in_.rows, last += matrix * in_.rows;
    if (f_.group_columns)
      grouped(matrix, index, first, last);
    else
      whole_row(matrix, first);
  }

 private:
  void whole_row(int64_t matrix, int64_t row) {
    const char* x = in_.row(row);
    float multiplier = out_.multiplier
                           ? out_.multiplier[matrix]
                           : put_scale(amax_bits(x, in_.dtype, in_.columns, false), f_, out_.rounding, 0,
                                       out_.scale + row * f_.scale_size());
    for (int64_t c = 0; c < in_.columns; c += chunk_) {
      int64_t n = widen_chunk(row, c, buffer_.get());
      encode_columns(row, c, n, buffer_.get(), multiplier);
    }
  }

  void grouped(int64_t matrix, int64_t index, int64_t first, int64_t last) {
    float global = 0;
    if (f_.global == PER_TENSOR) global = out_.global[matrix];
    if (f_.global == PER_TOKEN) {
      if (out_.own_global)
        out_.global[first] = global_from_amax(amax_bits(in_.row(first), in_.dtype, in_.columns, true));
      global = out_.global[first];
    }
    char* scale = out_.scale + (matrix * f_.scale_rows(in_.rows) + index) * scale_columns_ * f_.scale_size();
    const int64_t width = f_.group_columns;
    for (int64_t c = 0; c < in_.columns; c += chunk_) {
      int64_t n = 0;
      for (int64_t r = first; r < last; r++) n = widen_chunk(r, c, &buffer_[(r - first) * chunk_]);
      for (int64_t g = 0; g < n; g += width, scale += f_.scale_size()) {
        vi best{};
        for (int64_t r = 0; r < last - first; r++)
          for (int64_t i = 0; i < width; i += W) {
            vi a = load<vi>(&buffer_[r * chunk_ + g + i]) & 0x7fffffff;
            best = best > a ? best : a;
          }
        float multiplier = put_scale(max_lane(best), f_, out_.rounding, global, scale);
        for (int64_t r = first; r < last; r++)
          encode_columns(r, c + g, width, &buffer_[(r - first) * chunk_ + g], multiplier);
      }
    }
  }

  // Columns c.. of a row as f32, with zeros up to a whole number of groups; returns how many.
  int64_t widen_chunk(int64_t row, int64_t c, float* buffer) {
    int64_t unit = f_.group_columns ? f_.group_columns : W;
    int64_t n = in_.columns - c < chunk_ ? in_.columns - c : chunk_, padded = (n + unit - 1) / unit * unit;
    const char* x = in_.row(row) + c * size_of(in_.dtype);
    with_dtype(in_.dtype, [&]<Dtype D>() { widen<D>(x, n, buffer, padded); });
    return padded;
  }

  void encode_columns(int64_t row, int64_t c, int64_t n, const float* x, float multiplier) {
    constexpr int per_byte = packs_two(E) ? 2 : 1;
    char* out = out_.data + row * row_bytes_ + c / per_byte;
    int64_t stored = row_bytes_ - c / per_byte;  // formats of whole bytes do not store the padding
    int64_t whole = n / per_byte <= stored ? n : stored / W * W;
    const bool power = f_.scale == SCALE_E8M0;
    encode_run<E, WITH_ERROR>(x, whole, multiplier, power, out, sums_);
    if (whole < n) {
      char tail[W];
      encode_run<E, WITH_ERROR>(x + whole, W, multiplier, power, tail, sums_);
      memcpy(out + whole, tail, stored - whole);
    }
    if (WITH_ERROR) sums_.flush();
  }

  const Matrices& in_;
  const Target& out_;
  const Format f_;
  const int64_t block_rows_, row_bytes_, scale_columns_;
  int64_t chunk_;
  std::unique_ptr<float[]> buffer_;
  ErrorSums sums_;
};

// Blocks begin..end, counted through all matrices.
inline void quantize_blocks(const Matrices& in, const Target& out, int64_t begin, int64_t end) {
  int64_t per_matrix = out.format.group_rows ? (in.rows + out.format.group_rows - 1) / out.format.group_rows : in.rows;
  with_element(out.format.element, [&]<Element E>() {
    auto run = [&](auto quantizer) {
      for (int64_t i = begin; i < end; i++) quantizer.block(i / per_matrix, i % per_matrix);
    };
    if (out.error)
      run(RowQuantizer<E, true>(in, out));
    else
      run(RowQuantizer<E, false>(in, out));
  });
}

}  // namespace torchq
