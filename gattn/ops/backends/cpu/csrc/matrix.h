// Laws of whole rows on a matrix of logits, as complete graphs have it: each row is that of one head.
#pragma once

#include "thresholds.h"

namespace {

class MatrixRow : Thresholds {
 public:
  explicit MatrixRow(const Arguments& a) : Thresholds(a), law(a) {}

  // From logits to weights, in place.
  NOINLINE void weigh(A* row, int64_t count) const {
    rewrite(row, count);
    for_columns(row, count, [&](const Column& column) INLINE_LAMBDA {
      const Vec<A> base = law.is_exponential ? base_of(column) : Vec<A>{};
      law.visit([&](auto rule) INLINE_LAMBDA {
        column.map([&](Vec<A> x) INLINE_LAMBDA { return rule(x, base).value; });
      });
      if (!law.divides) return;
      const Vec<A> total = column.reduce(
          Vec<A>{}, [](Vec<A> x) INLINE_LAMBDA { return x == -A(INFINITY) ? Vec<A>{} : x; },
          [](Vec<A> x, Vec<A> y) INLINE_LAMBDA { return x + y; });
      const Vec<A> scale = total == A(0) ? Vec<A>{} : A(1) / total;
      column.map([&](Vec<A> x) INLINE_LAMBDA { return x * scale; });
    });
  }

  // From the gradients of weights to those of logits, in place.
  NOINLINE void differentiate(const A* weights, A* gradients, int64_t count) const {
    Applied sums = {};
    each(weights, gradients, count, [&](Vec<A> derivative, Vec<A> gradient, int64_t, int) INLINE_LAMBDA {
      sums = sums + Applied{derivative * gradient, derivative};
    });
    sums = fold_heads(sums, [](Applied x, Applied y) INLINE_LAMBDA { return x + y; });
    const Vec<A> mean = sums.derivative == A(0) ? Vec<A>{} : sums.value / sums.derivative;
    each(weights, gradients, count, [&](Vec<A> derivative, Vec<A> gradient, int64_t at, int lanes) INLINE_LAMBDA {
      store_part(gradients + at, derivative * (gradient - mean), lanes);
    });
  }

 private:
  // Calls f(derivative of the weights for a fixed threshold, gradient, position, lanes).
  template <class F>
  INLINE void each(const A* weights, const A* gradients, int64_t count, F&& f) const {
    for (int64_t at = 0; at < count; at += W) {
      const int lanes = int(min(W, count - at));
      const Vec<A> weight = load_part(weights + at, lanes);
      Vec<A> derivative = weight;
      if (law.name == kSparsemax) derivative = weight > A(0) ? splat<Vec<A>>(A(1)) : Vec<A>{};
      if (law.name == kEntmax15) derivative = vector_sqrt(weight);
      f(derivative, load_part(gradients + at, lanes), at, lanes);
    }
  }

  const Law law;
};

// Turns logits, [rows, columns], into weights, or, if these are given, gradients of weights into those of logits.
[[maybe_unused]] NOINLINE void matrix_rows(const Arguments& a, const void* weights, void* numbers, int64_t rows, int64_t columns) {
  const MatrixRow row(a);
#pragma omp parallel for num_threads(int(a.threads)) if (a.threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    A* to = static_cast<A*>(numbers) + r * columns;
    if (weights == nullptr) row.weigh(to, columns);
    else row.differentiate(static_cast<const A*>(weights) + r * columns, to, columns);
  }
}

}  // namespace
