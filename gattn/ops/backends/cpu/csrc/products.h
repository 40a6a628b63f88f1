// Products of matrices, by one micro-kernel: c[r][v] += a[r][k] * b[k][v], in which v runs along vectors.
#pragma once

#include <cstring>

#include "simd.h"

namespace {

constexpr int kMicroRows = 6, kStrip = kVectorBytes == 64 ? 4 : 2, kStripOfOne = 4;  // of accumulators

template <int R, int V>
NOINLINE void multiply_micro(const A* a, int64_t a_row, int64_t a_step, const A* b, int64_t b_step, int64_t steps, A* c,
                             int64_t c_row, bool adds) {
  Vec<A> sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = Vec<A>{};
  for (int64_t k = 0; k < steps; ++k) {
    Vec<A> right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) right[v] = load(b + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const A left = a[r * a_row];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] += left * right[v];
    }
    a += a_step, b += b_step;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      A* to = c + r * c_row + v * W;
      store(to, adds ? load(to) + sum[r][v] : sum[r][v]);
    }
}

using Micro = void (*)(const A*, int64_t, int64_t, const A*, int64_t, int64_t, A*, int64_t, bool);
template <int V>
constexpr Micro kMicro[kMicroRows] = {multiply_micro<1, V>, multiply_micro<2, V>, multiply_micro<3, V>,
                                      multiply_micro<4, V>, multiply_micro<5, V>, multiply_micro<6, V>};

// c[r][v] = (adds: c[r][v] +) the sum over steps of a[r][k] * b[k][v], for whole vectors.
inline void multiply(int64_t rows, int64_t vectors, const A* a, int64_t a_row, int64_t a_step, const A* b, int64_t b_step,
                     int64_t steps, A* c, int64_t c_row, bool adds) {
  for (int64_t v = 0; v < vectors;) {
    const int64_t left = vectors - v;
    if (rows == 1 && left >= kStripOfOne) {
      multiply_micro<1, kStripOfOne>(a, a_row, a_step, b + v * W, b_step, steps, c + v * W, c_row, adds);
      v += kStripOfOne;
      continue;
    }
    const int64_t taken = left >= kStrip ? kStrip : left >= 2 ? 2 : 1;
    for (int64_t r = 0; r < rows; r += kMicroRows) {
      const int64_t count = rows - r < kMicroRows ? rows - r : kMicroRows;
      const Micro* runs = taken == kStrip ? kMicro<kStrip> : taken == 2 ? kMicro<2> : kMicro<1>;
      runs[count - 1](a + r * a_row, a_row, a_step, b + v * W, b_step, steps, c + r * c_row + v * W, c_row, adds);
    }
    v += taken;
  }
}

constexpr int64_t kColumns = 64;      // that are packed together
constexpr int64_t kDepth = 256;       // rows that are packed together, which stay in the cache
constexpr int64_t kSums = 1 << 15;    // of a task, at most, unless its columns are so few
constexpr int64_t kTasks = 16;        // at least, where there are so many rows: they serve as many threads

// The products of the columns of two matrices, c[i][j] = sum over rows n of a[n][i] * b[n][j]: a gradient of weights.
// A task sums some rows for some columns of b. Tasks depend on sizes alone, so bits do not depend on the number of threads.
struct ColumnProducts {
  const A *a, *b;
  A* c;
  int64_t rows, left, right, a_row, b_row;
  int64_t width = 0, groups = 0, parts = 0;  // columns of a task, and what is cut into tasks

  void cut() {
    const int64_t panels = (right + kColumns - 1) / kColumns, most = kSums / kColumns / left;
    width = kColumns * (most < 1 ? 1 : most < panels ? most : panels);
    groups = (right + width - 1) / width;
    const int64_t wanted = (kTasks + groups - 1) / groups, blocks = rows / kDepth;
    parts = blocks < 1 ? 1 : blocks < wanted ? blocks : wanted;
  }
  int64_t workspace() const { return kDepth * kColumns + left * width; }
  int64_t sums_of_parts() const { return (parts - 1) * left * right; }

  // `sums` has what the parts but the first sum, [parts - 1][left][right].
  void run(A* packed, A* sums) const {
    A* tile = packed + kDepth * kColumns;
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < parts * groups; ++t) {
      const int64_t part = t / groups, first = t % groups * width, end = rows * (part + 1) / parts;
      const int64_t last = first + width < right ? first + width : right;
      for (int64_t n = rows * part / parts, begin = n; n < end; n += kDepth) {
        const int64_t depth = end - n < kDepth ? end - n : kDepth;
        for (int64_t j = first; j < last; j += kColumns) {
          const int64_t columns = last - j < kColumns ? last - j : kColumns, vectors = (columns + W - 1) / W;
          for (int64_t k = 0; k < depth; ++k)
            for (int64_t v = 0; v < vectors; ++v) {
              const A* from = b + (n + k) * b_row + j + v * W;
              const int64_t some = columns - v * W;
              store(packed + k * kColumns + v * W, some >= W ? load(from) : load_part(from, int(some)));
            }
          multiply(left, vectors, a + n * a_row, 1, a_row, packed, kColumns, depth, tile + j - first, width, n > begin);
        }
      }
      A* to = (part == 0 ? c : sums + (part - 1) * left * right) + first;
      for (int64_t i = 0; i < left; ++i) memcpy(to + i * right, tile + i * width, size_t(last - first) * sizeof(A));
    }
#pragma omp for
    for (int64_t i = 0; i < left; ++i)
      for (int64_t part = 1; part < parts; ++part) {
        const A* from = sums + ((part - 1) * left + i) * right;
        for (int64_t j = 0; j < right; ++j) c[i * right + j] += from[j];
      }
  }
};

}  // namespace
