// What the codes and scales of a tensor mean (the C++ side of torchq.keys.QuantKey), and the arithmetic of one scale.
#pragma once
#include "vec.h"

namespace torchq {

enum Element : int { E4M3 = 0, E2M1 = 1, INT8 = 2, INT4 = 3 };
enum Scale : int { SCALE_F32 = 0, SCALE_E8M0 = 1, SCALE_E4M3 = 2 };
enum Global : int { NO_GLOBAL = 0, PER_TENSOR = 1, PER_TOKEN = 2 };
enum Rounding : int64_t { FLOOR = 0, CEIL = 1, EVEN = 2 };

struct Format {
  Element element;
  Scale scale;
  Global global;
  bool dynamic;
  int64_t group_rows, group_columns;  // 0: the whole dimension

  // Packed by torchq.kernels.cpu_backend._packed.
  static Format unpack(int64_t k) {
    return {Element(k & 3),      Scale(k >> 2 & 3),    Global(k >> 4 & 3),
            bool(k >> 6 & 1), k >> 8 & 0xffffff, k >> 32 & 0xffffff};
  }

  bool four_bits() const { return element == E2M1 || element == INT4; }
  int64_t padded(int64_t columns) const {
    bool whole_groups = four_bits() || scale == SCALE_E8M0;
    return whole_groups ? (columns + group_columns - 1) / group_columns * group_columns : columns;
  }
  int64_t row_bytes(int64_t columns) const { return padded(columns) / (four_bits() ? 2 : 1); }
  int64_t scale_columns(int64_t columns) const {
    return group_columns ? (padded(columns) + group_columns - 1) / group_columns : 1;
  }
  int64_t scale_rows(int64_t rows) const { return group_rows ? (rows + group_rows - 1) / group_rows : 1; }
  int scale_size() const { return scale == SCALE_F32 ? 4 : 1; }
  float max() const { return element == E4M3 ? 448.f : element == E2M1 ? 6.f : element == INT8 ? 127.f : 7.f; }
};

constexpr int32_t INF_BITS = 0x7f800000;
constexpr float nan_value() { return bit_cast<float>(0x7fc00000); }

inline float e8m0_to_float(uint8_t byte) {
  return bit_cast<float>(byte == 255 ? 0x7fc00000u : byte == 0 ? 0x00400000u : uint32_t(byte) << 23);
}

constexpr float e4m3_to_float(uint8_t code) {
  uint32_t m = code & 0x7f, sign = uint32_t(code & 0x80) << 24;
  float v = m == 0x7f ? nan_value() : m < 8 ? float(m) * 0x1p-9f : bit_cast<float>((m << 20) + (120u << 23));
  return bit_cast<float>(bit_cast<uint32_t>(v) | sign);
}

inline uint8_t float_to_e4m3(float v) {
  uint32_t bits = bit_cast<uint32_t>(v), a = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
  if (a > uint32_t(INF_BITS)) return 0x7f;
  // Below 2^-6 the step is 2^-9: adding 2^14, whose last bit weighs that, rounds in the adder.
  uint32_t code = a < 0x3c800000u ? bit_cast<uint32_t>(bit_cast<float>(a) + 0x1p14f) - bit_cast<uint32_t>(0x1p14f)
                                  : ((a + 0x7ffff + (a >> 20 & 1)) >> 20) - 960;
  return sign | (code > 0x7e ? 0x7e : code);
}

// The scale byte of a group whose amax has these bits; see torchq.kernels.scales.e8m0_from_amax.
inline uint8_t e8m0_from_amax(int32_t bits, Element element, Rounding rounding) {
  if (bits >= INF_BITS) return 255;
  int emax = element == E2M1 ? 2 : 8, mantissa_bits = element == E2M1 ? 1 : 3;
  int32_t exponent;
  if (rounding == FLOOR) {
    exponent = bits >> 23;
  } else if (rounding == EVEN) {
    exponent = (bits + (1 << (22 - mantissa_bits))) >> 23;
  } else {
    int32_t max_fraction = element == E2M1 ? 0x400000 : 0x600000;  // 6 = 1.5 * 2^2, 448 = 1.75 * 2^8
    exponent = (bits >> 23) + ((bits & 0x7fffff) > max_fraction);
  }
  int32_t byte = exponent - emax;
  return byte < 0 ? 0 : byte > 254 ? 254 : byte;
}

// The f32 scale of a group; see torchq.kernels.scales.stored_scale.
inline float f32_from_amax(int32_t bits, const Format& f) {
  float amax = bit_cast<float>(bits);
  if (bits >= INF_BITS) return nan_value();
  if (f.element == E4M3) {
    if (f.group_rows == 0 || f.group_columns == 0) {
      float scale = amax / 448.f, floor = float(1.0 / (448 * 512));
      return scale < floor ? floor : scale;
    }
    float floor = f.dynamic ? 1e-10f : 1e-4f;
    return (amax < floor ? floor : amax) / 448.f;
  }
  float scale = amax / f.max();
  return scale == 0 ? 1.f : scale;
}

// Writes a group's stored scale and returns the multiplier that decodes its codes.
inline float put_scale(int32_t amax_bits, const Format& f, Rounding rounding, float global, char* scale) {
  if (f.scale == SCALE_E8M0) {
    uint8_t byte = e8m0_from_amax(amax_bits, f.element, rounding);
    *scale = char(byte);
    return e8m0_to_float(byte);
  }
  if (f.scale == SCALE_E4M3) {
    float block = bit_cast<float>(amax_bits) / 6.f / global;
    block = block > 448.f ? 448.f : block;
    uint8_t code = float_to_e4m3(amax_bits >= INF_BITS ? nan_value() : block);
    *scale = char(code);
    return e4m3_to_float(code) * global;
  }
  float s = f32_from_amax(amax_bits, f);
  memcpy(scale, &s, 4);
  return s;
}

inline float multiplier(const Format& f, const char* scale, int64_t index, float global) {
  if (f.scale == SCALE_E8M0) return e8m0_to_float(uint8_t(scale[index]));
  if (f.scale == SCALE_E4M3) return e4m3_to_float(uint8_t(scale[index])) * global;
  float s;
  memcpy(&s, scale + 4 * index, 4);
  return s;
}

}  // namespace torchq
