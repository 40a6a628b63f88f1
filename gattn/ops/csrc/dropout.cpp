// Dropout of any tensor's elements, by the generator that attention weights are dropped by.

#include "dropout.h"

#include "arguments.h"
#include "simd.h"

#ifndef GATTN_ISA
#define GATTN_ISA baseline
#endif
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace {

constexpr int64_t kChunk = 1 << 14;

template <class T>
void drop(const void* from, void* to, int64_t size, int64_t seed, uint32_t threshold, double scale, int64_t threads) {
  using A = Compute<T>;
  const T* x = static_cast<const T*>(from);
  T* y = static_cast<T*>(to);
  const uint32_t low_seed = uint32_t(seed), high_seed = uint32_t(uint64_t(seed) >> 32);
#pragma omp parallel for num_threads(int(threads)) if (threads > 1)
  for (int64_t chunk = 0; chunk < (size + kChunk - 1) / kChunk; ++chunk) {
    // A chunk never crosses a multiple of 2^32.
    const int64_t first = chunk * kChunk, last = first + kChunk < size ? first + kChunk : size;
    const uint32_t high = uint32_t(uint64_t(first) >> 32) ^ high_seed, low = uint32_t(first);
    for (int64_t n = 0; n < last - first; ++n) {
      const A factor = is_kept((low + uint32_t(n)) ^ low_seed, high, threshold) ? A(scale) : A(0);
      from_compute(to_compute(x[first + n]) * factor, y + first + n);
    }
  }
}

}  // namespace

void JOIN(gattn_drop_, GATTN_ISA)(const void* x, void* y, int64_t size, int64_t type, int64_t seed, int64_t threshold,
                                  double scale, int64_t threads) {
  switch (type) {
    case kFloat64: return drop<double>(x, y, size, seed, uint32_t(threshold), scale, threads);
    case kBFloat16: return drop<BFloat16>(x, y, size, seed, uint32_t(threshold), scale, threads);
    case kFloat16: return drop<Float16>(x, y, size, seed, uint32_t(threshold), scale, threads);
    default: return drop<float>(x, y, size, seed, uint32_t(threshold), scale, threads);
  }
}
