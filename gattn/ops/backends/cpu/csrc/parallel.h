// Threads, each with memory of its own.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdlib>

#include "simd.h"

namespace {

// Calls f(workspace) in each thread, with memory of its own. Returns 0, or -3 if memory ran out.
template <class F>
int64_t in_parallel(int64_t threads, int64_t elements, F&& f) {
  const size_t bytes = size_t(elements) * sizeof(A) + kVectorBytes;
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
  {
    void* memory = malloc(bytes);
    if (memory == nullptr) failed = true;
    // All threads work or none: those at work wait for each other.
#pragma omp barrier
    if (!failed) {
      uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
      f(reinterpret_cast<A*>(aligned));
    }
    free(memory);
  }
  return failed ? -3 : 0;
}

}  // namespace
