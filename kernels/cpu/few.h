// A few rows of x in f32 or int8 (bf16.h has bf16): codes are decoded in registers.
#pragma once
#include "dot.h"
#include "int8.h"

namespace torchq {

// 32 codes as f32, divided by `factor`, which is left to the scales.
template <Element E>
struct Raw {
  static constexpr int64_t bytes = packs_two(E) ? 16 : 32;
#if defined(__AVX2__)
  static constexpr float factor = E == E2M1 ? .5f : 1.f;
#else
  static constexpr float factor = 1.f;
#endif

  static void decode(const char* codes, vf (&v)[32 / W]) {
#if defined(__AVX2__)
    if constexpr (packs_two(E)) {
      alignas(32) int8_t values[32];
      const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)int8_values[E == INT4]));
      _mm256_store_si256((__m256i*)values, int8_of_nibbles(_mm_loadu_si128((const __m128i*)codes), table));
      for (int i = 0; i < 32 / W; i++) v[i] = from_int8((const char*)values + i * W);
    } else if constexpr (E == INT8) {
      for (int i = 0; i < 32 / W; i++) v[i] = from_int8(codes + i * W);
    } else {
      // f16 has the mantissa and, 2^8 further down, the exponents of e4m3; its NaN is elsewhere.
      for (int i = 0; i < 32 / W; i++) {
        vh c = convert<vh>(load<vb>(codes + i * W)), magnitude = c << 7 & 0x3f80;
        v[i] = from_f16((magnitude == 0x3f80 ? 0x7e00 - vh{} : magnitude) | (c << 8 & 0x8000)) * 256.f;
      }
    }
#else
    for (int i = 0; i < 32 / W; i++) v[i] = torchq::decode<E>(load_codes<E>(codes + i * W / (packs_two(E) ? 2 : 1)));
#endif
  }

 private:
#if defined(__AVX2__)
  static vf from_int8(const char* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#endif
  }
#endif
};

// sums[m * pitch] = dot products of one row of weights and MB rows of f32 x, without the outer factor. `scales`: f32
// for every SPAN columns. x has zeros after the row's last column, up to a multiple of 32.
template <Element E, int MB, int SPAN>
[[gnu::noinline]] void few_rows_of_f32(const char* codes, int64_t bytes, const float* scales, const float* x,
                                       int64_t ldx, float* sums, int64_t pitch) {
  constexpr int parts = 32 / W;
  vf acc[MB][2] = {};
  auto step = [&](const char* c, int64_t i, int u) {
    vf w[parts];
    Raw<E>::decode(c, w);
#pragma GCC unroll 8
    for (int m = 0; m < MB; m++) {
      const float* row = x + m * ldx + i * 32;
      if constexpr (SPAN == 32) {
        vf sum = w[0] * load<vf>(row);
        for (int j = 1; j < parts; j++) sum = fma(w[j], load<vf>(row + j * W), sum);
        acc[m][u] = fma(sum, splat(scales[i]), acc[m][u]);
      } else {
        for (int half = 0; half < 2; half++) {
          const int from = half * parts / 2;
          vf sum = w[from] * load<vf>(row + from * W);
          for (int j = from + 1; j < from + parts / 2; j++) sum = fma(w[j], load<vf>(row + j * W), sum);
          acc[m][u] = fma(sum, splat(scales[2 * i + half]), acc[m][u]);
        }
      }
    }
  };
  int64_t i = 0, at = 0;
  for (; at + 2 * Raw<E>::bytes <= bytes; at += 2 * Raw<E>::bytes, i += 2) {
    __builtin_prefetch(codes + at + 2048);  // the hardware's prefetcher stops at pages
    step(codes + at, i, 0);
    step(codes + at + Raw<E>::bytes, i + 1, 1);
  }
  for (; at < bytes; at += Raw<E>::bytes, i++) {
    alignas(32) char tail[Raw<E>::bytes] = {};
    memcpy(tail, codes + at, std::min(bytes - at, Raw<E>::bytes));
    step(tail, i, 0);
  }
#pragma GCC unroll 8
  for (int m = 0; m < MB; m++) sums[m * pitch] = sum_lanes(acc[m][0] + acc[m][1]);
}

// Rows of int8 weights: `rows` of them, `pitch` apart. A block past the last row repeats it.
struct RowsOfI8 {
  const int8_t* first;
  int64_t pitch, rows;
  const int8_t* operator[](int64_t n) const { return first + (n < rows ? n : rows - 1) * pitch; }
};

// sums[m * pitch + n] += dot products of 4 rows of weights and MB rows over k columns (a multiple of DotI8::step).
template <int MB>
[[gnu::noinline]] void block_of_i8(const RowsOfI8& w, int64_t first, const int8_t* x, int64_t ldx, int64_t k,
                                   int64_t* sums, int64_t pitch) {
  vi acc[4][MB] = {};
  const int8_t* from[4];
  for (int n = 0; n < 4; n++) from[n] = w[first + n];
  for (int64_t i = 0; i < k; i += DotI8::step) {
    DotI8::V row[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
      if constexpr (MB == 1) __builtin_prefetch(from[n] + i + 4 * w.pitch);
      row[n] = DotI8::load_w(from[n] + i);
    }
#pragma GCC unroll 4
    for (int m = 0; m < MB; m++) {
      const DotI8::V v = DotI8::load(x + m * ldx + i);
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) acc[n][m] = DotI8::add(acc[n][m], row[n], v);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < MB; m++)
    for (int n = 0; n < 4; n++) sums[m * pitch + n] += sum_lanes(acc[n][m]);
}

// The same for all rows of w and a few rows of x. sums has room for whole blocks.
inline void few_rows_of_i8(const RowsOfI8& w, const int8_t* x, int64_t ldx, int64_t rows_m, int64_t k, int64_t* sums,
                           int64_t pitch) {
  for (int64_t n = 0; n < w.rows; n += 4) {
    int64_t m = 0;
    auto block = [&]<int MB>() { block_of_i8<MB>(w, n, x + m * ldx, ldx, k, sums + m * pitch + n, pitch); };
    if constexpr (W == 16)
      for (; m + 4 <= rows_m; m += 4) block.template operator()<4>();
    for (; m + 2 <= rows_m; m += 2) block.template operator()<2>();
    for (; m < rows_m; m++) block.template operator()<1>();
  }
}

}  // namespace torchq
