// Quantization of rows, a few thousand values at a time so that the cache holds them: the amax of each group, the
// scales of all groups, then the codes and on request the squared error.
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
  // Magnitudes are ordered as their bits are.
  using V = std::conditional_t<D == F32, vi, vh>;
  constexpr int size = D == F32 ? 4 : 2;
  constexpr int32_t magnitude = D == F32 ? 0x7fffffff : 0x7fff;
  constexpr int32_t infinity = D == F32 ? INF_BITS : D == BF16 ? 0x7f80 : 0x7c00;
  V best{};
  auto take = [&](V a) {
    a &= magnitude;
    if (finite_only) a = a >= infinity ? V{} : a;
    best = best > a ? best : a;
  };
  int64_t i = 0;
  for (; i + W <= n; i += W) take(load<V>(x + i * size));
  if (i < n) {
    char tail[W * size] = {};
    memcpy(tail, x + i * size, (n - i) * size);
    take(load<V>(tail));
  }
  const auto bits = max_lane(best);
  if constexpr (D == F32) return bits;
  return D == BF16 ? int32_t(bits) << 16 : bit_cast<int32_t>(f16_to_float(bits));
}

inline int32_t amax_bits(const char* x, Dtype d, int64_t n, bool finite_only) {
  return with_dtype(d, [&]<Dtype D>() { return amax_bits<D>(x, n, finite_only); });
}

inline float global_from_amax(int32_t bits) {
  float scale = bit_cast<float>(bits) / 2688.f;
  return scale == 0 ? 1.f : scale;
}

// ---- codes ----

// Squares of values and of their changes; the sums are f32, of a few thousand values.
struct ErrorSums {
  vf value{}, change{};

  void add(vf x, vf decoded) {
    vf d = decoded - x;
    value = fma(x, x, value);
    change = fma(d, d, change);
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
  explicit EncoderBF16(float multiplier)
      : exponent_(_mm512_set1_epi16(int16_t(((bit_cast<int32_t>(multiplier) >> 23) + LEAST) << 7))) {}

  // The codes in 16-bit lanes; false where one is a subnormal of e4m3, which this does not do.
  bool operator()(__m512i x, __m512i& codes) const {
    __m512i a = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    __m512i relative = _mm512_subs_epu16(a, exponent_);
    if constexpr (E == E2M1) {
      __m512i index = _mm512_add_epi16(_mm512_srli_epi16(relative, 5),
                                       _mm512_srli_epi16(_mm512_add_epi16(relative, _mm512_set1_epi16(31)), 5));
      codes = rounding_e2m1(index, ~0u);
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

  static void store(char* out, __m512i codes) {
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
      value = _mm512_permutexvar_epi16(codes, _mm512_load_si512(tables_of<E2M1>.value));
      exponent = _mm512_sub_epi16(exponent_, _mm512_set1_epi16((127 + LEAST) << 7));
    } else {
      value = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x7f)), 4);
      value = _mm512_ternarylogic_epi32(value, _mm512_slli_epi16(codes, 8), _mm512_set1_epi16(int16_t(0x8000)), 0xf8);
      exponent = _mm512_sub_epi16(exponent_, _mm512_set1_epi16((7 + LEAST) << 7));
    }
    return _mm512_mask_add_epi16(value, _mm512_test_epi16_mask(codes, zero), value, exponent);
  }

 private:
  const __m512i exponent_;
};
#endif

// How values are divided by their scale, with the result of a division to the bit. Only the reciprocal of a power of
// two is exact: POWER multiplies by it, POWER_BF16 adds exponents.
//
// NEWTON is for values of at most 12 significant bits (f16, bf16): one Newton step makes x * (1 / d) the quotient that
// division rounds to, for any d (tried for every mantissa of both, see test_exact_division.py).
enum Way { DIVIDE, NEWTON, POWER, POWER_BF16 };

// Whether NEWTON or POWER_BF16 may take a group: no overflow, underflow or NaN on the way.
inline bool plain(vi amax_bits, vf multiplier, bool power_of_two) {
  const vi exponent = (vi)multiplier >> 23, range = (amax_bits >> 23) - exponent;
  return power_of_two ? all(exponent > 12 & exponent < 246) : all(exponent > 67 & exponent < 187 & range < 60);
}

template <Element E, Dtype D>
inline Way way(bool power_of_two, bool is_plain, int64_t width) {
#if defined(__AVX512BW__)
  if (D == BF16 && (E == E2M1 || E == E4M3) && power_of_two && is_plain && width % 32 == 0) return POWER_BF16;
#endif
  if (power_of_two) return POWER;
  return EXACT_FMA && D != F32 && is_plain ? NEWTON : DIVIDE;
}

// n values (a multiple of W) that share a multiplier.
template <Element E, Dtype D, bool WITH_ERROR, Way WAY>
[[gnu::always_inline]] inline void encode_run(const char* x, int64_t n, float multiplier, float inverse, char* out,
                                              ErrorSums& error) {
  constexpr int size = D == F32 ? 4 : 2, per_byte = packs_two(E) ? 2 : 1;
  if constexpr (WAY == DIVIDE || WAY == POWER)
    if (!(multiplier > 0)) {  // a zero or NaN multiplier has no codes
      for (int64_t i = 0; i < n; i += W) {
        store_codes<E>(out + i / per_byte, splat(E == INT4 ? 8 : 0));
        if constexpr (WITH_ERROR) error.add(load_as<D>(x + i * size), splat(0.f) * multiplier);
      }
      return;
    }
  auto each = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i += W) {
      const vf v = load_as<D>(x + i * size);
      vf scaled;
      if constexpr (WAY == DIVIDE) {
        scaled = v / multiplier;
      } else if constexpr (WAY == NEWTON) {
        vf q = v * inverse;
        q = fma(fma(-q, splat(multiplier), v), splat(inverse), q);
        scaled = (vf)((vi)q | ((vi)v & INT32_MIN));  // the step loses the sign of -0
      } else {
        scaled = v * inverse;
      }
      vi codes = encode<E>(scaled);
      store_codes<E>(out + i / per_byte, codes);
      if constexpr (WITH_ERROR) error.add(v, decode<E>(codes) * multiplier);
    }
  };
#if defined(__AVX512BW__)
  if constexpr (WAY == POWER_BF16) {
    const EncoderBF16<E> encoder(multiplier);
    for (int64_t i = 0; i < n; i += 32) {
      __m512i v = _mm512_loadu_si512(x + i * 2), codes;
      if (!encoder(v, codes)) {
        each(i, i + 32);
        continue;
      }
      encoder.store(out + i / per_byte, codes);
      if constexpr (WITH_ERROR) {
        const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000));
        __m512i d = encoder.decoded(codes);
        error.add((vf)_mm512_slli_epi32(v, 16), (vf)_mm512_slli_epi32(d, 16));
        error.add((vf)_mm512_and_si512(v, upper), (vf)_mm512_and_si512(d, upper));
      }
    }
    return;
  }
#endif
  each(0, n);
}

// Calls f with the way as a compile-time constant, of those that the element and the dtype have.
template <Element E, Dtype D, class F>
inline void with_way(Way way, F f) {
  if constexpr (E == E2M1 || E == E4M3) {
#if defined(__AVX512BW__)
    if constexpr (D == BF16)
      if (way == POWER_BF16) return f.template operator()<POWER_BF16>();
#endif
    if (way == POWER) return f.template operator()<POWER>();
  }
  if constexpr (D != F32)
    if (way == NEWTON) return f.template operator()<NEWTON>();
  f.template operator()<DIVIDE>();
}

template <Element E, Dtype D, bool WITH_ERROR>
class RowQuantizer {
  static constexpr int size = D == F32 ? 4 : 2, per_byte = packs_two(E) ? 2 : 1;
  static constexpr int64_t chunk = 4096;  // values of a row at a time: the error's sums stay short

 public:
  RowQuantizer(const Matrices& in, const Target& out)
      : in_(in),
        out_(out),
        f_(out.format),
        row_bytes_(f_.row_bytes(in.columns)),
        width_(f_.group_columns),
        groups_(width_ ? std::max<int64_t>(chunk / width_, 1) : 1),
        amax_(new int32_t[groups_ + W]),
        multiplier_(new float[groups_ + W]),
        inverse_(new float[groups_ + W]),
        padded_(new char[(width_ ? width_ : W) * size]),
        codes_(new char[width_ ? width_ : W]) {}

  // A block is `group_rows` rows of one matrix that share scales.
  void block(int64_t matrix, int64_t index) {
    const int64_t height = f_.group_rows ? f_.group_rows : 1;
    int64_t first = index * height, last = std::min(first + height, in_.rows);
    first += matrix * in_.rows, last += matrix * in_.rows;
    if (width_ == 0) return whole_row(matrix, first);
    if constexpr (D == BF16) {  // loops that know the width are faster, and longer to compile
      if constexpr (E == E2M1)
        if (width_ == 16) return grouped<16>(matrix, index, first, last);
      if (width_ == 32) return grouped<32>(matrix, index, first, last);
    }
    grouped<0>(matrix, index, first, last);
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
    const float inverse = 1.f / multiplier;
    with_way<E, D>(way<E, D>(false, plain(splat(amax), splat(multiplier), false), W), [&]<Way WAY>() {
      for (int64_t c = 0; c < in_.columns; c += chunk) {
        const int64_t n = std::min(chunk, in_.columns - c), whole = n / W * W;
        ErrorSums error;
        encode_run<E, D, WITH_ERROR, WAY>(at(row, c), whole, multiplier, inverse, code(row, c), error);
        if (whole < n) encode_padded<WAY>(row, c + whole, W, multiplier, inverse, error);
        add(error);
      }
    });
  }

  template <int WIDTH>
  void grouped(int64_t matrix, int64_t index, int64_t first, int64_t last) {
    const int64_t width = WIDTH ? WIDTH : width_;
    float global = 0;
    if (f_.global == PER_TENSOR) global = out_.global[matrix];
    if (f_.global == PER_TOKEN) {
      if (out_.own_global) out_.global[first] = global_from_amax(amax_bits<D>(in_.row(first), in_.columns, true));
      global = out_.global[first];
    }
    const int64_t columns = f_.scale_columns(in_.columns), scale_size = f_.scale_size();
    char* scale = out_.scale + (matrix * f_.scale_rows(in_.rows) + index) * columns * scale_size;
    for (int64_t g = 0; g < columns; g += groups_, scale += groups_ * scale_size) {
      const int64_t count = std::min(groups_, columns - g), whole = std::min(count, in_.columns / width - g);
      for (int64_t r = first; r < last; r++) {
        auto take = [&](int64_t i, int32_t bits) { amax_[i] = r > first ? std::max(amax_[i], bits) : bits; };
        const char* x = at(r, g * width);
        for (int64_t i = 0; i < whole; i++) take(i, amax_bits<D>(x + i * width * size, width, false));
        if (whole < count)
          take(whole, amax_bits<D>(x + whole * width * size, in_.columns - (g + whole) * width, false));
      }
      const bool is_plain = put_all_scales(count, global, scale);
      with_way<E, D>(way<E, D>(f_.scale == SCALE_E8M0, is_plain, width), [&]<Way WAY>() {
        for (int64_t r = first; r < last; r++) {
          ErrorSums error;
          const char* x = at(r, g * width);
          char* out = code(r, g * width);
          for (int64_t i = 0; i < whole; i++)
            encode_run<E, D, WITH_ERROR, WAY>(x + i * width * size, width, multiplier_[i], inverse_[i],
                                              out + i * width / per_byte, error);
          if (whole < count)
            encode_padded<WAY>(r, (g + whole) * width, width, multiplier_[whole], inverse_[whole], error);
          add(error);
        }
      });
    }
  }

  // Scales, multipliers and their inverses of the groups that amax_ holds; true where all of them are plain.
  bool put_all_scales(int64_t count, float global, char* scale) {
    for (int64_t i = count; i < count + W; i++) amax_[i] = amax_[count - 1];
    put_scales(amax_.get(), count, f_, out_.rounding, global, scale, multiplier_.get());
    bool is_plain = true;
    for (int64_t i = 0; i < count; i += W) {
      const vf multiplier = load<vf>(&multiplier_[i]);
      store(&inverse_[i], 1.f / multiplier);
      is_plain &= plain(load<vi>(&amax_[i]), multiplier, f_.scale == SCALE_E8M0);
    }
    return is_plain;
  }

  // The last columns of a row, from c on, as n of them: zeros follow, whose codes are stored where the format says so.
  template <Way WAY>
  void encode_padded(int64_t row, int64_t c, int64_t n, float multiplier, float inverse, ErrorSums& error) {
    const int64_t real = in_.columns - c, stored = std::min(row_bytes_ - c / per_byte, n / per_byte);
    memcpy(padded_.get(), at(row, c), real * size);
    memset(padded_.get() + real * size, 0, (n - real) * size);
    encode_run<E, D, WITH_ERROR, WAY>(padded_.get(), n, multiplier, inverse, codes_.get(), error);
    memcpy(code(row, c), codes_.get(), stored);
  }

  void add(const ErrorSums& error) {
    if (!WITH_ERROR) return;
    out_.error[0] += sum_lanes(error.value);
    out_.error[1] += sum_lanes(error.change);
  }

  const char* at(int64_t row, int64_t c) const { return in_.row(row) + c * size; }
  char* code(int64_t row, int64_t c) const { return out_.data + row * row_bytes_ + c / per_byte; }

  const Matrices& in_;
  const Target& out_;
  const Format f_;
  const int64_t row_bytes_, width_, groups_;
  const std::unique_ptr<int32_t[]> amax_;
  const std::unique_ptr<float[]> multiplier_, inverse_;
  const std::unique_ptr<char[]> padded_, codes_;
};

// Blocks begin..end, counted through all matrices.
inline void quantize_blocks(const Matrices& in, const Target& out, int64_t begin, int64_t end) {
  int64_t per_matrix = out.format.group_rows ? (in.rows + out.format.group_rows - 1) / out.format.group_rows : in.rows;
  auto run = [&](auto&& quantizer) {
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
