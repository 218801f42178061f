// Products of many rows: weights and x are repacked so that lanes run along the rows of weights, and a dword of x (1
// f32, 2 bf16 or 4 int8 along K) meets 2 W rows of weights at once. No sum is ever taken across lanes.
#pragma once
#include <numeric>
#include <utility>

#include "dot.h"

namespace torchq {

constexpr int64_t PANEL = 2 * W;  // rows of weights

// Most rows of x in a block: as many sums as the registers hold, half as many where the sums of groups come on top.
constexpr int BLOCK_ROWS = W == 16 ? 12 : W == 8 ? 6 : 4, BLOCK_ROWS_GROUPED = W == 16 ? 6 : 2;

template <class Dot>
constexpr int64_t PER_DWORD = 4 / sizeof(typename Dot::Packed);

// ---- repacking ----

template <int S, int... J>
inline void exchange(vi& a, vi& b, std::integer_sequence<int, J...>) {
  vi low = __builtin_shufflevector(a, b, (J & S ? W + J - S : J)...);
  b = __builtin_shufflevector(a, b, (J & S ? W + J : J + S)...);
  a = low;
}

template <int S = W / 2>
inline void transpose(vi (&rows)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++)
    if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, W>());
  if constexpr (S > 1) transpose<S / 2>(rows);
}

// out[i * pitch + n] = dword i of row n, for `n_rows` rows (W at most); zeros for the rest of `pitch` or of W.
template <class Row>
inline void pack_rows(Row row, int64_t n_rows, int64_t dwords, uint32_t* out, int64_t pitch) {
  const int64_t used = std::min<int64_t>(pitch, W);
  int64_t i = 0;
  for (; i + W <= dwords; i += W) {
    vi tile[W];
#pragma GCC unroll 16
    for (int n = 0; n < W; n++) tile[n] = n < n_rows ? load<vi>(row(n) + i) : vi{};
    transpose(tile);
    if (used == W || i + 2 * W <= dwords) {  // what is too much is written over by what follows
#pragma GCC unroll 16
      for (int j = 0; j < W; j++) store(out + (i + j) * pitch, tile[j]);
    } else {
      for (int j = 0; j < W; j++) memcpy(out + (i + j) * pitch, &tile[j], used * 4);
    }
  }
  for (; i < dwords; i++)
    for (int64_t n = 0; n < used; n++) out[i * pitch + n] = n < n_rows ? row(n)[i] : 0;
}

// ---- kernels: rows of `pitch` dwords of packed x, MB of them used; products go or are added to sums[m][PANEL] ----

// sums[m] += the products of PANEL rows of weights and row m of x over `dwords`; w and x move on.
template <class Dot, int MB>
[[gnu::always_inline]] inline void multiply(const uint32_t*& w, const uint32_t*& x, int64_t pitch, int64_t dwords,
                                            typename Dot::Sum (&sums)[MB][2]) {
  for (int64_t i = 0; i < dwords; i++, x += pitch, w += PANEL) {
    const auto w0 = load<typename Dot::V>(w), w1 = load<typename Dot::V>(w + W);
#pragma GCC unroll 16
    for (int m = 0; m < MB; m++) {
      const auto v = Dot::broadcast(x[m]);
      sums[m][0] = Dot::add(sums[m][0], w0, v);
      sums[m][1] = Dot::add(sums[m][1], w1, v);
    }
  }
}

template <class Dot, int MB, class S>
[[gnu::noinline]] void packed_block(const uint32_t* w, const uint32_t* x, int64_t pitch, int64_t dwords, S* sums,
                                    bool add) {
  typename Dot::Sum acc[MB][2] = {};
  multiply<Dot, MB>(w, x, pitch, dwords, acc);
#pragma GCC unroll 16
  for (int m = 0; m < MB; m++)
    for (int v = 0; v < 2; v++) {
      S* to = sums + m * PANEL + v * W;
      if constexpr (std::is_same_v<typename Dot::Sum, vf>)
        store(to, add ? load<vf>(to) + acc[m][v] : acc[m][v]);
      else
        for (int n = 0; n < W; n++) to[n] = (add ? to[n] : 0) + acc[m][v][n];
    }
}

// What the groups of a row's columns share: factors of w [groups][PANEL] and, where OF_X, of x [groups][pitch], and
// what integer sums of a group start from.
struct Groups {
  const float *w, *x;
  const int32_t* start;
  int64_t dwords;  // in a group
};

template <class Dot, int MB, bool OF_X>
[[gnu::noinline]] void packed_groups(const uint32_t* w, const uint32_t* x, int64_t pitch, int64_t dwords, Groups g,
                                     float* sums, bool add) {
  using Sum = typename Dot::Sum;
  vf acc[MB][2];
  for (int m = 0; m < MB; m++)
    for (int v = 0; v < 2; v++) acc[m][v] = add ? load<vf>(sums + m * PANEL + v * W) : vf{};
  for (; dwords > 0; dwords -= g.dwords, g.w += PANEL, g.x += pitch, g.start += pitch) {
    Sum part[MB][2];
#pragma GCC unroll 8
    for (int m = 0; m < MB; m++) {
      if constexpr (std::is_same_v<Sum, vi>)
        part[m][0] = part[m][1] = splat(g.start[m]);
      else
        part[m][0] = part[m][1] = Sum{};
    }
    multiply<Dot, MB>(w, x, pitch, g.dwords, part);
    const vf factor[2] = {load<vf>(g.w), load<vf>(g.w + W)};
#pragma GCC unroll 8
    for (int m = 0; m < MB; m++)
      for (int v = 0; v < 2; v++) {
        vf sum;
        if constexpr (std::is_same_v<Sum, vi>)
          sum = __builtin_convertvector(part[m][v], vf);
        else
          sum = part[m][v];
        acc[m][v] = fma(OF_X ? sum * g.x[m] : sum, factor[v], acc[m][v]);
      }
  }
  for (int m = 0; m < MB; m++)
    for (int v = 0; v < 2; v++) store(sums + m * PANEL + v * W, acc[m][v]);
}

// Calls f with an even number of rows, at most MOST, as a compile-time constant.
template <int MOST, class F>
inline void with_rows(int64_t rows, F f) {
  if constexpr (MOST > 2)
    if (rows < MOST) return with_rows<MOST - 2>(rows, f);
  f.template operator()<MOST>();
}

}  // namespace torchq
