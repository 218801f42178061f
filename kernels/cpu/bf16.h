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
      __m512i c = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
      __m512i low = _mm512_permutex2var_epi8(table_[0], c, table_[1]);
      __m512i high = _mm512_permutex2var_epi8(table_[2], c, table_[3]);
      high = _mm512_ternarylogic_epi32(high, c, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (c & 0x80)
      return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    } else {
      return {_mm512_permutexvar_epi16(nibbles(codes), table_[0]),
              _mm512_permutexvar_epi16(nibbles(codes + 16), table_[0])};
    }
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

// OUTER: none, the row's factor is all. PER_32: f32, one for every 32 columns. PER_16: bf16, one for every 16 (NVFP4).
enum Grouping { OUTER, PER_32, PER_16 };

inline Grouping grouping(const Format& f) {
  return f.group_columns == 0 ? OUTER : f.group_columns == 16 ? PER_16 : PER_32;
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
  int64_t groups = w.scale_columns, repeat = w.spans;
  int64_t end = (w.columns + 63) / 64 * 2;
  int64_t g = 0;
  if (repeat == 1 && w.format.scale == SCALE_F32 && groups == end) return (const float*)scale;
  if (repeat == 1 && w.format.scale == SCALE_E8M0)
    for (; g + W <= groups; g += W) {
      vi byte = __builtin_convertvector(load<vb>(scale + g), vi);
      vi bits = byte == 0 ? splat(0x00400000) : byte << 23;
      store(out + g, byte == 255 ? splat(0x7fc00000) : bits);
    }
  for (; g < groups; g++)
    for (int64_t i = 0; i < repeat && g * repeat + i < end; i++) out[g * repeat + i] = multiplier(w.format, scale, g, 1.f);
  for (int64_t i = groups * repeat; i < end; i++) out[i] = 0;
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

// ---- few rows of x: decode in registers, one pass over the codes ----

// sums[m * pitch] = dot products of one row of weights and MB rows of x, without the outer factor. x is padded with zeros
// to a multiple of 64 columns. Rows are read one after the other, as one stream: memory is what limits this.
template <Element E, Grouping G, int MB>
[[gnu::noinline]] void stream_row(const Quantized& w, int64_t matrix, int64_t row, const uint16_t* x, int64_t ldx,
                                  float* sums, int64_t pitch, float* scratch) {
  constexpr int UNROLL = MB == 1 ? 4 : 2;  // independent sums, as many as hide the latency of an addition
  constexpr int64_t ahead = 4096;          // bytes to prefetch: the hardware's prefetcher stops at pages
  const Decoder<E> decode;
  const SpreadPer16 spread;
  const int64_t row_bytes = w.row_bytes;
  const char* codes = w.row_data(matrix * w.rows + row);
  const float* per_32 = scratch;
  const uint16_t* per_16 = (const uint16_t*)scratch;
  if constexpr (G == PER_32) per_32 = scales_per_32(w, matrix, row, scratch);
  if constexpr (G == PER_16) scales_per_16(w, matrix, row, Decoder<E4M3>(), (uint16_t*)scratch);
  vf acc[MB][UNROLL] = {};
  auto step = [&](const char* at, int64_t k, int u) __attribute__((always_inline)) {
    Pair p = decode(at);
    vf scale[2];
    if constexpr (G == PER_32) {
      scale[0] = splat(per_32[k / 32]);
      scale[1] = splat(per_32[k / 32 + 1]);
    }
    if constexpr (G == PER_16) {
      __m512i four = _mm512_set1_epi64(load<int64_t>(per_16 + k / 16));
      scale[0] = SpreadPer16::spread(spread.first, four);
      scale[1] = SpreadPer16::spread(spread.second, four);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MB; m++) {
      __m512bh x0 = DotBF16::load_x(x + m * ldx + k), x1 = DotBF16::load_x(x + m * ldx + k + 32);
      if constexpr (G == OUTER) {
        acc[m][u] = _mm512_dpbf16_ps(acc[m][u], (__m512bh)p.a, x0);
        acc[m][u] = _mm512_dpbf16_ps(acc[m][u], (__m512bh)p.b, x1);
      } else {
        acc[m][u] = fma(_mm512_dpbf16_ps(vf{}, (__m512bh)p.a, x0), scale[0], acc[m][u]);
        acc[m][u] = fma(_mm512_dpbf16_ps(vf{}, (__m512bh)p.b, x1), scale[1], acc[m][u]);
      }
    }
  };
  constexpr int64_t bytes = Decoder<E>::bytes;
  int64_t at = 0;
  for (; at + UNROLL * bytes <= row_bytes; at += UNROLL * bytes) {
#pragma GCC unroll 8
    for (int u = 0; u < UNROLL; u++) {
      if (u * bytes % 64 == 0) _mm_prefetch(codes + at + u * bytes + ahead, _MM_HINT_T0);
      step(codes + at + u * bytes, (at + u * bytes) / bytes * 64, u);
    }
  }
  for (; at + bytes <= row_bytes; at += bytes) step(codes + at, at / bytes * 64, 0);
  if (at < row_bytes) {
    alignas(64) char tail[64] = {};  // stray codes meet zeros of x
    memcpy(tail, codes + at, row_bytes - at);
    step(tail, at / bytes * 64, 0);
  }
#pragma GCC unroll 8
  for (int m = 0; m < MB; m++) {
    vf sum = acc[m][0];
    for (int u = 1; u < UNROLL; u++) sum += acc[m][u];
    sums[m * pitch] = sum_lanes(sum);
  }
}

// ---- many rows of x: a tile of weights as bf16 ----

// Whether a code times its scale stays among bf16's normal numbers for every scale byte of the row and every code.
inline bool bakes(const Quantized& w, int64_t matrix, int64_t row) {
  const uint8_t* scale = (const uint8_t*)w.row_scale(matrix, row);
  int low = w.format.element == E2M1 ? 2 : 10, high = w.format.element == E2M1 ? 252 : 246;
  bool ok = true;
  for (int64_t g = 0; g < w.scale_columns; g++) ok &= scale[g] >= low && scale[g] <= high;
  return ok;
}

inline __m512i times_power(__m512i values, uint8_t byte) {
  // Zeros and NaN stay as they are: their bits, less one and without the sign, are not below those of NaN.
  const __m512i one = _mm512_set1_epi16(1), below = _mm512_set1_epi16(0x7fbf);
  __m512i magnitude = _mm512_and_si512(values, _mm512_set1_epi16(0x7fff));
  __mmask32 scaled = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, one), below);
  return _mm512_mask_add_epi16(values, scaled, values, _mm512_set1_epi16(int16_t((byte - 127) * 128)));
}

// A row to bf16, without the outer factor and without PER_32 scales that are not powers of two; zeros or stray values
// (that meet zeros of x) up to a multiple of 64 columns.
template <Element E>
[[gnu::noinline]] void decode_row_bf16(const Quantized& w, int64_t matrix, int64_t row, float* scratch, uint16_t* out) {
  const Decoder<E> decode;
  const int64_t row_bytes = w.row_bytes;
  const char* codes = w.row_data(matrix * w.rows + row);
  const uint8_t* scale = (const uint8_t*)w.row_scale(matrix, row);
  const int64_t per_scale = w.format.group_columns;
  const bool power = w.format.scale == SCALE_E8M0;
  auto store_pair = [&](int64_t k, Pair p) {
    _mm512_storeu_si512(out + k, p.a);
    _mm512_storeu_si512(out + k + 32, p.b);
  };
  if (power && !bakes(w, matrix, row)) {
    int64_t end = (w.columns + 63) / 64 * 64, chunk = per_scale;
    for (int64_t k = 0; k < w.columns; k += chunk) {
      decode_columns<E>(w, matrix, row, k, chunk, scratch);
      narrow<BF16>(scratch, chunk < end - k ? chunk : end - k, (char*)(out + k));
    }
    for (int64_t k = w.format.padded(w.columns); k < end; k++) out[k] = 0;
    return;
  }
  const Decoder<E4M3> decode_scale;
  uint16_t* scales16 = (uint16_t*)scratch;
  if (grouping(w.format) == PER_16) scales_per_16(w, matrix, row, decode_scale, scales16);
  const SpreadPer16 spread;
  const __m512 values16 =
      _mm512_cvtpbh_ps((__m256bh)_mm512_castsi512_si256(decode.table()));  // of the 4-bit codes, as f32
  for (int64_t k = 0, at = 0; at < row_bytes; k += 64, at += decode.bytes) {
    alignas(64) char tail[64] = {};
    const char* from = codes + at;
    if (at + decode.bytes > row_bytes) memcpy(tail, from, row_bytes - at), from = tail;
    if constexpr (E == E2M1) {
      if (grouping(w.format) == PER_16) {
        // Two groups have a table each, of 16 products; bit 4 of the index says which.
        auto scaled = [&](const char* p, const uint16_t* s) {
          auto times = [&](uint16_t b) { return values16 * _mm512_set1_ps(bit_cast<float>(uint32_t(b) << 16)); };
          const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
          __m512i table = (__m512i)_mm512_cvtne2ps_pbh(times(s[1]), times(s[0]));
          __m512i index = _mm512_ternarylogic_epi32(Decoder<E>::nibbles(p), _mm512_set1_epi16(15), upper, 0xea);
          return _mm512_permutexvar_epi16(index, table);  // index = (nibble & 15) | upper
        };
        store_pair(k, {scaled(from, scales16 + k / 16), scaled(from + 16, scales16 + k / 16 + 2)});
        continue;
      }
    }
    Pair p = decode(from);
    if (power) {
      int64_t last = w.scale_columns - 1, next = (k + 32) / per_scale;
      p.a = times_power(p.a, scale[k / per_scale]);
      p.b = times_power(p.b, scale[next < last ? next : last]);
    }
    store_pair(k, p);
  }
}

// sums[m * pitch + n] = dot products of two rows of a bf16 tile and MB rows of x, with f32 scales for every 32 columns.
template <int MB>
[[gnu::noinline]] void scaled_block(const uint16_t* w, int64_t ldw, const float* const* scales, int64_t span,
                         const uint16_t* x, int64_t ldx, int64_t k, float* sums, int64_t pitch) {
  constexpr int NB = 2;  // sums of the group and of the row: twice the registers
  vf acc[NB][MB] = {};
  for (int64_t g = 0; g < k; g += span) {
    vf part[NB][MB] = {};
    int64_t end = g + span < k ? g + span : k;
    for (int64_t i = g; i < end; i += 32) {
      __m512bh row[NB];
#pragma GCC unroll 8
      for (int n = 0; n < NB; n++) row[n] = DotBF16::load_w(w + n * ldw + i);
#pragma GCC unroll 8
      for (int m = 0; m < MB; m++) {
        __m512bh v = DotBF16::load_x(x + m * ldx + i);
#pragma GCC unroll 8
        for (int n = 0; n < NB; n++) part[n][m] = _mm512_dpbf16_ps(part[n][m], row[n], v);
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) {
      vf s = splat(scales[n][g / 32]);
#pragma GCC unroll 8
      for (int m = 0; m < MB; m++) acc[n][m] = fma(part[n][m], s, acc[n][m]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MB; m++)
#pragma GCC unroll 8
    for (int n = 0; n < NB; n++) sums[m * pitch + n] = sum_lanes(acc[n][m]);
}

}  // namespace torchq
#endif
