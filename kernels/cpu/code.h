// Codes of W values at a time: encode (values already divided by their scale, not NaN) and decode.
#pragma once
#include "format.h"

namespace torchq {

inline vi min(vi a, int32_t b) { return a < b ? a : splat(b); }

#if defined(__AVX512BW__)
// The e2m1 code of a magnitude of at least 1/4 (lower ones count as 1/4): looked up from how far above 1/4 the bits are
// in steps of a quarter of a power of two, twice, plus one where more bits follow (a tie is broken by them).
struct RoundingE2M1 {
  alignas(64) uint16_t code[64] = {};
  constexpr RoundingE2M1() {
    const float ties[7] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
    for (int i = 0; i < 64; i++) {
      float v = (1 + (i >> 1 & 3) * .25f) / 4;
      for (int e = 0; e < i >> 3; e++) v *= 2;
      for (int t = 0; t < 7; t++) code[i] += v > ties[t] || (v == ties[t] && (i % 2 || t % 2));
    }
  }
  __m512i operator()(__m512i index, __mmask32 lanes) const {
    return _mm512_maskz_permutex2var_epi16(lanes, _mm512_load_si512(code), index, _mm512_load_si512(code + 32));
  }
};
inline constexpr RoundingE2M1 rounding_e2m1;
#endif

template <Element E>
inline vi encode(vf v) {
  constexpr int32_t sign_free = 0x7fffffff;
#if defined(__AVX512BW__)
  if constexpr (E == E2M1) {
    vi above = ((vi)v & sign_free) - bit_cast<int32_t>(.25f);
    above = above > 0 ? above : vi{};
    above = min(above, 5 << 23);
    vi index = (above >> 21) + ((above + 0x1fffff) >> 21);
    return (vi)rounding_e2m1((__m512i)index, 0x55555555) | (vi)((vu)v >> 28 & 8);
  }
#endif
  if constexpr (E == E2M1 || E == E4M3) {
    // Normal codes: round the mantissa bits to nearest even. Subnormal codes: add the power of two whose last bit is
    // the code's step, so that the adder rounds; what it adds to the bits is the code.
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
    return E == INT8 ? code : code - (bit_cast<int32_t>(12582912.f) - 8);
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

// bf16 values of 128 codes (the sign of an 8-bit code is put on later), and their two bytes.
template <Element E>
struct Tables {
  alignas(64) uint16_t value[128] = {};
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr Tables() {
    const float e2m1[16] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
    for (int c = 0; c < 128; c++) {
      float v = E == E4M3 ? e4m3_to_float(uint8_t(c)) : E == INT4 ? float((c & 15) - 8) : e2m1[c & 15];
      value[c] = bit_cast<uint32_t>(v) >> 16;
      low[c] = uint8_t(value[c]), high[c] = uint8_t(value[c] >> 8);
    }
  }
};
template <Element E>
constexpr Tables<E> tables_of;

constexpr bool packs_two(Element e) { return e == E2M1 || e == INT4; }

// Stores W codes: bytes, or pairs in W / 2 bytes with the even element in the low nibble.
template <Element E>
inline void store_codes(char* p, vi codes) {
  if constexpr (packs_two(E)) {
#if defined(__AVX512BW__)
    __m128i pair = _mm_maddubs_epi16(_mm512_cvtepi32_epi8((__m512i)codes), _mm_set1_epi16(0x1001));
    return _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(pair, pair));
#endif
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
