// Codes of W values at a time: encode (values already divided by their scale, not NaN) and decode.
#pragma once
#include "format.h"

namespace torchq {

inline vi min(vi a, int32_t b) { return a < b ? a : splat(b); }

template <Element E>
inline vi encode(vf v) {
  constexpr int32_t sign_free = 0x7fffffff;
  if constexpr (E == E2M1 || E == E4M3) {
    // Normal codes: round the mantissa bits to nearest even. Subnormal codes: add the power of two whose last bit is the
    // code's step, so that the adder rounds; what it adds to the bits is the code.
    constexpr int drop = E == E2M1 ? 22 : 20;
    constexpr float first_normal = E == E2M1 ? 1.f : 0x1p-6f, step_one = E == E2M1 ? 0x1p22f : 0x1p14f;
    constexpr int32_t bias = E == E2M1 ? 252 : 960, largest = E == E2M1 ? 7 : 0x7e, sign = E == E2M1 ? 8 : 0x80;
    vi a = (vi)v & sign_free;
    vi normal = ((a + ((1 << (drop - 1)) - 1) + (a >> drop & 1)) >> drop) - bias;
    vi subnormal = (vi)((vf)a + step_one) - bit_cast<int32_t>(step_one);
    vi code = min(a < bit_cast<int32_t>(first_normal) ? subnormal : normal, largest);
    return code | (vi)((vu)v >> (E == E2M1 ? 28 : 24) & sign);
  } else {
    constexpr float limit = E == INT8 ? 127.f : 7.f;
    v = v > limit ? splat(limit) : v;
    v = v < -limit ? splat(-limit) : v;
    vi code = (vi)(v + 12582912.f);  // 1.5 * 2^23: the last bit is one
    return E == INT8 ? code : (code - bit_cast<int32_t>(12582912.f)) + 8;
  }
}

// f32 values of codes in 32-bit lanes (4-bit codes: higher bits may hold anything).
template <Element E>
inline vf decode(vi c) {
  if constexpr (E == E2M1) {
#if defined(__AVX512F__)
    const vf values = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
    return _mm512_permutexvar_ps((__m512i)c, values);
#elif defined(__AVX2__)
    const vf values = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
    return (vf)((vi)_mm256_permutevar8x32_ps(values, (__m256i)c) | (c & 8) << 28);
#else
    vi m = c & 7;
    vf v = m < 2 ? __builtin_convertvector(m, vf) * .5f : (vf)((m << 22) + (126 << 23));
    return (vf)((vi)v | (c & 8) << 28);
#endif
  } else if constexpr (E == E4M3) {
    vi m = c & 0x7f;
    vf v = m < 8 ? __builtin_convertvector(m, vf) * 0x1p-9f : (vf)((m << 20) + (120 << 23));
    v = m == 0x7f ? splat(nan_value()) : v;
    return (vf)((vi)v | (c & 0x80) << 24);
  } else if constexpr (E == INT8) {
    return __builtin_convertvector(c << 24 >> 24, vf);
  } else {
    return __builtin_convertvector((c & 15) - 8, vf);
  }
}

constexpr bool packs_two(Element e) { return e == E2M1 || e == INT4; }

// Stores W codes: bytes, or pairs in W / 2 bytes with the even element in the low nibble.
template <Element E>
inline void store_codes(char* p, vi codes) {
  if constexpr (packs_two(E)) {
    vq pairs = (vq)codes;
    store(p, convert<vb_half>(pairs | pairs >> 28));
  } else {
    store(p, convert<vb>(codes));
  }
}

template <Element E>
inline vi load_codes(const char* p) {
  if constexpr (packs_two(E)) {
    vq bytes = convert<vq>(load<vb_half>(p));
    return (vi)(bytes | bytes << 28);
  } else {
    return convert<vi>(load<vb>(p));
  }
}

// Calls f with the element as a compile-time constant.
template <class F>
inline void with_element(Element e, F f) {
  if (e == E4M3) f.template operator()<E4M3>();
  if (e == E2M1) f.template operator()<E2M1>();
  if (e == INT8) f.template operator()<INT8>();
  if (e == INT4) f.template operator()<INT4>();
}

}  // namespace torchq
