// Features of edges, [E, D], which a weight [D, width] turns into rows of channels block by block, or types of edges,
// each of which has such a row: nothing of size [E, width] is ever stored.
#pragma once

#include "rows.h"

namespace {

// to[i] = (or, with kAdds, +=) the sum over j < terms of x[i * row + j * column] times y[j], rows of `width`.
template <bool kAdds, class X>
NOINLINE void add_products(int64_t rows, int64_t terms, const A* x, int64_t row, int64_t column, const A* y, int64_t width,
                  X* to) {
  for_strips(width, [&](auto strip) INLINE_LAMBDA {
    using S = decltype(strip);
    constexpr int kRows = (kVectorBytes == 64 ? 16 : 8) / S::kVectors;  // as many sums as fit into registers
    auto add = [&](auto count, int64_t i) INLINE_LAMBDA {
      constexpr int kCount = decltype(count)::kValue;
      Vec<A> sum[kCount][S::kVectors];
#pragma GCC unroll 16
      for (int r = 0; r < kCount; ++r) EACH_VECTOR {
        if constexpr (kAdds) sum[r][k] = strip.load_at(to + (i + r) * width, k);
        else sum[r][k] = Vec<A>{};
      }
      for (int64_t j = 0; j < terms; ++j) {
        Vec<A> factor[S::kVectors];
        EACH_VECTOR factor[k] = strip.load_at(y + j * width, k);
#pragma GCC unroll 16
        for (int r = 0; r < kCount; ++r) {
          const Vec<A> by = splat<Vec<A>>(x[(i + r) * row + j * column]);
          EACH_VECTOR sum[r][k] += by * factor[k];
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kCount; ++r) EACH_VECTOR strip.store_at(to + (i + r) * width, k, sum[r][k]);
    };
    int64_t i = 0;
    for (; i + kRows <= rows; i += kRows) add(Count<kRows>{}, i);
    for (; i < rows; ++i) add(Count<1>{}, i);
  });
}

// The features or types of a block's edges. Without any (`channels` is zero), it has no memory and is never asked.
class Projection {
 public:
  static int64_t workspace_elements(const Arguments& a) {
    if (a.edge_channels == 0) return 0;
    return kBlock * ((a.edge_type == nullptr ? 2 * a.edge_channels : 0) + 2 * a.heads * a.channels);
  }
  Projection(const Arguments& arguments, A* workspace)
      : a(arguments), channels(a.edge_channels), width(a.heads * a.channels) {
    const int64_t of_features = a.edge_type == nullptr ? kBlock * channels : 0;
    features = workspace, gradients = features + of_features;
    rows = gradients + of_features, row_gradients = rows + kBlock * width;
  }

  // The block now consists of these edges.
  NOINLINE void gather(const int64_t* edge, int n) {
    is_projected = false;
    for (int e = 0; e < n; ++e) {
      if (a.edge_type != nullptr) {
        type[e] = a.edge_type[edge[e]];
        continue;
      }
      const T* from = static_cast<const T*>(a.edge) + edge[e] * channels;
      for_strips(channels, [&](auto strip) INLINE_LAMBDA {
        using S = decltype(strip);
        EACH_VECTOR strip.store_at(features + e * channels, k, strip.load_at(from, k));
      });
    }
  }
  // The row of an edge's type.
  template <class X>
  const X* row_of_type(int e) const {
    return static_cast<const X*>(a.edge) + type[e] * width;
  }
  // Their rows, of type T or A, computed when they are first asked for.
  template <class X>
  NOINLINE const X* projected(int n) {
    X* to = reinterpret_cast<X*>(rows);
    if (a.edge_type != nullptr) {
      for (int e = 0; e < n; ++e) memcpy(to + e * width, row_of_type<X>(e), size_t(width) * sizeof(X));
    } else if (!is_projected) {
      add_products<false>(n, channels, features, channels, 1, static_cast<const A*>(a.edge_projection), width, to);
    }
    is_projected = true;
    return to;
  }

  // Where gradients of rows may be put.
  A* gradient_of_row(int e) { return row_gradients + e * width; }
  // Sums of the weight's gradient begin at zero in each task.
  void start_gradients(int64_t task, int64_t b) {
    if (a.grad_edge_projection == nullptr) return;
    const int64_t size = channels * width;
    weight_gradient = static_cast<A*>(a.grad_edge_projection) + (task * a.batch + b) * size;
    memset(weight_gradient, 0, size_t(size) * sizeof(A));
  }
  // What the gradients of the block's rows mean for the weight, and, multiplied by `factor`, unless that is null, for
  // the features.
  NOINLINE void add_gradients(const int64_t* edge, int64_t b, int n, A* of_rows, const A* factor) {
    if (a.edge_type != nullptr) {
      for (int e = 0; e < n && weight_gradient != nullptr; ++e)
        add_row(of_rows + e * width, weight_gradient + type[e] * width);
      return;
    }
    if (weight_gradient != nullptr)
      add_products<true>(channels, n, features, 1, channels, of_rows, width, weight_gradient);
    if (a.grad_edge == nullptr) return;
    if (factor != nullptr)
      for (int e = 0; e < n; ++e)
        for (int64_t c = 0; c < width; ++c) of_rows[e * width + c] *= factor[c];
    const A* weight = static_cast<const A*>(a.edge_projection_rows);
    add_products<false>(n, width, of_rows, width, 1, weight, channels, gradients);
    T* to = static_cast<T*>(a.grad_edge) + b * a.edges * channels;
    for (int e = 0; e < n; ++e) store_row(to + edge[e] * channels, gradients + e * channels, channels);
  }

 private:
  void add_row(const A* row, A* to) const {
    for_strips(width, [&](auto strip) INLINE_LAMBDA {
      using S = decltype(strip);
      EACH_VECTOR strip.store_at(to, k, strip.load_at(to, k) + strip.load_at(row, k));
    });
  }

  const Arguments& a;
  const int64_t channels, width;
  A *features, *gradients;  // [kBlock, channels]
  A *rows, *row_gradients;  // [kBlock, width]
  A* weight_gradient = nullptr;
  bool is_projected = false;
  int64_t type[kBlock];
};

}  // namespace
