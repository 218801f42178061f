// The linear layer: panels of output columns, for every expert.
#pragma once
#include "few.h"
#include "prepare.h"

namespace torchq {

struct Linear {
  Quantized w;
  const Prepared& x;
  const PackedRows& packed;
  const char* bias;  // per matrix and row of w, or nullptr
  Dtype bias_dtype;
  char* out;  // [rows of x, rows of w]
  Dtype out_dtype;

  int64_t panels() const { return (w.rows + PANEL - 1) / PANEL; }
};

// Rows of x that an expert has; with blocks of them where they are many.
struct Share {
  int64_t matrix, from, rows;
  std::vector<Block> blocks;
};

// PANEL rows of w, fewer at the end.
struct Panel {
  int64_t matrix, first, rows;
};

// Memory of one thread, kept between calls: one piece for each use.
enum Use { SUMS, PACKED, DECODED, WIDE, SCALES, SPREAD, FACTORS };

template <Use USE, class T>
inline T* scratch(int64_t n) {
  thread_local Aligned<T> memory;
  if (memory.size() < n) memory = Aligned<T>(n);
  return memory.data();
}

inline float value_at(const char* p, Dtype d, int64_t i) {
  if (d == F32) return ((const float*)p)[i];
  uint16_t h = ((const uint16_t*)p)[i];
  return d == F16 ? f16_to_float(h) : bit_cast<float>(uint32_t(h) << 16);
}

// Sums [m][PANEL] times the outer factors, plus bias, to the output.
template <class S>
inline void finish(const Linear& l, const Panel& p, int64_t from, int64_t m_rows, const S* sums) {
  alignas(64) float factor[PANEL] = {}, bias[PANEL] = {};
  for (int64_t n = 0; n < p.rows; n++) {
    factor[n] = l.w.outer(p.matrix, p.first + n);
    if (l.bias) bias[n] = value_at(l.bias, l.bias_dtype, p.matrix * l.w.rows + p.first + n);
  }
  with_dtype(l.out_dtype, [&]<Dtype D>() {
    constexpr int size = D == F32 ? 4 : 2;
    for (int64_t m = 0; m < m_rows; m++) {
      const float row = l.x.row_factor.size() ? l.x.row_factor[from + m] : 1.f;
      char* out = l.out + ((from + m) * l.w.rows + p.first) * size;
      alignas(64) char last[PANEL * size];
      char* to = p.rows == PANEL ? out : last;
      for (int64_t n = 0; n < PANEL; n += W) {
        vf sum;
        if constexpr (std::is_same_v<S, float>)
          sum = load<vf>(sums + m * PANEL + n);
        else
          for (int i = 0; i < W; i++) sum[i] = float(sums[m * PANEL + n + i]);
        store_as<D>(to + n * size, sum * load<vf>(factor + n) * row + load<vf>(bias + n));
      }
      if (to == last) memcpy(out, last, p.rows * size);
    }
  });
}

// ---- a few rows of x ----

// Calls f with the number of rows, at most 4, as a compile-time constant.
template <class F>
inline void with_few_rows(int64_t rows, F f) {
  rows == 1   ? f.template operator()<1>()
  : rows == 2 ? f.template operator()<2>()
  : rows == 3 ? f.template operator()<3>()
              : f.template operator()<4>();
}

#if TORCHQ_BF16_DOT
template <Element E, int SPAN, int MB>
[[gnu::noinline]] void stream_panel(const Linear& l, const Panel& p, const uint32_t* x, float* sums) {
  const Quantized& w = l.w;
  const int64_t pitch = l.packed.few_pitch, count = SPAN ? 2 * pitch / SPAN : 0;
  const int64_t bytes = w.scale_columns * w.format.scale_size();
  float* scales = scratch<SCALES, float>(count + 2 * W);
  const Decoder<E> decode;
  for (int64_t n = 0; n < p.rows; n++) {
    if constexpr (SPAN) {
      const char* next = w.row_scale(p.matrix, p.first + n) + 8 * bytes;
      for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
      spread_scales(w, p.matrix, p.first + n, SPAN, count, scales);
    }
    const char* codes = w.row_data(p.matrix * w.rows + p.first + n);
    stream_row<E, SPAN, MB>(decode, codes, w.row_bytes, scales, x, pitch, sums + n, PANEL);
  }
}

template <Element E>
inline void few_in_bf16(const Linear& l, const Panel& p, int64_t from, int64_t m_rows, float* sums) {
  const int64_t width = l.w.format.group_columns;
  for (int64_t m = 0; m < m_rows; m += 4)
    with_few_rows(m_rows - m, [&]<int MB>() {
      const uint32_t* x = &l.packed.few[(from + m) * l.packed.few_pitch];
      float* to = sums + m * PANEL;
      if constexpr (E == E2M1)
        if (width == 16) return stream_panel<E, 16, MB>(l, p, x, to);
      if constexpr (E != INT8)
        if (width) return stream_panel<E, 32, MB>(l, p, x, to);
      if constexpr (!packs_two(E)) stream_panel<E, 0, MB>(l, p, x, to);
    });
}
#endif

template <Element E>
inline void few_in_f32(const Linear& l, const Panel& p, int64_t from, int64_t m_rows, float* sums) {
  const Quantized& w = l.w;
  const int64_t width = w.format.group_columns, span = width % 32 ? 16 : 32;
  const int64_t count = (w.format.padded(w.columns) + 31) / 32 * 32 / span;
  float* scales = scratch<SCALES, float>(count + 2 * W);
  if (!width) std::fill_n(scales, count, Raw<E>::factor);
  for (int64_t n = 0; n < p.rows; n++) {
    if (width) {
      spread_scales(w, p.matrix, p.first + n, span, count, scales);
      for (int64_t i = 0; i < count; i += W) store(scales + i, load<vf>(scales + i) * Raw<E>::factor);
    }
    const char* codes = w.row_data(p.matrix * w.rows + p.first + n);
    auto rows = [&]<int MB>(int64_t m) {
      const float* x = (const float*)l.x.row(from + m);
      float* to = sums + m * PANEL + n;
      span == 32 ? few_rows_of_f32<E, MB, 32>(codes, w.row_bytes, scales, x, l.x.pitch, to, PANEL)
                 : few_rows_of_f32<E, MB, 16>(codes, w.row_bytes, scales, x, l.x.pitch, to, PANEL);
    };
    for (int64_t m = 0; m < m_rows; m += 2)
      m + 1 < m_rows ? rows.template operator()<2>(m) : rows.template operator()<1>(m);
  }
}

inline void few_in_i8(const Linear& l, const Panel& p, int64_t from, int64_t m_rows, int64_t* sums) {
  constexpr int64_t chunk = 1 << 15;  // sums of so many products of bytes fit 32 bits
  const int64_t columns = l.w.columns, step = DotI8::step;
  const int8_t* w = (const int8_t*)l.w.row_data(p.matrix * l.w.rows + p.first);
  for (int64_t k = 0; k < columns; k += chunk) {
    int64_t n = std::min(chunk, columns - k), whole = n / step * step;
    const int8_t* x = (const int8_t*)l.x.row(from) + k;
    few_rows_of_i8({w + k, columns, p.rows}, x, l.x.pitch, m_rows, whole, sums, PANEL);
    if (whole == n) continue;
    alignas(64) int8_t tail[PANEL * DotI8::step] = {};  // meets zeros of x
    for (int64_t r = 0; r < p.rows; r++) memcpy(tail + r * step, w + r * columns + k + whole, n - whole);
    few_rows_of_i8({tail, step, p.rows}, x + whole, l.x.pitch, m_rows, step, sums, PANEL);
  }
}

// ---- many rows of x ----

// Repacks columns k.. of a panel through rows of values: `decode(n, k, columns, out)` gives columns of row n, k and
// columns being multiples of `unit`.
template <class Dot, class Decode>
inline void repack_values(int64_t n_rows, int64_t k, int64_t columns, int64_t unit, Decode decode, uint32_t* out) {
  using Packed = typename Dot::Packed;
  constexpr int64_t per = PER_DWORD<Dot>;
  const int64_t part = std::max<int64_t>(256 * per / unit * unit, unit);
  Packed* rows = scratch<DECODED, Packed>(W * part);
  for (int64_t at = 0; at < columns; at += part) {
    const int64_t n = std::min(part, columns - at);
    for (int64_t half = 0; half < PANEL; half += W) {
      const int64_t used = std::clamp<int64_t>(n_rows - half, 0, W);
      for (int64_t r = 0; r < used; r++) decode(half + r, k + at, n, rows + r * part);
      pack_rows([&](int64_t r) { return (const uint32_t*)(rows + r * part); }, used, n / per,
                out + at / per * PANEL + half, PANEL);
    }
  }
}

// `repack(k, columns, out)` gives columns of the panel, k and columns being multiples of `unit`.
template <class Dot, class S, class Repack>
inline void packed_panel(const Linear& l, const std::vector<Block>& blocks, int64_t unit, Repack repack,
                         const float* factors, S* sums) {
  constexpr int64_t per = PER_DWORD<Dot>;
  const int64_t pitch = l.x.pitch, span = l.x.in.span, whole = span ? std::lcm(unit, span) : unit;
  const int64_t chunk = std::max<int64_t>(2048 * per / whole * whole, whole);  // what the second-level cache holds
  uint32_t* packed = scratch<PACKED, uint32_t>(std::min(chunk, pitch) / per * PANEL);
  for (int64_t k = 0; k < pitch; k += chunk) {
    const int64_t columns = std::min(chunk, pitch - k);
    repack(k, columns, packed);
    for (const Block& b : blocks) {
      const uint32_t* x = &l.packed.x[b.at * l.packed.dwords + k / per * b.pitch];
      S* to = sums + (b.from - blocks[0].from) * PANEL;
      if constexpr (std::is_same_v<S, float>)
        if (span) {
          const int64_t first = b.at * l.x.spans() + k / span * b.pitch;
          const Groups groups{factors + k / span * PANEL, &l.packed.factor[first], &l.packed.start[first], span / per};
          with_rows<BLOCK_ROWS_GROUPED>(b.pitch, [&]<int MB>() {
            l.x.span_factor.size()
                ? packed_groups<Dot, MB, true>(packed, x, b.pitch, columns / per, groups, to, k > 0)
                : packed_groups<Dot, MB, false>(packed, x, b.pitch, columns / per, groups, to, k > 0);
          });
          continue;
        }
      const bool add = k > 0 || !std::is_same_v<S, float>;
      with_rows<BLOCK_ROWS>(b.pitch,
                            [&]<int MB>() { packed_block<Dot, MB>(packed, x, b.pitch, columns / per, to, add); });
    }
  }
}

// Values of a row from column k on, by f32: any format, as slow as that is.
template <Element E, Dtype D>
inline void decode_values(const Quantized& w, int64_t matrix, int64_t row, int64_t k, int64_t columns, char* out) {
  const int64_t real = std::clamp<int64_t>(w.columns - k, 0, columns);
  float* values = scratch<WIDE, float>(columns + w.format.group_columns + W);
  if (real) decode_columns<E>(w, matrix, row, k, real, values);
  std::fill(values + real, values + columns, 0.f);
  narrow<D>(values, columns, out);
}

// Factors of the panel's rows for every span, [span][PANEL]; ones where w has none.
inline const float* panel_factors(const Linear& l, const Panel& p, bool of_w) {
  const int64_t spans = l.x.spans(), room = spans + W;
  float* rows = scratch<SPREAD, float>(W * room);
  uint32_t* out = scratch<FACTORS, uint32_t>(std::max<int64_t>(spans, 1) * PANEL);
  const float factor = l.x.in.kind == Arithmetic::IN_I8 ? int8_factor(l.w.format) : 1.f;
  for (int64_t half = 0; half < PANEL; half += W) {
    for (int64_t n = 0; n < W; n++) {
      float* row = rows + n * room;
      if (of_w && half + n < p.rows)
        spread_scales(l.w, p.matrix, p.first + half + n, l.x.in.span, spans, row);
      else
        std::fill(row, row + spans, 1.f);
      if (of_w && factor != 1)
        for (int64_t s = 0; s < spans; s++) row[s] *= factor;
    }
    pack_rows([&](int64_t n) { return (const uint32_t*)(rows + n * room); }, W, spans, out + half, PANEL);
  }
  return (const float*)out;
}

#if TORCHQ_BF16_DOT
template <Element E, Scaling S>
inline void many_in_bf16(const Linear& l, const Panel& p, const std::vector<Block>& blocks, float* sums) {
  const int64_t width = l.w.format.group_columns, count = l.x.pitch / (S == POWERS ? 32 : 16),
                room = count + width / 16 + 64;
  const float* factors = l.x.in.span ? panel_factors(l, p, S == ON_SUMS && width) : nullptr;
  uint32_t* rows = scratch<SPREAD, uint32_t>(W * room);
  uint32_t* scales = scratch<SCALES, uint32_t>(room * PANEL);
  bool normal = true;
  if constexpr (S == POWERS || S == BLOCKS)
    for (int64_t half = 0; half < PANEL; half += W) {
      const int64_t used = std::clamp<int64_t>(p.rows - half, 0, W);
      for (int64_t n = 0; n < used; n++) {
        std::fill_n(rows + n * room, room, 0);
        normal &= scale_vectors<E, S>(l.w, p.matrix, p.first + half + n, rows + n * room);
      }
      pack_rows([&](int64_t n) { return rows + n * room; }, used, count, scales + half, PANEL);
    }
  if (normal) {
    const ToBF16<E, S> convert(scales);
    auto straight = [&](int64_t k, int64_t columns, uint32_t* out) {
      repack(l.w, p.matrix, p.first, p.rows, k, columns, convert, out);
    };
    return packed_panel<DotBF16>(l, blocks, 128, straight, factors, sums);
  }
  const int64_t unit = std::lcm<int64_t>(64, width ? width : 1);
  auto decode = [&](int64_t n, int64_t k, int64_t columns, uint16_t* out) {
    decode_values<E, BF16>(l.w, p.matrix, p.first + n, k, columns, (char*)out);
  };
  auto by_values = [&](int64_t k, int64_t columns, uint32_t* out) {
    repack_values<DotBF16>(p.rows, k, columns, unit, decode, out);
  };
  packed_panel<DotBF16>(l, blocks, unit, by_values, factors, sums);
}
#endif

template <Element E>
inline void many_in_f32(const Linear& l, const Panel& p, const std::vector<Block>& blocks, float* sums) {
  const int64_t width = l.w.format.group_columns, unit = std::lcm<int64_t>(W, width ? width : 1);
  auto decode = [&](int64_t n, int64_t k, int64_t columns, float* out) {
    decode_values<E, F32>(l.w, p.matrix, p.first + n, k, columns, (char*)out);
  };
  auto by_values = [&](int64_t k, int64_t columns, uint32_t* out) {
    repack_values<DotF32>(p.rows, k, columns, unit, decode, out);
  };
  packed_panel<DotF32>(l, blocks, unit, by_values, nullptr, sums);
}

template <Element E, class S>
inline void many_in_i8(const Linear& l, const Panel& p, const std::vector<Block>& blocks, S* sums) {
  const float* factors = l.x.in.span ? panel_factors(l, p, l.w.format.group_columns > 0) : nullptr;
#if defined(__AVX512VNNI__)
  auto straight = [&](int64_t k, int64_t columns, uint32_t* out) {
    repack(l.w, p.matrix, p.first, p.rows, k, columns, ToInt8<E>(), out);
  };
  packed_panel<DotI8>(l, blocks, 128, straight, factors, sums);
#else
  std::vector<int8_t> codes;
  auto decode = [&](int64_t n, int64_t k, int64_t columns, DotI8::Packed* out) {
    codes.resize(columns);
    int8_codes(l.w.format, l.w.row_data(p.matrix * l.w.rows + p.first + n), l.w.row_bytes, k, columns, codes.data());
    std::copy_n(codes.data(), columns, out);
  };
  auto by_values = [&](int64_t k, int64_t columns, uint32_t* out) {
    repack_values<DotI8>(p.rows, k, columns, 64, decode, out);
  };
  packed_panel<DotI8>(l, blocks, 64, by_values, factors, sums);
#endif
}

// ---- a panel for all rows of x that an expert has ----

inline void linear_panel(const Linear& l, const Panel& p, const Share& share) {
  const int64_t rows = share.rows, room = (rows + BLOCK_ROWS + 8) * PANEL;  // blocks may pass the last row
  const bool many = !share.blocks.empty();
  if (l.x.in.kind == Arithmetic::IN_I8 && l.x.in.span == 0) {
    int64_t* sums = scratch<SUMS, int64_t>(room);
    for (int64_t m = 0; m < rows; m++)
      std::fill_n(sums + m * PANEL, PANEL, -int64_t(DotI8::offset) * l.x.row_sum[share.from + m]);
    many ? many_in_i8<INT8>(l, p, share.blocks, sums) : few_in_i8(l, p, share.from, rows, sums);
    return finish(l, p, share.from, rows, sums);
  }
  float* sums = scratch<SUMS, float>(room);
  if (l.x.in.kind == Arithmetic::IN_I8)
    with_element(l.w.format.element, [&]<Element E>() {
      if constexpr (E != E4M3) many_in_i8<E>(l, p, share.blocks, sums);
    });
#if TORCHQ_BF16_DOT
  if (l.x.in.kind == Arithmetic::IN_BF16) {
    with_element(l.w.format.element, [&]<Element E>() {
      if (!many) return few_in_bf16<E>(l, p, share.from, rows, sums);
      const Scaling scaling = scaling_of(l.w.format);
      if constexpr (E == E2M1 || E == E4M3)
        if (scaling == POWERS) return many_in_bf16<E, POWERS>(l, p, share.blocks, sums);
      if constexpr (E == E2M1)
        if (scaling == BLOCKS) return many_in_bf16<E, BLOCKS>(l, p, share.blocks, sums);
      many_in_bf16<E, ON_SUMS>(l, p, share.blocks, sums);
    });
  }
#endif
  if (l.x.in.kind == Arithmetic::IN_F32)
    with_element(l.w.format.element, [&]<Element E>() {
      many ? many_in_f32<E>(l, p, share.blocks, sums) : few_in_f32<E>(l, p, share.from, rows, sums);
    });
  finish(l, p, share.from, rows, sums);
}

}  // namespace torchq
