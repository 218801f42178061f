// From the amax of a group to its stored scale, W groups at a time.
#pragma once
#include "code.h"

namespace torchq {

// The scale bytes of groups whose amax have these bits; see torchq.kernels.scales.e8m0_from_amax.
inline vi e8m0_from_amax(vi bits, Element element, Rounding rounding) {
  const int emax = element == E2M1 ? 2 : 8, mantissa_bits = element == E2M1 ? 1 : 3;
  vi exponent;
  if (rounding == FLOOR) {
    exponent = bits >> 23;
  } else if (rounding == EVEN) {
    exponent = (bits + (1 << (22 - mantissa_bits))) >> 23;
  } else {
    const int32_t max_fraction = element == E2M1 ? 0x400000 : 0x600000;  // 6 = 1.5 * 2^2, 448 = 1.75 * 2^8
    exponent = (bits >> 23) - ((bits & 0x7fffff) > max_fraction);        // true is -1
  }
  vi byte = exponent - emax;
  byte = byte < 0 ? vi{} : byte > 254 ? splat(254) : byte;
  return bits >= INF_BITS ? splat(255) : byte;
}

inline vf e8m0_to_float(vi byte) {
  vi bits = byte == 0 ? splat(0x00400000) : byte << 23;
  return (vf)(byte == 255 ? splat(0x7fc00000) : bits);
}

// W stored scales as f32, without a global scale.
inline vf stored_scales(const Format& f, const char* scale) {
  if (f.scale == SCALE_F32) return load<vf>(scale);
  const vi bytes = convert<vi>(load<vb>(scale));
  return f.scale == SCALE_E8M0 ? e8m0_to_float(bytes) : decode<E4M3>(bytes);
}

// The f32 scales of groups; see torchq.kernels.scales.stored_scale.
inline vf f32_from_amax(vi bits, const Format& f) {
  vf amax = (vf)bits, scale;
  if (f.element == E4M3 && f.group_rows && f.group_columns) {
    const vf floor = splat(f.dynamic ? 1e-10f : 1e-4f);
    scale = (amax < floor ? floor : amax) / 448.f;
  } else if (f.element == E4M3) {
    const vf floor = splat(float(1.0 / (448 * 512)));
    scale = amax / 448.f;
    scale = scale < floor ? floor : scale;
  } else {
    scale = amax / f.max();
    scale = scale == 0.f ? splat(1.f) : scale;
  }
  return bits >= INF_BITS ? splat(nan_value()) : scale;
}

// Writes the stored scales of `count` groups and the multipliers that decode their codes. Both arrays of f32 or of bits
// have room for W more.
inline void put_scales(const int32_t* amax_bits, int64_t count, const Format& f, Rounding rounding, float global,
                       char* scale, float* multiplier) {
  for (int64_t i = 0; i < count; i += W) {
    const vi bits = load<vi>(amax_bits + i);
    alignas(64) char stored[W * 4];
    vf decoded;
    if (f.scale == SCALE_E8M0) {
      vi byte = e8m0_from_amax(bits, f.element, rounding);
      decoded = e8m0_to_float(byte);
      store(stored, convert<vb>(byte));
    } else if (f.scale == SCALE_E4M3) {
      vf block = (vf)bits / 6.f / global;
      vi code = bits >= INF_BITS || block != block ? splat(0x7f) : encode<E4M3>(block > 448.f ? splat(448.f) : block);
      decoded = decode<E4M3>(code) * global;
      store(stored, convert<vb>(code));
    } else {
      decoded = f32_from_amax(bits, f);
      store(stored, decoded);
    }
    memcpy(scale + i * f.scale_size(), stored, (count - i < W ? count - i : W) * f.scale_size());
    store(multiplier + i, decoded);
  }
}

// The same for one group.
inline float put_scale(int32_t amax_bits, const Format& f, Rounding rounding, float global, char* scale) {
  int32_t bits[W] = {amax_bits};
  float multiplier[W];
  put_scales(bits, 1, f, rounding, global, scale, multiplier);
  return multiplier[0];
}

}  // namespace torchq
