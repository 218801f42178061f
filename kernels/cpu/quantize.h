// Quantization of rows, a few thousand values at a time so that the cache holds them: the amax of each group, the scales
// of all groups, then the codes and on request the squared error.
#pragma once
#include <algorithm>
#include <memory>

#include "scale.h"

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

// ---- amax, as the bits of an f32 ----

template <Dtype D>
inline int32_t amax_bits(const char* x, int64_t n, bool finite_only) {
  if constexpr (D == F32) {
    vi best{};
    auto take = [&](vi a) {
      a &= 0x7fffffff;
      if (finite_only) a = a >= INF_BITS ? vi{} : a;
      best = best > a ? best : a;
    };
    int64_t i = 0;
    for (; i + W <= n; i += W) take(load<vi>(x + i * 4));
    if (i < n) {
      char tail[W * 4] = {};
      memcpy(tail, x + i * 4, (n - i) * 4);
      take(load<vi>(tail));
    }
    return max_lane(best);
  } else {  // magnitudes are ordered as their bits are
    constexpr uint16_t infinity = D == BF16 ? 0x7f80 : 0x7c00;
    vh best{};
    auto take = [&](vh a) {
      a &= 0x7fff;
      if (finite_only) a = a >= infinity ? vh{} : a;
      best = best > a ? best : a;
    };
    int64_t i = 0;
    for (; i + W <= n; i += W) take(load<vh>(x + i * 2));
    if (i < n) {
      char tail[W * 2] = {};
      memcpy(tail, x + i * 2, (n - i) * 2);
      take(load<vh>(tail));
    }
    const uint16_t bits = max_lane(best);
    return D == BF16 ? int32_t(bits) << 16 : bit_cast<int32_t>(f16_to_float(bits));
  }
}

inline int32_t amax_bits(const char* x, Dtype d, int64_t n, bool finite_only) {
  return with_dtype(d, [&]<Dtype D>() { return amax_bits<D>(x, n, finite_only); });
}

inline float global_from_amax(int32_t bits) {
  float scale = bit_cast<float>(bits) / 2688.f;
  return scale == 0 ? 1.f : scale;
}

// ---- codes ----

// Squares of values and of their changes. The sums are f32: flush before they grow long.
struct ErrorSums {
  vf value{}, change{};
  double total[2] = {0, 0};

  void add(vf x, vf decoded) {
    vf d = decoded - x;
    value = fma(x, x, value);
    change = fma(d, d, change);
  }
  void flush() {
    total[0] += sum_lanes(value);
    total[1] += sum_lanes(change);
    value = change = vf{};
  }
};

#if defined(__AVX512BW__)
// bf16 values and a power of two as scale: 32 values at a time, in the integers that their bits are.
template <Element E>
class EncoderBF16 {
  static_assert(E == E2M1 || E == E4M3);
  // Values below 2^LEAST, scaled, have code 0; so do those that saturate when their exponents are made relative to it.
  static constexpr int LEAST = E == E2M1 ? -2 : -11;

 public:
  static bool takes(float multiplier) {
    int exponent = bit_cast<int32_t>(multiplier) >> 23;
    return exponent > 12 && exponent < 246;
  }

  explicit EncoderBF16(float multiplier)
      : exponent_(_mm512_set1_epi16(int16_t(((bit_cast<int32_t>(multiplier) >> 23) + LEAST) << 7))) {}

  // The codes in 16-bit lanes; false where one is a subnormal of e4m3, which this does not do.
  bool operator()(__m512i x, __m512i& codes) const {
    __m512i a = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    __m512i relative = _mm512_subs_epu16(a, exponent_);
    if constexpr (E == E2M1) {
      // Three bits of exponent, two of mantissa, and whether any bit follows them, tell the code.
      __m512i index = _mm512_add_epi16(_mm512_srli_epi16(relative, 5),
                                       _mm512_srli_epi16(_mm512_add_epi16(relative, _mm512_set1_epi16(31)), 5));
      codes = _mm512_permutex2var_epi16(_mm512_load_si512(rounded_.code), index, _mm512_load_si512(rounded_.code + 32));
      codes = _mm512_ternarylogic_epi32(codes, _mm512_srli_epi16(x, 12), _mm512_set1_epi16(8), 0xf8);  // | x >> 12 & 8
    } else {
      constexpr int subnormal = (-6 - LEAST) << 7;
      const __m512i one = _mm512_set1_epi16(1);
      if (_mm512_cmplt_epu16_mask(_mm512_sub_epi16(relative, one), _mm512_set1_epi16(subnormal - 1))) return false;
      __m512i odd = _mm512_and_si512(_mm512_srli_epi16(relative, 4), one);
      __m512i rounded = _mm512_add_epi16(_mm512_add_epi16(relative, _mm512_set1_epi16(7)), odd);
      codes = _mm512_subs_epu16(_mm512_srli_epi16(rounded, 4), _mm512_set1_epi16((subnormal >> 4) - 8));
      codes = _mm512_min_epu16(codes, _mm512_set1_epi16(0x7e));
      codes = _mm512_ternarylogic_epi32(codes, _mm512_srli_epi16(x, 8), _mm512_set1_epi16(0x80), 0xf8);
    }
    return true;
  }

  static void store_codes(char* out, __m512i codes) {
    if constexpr (E == E2M1) {
      const __m512i pair = _mm512_set1_epi32(1 | 16 << 16);
      _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8(_mm512_madd_epi16(codes, pair)));
    } else {
      _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi16_epi8(codes));
    }
  }

  // The bf16 values that the codes stand for.
  __m512i decoded(__m512i codes) const {
    const __m512i zero = _mm512_set1_epi16(E == E2M1 ? 7 : 0x7f);
    __m512i value, exponent;
    if constexpr (E == E2M1) {
      value = _mm512_permutexvar_epi16(codes, _mm512_load_si512(rounded_.value));
      exponent = _mm512_sub_epi16(exponent_, _mm512_set1_epi16((127 + LEAST) << 7));
    } else {
      value = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x7f)), 4);
      value = _mm512_ternarylogic_epi32(value, _mm512_slli_epi16(codes, 8), _mm512_set1_epi16(int16_t(0x8000)), 0xf8);
      exponent = _mm512_sub_epi16(exponent_, _mm512_set1_epi16((7 + LEAST) << 7));
    }
    return _mm512_mask_add_epi16(value, _mm512_test_epi16_mask(codes, zero), value, exponent);
  }

 private:
  struct Rounded {
    alignas(64) uint16_t code[64] = {}, value[32] = {};
    constexpr Rounded() {
      const float e2m1[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6}, ties[7] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
      for (int q = 0; q < 32; q++)
        for (int more = 0; more < 2; more++) {
          float v = (1 + (q & 3) * .25f) / 4;
          for (int i = 0; i < q >> 2; i++) v *= 2;
          int c = 0;
          for (int t = 0; t < 7; t++) c += v > ties[t] || (v == ties[t] && (more || t % 2));
          if (2 * q + more < 64) code[2 * q + more] = uint16_t(c);
        }
      for (int c = 0; c < 32; c++) value[c] = (bit_cast<uint32_t>(e2m1[c & 7]) >> 16) | (c & 8) << 12;
    }
  };
  static constexpr Rounded rounded_{};

  const __m512i exponent_;
};
#endif

// n values (a multiple of W) that share a multiplier. `amax`: bits that none of them exceeds.
template <Element E, Dtype D, bool WITH_ERROR>
inline void encode_run(const char* x, int64_t n, float multiplier, int32_t amax, bool power_of_two, char* out,
                       ErrorSums& sums) {
  constexpr int size = D == F32 ? 4 : 2, per_byte = packs_two(E) ? 2 : 1;
  ErrorSums error = sums;
  auto each = [&](int64_t from, int64_t to, auto scaled) {
    for (int64_t i = from; i < to; i += W) {
      vf v = load_as<D>(x + i * size);
      vi codes = encode<E>(scaled(v));
      torchq::store_codes<E>(out + i / per_byte, codes);
      if constexpr (WITH_ERROR) error.add(v, decode<E>(codes) * multiplier);
    }
  };
  const vf divisor = splat(multiplier), inverse = splat(1.f / multiplier);
  auto times_inverse = [&](vf v) { return v * inverse; };
  const int exponent = bit_cast<int32_t>(multiplier) >> 23;
  if (!(multiplier > 0)) {  // a zero or NaN multiplier has no codes
    for (int64_t i = 0; i < n; i += W) {
      torchq::store_codes<E>(out + i / per_byte, splat(E == INT4 ? 8 : 0));
      if constexpr (WITH_ERROR) error.add(load_as<D>(x + i * size), splat(0.f) * multiplier);
    }
  } else if (power_of_two) {  // only its reciprocal is exact
    int64_t i = 0;
#if defined(__AVX512BW__)
    if constexpr (D == BF16 && (E == E2M1 || E == E4M3))
      if (EncoderBF16<E>::takes(multiplier)) {
        const EncoderBF16<E> encoder(multiplier);
        for (; i + 32 <= n; i += 32) {
          __m512i v = _mm512_loadu_si512(x + i * 2), codes;
          if (!encoder(v, codes)) {
            each(i, i + 32, times_inverse);
            continue;
          }
          EncoderBF16<E>::store_codes(out + i / per_byte, codes);
          if constexpr (WITH_ERROR) {
            const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000));
            __m512i d = encoder.decoded(codes);
            error.add((vf)_mm512_slli_epi32(v, 16), (vf)_mm512_slli_epi32(d, 16));
            error.add((vf)_mm512_and_si512(v, upper), (vf)_mm512_and_si512(d, upper));
          }
        }
      }
#endif
    each(i, n, times_inverse);
  } else if (EXACT_FMA && D != F32 && exponent > 67 && exponent < 187 && (amax >> 23) - exponent < 60) {
    // For x of at most 12 significant bits and any f32 d, one Newton step makes x * (1 / d) the quotient that division
    // rounds to (tried for every mantissa of both; test_exact_division.py). It loses the sign of -0.
    each(0, n, [&](vf v) {
      vf q = v * inverse, left = fma(-q, divisor, v);
      return (vf)((vi)fma(left, inverse, q) | ((vi)v & INT32_MIN));
    });
  } else {
    each(0, n, [&](vf v) { return v / divisor; });
  }
  sums = error;
}

template <Element E, Dtype D, bool WITH_ERROR>
class RowQuantizer {
  static constexpr int size = D == F32 ? 4 : 2, per_byte = packs_two(E) ? 2 : 1;

 public:
  RowQuantizer(const Matrices& in, const Target& out)
      : in_(in),
        out_(out),
        f_(out.format),
        row_bytes_(f_.row_bytes(in.columns)),
        width_(f_.group_columns),
        groups_(width_ ? std::max<int64_t>(2048 / width_, 1) : 1),
        amax_(new int32_t[groups_ + W]),
        multiplier_(new float[groups_ + W]),
        padded_(new char[(width_ ? width_ : W) * size]),
        codes_(new char[width_ ? width_ : W]) {}

  ~RowQuantizer() {
    if (WITH_ERROR) {
      out_.error[0] += sums_.total[0];
      out_.error[1] += sums_.total[1];
    }
  }

  // A block is `group_rows` rows of one matrix that share scales.
  void block(int64_t matrix, int64_t index) {
    const int64_t height = f_.group_rows ? f_.group_rows : 1;
    int64_t first = index * height, last = std::min(first + height, in_.rows);
    first += matrix * in_.rows, last += matrix * in_.rows;
    if (width_)
      grouped(matrix, index, first, last);
    else
      whole_row(matrix, first);
  }

 private:
  void whole_row(int64_t matrix, int64_t row) {
    int32_t amax;
    float multiplier;
    if (out_.multiplier) {
      multiplier = out_.multiplier[matrix];
      amax = bit_cast<int32_t>(multiplier * 512);
    } else {
      amax = amax_bits<D>(in_.row(row), in_.columns, false);
      multiplier = put_scale(amax, f_, out_.rounding, 0, out_.scale + row * f_.scale_size());
    }
    for (int64_t c = 0; c < in_.columns; c += chunk) {
      const int64_t n = std::min(chunk, in_.columns - c), whole = n / W * W;
      encode_run<E, D, WITH_ERROR>(at(row, c), whole, multiplier, amax, false, code(row, c), sums_);
      if (whole < n) encode_padded(row, c + whole, W, multiplier, amax);
      if (WITH_ERROR) sums_.flush();
    }
  }

  void grouped(int64_t matrix, int64_t index, int64_t first, int64_t last) {
    float global = 0;
    if (f_.global == PER_TENSOR) global = out_.global[matrix];
    if (f_.global == PER_TOKEN) {
      if (out_.own_global) out_.global[first] = global_from_amax(amax_bits<D>(in_.row(first), in_.columns, true));
      global = out_.global[first];
    }
    const int64_t columns = f_.scale_columns(in_.columns), size_of_scale = f_.scale_size();
    char* scale = out_.scale + (matrix * f_.scale_rows(in_.rows) + index) * columns * size_of_scale;
    const bool power_of_two = f_.scale == SCALE_E8M0;
    for (int64_t g = 0; g < columns; g += groups_, scale += groups_ * size_of_scale) {
      const int64_t count = std::min(groups_, columns - g);
      for (int64_t r = first; r < last; r++)
        for (int64_t i = 0; i < count; i++) {
          int64_t c = (g + i) * width_;
          int32_t bits = amax_bits<D>(at(r, c), std::min(width_, in_.columns - c), false);
          amax_[i] = r > first ? std::max(amax_[i], bits) : bits;
        }
      put_scales(amax_.get(), count, f_, out_.rounding, global, scale, multiplier_.get());
      for (int64_t r = first; r < last; r++) {
        for (int64_t i = 0; i < count; i++) {
          int64_t c = (g + i) * width_;
          if (c + width_ > in_.columns)
            encode_padded(r, c, width_, multiplier_[i], amax_[i]);
          else
            encode_run<E, D, WITH_ERROR>(at(r, c), width_, multiplier_[i], amax_[i], power_of_two, code(r, c), sums_);
        }
        if (WITH_ERROR) sums_.flush();
      }
    }
  }

  // The last columns of a row, from c on, as n of them: zeros follow, whose codes are stored where the format says so.
  void encode_padded(int64_t row, int64_t c, int64_t n, float multiplier, int32_t amax) {
    const int64_t real = in_.columns - c, stored = std::min(row_bytes_ - c / per_byte, n / per_byte);
    memcpy(padded_.get(), at(row, c), real * size);
    memset(padded_.get() + real * size, 0, (n - real) * size);
    encode_run<E, D, WITH_ERROR>(padded_.get(), n, multiplier, amax, f_.scale == SCALE_E8M0, codes_.get(), sums_);
    memcpy(code(row, c), codes_.get(), stored);
  }

  const char* at(int64_t row, int64_t c) const { return in_.row(row) + c * size; }
  char* code(int64_t row, int64_t c) const { return out_.data + row * row_bytes_ + c / per_byte; }

  static constexpr int64_t chunk = 4096;  // sums of the error stay short

  const Matrices& in_;
  const Target& out_;
  const Format f_;
  const int64_t row_bytes_, width_, groups_;
  std::unique_ptr<int32_t[]> amax_;
  std::unique_ptr<float[]> multiplier_;
  std::unique_ptr<char[]> padded_, codes_;
  ErrorSums sums_;
};

// Blocks begin..end, counted through all matrices.
inline void quantize_blocks(const Matrices& in, const Target& out, int64_t begin, int64_t end) {
  int64_t per_matrix = out.format.group_rows ? (in.rows + out.format.group_rows - 1) / out.format.group_rows : in.rows;
  auto run = [&](auto quantizer) {
    for (int64_t i = begin; i < end; i++) quantizer.block(i / per_matrix, i % per_matrix);
  };
  with_element(out.format.element, [&]<Element E>() {
    with_dtype(in.dtype, [&]<Dtype D>() {
      if (out.error)
        run(RowQuantizer<E, D, true>(in, out));
      else
        run(RowQuantizer<E, D, false>(in, out));
    });
  });
}

}  // namespace torchq
