// Weights for packed.h straight from their codes, on AVX-512: 16 rows of 64 bytes are transposed as they are stored,
// and decoded where they will be used.
#pragma once
#include "bf16.h"
#include "int8.h"
#include "packed.h"

namespace torchq {

#if defined(__AVX512BW__)
// Columns k..k + n of a panel (k a multiple of 128, n of 64), as dwords [dword][PANEL]. `convert(codes, k, half, out)`
// makes Convert::vectors vectors of a dword of codes of W rows, whose columns start at k, and puts them PANEL apart.
template <class Convert>
inline void repack(const Quantized& w, int64_t matrix, int64_t first, int64_t n_rows, int64_t k, int64_t n,
                   const Convert& convert, uint32_t* out) {
  constexpr int64_t per_byte = Convert::per_byte, per_dword = 4 * per_byte;
  constexpr int64_t ahead = 512;  // bytes of each row to prefetch, and at its end as much of the row W further down
  for (int64_t half = 0; half < PANEL; half += W) {
    const char* rows = w.row_data(matrix * w.rows + first + half) + k / per_byte;
    const int64_t used = n_rows - half;
    uint32_t* to = out + half;
    for (int64_t c = 0; c < n; c += 64 * per_byte) {
      const int64_t left = w.row_bytes - (k + c) / per_byte;
      const __mmask64 there = left >= 64 ? ~0ull : left > 0 ? (1ull << left) - 1 : 0;
      const int64_t next = left > ahead ? ahead : ahead + (W - 1) * w.row_bytes;
      vi tile[W];
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) {
        const char* row = rows + r * w.row_bytes + c / per_byte;
        _mm_prefetch(row + next, _MM_HINT_T0);
        tile[r] = (vi)_mm512_maskz_loadu_epi8(r < used ? there : 0, row);
      }
      transpose(tile);
      const int64_t dwords = std::min<int64_t>((n - c) / per_dword, W);
      for (int64_t j = 0; j < dwords; j++, to += Convert::vectors * PANEL)
        convert((__m512i)tile[j], k + c + j * per_dword, half, to);
    }
  }
}

#if defined(__AVX512VNNI__)
template <Element E>
struct ToInt8 {
  static constexpr int per_byte = packs_two(E) ? 2 : 1, vectors = per_byte;

  void operator()(__m512i codes, int64_t, int64_t, uint32_t* out) const {
    const __m512i flip = _mm512_set1_epi32(0x80808080);
    if constexpr (E == INT8) {
      store(out, _mm512_xor_si512(codes, flip));
    } else {
      const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)int8_values[E == INT4]));
      const __m512i table = _mm512_xor_si512(values, flip), nibble = _mm512_set1_epi32(0x000f000f);
      for (int i = 0; i < 2; i++) {  // bytes 2i, 2i, 2i + 1, 2i + 1; the odd ones' upper nibble
        const __m512i twice = _mm512_broadcast_i32x4(
            _mm_add_epi8(_mm_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13), _mm_set1_epi8(2 * i)));
        __m512i b = _mm512_shuffle_epi8(codes, twice);
        __m512i upper = _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_slli_epi16(nibble, 8));
        store(out + i * PANEL, _mm512_shuffle_epi8(table, _mm512_ternarylogic_epi32(b, nibble, upper, 0xea)));
      }
    }
  }
};
#endif

#if TORCHQ_BF16_DOT
// Scales that are multiplied into the weights, where that is exact: POWERS (MX) and BLOCKS (NVFP4). Others are left to
// the sums (ON_SUMS), as the factors of groups or of rows.
enum Scaling { ON_SUMS, POWERS, BLOCKS };

inline Scaling scaling_of(const Format& f) {
  if (f.scale == SCALE_E8M0) return POWERS;
  return f.scale == SCALE_E4M3 && f.group_columns == 16 ? BLOCKS : ON_SUMS;
}

// The scale bytes that keep every code a normal number of bf16.
constexpr int least_normal(Element e) { return e == E2M1 ? 2 : 10; }
constexpr int most_normal(Element e) { return e == E2M1 ? 252 : 246; }

template <Element E, Scaling S>
class ToBF16 {
 public:
  static constexpr int per_byte = packs_two(E) ? 2 : 1, vectors = 2 * per_byte;

  // `scales`: what scale_vectors made.
  explicit ToBF16(const uint32_t* scales) : scales_(scales) {}

  void operator()(__m512i codes, int64_t k, int64_t half, uint32_t* out) const {
    __m512i scale{};
    if constexpr (S == POWERS || S == BLOCKS)
      scale = load<__m512i>(scales_ + k / (S == POWERS ? 32 : 16) * PANEL + half);
    if constexpr (packs_two(E)) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        __m512i value = decode_.nibbles(codes, i);
        if constexpr (S == POWERS) {
          const __m512i index = Decoder<E>::nibble_index(codes, i);
          value = _mm512_mask_add_epi16(value, _mm512_test_epi16_mask(index, _mm512_set1_epi16(7)), value, scale);
        }
        if constexpr (S == BLOCKS) value = times(value, (vf)scale);
        store(out + i * PANEL, value);
      }
    } else if constexpr (E == INT8) {
      auto exact = [](__m512i v) { return (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(v, 24)); };
      for (int i = 0; i < 2; i++) {
        __m512i low = exact(_mm512_slli_epi32(codes, 24 - 16 * i)), high = exact(_mm512_slli_epi32(codes, 16 - 16 * i));
        store(out + i * PANEL, _mm512_or_si512(high, _mm512_srli_epi32(low, 16)));
      }
    } else {
      const __m512i columns =
          _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
      __m512i v[2];
      decode_.bytes(_mm512_shuffle_epi8(codes, columns), v);
      for (int i = 0; i < 2; i++) store(out + i * PANEL, S == POWERS ? times_power(v[i], scale) : v[i]);
    }
  }

 private:
  static __m512i times_power(__m512i values, __m512i exponent) {
    // Zeros and NaN stay as they are: their bits, less one and without the sign, are not below those of NaN.
    const __m512i one = _mm512_set1_epi16(1), below = _mm512_set1_epi16(0x7fbf);
    __m512i magnitude = _mm512_and_si512(values, _mm512_set1_epi16(0x7fff));
    __mmask32 scaled = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, one), below);
    return _mm512_mask_add_epi16(values, scaled, values, exponent);
  }

  // Products that bf16 holds: the halves of f32 that are cut are zeros.
  static __m512i times(__m512i v, vf scale) {
    vf low = (vf)_mm512_slli_epi32(v, 16) * scale,
       high = (vf)_mm512_and_si512(v, _mm512_set1_epi32(0xffff0000)) * scale;
    return _mm512_or_si512((__m512i)high, _mm512_srli_epi32((__m512i)low, 16));
  }

  const Decoder<E> decode_;
  const uint32_t* scales_;
};

// The scales of one row that ToBF16 multiplies into weights, a dword for every 32 columns (POWERS: what to add to bf16
// bits, twice) or 16 (BLOCKS: f32); false where some weight is not a normal number of bf16.
template <Element E, Scaling S>
inline bool scale_vectors(const Quantized& w, int64_t matrix, int64_t row, uint32_t* out) {
  if constexpr (S == POWERS) {
    const uint8_t* scale = (const uint8_t*)w.row_scale(matrix, row);
    const int64_t repeat = w.format.group_columns / 32, count = w.scale_columns * repeat;
    int64_t i = 0;
    vi odd{};
    auto exponents = [&](vi s) {
      odd |= s<least_normal(E) | s> most_normal(E);
      vi e = (s - 127) * 128 & 0xffff;
      return e | e << 16;
    };
    if (repeat == 1)
      for (; i + W <= count; i += W) store(out + i, exponents(convert<vi>(load<vb>(scale + i))));
    for (; i < count; i++) out[i] = exponents(splat(scale[i / repeat]))[0];
    return all(odd == 0);
  }
  if constexpr (S == BLOCKS) spread_scales(w, matrix, row, 16, w.scale_columns, (float*)out);
  return true;
}
#endif
#endif

}  // namespace torchq
