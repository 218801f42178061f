// Dot products of a few rows of x, lanes along K: everything stays in registers until the sums. And what a step of a
// dot product is, for these and for packed.h.
#pragma once
#include "vec.h"

namespace torchq {

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define TORCHQ_BF16_DOT 1
#endif

struct DotF32 {
  using T = float;
  using Packed = float;
  using V = vf;
  using Sum = vf;
  static constexpr int step = W;
  static V load(const T* p) { return torchq::load<vf>(p); }
  static V broadcast(uint32_t dword) { return splat(bit_cast<float>(dword)); }
  static Sum add(Sum s, V w, V x) { return fma(w, x, s); }
};

#if TORCHQ_BF16_DOT
struct DotBF16 {
  using T = uint16_t;
  using Packed = uint16_t;
  using V = __m512bh;
  using Sum = vf;
  static constexpr int step = 32;
  static V load(const T* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static V broadcast(uint32_t dword) { return (__m512bh)_mm512_set1_epi32(dword); }
  static Sum add(Sum s, V w, V x) { return _mm512_dpbf16_ps(s, w, x); }
};
#endif

// Exact products of int8 codes. Where the instruction takes unsigned weights, they are shifted by `offset`.
struct DotI8 {
  using T = int8_t;
  using Sum = vi;
#if defined(__AVX512VNNI__)
  using Packed = int8_t;
  using V = __m512i;
  static constexpr int step = 64, offset = 128;
  static V load(const T* p) { return _mm512_loadu_si512(p); }
  static V load_w(const T* p) { return _mm512_xor_si512(load(p), _mm512_set1_epi8(char(0x80))); }
  static V broadcast(uint32_t dword) { return _mm512_set1_epi32(dword); }
  static Sum add(Sum s, V w, V x) { return (vi)_mm512_dpbusd_epi32((__m512i)s, w, x); }
#elif defined(__AVX512F__)
  using Packed = int16_t;
  using V = __m512i;
  static constexpr int step = 32, offset = 0;
  static V load(const T* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  static V load_w(const T* p) { return load(p); }
  static V broadcast(uint32_t dword) { return _mm512_set1_epi32(dword); }
  static Sum add(Sum s, V w, V x) { return s + (vi)_mm512_madd_epi16(w, x); }
#elif defined(__AVX2__)
  using Packed = int16_t;
  using V = __m256i;
  static constexpr int step = 16, offset = 0;
  static V load(const T* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
  static V load_w(const T* p) { return load(p); }
  static V broadcast(uint32_t dword) { return _mm256_set1_epi32(dword); }
  static Sum add(Sum s, V w, V x) { return s + (vi)_mm256_madd_epi16(w, x); }
#else
  using Packed = int32_t;
  using V = vi;
  static constexpr int step = W, offset = 0;
  static V load(const T* p) { return __builtin_convertvector(torchq::load<vsb>(p), vi); }
  static V load_w(const T* p) { return load(p); }
  static V broadcast(uint32_t dword) { return splat(int32_t(dword)); }
  static Sum add(Sum s, V w, V x) { return s + w * x; }
#endif
};

template <class Dot>
inline typename Dot::V load_weights(const typename Dot::T* p) {
  if constexpr (std::is_same_v<Dot, DotI8>)
    return Dot::load_w(p);
  else
    return Dot::load(p);
}

// Rows of weights: `rows` of them, `pitch` elements apart. A block past the last row repeats it.
template <class T>
struct RowsOf {
  const T* first;
  int64_t pitch, rows;
  const T* operator[](int64_t n) const { return first + (n < rows ? n : rows - 1) * pitch; }
};

// sums[m * pitch + n] += dot products of BLOCK_N and MB rows over k columns (a multiple of Dot::step).
constexpr int BLOCK_N = 4;

template <class Dot, int MB, class S>
[[gnu::noinline]] void dot_block(const RowsOf<typename Dot::T>& w, int64_t first, const typename Dot::T* x, int64_t ldx,
                                 int64_t k, S* sums, int64_t pitch) {
  constexpr int NB = BLOCK_N;
  typename Dot::Sum acc[NB][MB] = {};
  const typename Dot::T* from[NB];
  for (int n = 0; n < NB; n++) from[n] = w[first + n];
  for (int64_t i = 0; i < k; i += Dot::step) {
    typename Dot::V row[NB];
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) {
      if constexpr (MB == 1) __builtin_prefetch(from[n] + i + NB * w.pitch);
      row[n] = load_weights<Dot>(from[n] + i);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MB; m++) {
      typename Dot::V v = Dot::load(x + m * ldx + i);
#pragma GCC unroll 8
      for (int n = 0; n < NB; n++) acc[n][m] = Dot::add(acc[n][m], row[n], v);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MB; m++)
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) sums[m * pitch + n] += sum_lanes(acc[n][m]);
}

// sums[m * pitch + n] += all dot products of the rows of w and a few rows of x. sums has room for whole blocks.
template <class Dot, class S>
inline void dot_rows(const RowsOf<typename Dot::T>& w, const typename Dot::T* x, int64_t ldx, int64_t rows_m, int64_t k,
                     S* sums, int64_t pitch) {
  for (int64_t n = 0; n < w.rows; n += BLOCK_N) {
    int64_t m = 0;
    auto block = [&]<int MB>() { dot_block<Dot, MB>(w, n, x + m * ldx, ldx, k, sums + m * pitch + n, pitch); };
    if constexpr (W == 16)
      for (; m + 4 <= rows_m; m += 4) block.template operator()<4>();
    for (; m + 2 <= rows_m; m += 2) block.template operator()<2>();
    for (; m < rows_m; m++) block.template operator()<1>();
  }
}

}  // namespace torchq
