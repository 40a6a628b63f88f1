// Vectors of one instruction set, and the storage types that they are loaded from and stored to.
//
// Every translation unit that includes this is compiled for one instruction set and one storage type. All of it has
// internal linkage: the linker must never hand code for one instruction set to another. For the same reason nothing
// here, or above it, may use the standard library's templates.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
// What runs once per block of edges or less often: GCC would compile a copy for each caller.
#define NOINLINE __attribute__((noinline))

#ifndef GATTN_TYPE
#define GATTN_TYPE float
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// What a storage type is computed in.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

template <class A>
struct Simd {
  static constexpr int W = kVectorBytes / int(sizeof(A));
  typedef A V __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using Vec = typename Simd<A>::V;
template <class A>
constexpr int kLanes = Simd<A>::W;

typedef int32_t VecInt __attribute__((vector_size(kVectorBytes)));
typedef uint32_t VecUInt __attribute__((vector_size(kVectorBytes)));

template <class V, class A>
INLINE V splat(A x) {
  return x - V{};  // which is x, where V{} + x would not be for -0: it costs no addition
}

// Scalar conversions.

INLINE float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

INLINE float to_compute(float x) { return x; }
INLINE double to_compute(double x) { return x; }
INLINE float to_compute(BFloat16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
INLINE float to_compute(Float16 x) {
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // 2^112 rebiases the exponent, of subnormal numbers too.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * bits_to_float(0x77800000)));
}

INLINE void from_compute(float x, float* p) { *p = x; }
INLINE void from_compute(double x, double* p) { *p = x; }
INLINE void from_compute(float x, BFloat16* p) {
  uint32_t bits = float_to_bits(x);
  p->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
INLINE void from_compute(float x, Float16* p) {
  uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    p->bits = uint16_t(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000) {  // rounds to infinity
    p->bits = uint16_t(sign | 0x7c00);
  } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 lets the hardware round at the right bit
    uint32_t rounded = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000;
    p->bits = uint16_t(sign | rounded);
  } else {
    p->bits = uint16_t(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13));
  }
}

// Whole vectors.

INLINE Vec<float> load(const float* p) {
  Vec<float> v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE Vec<double> load(const double* p) {
  Vec<double> v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float* p, Vec<float> v) { memcpy(p, &v, sizeof v); }
INLINE void store(double* p, Vec<double> v) { memcpy(p, &v, sizeof v); }

#if defined(__AVX2__)
#if defined(__AVX512F__)
INLINE Vec<float> widen(BFloat16, __m256i x) { return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
INLINE Vec<float> widen(Float16, __m256i x) { return (Vec<float>)_mm512_cvtph_ps(x); }
INLINE __m256i narrow(BFloat16, Vec<float> v) {
  VecUInt bits = (VecUInt)v;
  VecUInt rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  rounded = v != v ? splat<VecUInt>(0x7fc0u) : rounded;
  return _mm512_cvtepi32_epi16((__m512i)rounded);
}
INLINE __m256i narrow(Float16, Vec<float> v) { return _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
typedef __m256i Packed;
#else
INLINE Vec<float> widen(BFloat16, __m128i x) { return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16); }
INLINE Vec<float> widen(Float16, __m128i x) { return (Vec<float>)_mm256_cvtph_ps(x); }
INLINE __m128i narrow(BFloat16, Vec<float> v) {
  VecUInt bits = (VecUInt)v;
  VecUInt rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  rounded = v != v ? splat<VecUInt>(0x7fc0u) : rounded;
  __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)rounded, (__m256i)rounded), 0x08);
  return _mm256_castsi256_si128(words);
}
INLINE __m128i narrow(Float16, Vec<float> v) { return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
typedef __m128i Packed;
#endif
template <class T>
INLINE Vec<float> load(const T* p) {
  Packed x;
  memcpy(&x, p, sizeof x);
  return widen(T{}, x);
}
template <class T>
INLINE void store(T* p, Vec<float> v) {
  Packed x = narrow(T{}, v);
  memcpy(p, &x, sizeof x);
}
#else
INLINE Vec<float> load(const BFloat16* p) {
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = to_compute(p[i]);
  return v;
}
INLINE void store(BFloat16* p, Vec<float> v) {
  for (int i = 0; i < kLanes<float>; ++i) from_compute(v[i], p + i);
}
// Without instructions for it, a conversion is long: in line, it takes most of the time of the compiler.
[[maybe_unused]] NOINLINE Vec<float> load(const Float16* p) {
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = to_compute(p[i]);
  return v;
}
[[maybe_unused]] NOINLINE void store(Float16* p, Vec<float> v) {
  for (int i = 0; i < kLanes<float>; ++i) from_compute(v[i], p + i);
}
#endif

// The first n lanes; the others are zero, and never touch memory.

template <class T>
INLINE Vec<Compute<T>> load_part(const T* p, int n) {
  T lanes[kLanes<Compute<T>>] = {};
  memcpy(lanes, p, size_t(n) * sizeof(T));
  return load(lanes);
}
template <class T>
INLINE void store_part(T* p, Vec<Compute<T>> v, int n) {
  T lanes[kLanes<Compute<T>>];
  store(lanes, v);
  memcpy(p, lanes, size_t(n) * sizeof(T));
}
#if defined(__AVX512F__)
INLINE Vec<float> load_part(const float* p, int n) {
  return (Vec<float>)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
}
INLINE void store_part(float* p, Vec<float> v, int n) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)v);
}
INLINE Vec<float> load_part(const BFloat16* p, int n) {
  return widen(BFloat16{}, _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p));
}
INLINE Vec<float> load_part(const Float16* p, int n) {
  return widen(Float16{}, _mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p));
}
#elif defined(__AVX2__)
INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE Vec<float> load_part(const float* p, int n) { return (Vec<float>)_mm256_maskload_ps(p, first_lanes(n)); }
INLINE void store_part(float* p, Vec<float> v, int n) { _mm256_maskstore_ps(p, first_lanes(n), (__m256)v); }
#endif

template <class V>
INLINE auto sum_lanes(V v) {
  auto total = v[0];
  constexpr int n = int(sizeof(V) / sizeof(v[0]));
  if constexpr (n == 2) {
    return total + v[1];
  } else {
    typedef decltype(total) Half __attribute__((vector_size(sizeof(V) / 2)));
    Half low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, (const char*)&v + sizeof low, sizeof high);
    return sum_lanes(low + high);
  }
}
#if defined(__AVX512F__)
INLINE float sum_lanes(Vec<float> v) { return _mm512_reduce_add_ps((__m512)v); }
#endif

// Numbers of lanes, to shuffle by.
template <class A>
using LaneVec = decltype(Vec<A>{} > Vec<A>{});
template <class A>
struct LaneIntOf {
  using type = int32_t;
};
template <>
struct LaneIntOf<double> {
  using type = int64_t;
};
template <class A>
using LaneInt = typename LaneIntOf<A>::type;

template <class A>
INLINE LaneVec<A> lane_numbers() {
  LaneVec<A> lane;
  for (int i = 0; i < kLanes<A>; ++i) lane[i] = i;
  return lane;
}

template <class V, class Lanes>
INLINE V shuffle(V v, Lanes lanes) {
#if defined(__clang__)
  V result;
  for (int i = 0; i < int(sizeof(V) / sizeof(v[0])); ++i) result[i] = v[lanes[i]];
  return result;
#else
  return __builtin_shuffle(v, lanes);
#endif
}

// The sums of each `width` lanes of n vectors: that of the w-th of vector i is in lane w * width + i. It takes a few
// instructions per vector, where sum_lanes() takes some for each halving.
template <int n, class A>
INLINE Vec<A> sum_each(Vec<A>* v, int width = kLanes<A>) {
  const LaneVec<A> lane = lane_numbers<A>();
  int distance = 1;
#pragma GCC unroll 4
  for (int left = n / 2; left > 0; left /= 2, distance *= 2) {
    const LaneVec<A> odd = (lane & LaneInt<A>(distance)) != 0;
#pragma GCC unroll 8
    for (int i = 0; i < left; ++i) {
      const Vec<A> first = v[2 * i], second = v[2 * i + 1];
      v[i] = (odd ? second : first) + shuffle(odd ? first : second, lane ^ LaneInt<A>(distance));
    }
  }
#pragma GCC unroll 4
  for (int d = n; d < kLanes<A>; d *= 2)
    if (d < width) v[0] += shuffle(v[0], lane ^ LaneInt<A>(d));
  return v[0];
}

// Lane i gets lane i + shift, around the end.
template <class A, class V>
INLINE V rotate_lanes(V v, int shift) {
  return shuffle(v, (lane_numbers<A>() + LaneInt<A>(shift)) & (kLanes<A> - 1));
}

// The first n lanes of one vector, the others of another.
template <class A>
INLINE Vec<A> first_lanes_of(Vec<A> v, Vec<A> other, int n) {
  return lane_numbers<A>() < LaneInt<A>(n) ? v : other;
}

// Whether any lane of a comparison is true.
template <class M>
INLINE bool any_lane(M mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  return sum_lanes(mask) != 0;
#endif
}

// The bits of a comparison, one per lane, and back: only where a vector fills whole bytes.

template <class A>
constexpr bool kHasBits = sizeof(A) == 4 && kVectorBytes >= 32;

#if defined(__AVX512F__)
typedef uint16_t LaneBits;
INLINE LaneBits positive_bits(Vec<float> v) {
  return _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_GT_OQ);
}
INLINE Vec<float> select_bits(LaneBits bits, Vec<float> yes, Vec<float> no) {
  return (Vec<float>)_mm512_mask_blend_ps(bits, (__m512)no, (__m512)yes);
}
#elif defined(__AVX2__)
typedef uint8_t LaneBits;
INLINE LaneBits positive_bits(Vec<float> v) {
  return uint8_t(_mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_setzero_ps(), _CMP_GT_OQ)));
}
INLINE Vec<float> select_bits(LaneBits bits, Vec<float> yes, Vec<float> no) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i is_set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), lane), lane);
  return (Vec<float>)_mm256_blendv_ps((__m256)no, (__m256)yes, _mm256_castsi256_ps(is_set));
}
#else
typedef uint8_t LaneBits;
#endif
// Without kHasBits they are compiled, but never called.
template <class V>
INLINE LaneBits positive_bits(V) {
  return 0;
}
template <class V>
INLINE V select_bits(LaneBits, V, V no) {
  return no;
}

// Functions. NaN stays NaN.

INLINE Vec<float> vector_exp(Vec<float> x) {
  // exp(x) = 2^n exp(r), |r| <= ln(2) / 2, with the polynomial and the split of ln(2) of the Cephes library (S. Moshier).
  const Vec<float> lowest = splat<Vec<float>>(-87.33654f), highest = splat<Vec<float>>(88.72283f);
  Vec<float> bounded = x < lowest ? lowest : x;
  bounded = bounded > highest ? highest : bounded;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  Vec<float> shifted = bounded * 1.44269504f + shift;
  Vec<float> n = shifted - shift;
  Vec<float> r = bounded - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec<float> y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  // Two factors, because 2^128 is no float.
  VecInt whole = (VecInt)shifted - (VecInt)splat<Vec<float>>(shift);
  VecInt half = whole >> 1;
  y = y * (Vec<float>)((half + 127) << 23) * (Vec<float>)((whole - half + 127) << 23);
  y = x < lowest ? Vec<float>{} : y;
  return x > highest ? splat<Vec<float>>(INFINITY) : y;
}
INLINE Vec<double> vector_exp(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = exp(x[i]);
  return x;
}

// NaN stays.
INLINE Vec<float> bounded(Vec<float> x, Vec<float> lowest, Vec<float> highest) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_min_ps((__m512)highest, _mm512_max_ps((__m512)lowest, (__m512)x));
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_min_ps((__m256)highest, _mm256_max_ps((__m256)lowest, (__m256)x));
#else
  x = x < lowest ? lowest : x;
  return x > highest ? highest : x;
#endif
}

// exp(x) is power (1 + rest), for x bounded by 87.
struct ExpParts {
  Vec<float> power, rest;
};
INLINE ExpParts exp_parts(Vec<float> x) {
  x = bounded(x, splat<Vec<float>>(-87.0f), splat<Vec<float>>(87.0f));
  // 2^n exp(r), as in vector_exp; adding the shift puts n + 127 into the low bits. The polynomial is a minimax fit of
  // (exp(r) - 1) / r to a relative 1.1e-8.
  const float shift = 12582912.0f + 127.0f;
  const Vec<float> shifted = x * 1.44269504f + shift, n = shifted - shift;
  Vec<float> r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec<float> y = r * 1.3888872555e-03f + 8.3691400427e-03f;
  y = y * r + 4.1667138092e-02f;
  y = y * r + 1.6666505578e-01f;
  y = y * r + 4.9999998114e-01f;
  y = (y * r + 1.0000000107e+00f) * r;
  return {(Vec<float>)((VecInt)shifted << 23), y};
}
INLINE Vec<float> bounded_exp(Vec<float> x) {
  const ExpParts y = exp_parts(x);
  return y.power * y.rest + y.power;
}
INLINE Vec<double> bounded_exp(Vec<double> x) { return vector_exp(x); }
// exp(x), which is 0 below -87 and stays what it is above 87.
INLINE Vec<float> quick_exp(Vec<float> x) { return x < -87.0f ? Vec<float>{} : bounded_exp(x); }
INLINE Vec<double> quick_exp(Vec<double> x) { return vector_exp(x); }
// exp(x) - 1, without a loss of digits near zero.
INLINE Vec<float> vector_exp_minus_one(Vec<float> x) {
  const ExpParts y = exp_parts(x);
  return y.power * y.rest + (y.power - 1.0f);
}
INLINE Vec<double> vector_exp_minus_one(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = expm1(x[i]);
  return x;
}

INLINE Vec<float> vector_tanh(Vec<float> x) {
  // x P(x^2) / Q(x^2), with a minimax fit to a relative 2e-8 up to where tanh(x) rounds to 1.
  x = bounded(x, splat<Vec<float>>(-9.02f), splat<Vec<float>>(9.02f));
  const Vec<float> t = x * x;
  Vec<float> p = t * 1.331908385e-8f + 2.058349175e-5f, q = t * 7.762024864e-7f + 3.283093969e-4f;
  p = p * t + 3.494035300e-3f, q = q * t + 2.587107618e-2f;
  p = p * t + 1.337971863e-1f, q = q * t + 4.671303388e-1f;
  p = p * t + 9.999999791e-1f, q = q * t + 1.0f;
  return bounded(x * p / q, splat<Vec<float>>(-1.0f), splat<Vec<float>>(1.0f));
}
INLINE Vec<double> vector_tanh(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = tanh(x[i]);
  return x;
}

template <class V>
INLINE V vector_sqrt(V x) {
  for (int i = 0; i < int(sizeof(V) / sizeof(x[0])); ++i) x[i] = sqrt(x[i]);
  return x;
}

// The standard normal distribution function, from erfc(|x| / sqrt(2)) / 2 on the side where that is small; `density` is
// exp(-x^2 / 2).
INLINE Vec<float> vector_normal(Vec<float> x, Vec<float> density) {
  // With t = 1 / (1 + z / 2), erfc(z) exp(z^2) / t is a polynomial of 2t - 1, a Chebyshev fit to a relative 2e-7.
  const Vec<float> z = (x < 0.0f ? -x : x) * 0.707106781f, t = 1.0f / (1.0f + 0.5f * z), s = 2.0f * t - 1.0f;
  Vec<float> y = s * 4.21611972e-05f - 3.66018769e-05f;
  y = y * s - 2.99382712e-04f;
  y = y * s + 4.30670488e-04f;
  y = y * s + 1.52915716e-03f;
  y = y * s - 3.24345192e-03f;
  y = y * s - 1.07516262e-02f;
  y = y * s + 1.82216694e-02f;
  y = y * s + 1.39735734e-01f;
  y = y * s + 3.43580319e-01f;
  y = y * s + 5.10791357e-01f;
  const Vec<float> tail = 0.5f * t * y * density;
  return x > 0.0f ? 1.0f - tail : tail;
}
INLINE Vec<double> vector_normal(Vec<double> x, Vec<double>) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = 0.5 * erfc(-0.70710678118654752 * x[i]);
  return x;
}

template <class A>
INLINE A exp_of(A x) {
  return vector_exp(splat<Vec<A>>(x))[0];
}

// What this translation unit is compiled for: the type of stored rows, the type that is computed in, and its lanes.
using T = GATTN_TYPE;
using A = Compute<T>;
constexpr int W = kLanes<A>;

}  // namespace
