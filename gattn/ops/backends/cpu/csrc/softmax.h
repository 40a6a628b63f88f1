// The softmax: how the logits of a row become weights. All that the kernels know about it is here.
//
// A row's edges come in runs, and long rows in parts that are merged. Weights are exp(logit - maximum), and the
// output's sum of weighted values is multiplied by the reciprocal of their sum at the end. Both numbers of each row are
// kept for the backward pass.
#pragma once

#include "heads.h"

namespace {

class Softmax : Heads {
 public:
  // Numbers per head that are kept of a row, and those of a part of one; `state` is what a part leaves.
  static constexpr int64_t kStats = 2, kState = 2;
  static int64_t workspace_elements(int64_t heads) { return 3 * (heads + 2 * W); }

  // `workspace` is aligned.
  Softmax(int64_t heads, A* workspace) : Heads(heads) {
    const int64_t row = (heads + 2 * W - 1) / W * W;
    maximum = workspace, sum = workspace + row, factor_ = workspace + 2 * row;
  }

  // What earlier runs of the row summed up has to be multiplied by this.
  const A* factor() const { return factor_; }
  // What the sum of a row with these stats has to be multiplied by.
  INLINE const A* scales(const A* stats) const { return stats + H; }

  // Turns the run's logits into weights, and brings the state up to date; the last run of a row writes its stats.
  void add_run(const Run& run, A* logits, A* stats) {
    if (!is_cyclic) {
      subtract_maximum(run, logits, stats);
      for (int64_t at = run.first * H; at < run.last * H; ++at) logits[at] = exp_of(logits[at]);
      add_weights(run, logits, stats);
      return;
    }
    const Vec<A> lowest = splat<Vec<A>>(-A(INFINITY));
    const Vec<A> before = run.begins ? lowest : repeat_heads(maximum);
    Vec<A> most = before;
    for_run(run, [&](int64_t at, auto lanes) INLINE_LAMBDA {
      const Vec<A> logit = lanes.load_or(logits + at, lowest);
      most = logit > most ? logit : most;
    });
    most = fold_heads(most, [](Vec<A> x, Vec<A> y) INLINE_LAMBDA { return x > y ? x : y; });
    // A row of -inf alone would give exp(-inf + inf).
    const Vec<A> base = most == -A(INFINITY) ? Vec<A>{} : most;
    Vec<A> total_weight = {};
    for_run(run, [&](int64_t at, auto lanes) INLINE_LAMBDA {
      const Vec<A> weight = vector_exp(lanes.load_or(logits + at, lowest) - base);
      lanes.store_to(logits + at, weight);
      total_weight += weight;
    });
    total_weight = fold_heads(total_weight, [](Vec<A> x, Vec<A> y) INLINE_LAMBDA { return x + y; });
    if (!run.begins) {
      const Vec<A> by = vector_exp(before - base);
      total_weight += repeat_heads(sum) * by;
      store_part(factor_, by, int(H));
    }
    if (run.ends) {
      store_part(stats, base, int(H));
      store_part(stats + H, reciprocal(total_weight), int(H));
    } else {
      store_part(maximum, most, int(H));
      store_part(sum, total_weight, int(H));
    }
  }

  // Parts of a row: their states are saved, and merged again, each head's with `width` sums of values. The last
  // step writes the row's stats.
  void save(A* state) const {
    memcpy(state, maximum, size_t(H) * sizeof(A));
    memcpy(state + H, sum, size_t(H) * sizeof(A));
  }
  void start_merging() {
    for (int64_t h = 0; h < H; ++h) maximum[h] = -INFINITY, sum[h] = 0;
  }
  void merge(const A* state, const A* part, int64_t width, A* acc) {
    for (int64_t h = 0; h < H; ++h) {
      const A most = state[h] > maximum[h] ? state[h] : maximum[h], base = finite_base(most);
      const A old_factor = exp_of(maximum[h] - base), new_factor = exp_of(state[h] - base);
      sum[h] = sum[h] * old_factor + state[H + h] * new_factor;
      maximum[h] = most;
      for (int64_t c = h * width; c < (h + 1) * width; ++c) acc[c] = acc[c] * old_factor + part[c] * new_factor;
    }
  }
  void finish_merging(A* stats) const {
    for (int64_t h = 0; h < H; ++h) {
      stats[h] = finite_base(maximum[h]);
      stats[H + h] = sum[h] == 0 ? A(0) : 1 / sum[h];
    }
  }

  // The weight, from the logit and its row's two stats.
  static INLINE Vec<A> weight(Vec<A> logit, Vec<A> base, Vec<A> scale) { return vector_exp(logit - base) * scale; }
  // The gradient of the logit, from that of the weight; delta is the sum of weights times their gradients.
  static INLINE Vec<A> gradient(Vec<A> weight, Vec<A> grad_weight, Vec<A> delta) {
    return weight * (grad_weight - delta);
  }

 private:
  static A finite_base(A most) { return most == -A(INFINITY) ? A(0) : most; }
  static A exp_of(A value) { return vector_exp(splat<Vec<A>>(value))[0]; }
  // Only exact zeros are replaced, so that a NaN shows in the whole row.
  static INLINE Vec<A> reciprocal(Vec<A> x) { return x == A(0) ? Vec<A>{} : A(1) / x; }

  // What add_run does, where H does not divide the lanes.
  void subtract_maximum(const Run& run, A* logits, A* stats) {
    for_heads([&](auto heads) INLINE_LAMBDA {
      using S = decltype(heads);
      EACH_VECTOR {
        const Vec<A> before = run.begins ? splat<Vec<A>>(-A(INFINITY)) : heads.load_at(maximum, k);
        Vec<A> most = before;
        for (int e = run.first; e < run.last; ++e) {
          const Vec<A> logit = heads.load_at(logits + e * H, k);
          most = logit > most ? logit : most;
        }
        const Vec<A> base = most == -A(INFINITY) ? Vec<A>{} : most;
        if (!run.begins) heads.store_at(factor_, k, vector_exp(before - base));
        heads.store_at(maximum, k, most);
        if (run.ends) heads.store_at(stats, k, base);
        for (int e = run.first; e < run.last; ++e)
          heads.store_at(logits + e * H, k, heads.load_at(logits + e * H, k) - base);
      }
    });
  }
  void add_weights(const Run& run, const A* logits, A* stats) {
    for_heads([&](auto heads) INLINE_LAMBDA {
      using S = decltype(heads);
      EACH_VECTOR {
        Vec<A> total_weight = {};
        if (!run.begins) total_weight = heads.load_at(sum, k) * heads.load_at(factor_, k);
        for (int e = run.first; e < run.last; ++e) total_weight += heads.load_at(logits + e * H, k);
        heads.store_at(sum, k, total_weight);
        if (run.ends) heads.store_at(stats + H, k, reciprocal(total_weight));
      }
    });
  }

  A *maximum, *sum, *factor_;
};

}  // namespace
