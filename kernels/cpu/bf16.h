// Weights as bf16 for the dot product instruction of AVX512-BF16: codes decode through tables held in registers.
//
// Every code is exact in bf16. (The instruction takes subnormal inputs, below 2^-126, for zero.)
#pragma once
#include "dequantize.h"
#include "dot.h"

#if TORCHQ_BF16_DOT
namespace torchq {

inline bool has_bf16_kernel(const Format& f) {
  if (f.group_columns == 0) return !f.four_bits();
  return f.element == INT8 ? false : f.group_columns == 16 ? f.scale == SCALE_E4M3 : f.group_columns % 32 == 0;
}

// Unscaled values of 64 bytes of codes. What is cheapest to decode is not in the order of columns: pair i of columns
// comes out as dword `place(i)` of the vectors. Every lane of a vector holds columns of one span of 16 (32 for 8-bit
// codes).
template <Element E>
class Decoder {
 public:
  static constexpr int vectors = packs_two(E) ? 4 : 2, columns = 32 * vectors;

  static constexpr int64_t place(int64_t pair) {
    if (E == INT8) return pair;
    return E == E4M3 ? pair / 4 % 2 * 16 + pair / 8 * 4 + pair % 4 : pair % 4 * 16 + pair / 4;
  }

  Decoder() {
    for (int i = 0; i < 2; i++) {
      table_[i] = _mm512_load_si512(tables_of<E>.low + 64 * i);
      table_[2 + i] = _mm512_load_si512(tables_of<E>.high + 64 * i);
    }
    // Twice 16 entries: the index of a 4-bit code has five bits, the fifth is noise.
    if constexpr (packs_two(E)) table_[0] = _mm512_load_si512(tables_of<E>.value);
  }

  void operator()(__m512i codes, __m512i (&v)[vectors]) const {
    if constexpr (E == INT8) {
      auto wide = [](__m128i c) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c)); };
      v[0] =
          (__m512i)_mm512_cvtne2ps_pbh(wide(_mm512_extracti32x4_epi32(codes, 1)), wide(_mm512_castsi512_si128(codes)));
      v[1] = (__m512i)_mm512_cvtne2ps_pbh(wide(_mm512_extracti32x4_epi32(codes, 3)),
                                          wide(_mm512_extracti32x4_epi32(codes, 2)));
    } else if constexpr (E == E4M3) {
      bytes(codes, v);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) v[i] = nibbles(codes, i);
    }
  }

  // 64 E4M3 codes: the lower and the upper halves of the 16-byte lanes.
  void bytes(__m512i c, __m512i (&v)[2]) const {
    __m512i low = _mm512_permutex2var_epi8(table_[0], c, table_[1]);
    __m512i high = _mm512_permutex2var_epi8(table_[2], c, table_[3]);
    high = _mm512_ternarylogic_epi32(high, c, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (c & 0x80)
    v[0] = _mm512_unpacklo_epi8(low, high);
    v[1] = _mm512_unpackhi_epi8(low, high);
  }

  // The two codes in byte i of every dword.
  __m512i nibbles(__m512i codes, int i) const { return _mm512_permutexvar_epi16(nibble_index(codes, i), table_[0]); }

  static __m512i nibble_index(__m512i codes, int i) {
    const __m512i shifts = _mm512_add_epi8(_mm512_set1_epi64(0x0024'0020'0004'0000), _mm512_set1_epi8(8 * i));
    return _mm512_multishift_epi64_epi8(shifts, codes);
  }

 private:
  __m512i table_[4];
};

// Pairs of x in the order in which a decoder gives those of the weights; zeros after them, up to `pitch` (whole
// blocks).
template <Element E>
inline void shuffle_pairs(const uint32_t* x, int64_t pairs, uint32_t* out, int64_t pitch) {
  constexpr int64_t block = Decoder<E>::columns / 2;
  for (int64_t i = 0; i < pitch; i += block)
    for (int64_t j = 0; j < block; j++) out[i + Decoder<E>::place(j)] = i + j < pairs ? x[i + j] : 0;
}

// sums[m * pitch] = dot products of a row of weights and MB rows of shuffled x, without the outer factor. `scales`: f32
// for every SPAN columns (0: none). Memory is what limits this: rows are read one after the other, as one stream.
template <Element E, int SPAN, int MB>
inline void stream_row(const Decoder<E>& decode, const char* codes, int64_t bytes, const float* scales,
                       const uint32_t* x, int64_t ldx, float* sums, int64_t pitch) {
  constexpr int vectors = Decoder<E>::vectors, per_block = SPAN ? Decoder<E>::columns / SPAN : 0;
  constexpr int64_t ahead = 8192;  // bytes to prefetch: the hardware's prefetcher stops at pages
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i span = _mm512_srli_epi32(lane, per_block == 8 ? 1 : per_block == 4 ? 2 : 3);
  vf acc[MB][SPAN ? 1 : vectors] = {};
  auto block = [&](int64_t i, __mmask64 there) {
    __m512i w[vectors];
    decode(_mm512_maskz_loadu_epi8(there, codes + 64 * i), w);
    vf scale;
    if constexpr (SPAN)
      scale = _mm512_permutexvar_ps(span, _mm512_castps256_ps512(_mm256_loadu_ps(scales + i * per_block)));
#pragma GCC unroll 4
    for (int m = 0; m < MB; m++) {
      vf part{};
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) {
        const auto of_x = (__m512bh)_mm512_load_si512(x + m * ldx + 16 * (vectors * i + v));
        vf& sum = SPAN ? part : acc[m][v];
        sum = _mm512_dpbf16_ps(sum, (__m512bh)w[v], of_x);
      }
      if constexpr (SPAN) acc[m][0] = fma(part, scale, acc[m][0]);
    }
  };
  const int64_t whole = bytes / 64;
  for (int64_t i = 0; i < whole; i++) {
    _mm_prefetch(codes + 64 * i + ahead, _MM_HINT_T1);
    block(i, ~0ull);
  }
  if (bytes % 64) block(whole, (1ull << bytes % 64) - 1);
#pragma GCC unroll 4
  for (int m = 0; m < MB; m++) {
    vf sum = acc[m][0];
    if constexpr (!SPAN)
      for (int v = 1; v < vectors; v++) sum += acc[m][v];
    sums[m * pitch] = sum_lanes(sum);
  }
}

}  // namespace torchq
#endif
