// Dropout: which weights, or elements of any tensor, are kept is defined in gattn/ops/dropout.py.
#pragma once

#include "simd.h"

namespace {

inline uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x45d9f3bu;
  x = (x ^ x >> 16) * 0x45d9f3bu;
  return x ^ x >> 16;
}

// For the halves of a weight's number, each combined with that of the seed.
inline bool is_kept(uint32_t low, uint32_t high, uint32_t threshold) { return mix(mix(low) ^ high) >= threshold; }

// y = x with elements dropped, the others times scale.
[[maybe_unused]] void drop(const void* from, void* to, int64_t size, int64_t seed, int64_t threshold, double scale,
                           int64_t threads) {
  constexpr int64_t kChunk = 1 << 14;
  const T* x = static_cast<const T*>(from);
  T* y = static_cast<T*>(to);
  const uint32_t low_seed = uint32_t(seed), high_seed = uint32_t(uint64_t(seed) >> 32), limit = uint32_t(threshold);
#pragma omp parallel for num_threads(int(threads)) if (threads > 1)
  for (int64_t chunk = 0; chunk < (size + kChunk - 1) / kChunk; ++chunk) {
    // A chunk never crosses a multiple of 2^32.
    const int64_t first = chunk * kChunk, last = first + kChunk < size ? first + kChunk : size;
    const uint32_t high = uint32_t(uint64_t(first) >> 32) ^ high_seed, low = uint32_t(first);
    for (int64_t n = 0; n < last - first; ++n) {
      const A factor = is_kept((low + uint32_t(n)) ^ low_seed, high, limit) ? A(scale) : A(0);
      from_compute(to_compute(x[first + n]) * factor, y + first + n);
    }
  }
}

}  // namespace
