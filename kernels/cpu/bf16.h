// Weights as bf16 for the dot product instruction of AVX512-BF16: codes decode through tables held in registers.
//
// Every code is exact in bf16, and so is a code times a power of two or times an e4m3 scale. Scales that are not are
// applied to the f32 sums of their group. (The instruction takes subnormal inputs, below 2^-126, for zero.)
#pragma once
#include "dequantize.h"
#include "dot.h"

#if TORCHQ_BF16_DOT
namespace torchq {

struct Pair {
  __m512i a, b;  // columns 0..31 and 32..63
};

// Unscaled values of 64 codes.
template <Element E>
class Decoder {
 public:
  static constexpr int bytes = packs_two(E) ? 32 : 64;

  Decoder() {
    for (int i = 0; i < 2; i++) {
      table_[i] = _mm512_load_si512(tables_of<E>.low + 64 * i);
      table_[2 + i] = _mm512_load_si512(tables_of<E>.high + 64 * i);
    }
    // Twice 16 entries: the index of a 4-bit code has five bits, the fifth is noise.
    if constexpr (packs_two(E)) table_[0] = _mm512_load_si512(tables_of<E>.value);
  }

  Pair operator()(const char* codes) const {
    if constexpr (E == INT8) {
      return {from_int8(codes), from_int8(codes + 32)};
    } else if constexpr (E == E4M3) {
      const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that unpacking gives the natural order
      return unpacked(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes)));
    } else {
      return {_mm512_permutexvar_epi16(nibbles(codes), table_[0]),
              _mm512_permutexvar_epi16(nibbles(codes + 16), table_[0])};
    }
  }

  // 64 8-bit codes: the lower and the upper halves of the 16-byte lanes.
  Pair unpacked(__m512i c) const {
    __m512i low = _mm512_permutex2var_epi8(table_[0], c, table_[1]);
    __m512i high = _mm512_permutex2var_epi8(table_[2], c, table_[3]);
    high = _mm512_ternarylogic_epi32(high, c, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (c & 0x80)
    return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  }

  // 32 4-bit codes in the low bits of 16-bit lanes; higher bits hold anything.
  static __m512i nibbles(const char* codes) {
    const __m512i shifts = _mm512_set1_epi64(0x000c'0008'0004'0000);
    return _mm512_multishift_epi64_epi8(shifts, _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i*)codes)));
  }

  __m512i table() const { return table_[0]; }

 private:
  static __m512i from_int8(const char* codes) {
    auto wide = [](const char* p) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
    };
    return (__m512i)_mm512_cvtne2ps_pbh(wide(codes + 16), wide(codes));
  }

  __m512i table_[4];
};

// ---- scales of a row's groups, as the kernels below take them ----

// PLAIN: none, the row's outer factor is all. Multiplied into the sums of a group: PER_32, f32 for every 32 columns;
// PER_16, bf16 for every 16 (NVFP4). Multiplied into the weights, where that is exact: POWERS (MX) and BLOCKS (NVFP4).
enum Scaling { PLAIN, PER_32, PER_16, POWERS, BLOCKS };

inline Scaling of_sums(const Format& f) { return f.group_columns == 0 ? PLAIN : f.group_columns == 16 ? PER_16 : PER_32; }

inline Scaling of_weights(const Format& f) {
  Scaling s = of_sums(f);
  return f.scale == SCALE_E8M0 ? POWERS : s == PER_16 ? BLOCKS : s;
}

inline bool has_bf16_kernel(const Format& f) {
  if (f.group_columns == 0) return true;
  return f.element == INT8 ? false : f.group_columns == 16 ? f.scale == SCALE_E4M3 : f.group_columns % 32 == 0;
}

inline void prefetch_scales(const Quantized& w, const char* scale) {
  const int64_t bytes = w.scale_columns * w.format.scale_size();
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(scale + i + 8 * bytes, _MM_HINT_T0);
}

// f32 scales for every 32 columns of a row, in place or in `out`, which has room for 64 columns more than the row.
inline const float* scales_per_32(const Quantized& w, int64_t matrix, int64_t row, float* out) {
  const char* scale = w.row_scale(matrix, row);
  prefetch_scales(w, scale);
  const int64_t end = (w.format.padded(w.columns) + 63) / 64 * 2;
  if (w.format.group_columns == 32 && w.format.scale == SCALE_F32 && w.scale_columns == end) return (const float*)scale;
  spread_scales(w, matrix, row, 32, end, out);
  return out;
}

// bf16 scales for every 16 columns of a row; `out` has room for 1024 columns more than the row.
inline void scales_per_16(const Quantized& w, int64_t matrix, int64_t row, const Decoder<E4M3>& decode, uint16_t* out) {
  const char* scale = w.row_scale(matrix, row);
  prefetch_scales(w, scale);
  int64_t groups = w.scale_columns;
  for (int64_t g = 0; g < groups; g += 64) {
    alignas(64) char tail[64] = {};
    if (g + 64 > groups) memcpy(tail, scale + g, groups - g);
    Pair p = decode(g + 64 > groups ? tail : scale + g);
    _mm512_storeu_si512(out + g, p.a);
    _mm512_storeu_si512(out + g + 32, p.b);
  }
}

// Scales of 16-column groups spread over the lanes of the sums of 64 columns.
struct SpreadPer16 {
  __m512i first = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(1), 1);  // 0 for 16 lanes, then 1
  __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(2));

  static __m512 spread(__m512i index, __m512i four) {  // a bf16 in the upper half of a lane is its f32
    return (__m512)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, index, four);
  }
};

// The scale bytes that keep every code a normal number of bf16.
constexpr int least_normal(Element e) { return e == E2M1 ? 2 : 10; }
constexpr int most_normal(Element e) { return e == E2M1 ? 252 : 246; }

// What to add to the bits of a row's bf16 values, for every 32 columns; `out` has room for 64 columns more than the row.
// False where a scale is not one of those.
inline bool exponents_per_32(const Quantized& w, int64_t matrix, int64_t row, int16_t* out) {
  const uint8_t* scale = (const uint8_t*)w.row_scale(matrix, row);
  const int low = least_normal(w.format.element), high = most_normal(w.format.element);
  int odd = 0;
  for (int64_t g = 0; g < w.scale_columns; g++) odd |= (scale[g] < low) | (scale[g] > high);
  if (odd) return false;
  const int64_t repeat = w.format.group_columns / 32;
  if (repeat == 1)
    for (int64_t g = 0; g < w.scale_columns; g++) out[g] = int16_t((scale[g] - 127) * 128);
  else
    for (int64_t g = 0; g < w.scale_columns * repeat; g++) out[g] = int16_t((scale[g / repeat] - 127) * 128);
  out[w.scale_columns * repeat] = 0;  // the odd half of the last 64 columns
  return true;
}

inline __m512i times_power(__m512i values, __m512i exponent) {
  // Zeros and NaN stay as they are: their bits, less one and without the sign, are not below those of NaN.
  const __m512i one = _mm512_set1_epi16(1), below = _mm512_set1_epi16(0x7fbf);
  __m512i magnitude = _mm512_and_si512(values, _mm512_set1_epi16(0x7fff));
  __mmask32 scaled = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, one), below);
  return _mm512_mask_add_epi16(values, scaled, values, exponent);
}

// bf16 values of 64 codes, with the scales in where S says so. `prepared`: exponents_per_32 or scales_per_16 of the row.
template <Element E, Scaling S>
class Values {
 public:
  explicit Values(const void* prepared) : exponent_((const int16_t*)prepared), block_((const uint16_t*)prepared) {
    if constexpr (S == BLOCKS) as_f32_ = _mm512_cvtpbh_ps((__m256bh)_mm512_castsi512_si256(decode_.table()));
  }

  Pair operator()(const char* codes, int64_t k) const {
    if constexpr (S == POWERS && E == E2M1) {
      return {scaled_table(codes, exponent_[k / 32]), scaled_table(codes + 16, exponent_[k / 32 + 1])};
    } else if constexpr (S == POWERS) {
      Pair p = decode_(codes);
      return {times_power(p.a, _mm512_set1_epi16(exponent_[k / 32])),
              times_power(p.b, _mm512_set1_epi16(exponent_[k / 32 + 1]))};
    } else if constexpr (S == BLOCKS) {
      return {two_tables(codes, block_ + k / 16), two_tables(codes + 16, block_ + k / 16 + 2)};
    } else {
      return decode_(codes);
    }
  }

 private:
  __m512i scaled_table(const char* codes, int16_t exponent) const {
    const __m512i table = decode_.table();  // all its entries but the two zeros take the exponent
    return _mm512_permutexvar_epi16(Decoder<E>::nibbles(codes),
                                    _mm512_mask_add_epi16(table, 0xfefefefe, table, _mm512_set1_epi16(exponent)));
  }

  // Two groups have a table each, of 16 products; bit 4 of the index says which.
  __m512i two_tables(const char* codes, const uint16_t* scale) const {
    auto times = [&](uint16_t s) { return as_f32_ * _mm512_set1_ps(bit_cast<float>(uint32_t(s) << 16)); };
    const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    __m512i table = (__m512i)_mm512_cvtne2ps_pbh(times(scale[1]), times(scale[0]));
    __m512i index = _mm512_ternarylogic_epi32(Decoder<E>::nibbles(codes), _mm512_set1_epi16(15), upper, 0xea);
    return _mm512_permutexvar_epi16(index, table);  // index = (nibble & 15) | upper
  }

  const Decoder<E> decode_;
  const int16_t* exponent_;
  const uint16_t* block_;
  __m512 as_f32_;
};

// Calls f(codes, column, u) for every 64 columns of a row before column `columns` (a multiple of 64), u counting through 0 .. UNROLL - 1; a partial end comes as a copy with zeros after it, whose values meet zeros of x.
template <Element E, int UNROLL, class F>
inline void for_every_64(const Quantized& w, const char* codes, int64_t columns, F f) {
  constexpr int64_t bytes = Decoder<E>::bytes;
  constexpr int64_t ahead = 4096;  // bytes to prefetch: the hardware's prefetcher stops at pages
  const int64_t end = std::min(w.row_bytes, columns / 64 * bytes);
  int64_t at = 0;
  for (; at + UNROLL * bytes <= end; at += UNROLL * bytes) {
#pragma GCC unroll 8
    for (int u = 0; u < UNROLL; u++) {
      if (UNROLL == 1 || u * bytes % 64 == 0) _mm_prefetch(codes + at + u * bytes + ahead, _MM_HINT_T0);
      f(codes + at + u * bytes, (at + u * bytes) / bytes * 64, u);
    }
  }
  for (; at + bytes <= end; at += bytes) f(codes + at, at / bytes * 64, 0);
  if (at < end) {
    alignas(64) char tail[64] = {};
    memcpy(tail, codes + at, end - at);
    f(tail, at / bytes * 64, 0);
  }
}

// ---- few rows of x: decode in registers, one pass over the codes ----

// sums[m * pitch] = dot products of one row of weights and MB rows of x (the last one again past `rows`), without the
// outer factor. Rows are read one after the other, as one stream: memory is what limits this.
template <Element E, Scaling S, int MB>
[[gnu::noinline]] void stream_row(const Quantized& w, int64_t matrix, int64_t row, const uint16_t* x, int64_t ldx,
                                  int64_t rows, float* sums, int64_t pitch, void* scratch) {
  constexpr int UNROLL = MB == 1 ? 4 : 2;  // enough independent sums to hide an addition's latency
  const SpreadPer16 spread;
  const float* per_32 = nullptr;
  const uint16_t* per_16 = (const uint16_t*)scratch;
  if constexpr (S == PER_32) per_32 = scales_per_32(w, matrix, row, (float*)scratch);
  if constexpr (S == PER_16 || S == BLOCKS) scales_per_16(w, matrix, row, Decoder<E4M3>(), (uint16_t*)scratch);
  const Values<E, S> values(scratch);
  const uint16_t* from[MB];
  for (int m = 0; m < MB; m++) from[m] = x + (m < rows ? m : rows - 1) * ldx;
  vf acc[MB][2 * UNROLL] = {};
  for_every_64<E, UNROLL>(w, w.row_data(matrix * w.rows + row), ldx, [&](const char* codes, int64_t k, int u) {
    Pair p = values(codes, k);
    vf scale[2];
    if constexpr (S == PER_32) {
      scale[0] = splat(per_32[k / 32]);
      scale[1] = splat(per_32[k / 32 + 1]);
    }
    if constexpr (S == PER_16) {
      __m512i four = _mm512_set1_epi64(load<int64_t>(per_16 + k / 16));
      scale[0] = SpreadPer16::spread(spread.first, four);
      scale[1] = SpreadPer16::spread(spread.second, four);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MB; m++) {
      __m512bh x0 = DotBF16::load(from[m] + k), x1 = DotBF16::load(from[m] + k + 32);
      vf &sum0 = acc[m][2 * u], &sum1 = acc[m][2 * u + 1];
      if constexpr (S == PER_32 || S == PER_16) {
        sum0 = fma(_mm512_dpbf16_ps(vf{}, (__m512bh)p.a, x0), scale[0], sum0);
        sum1 = fma(_mm512_dpbf16_ps(vf{}, (__m512bh)p.b, x1), scale[1], sum1);
      } else {
        sum0 = _mm512_dpbf16_ps(sum0, (__m512bh)p.a, x0);
        sum1 = _mm512_dpbf16_ps(sum1, (__m512bh)p.b, x1);
      }
    }
  });
#pragma GCC unroll 8
  for (int m = 0; m < MB; m++) {
    vf sum = acc[m][0];
    for (int u = 1; u < 2 * UNROLL; u++) sum += acc[m][u];
    sums[m * pitch] = sum_lanes(sum);
  }
}

}  // namespace torchq
#endif
