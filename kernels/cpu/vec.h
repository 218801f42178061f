// Vectors of W floats or 32-bit ints on the compiler's vector extension: one source for AVX-512, AVX2 and every other
// CPU (W = 4: SSE2, NEON or plain scalar code). Intrinsics appear only where the extension has no word for an
// instruction.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace torchq {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint64_t vq __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vsb __attribute__((vector_size(W)));
typedef uint8_t vb_half __attribute__((vector_size(W / 2)));

// Uninitialized memory on a cache line's start: a vector that crosses two lines takes two loads.
template <class T>
class Aligned {
 public:
  explicit Aligned(int64_t n = 0)
      : data_(n ? (T*)std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64) : nullptr), size_(n) {
    if (n && !data_) throw std::bad_alloc();
  }
  Aligned(Aligned&& other) : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}
  Aligned& operator=(Aligned&& other) {
    data_ = std::move(other.data_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }
  T* data() const { return data_.get(); }
  int64_t size() const { return size_; }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data_;
  int64_t size_;
};

// The same for the length of a call: what a thread's calls let go of is kept for its next ones, up to 6 pieces of 16
// MB, so that the system need not clear new pages every time.
template <class T>
class Kept {
 public:
  explicit Kept(int64_t n = 0) : size_(n) {
    if (!n) return;
    const int64_t bytes = n * sizeof(T);
    for (auto& piece : pool())
      if (piece.size() >= bytes && piece.size() < 8 * bytes + 4096) {
        memory_ = std::move(piece);
        std::swap(piece, pool().back());
        pool().pop_back();
        return;
      }
    memory_ = Aligned<char>(bytes);
  }
  Kept(Kept&&) = default;
  Kept& operator=(Kept&& other) {
    std::swap(memory_, other.memory_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Kept() {
    if (memory_.size() && memory_.size() <= 16 << 20 && pool().size() < 6) pool().push_back(std::move(memory_));
  }
  T* data() const { return (T*)memory_.data(); }
  int64_t size() const { return size_; }
  T& operator[](int64_t i) const { return data()[i]; }

 private:
  static std::vector<Aligned<char>>& pool() {
    thread_local std::vector<Aligned<char>> pieces;
    return pieces;
  }
  Aligned<char> memory_;
  int64_t size_;
};

template <class V>
inline V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
inline void store(void* p, V v) {
  memcpy(p, &v, sizeof(V));
}

inline vf splat(float a) { return a - vf{}; }
inline vi splat(int32_t a) { return a - vi{}; }

template <class To, class From>
constexpr To bit_cast(From a) {
  return __builtin_bit_cast(To, a);
}

// Unsigned lanes to a width of lane, cut or filled with zeros: __builtin_convertvector, which compilers spell out lane
// by lane where one instruction or two would do.
template <class To, class From>
inline To convert(From v) {
#if defined(__AVX2__)
  constexpr int from = sizeof(v[0]), to = sizeof(To{}[0]);
  auto bits = [](auto r) {
    To t;
    memcpy(&t, &r, sizeof(t));
    return t;
  };
  __m128i small{};
  if constexpr (from < to) memcpy(&small, &v, sizeof(v) < 16 ? sizeof(v) : 16);
#if defined(__AVX512F__)
  if constexpr (from == 1 && to == 2) return bits(_mm256_cvtepu8_epi16(small));
  if constexpr (from == 1 && to == 4) return bits(_mm512_cvtepu8_epi32(small));
  if constexpr (from == 1 && to == 8) return bits(_mm512_cvtepu8_epi64(small));
  if constexpr (from == 2 && to == 4) return bits(_mm512_cvtepu16_epi32((__m256i)v));
  if constexpr (from == 4 && to == 1) return bits(_mm512_cvtepi32_epi8((__m512i)v));
  if constexpr (from == 4 && to == 2) return bits(_mm512_cvtepi32_epi16((__m512i)v));
  if constexpr (from == 8 && to == 1) return bits(_mm512_cvtepi64_epi8((__m512i)v));
#else
  if constexpr (from == 1 && to == 2) return bits(_mm_cvtepu8_epi16(small));
  if constexpr (from == 1 && to == 4) return bits(_mm256_cvtepu8_epi32(small));
  if constexpr (from == 1 && to == 8) return bits(_mm256_cvtepu8_epi64(small));
  if constexpr (from == 2 && to == 4) return bits(_mm256_cvtepu16_epi32(small));
  if constexpr (from > to) {
    auto gathered = [&](auto... byte) {  // the bytes of each half that stay, then both halves side by side
      __m256i r = _mm256_shuffle_epi8((__m256i)v, _mm256_setr_epi8(byte..., byte...));
      constexpr int width = 16 / from * to;
      __m128i low = _mm256_castsi256_si128(r), high = _mm256_extracti128_si256(r, 1);
      return bits(width == 8   ? _mm_unpacklo_epi64(low, high)
                  : width == 4 ? _mm_unpacklo_epi32(low, high)
                               : _mm_unpacklo_epi16(low, high));
    };
    if constexpr (to == 2) return gathered(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    if constexpr (from == 4) return gathered(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    return gathered(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  }
#endif
#else
  return __builtin_convertvector(v, To);
#endif
}

inline int32_t max_lane(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t m = v[0];
  for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

inline uint16_t max_lane(vh v) {
#if defined(__AVX512F__)
  __m128i m = _mm_max_epu16(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
#elif defined(__AVX2__)
  __m128i m = (__m128i)v;
#endif
#if defined(__AVX2__)
  return ~_mm_extract_epi16(_mm_minpos_epu16(~m), 0);  // the least of 8, and there is no instruction for the most
#else
  uint16_t m = v[0];
  for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// Whether every lane of a comparison is true.
inline bool all(vi mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) == 0xffff;
#else
  int32_t least = -1;
  for (int i = 0; i < W; i++) least &= mask[i];
  return least;
#endif
}

inline float sum_lanes(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float s = 0;
  for (int i = 0; i < W; i++) s += v[i];
  return s;
#endif
}

inline int32_t sum_lanes(vi v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t s = 0;
  for (int i = 0; i < W; i++) s += v[i];
  return s;
#endif
}

// a * b + c, rounded once where EXACT_FMA; the compiler may not contract on its own (quantization must round twice
// where the twin does).
#if defined(__AVX2__)
constexpr bool EXACT_FMA = true;
#else
constexpr bool EXACT_FMA = false;
#endif

inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// ---- dtypes of values: f32, bf16, f16 ----

enum Dtype : int64_t { F32 = 0, BF16 = 1, F16 = 2 };

inline int size_of(Dtype d) { return d == F32 ? 4 : 2; }

inline vf from_bf16(vh h) { return (vf)(convert<vu>(h) << 16); }

inline vf from_f16(vh h) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  return _mm256_cvtph_ps((__m128i)h);
#else
  // Shift the fields into place, then rebias by a multiplication, which also normalizes subnormals.
  vu u = convert<vu>(h);
  vf scaled = (vf)((u & 0x7fff) << 13) * 0x1p112f;
  vu bits = (vu)scaled | ((u & 0x7c00) == 0x7c00 ? (vu)splat(0x7f800000) : vu{});
  return (vf)(bits | (u & 0x8000) << 16);
#endif
}

inline float f16_to_float(uint16_t h) {
  float magnitude = bit_cast<float>(uint32_t(h & 0x7fff) << 13) * 0x1p112f;
  uint32_t bits = bit_cast<uint32_t>(magnitude) | ((h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u);
  return bit_cast<float>(bits | uint32_t(h & 0x8000) << 16);
}

inline vh to_bf16(vf v) {
  vu u = (vu)v;
  vu r = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return convert<vh>(v == v ? r : (vu)splat(0x7fc0));
}

inline uint16_t to_f16(float value) {
  // Round to nearest even by adding a magic number whose last bit is the result's, as torch's portable code does.
  uint32_t w = bit_cast<uint32_t>(value), sign = w >> 16 & 0x8000, twice = w + w;
  float base = __builtin_fabsf(value) * 0x1p112f * 0x1p-110f;
  uint32_t bias = twice & 0xff000000u;
  bias = bias < 0x71000000u ? 0x71000000u : bias;
  uint32_t bits = bit_cast<uint32_t>(bit_cast<float>((bias >> 1) + 0x07800000u) + base);
  uint32_t magnitude = (bits >> 13 & 0x7c00) + (bits & 0x0fff);
  return sign | (twice > 0xff000000u ? 0x7e00 : magnitude);
}

inline vh to_f16(vf v) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vh)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vh h;
  for (int i = 0; i < W; i++) h[i] = to_f16(v[i]);
  return h;
#endif
}

template <Dtype D>
inline vf load_as(const char* p) {
  if constexpr (D == F32) return load<vf>(p);
  if constexpr (D == BF16) return from_bf16(load<vh>(p));
  if constexpr (D == F16) return from_f16(load<vh>(p));
}

template <Dtype D>
inline void store_as(char* p, vf v) {
  if constexpr (D == F32) store(p, v);
  if constexpr (D == BF16) store(p, to_bf16(v));
  if constexpr (D == F16) store(p, to_f16(v));
}

// Calls f with the dtype as a compile-time constant.
template <class F>
inline auto with_dtype(Dtype d, F f) {
  if (d == BF16) return f.template operator()<BF16>();
  if (d == F16) return f.template operator()<F16>();
  return f.template operator()<F32>();
}

// n values to f32, then zeros up to `padded` (a multiple of W).
template <Dtype D>
inline void widen(const char* x, int64_t n, float* out, int64_t padded) {
  constexpr int size = D == F32 ? 4 : 2;
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load_as<D>(x + i * size));
  if (i < n) {
    char tail[W * size] = {};
    memcpy(tail, x + i * size, (n - i) * size);
    store(out + i, load_as<D>(tail));
    i += W;
  }
  for (; i < padded; i += W) store(out + i, vf{});
}

// n f32 values (readable up to a multiple of W) rounded once to the dtype.
template <Dtype D>
inline void narrow(const float* x, int64_t n, char* out) {
  constexpr int size = D == F32 ? 4 : 2;
  int64_t i = 0;
  for (; i + W <= n; i += W) store_as<D>(out + i * size, load<vf>(x + i));
  if (i < n) {
    char tail[W * size];
    store_as<D>(tail, load<vf>(x + i));
    memcpy(out + i * size, tail, (n - i) * size);
  }
}

}  // namespace torchq
