// Which weights dropout keeps: the definition in gattn/ops/dropout.py.
#pragma once

#include <cstdint>

namespace {

inline uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x45d9f3bu;
  x = (x ^ x >> 16) * 0x45d9f3bu;
  return x ^ x >> 16;
}

// For the halves of a weight's number, each combined with that of the seed.
inline bool is_kept(uint32_t low, uint32_t high, uint32_t threshold) { return mix(mix(low) ^ high) >= threshold; }

}  // namespace
