// A step of a dot product on this instruction set: sums of W lanes, a dword each of w and of x (1 f32, 2 bf16, 4 int8;
// fewer int8 where they have to be widened).
#pragma once
#include "vec.h"

namespace torchq {

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define TORCHQ_BF16_DOT 1
#endif

struct DotF32 {
  using Packed = float;
  using V = vf;
  using Sum = vf;
  static V broadcast(uint32_t dword) { return splat(bit_cast<float>(dword)); }
  static Sum add(Sum s, V w, V x) { return fma(w, x, s); }
};

#if TORCHQ_BF16_DOT
struct DotBF16 {
  using Packed = uint16_t;
  using V = __m512bh;
  using Sum = vf;
  static V broadcast(uint32_t dword) { return (__m512bh)_mm512_set1_epi32(dword); }
  static Sum add(Sum s, V w, V x) { return _mm512_dpbf16_ps(s, w, x); }
};
#endif

// Exact products of int8 codes. Where the instruction takes unsigned weights, they are shifted by `offset`.
struct DotI8 {
  using Sum = vi;
#if defined(__AVX512VNNI__)
  using Packed = int8_t;
  using V = __m512i;
  static constexpr int step = 64, offset = 128;
  static V load(const int8_t* p) { return _mm512_loadu_si512(p); }
  static V load_w(const int8_t* p) { return _mm512_xor_si512(load(p), _mm512_set1_epi8(char(0x80))); }
  static V broadcast(uint32_t dword) { return _mm512_set1_epi32(dword); }
  static Sum add(Sum s, V w, V x) { return (vi)_mm512_dpbusd_epi32((__m512i)s, w, x); }
#elif defined(__AVX512F__)
  using Packed = int16_t;
  using V = __m512i;
  static constexpr int step = 32, offset = 0;
  static V load(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  static V load_w(const int8_t* p) { return load(p); }
  static V broadcast(uint32_t dword) { return _mm512_set1_epi32(dword); }
  static Sum add(Sum s, V w, V x) { return s + (vi)_mm512_madd_epi16(w, x); }
#elif defined(__AVX2__)
  using Packed = int16_t;
  using V = __m256i;
  static constexpr int step = 16, offset = 0;
  static V load(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
  static V load_w(const int8_t* p) { return load(p); }
  static V broadcast(uint32_t dword) { return _mm256_set1_epi32(dword); }
  static Sum add(Sum s, V w, V x) { return s + (vi)_mm256_madd_epi16(w, x); }
#else
  using Packed = int32_t;
  using V = vi;
  static constexpr int step = W, offset = 0;
  static V load(const int8_t* p) { return __builtin_convertvector(torchq::load<vsb>(p), vi); }
  static V load_w(const int8_t* p) { return load(p); }
  static V broadcast(uint32_t dword) { return splat(int32_t(dword)); }
  static Sum add(Sum s, V w, V x) { return s + w * x; }
#endif
};

}  // namespace torchq
