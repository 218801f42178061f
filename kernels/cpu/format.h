// What the codes and scales of a tensor mean: the C++ side of torchq.keys.QuantKey.
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
    return {Element(k & 3),   Scale(k >> 2 & 3), Global(k >> 4 & 3),
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

inline float multiplier(const Format& f, const char* scale, int64_t index, float global) {
  if (f.scale == SCALE_E8M0) return e8m0_to_float(uint8_t(scale[index]));
  if (f.scale == SCALE_E4M3) return e4m3_to_float(uint8_t(scale[index])) * global;
  float s;
  memcpy(&s, scale + 4 * index, 4);
  return s;
}

}  // namespace torchq
