// Codes that are int8, or become it by doubling (e2m1), for exact products in integers.
#pragma once
#include "dequantize.h"

namespace torchq {

inline bool whole_row_int8(const Format& f) { return f.element == INT8 && f.group_columns == 0; }

inline bool has_int8_codes(const Format& f) {
  return whole_row_int8(f) ||
         (f.element != E4M3 && f.scale != SCALE_E4M3 && f.group_columns && f.group_columns % 32 == 0);
}

// What a scale is multiplied by to fit the int8 codes.
inline float int8_factor(const Format& f) { return f.element == E2M1 ? .5f : 1.f; }

// What the codes of e2m1 (twice) and of int4 stand for.
alignas(16) constexpr int8_t int8_values[2][16] = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
                                                   {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}};

#if defined(__AVX2__)
// 32 values of 4-bit codes, from a table of 16 in both halves.
inline __m256i int8_of_nibbles(__m128i codes, __m256i table) {
  __m256i w = _mm256_cvtepu8_epi16(codes);
  return _mm256_shuffle_epi8(table,
                             _mm256_and_si256(_mm256_or_si256(w, _mm256_slli_epi16(w, 4)), _mm256_set1_epi8(15)));
}
#endif

// Columns k..k + n of a row of codes; zeros past the row's end. k is even, and n a multiple of 32.
inline void int8_codes(const Format& f, const char* row, int64_t row_bytes, int64_t k, int64_t n, int8_t* out) {
  if (f.element == INT8) {
    const int64_t real = std::max<int64_t>(std::min(n, row_bytes - k), 0);
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(row + k + n + i);  // what comes next
    memcpy(out, row + k, real);
    memset(out + real, 0, n - real);
    return;
  }
  const int8_t* table = int8_values[f.element == INT4];
  const int64_t real = std::max<int64_t>(std::min(n / 2, row_bytes - k / 2), 0);
  row += k / 2;
  int64_t i = 0;
#if defined(__AVX2__)
  const __m256i lookup = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
  for (; i + 16 <= real; i += 16) {
    __builtin_prefetch(row + i + n / 2);
    _mm256_storeu_si256((__m256i*)(out + 2 * i), int8_of_nibbles(_mm_loadu_si128((const __m128i*)(row + i)), lookup));
  }
#endif
  for (; i < real; i++) {
    out[2 * i] = table[row[i] & 15];
    out[2 * i + 1] = table[row[i] >> 4 & 15];
  }
  memset(out + 2 * real, 0, n - 2 * real);
}

}  // namespace torchq
