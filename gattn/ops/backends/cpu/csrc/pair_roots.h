// The features of pairs of nodes that GRIT's attention makes, and their gradients: see gattn/ops/pair_roots.py.
#pragma once

#include <cmath>
#include <cstdint>

// Rows of `width` numbers: of targets and sources, [targets or sources, width], and of pairs, [pairs, width].
// Mirrored by `PairRoots` in native.py.
struct PairRoots {
  const int64_t *target, *source;  // of each pair
  int64_t targets, sources, pairs, width, threads;
  const void *query, *key, *weight, *shift;
  void* out;                                // read by the backward pass
  const void* grad;                         // of out
  void *grad_ends, *grad_weight, *grad_shift;
};

namespace {

// Calls f(pair, row of the query, row of the key) for all pairs; returns -1 if a node is out of range.
template <class F>
int64_t for_pairs(const PairRoots& p, F&& f) {
  bool is_wrong = false;
#pragma omp parallel for num_threads(int(p.threads)) if (p.threads > 1) reduction(|| : is_wrong)
  for (int64_t pair = 0; pair < p.pairs; ++pair) {
    const int64_t i = p.target[pair], j = p.source[pair];
    if (uint64_t(i) >= uint64_t(p.targets) || uint64_t(j) >= uint64_t(p.sources)) is_wrong = true;
    else f(pair * p.width, i * p.width, j * p.width);
  }
  return is_wrong ? -1 : 0;
}

// out = max(sign(z) sqrt|z| + shift, 0) with z = (query + key) weight.
template <class T>
int64_t pair_roots(const PairRoots& p) {
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key);
  const T *weight = static_cast<const T*>(p.weight), *shift = static_cast<const T*>(p.shift);
  T* out = static_cast<T*>(p.out);
  const int64_t width = p.width;
  return for_pairs(p, [=](int64_t e, int64_t i, int64_t j) {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      const T z = (query[i + c] + key[j + c]) * weight[e + c];
      const T y = std::copysign(std::sqrt(std::abs(z)), z) + shift[e + c];
      out[e + c] = y < 0 ? T(0) : y;  // NaN stays
    }
  });
}

// The root's derivative, 1 / (2 sqrt|z|), is taken to be zero at zero.
template <class T>
int64_t pair_roots_backward(const PairRoots& p) {
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key);
  const T *weight = static_cast<const T*>(p.weight), *grad = static_cast<const T*>(p.grad);
  const T* out = static_cast<const T*>(p.out);
  T *grad_ends = static_cast<T*>(p.grad_ends), *grad_weight = static_cast<T*>(p.grad_weight);
  T* grad_shift = static_cast<T*>(p.grad_shift);
  const int64_t width = p.width;
  return for_pairs(p, [=](int64_t e, int64_t i, int64_t j) {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      const T ends = query[i + c] + key[j + c], w = weight[e + c], g = grad[e + c];
      const T root = std::sqrt(std::abs(ends * w));
      const T of_sum = out[e + c] > 0 ? g : T(0);
      const T ratio = of_sum / (2 * root);
      const T of_product = root > 0 ? ratio : T(0);
      grad_shift[e + c] = of_sum;
      grad_ends[e + c] = of_product * w;
      grad_weight[e + c] = of_product * ends;
    }
  });
}

}  // namespace
