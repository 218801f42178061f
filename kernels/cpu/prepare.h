// x as the products take it: in rows for a few of them, in packed blocks for many.
#pragma once
#include "quantize.h"
#include "repack.h"

namespace torchq {

// How a pair of formats is multiplied.
struct Arithmetic {
  enum Kind { IN_F32, IN_BF16, IN_I8 } kind;
  int64_t span = 0;  // columns whose sums take factors of w, of x or of both; 0: none do
  int64_t few = 4;   // most rows of x for which repacking the weights does not repay

  int size() const { return kind == IN_F32 ? 4 : kind == IN_BF16 ? 2 : 1; }
  int packed_size() const { return kind == IN_I8 ? sizeof(DotI8::Packed) : size(); }
};

// Integers where both sides have int8 codes; bf16 where values are exact in it and this CPU multiplies them; else f32.
// `many`: rows of x are enough to repack the weights for them.
inline Arithmetic arithmetic_of(const Format& weight, const Format* activation, Dtype dtype, bool many) {
  if (activation && has_int8_codes(weight) && has_int8_codes(*activation)) {
    const int64_t span = std::gcd(weight.group_columns, activation->group_columns);  // gcd(0, n) is n
    if (span == 0) return {Arithmetic::IN_I8};
    if (many && W > 4) return {Arithmetic::IN_I8, span, 0};  // without an instruction for it, f32 is faster
  }
#if TORCHQ_BF16_DOT
  if ((activation || dtype == BF16) && has_bf16_kernel(weight)) {
    const int64_t w = scaling_of(weight) == ON_SUMS ? weight.group_columns : 0;
    const bool factors = activation && activation->group_columns && activation->scale == SCALE_F32;
    if (!factors) return {Arithmetic::IN_BF16, w, scaling_of(weight) == BLOCKS ? 8 : 4};
    const int64_t span = std::gcd(w, activation->group_columns);
    if (span % 32 == 0) return {Arithmetic::IN_BF16, span, 0};
  }
#endif
  return {Arithmetic::IN_F32};
}

struct Prepared {
  Arithmetic in;
  const char* x;
  int64_t rows, pitch;      // elements of a row: zeros after the last column
  Kept<char> own;           // x, where it is not the caller's memory
  Kept<float> row_factor;   // empty: all ones
  Kept<int32_t> row_sum;    // of int8 codes, per row or per span
  Kept<float> span_factor;  // per row and span; empty: all ones

  const char* row(int64_t i) const { return x + i * pitch * in.size(); }
  int64_t spans() const { return in.span ? pitch / in.span : 0; }
};

inline int64_t padded_pitch(int64_t columns, const Arithmetic& in) {
  int64_t unit = in.kind == Arithmetic::IN_F32 ? 32 : 64;
  if (in.span) unit = std::lcm(unit, in.span);
  return (columns + unit - 1) / unit * unit;
}

// Row i of x, not quantized.
inline void prepare_row(const Matrices& x, Prepared& p, int64_t i) {
  char* out = p.own.data() + i * p.pitch * p.in.size();
  if (p.in.kind == Arithmetic::IN_BF16) {
    memcpy(out, x.row(i), x.columns * 2);
    memset(out + x.columns * 2, 0, (p.pitch - x.columns) * 2);
  } else {
    with_dtype(x.dtype, [&]<Dtype D>() { widen<D>(x.row(i), x.columns, (float*)out, p.pitch); });
  }
}

// Row i of the quantized x, without what row_factor and span_factor take.
inline void prepare_row(const Quantized& q, Prepared& p, int64_t i) {
  const Arithmetic& in = p.in;
  char* out = p.own.data() + i * p.pitch * in.size();
  const int64_t spans = p.spans();
  const bool factors = p.span_factor.size() > 0;
  if (in.kind != Arithmetic::IN_F32) p.row_factor[i] = factors ? 1.f : q.outer(0, i);
  if (factors) {
    float* factor = &p.span_factor[i * spans];
    spread_scales(q, 0, i, in.span, spans, factor);
    if (in.kind == Arithmetic::IN_I8)
      for (int64_t s = 0; s < spans; s++) factor[s] *= int8_factor(q.format);
  }
  if (in.kind == Arithmetic::IN_I8) {
    int8_codes(q.format, q.row_data(i), q.row_bytes, 0, p.pitch, (int8_t*)out);
    const int64_t sums = spans ? spans : 1, width = p.pitch / sums;
    for (int64_t s = 0; s < sums; s++) {
      int32_t sum = 0;
      for (int64_t k = s * width; k < (s + 1) * width; k++) sum += int8_t(out[k]);
      p.row_sum[i * sums + s] = sum;
    }
    return;
  }
  Kept<float> values(q.format.padded(q.columns) + q.format.group_columns + W);
  with_element(q.format.element, [&]<Element E>() { decode_columns<E>(q, 0, i, 0, q.columns, values.data()); });
  if (in.kind == Arithmetic::IN_F32)
    memcpy(out, values.data(), q.columns * 4);
  else
    narrow<BF16>(values.data(), q.columns, out);
  memset(out + q.columns * in.size(), 0, (p.pitch - q.columns) * in.size());
}

// Rows of x packed side by side, an even number of them; `at`: where they are in the packed memory, in rows.
struct Block {
  int64_t from, rows, pitch, at;
};

// `rows` rows from `from` on in as few blocks as there must be, of about the same size.
inline void add_blocks(int64_t from, int64_t rows, const Arithmetic& in, std::vector<Block>& blocks) {
  const int64_t most = (in.span ? BLOCK_ROWS_GROUPED : BLOCK_ROWS) / 2, pairs = (rows + 1) / 2;
  const int64_t count = (pairs + most - 1) / most;
  for (int64_t i = 0; i < count; i++) {
    const int64_t first = i * pairs / count * 2, last = (i + 1) * pairs / count * 2;
    const int64_t at = blocks.empty() ? 0 : blocks.back().at + blocks.back().pitch;
    blocks.push_back({from + first, std::min(last, rows) - first, last - first, at});
  }
}

struct PackedRows {
  int64_t dwords;      // of a row
  Kept<uint32_t> few;  // rows of few_pitch dwords, their pairs of bf16 shuffled and zeros after them
  int64_t few_pitch;
  Kept<uint32_t> x;     // [block][dword][pitch]
  Kept<float> factor;   // [block][span][pitch]
  Kept<int32_t> start;  // what integer sums of a span start from
};

template <class Dot>
inline void pack_block(const Prepared& p, const Block& b, PackedRows& out) {
  using Packed = typename Dot::Packed;
  const int64_t spans = p.spans();
  Kept<Packed> wide;
  if constexpr (std::is_same_v<Dot, DotI8> && sizeof(Packed) > 1) {
    wide = Kept<Packed>(b.rows * p.pitch);
    std::copy_n((const int8_t*)p.row(b.from), b.rows * p.pitch, wide.data());
  }
  const char* x = wide.size() ? (const char*)wide.data() : p.row(b.from);
  pack_rows([&](int64_t n) { return (const uint32_t*)x + n * out.dwords; }, b.rows, out.dwords,
            &out.x[b.at * out.dwords], b.pitch);
  for (int64_t s = 0; s < spans; s++)
    for (int64_t m = 0; m < b.pitch; m++) {
      const int64_t to = b.at * spans + s * b.pitch + m, row = b.from + m;
      const bool real = m < b.rows;
      out.factor[to] = real && p.span_factor.size() ? p.span_factor[row * spans + s] : 0.f;
      if (out.start.size()) out.start[to] = real ? -DotI8::offset * p.row_sum[row * spans + s] : 0;
    }
}

}  // namespace torchq
