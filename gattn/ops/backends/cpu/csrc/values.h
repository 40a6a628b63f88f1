// Weights and values: the sum that attention gives, and its gradients. Nothing here depends on how the ends compare.
#pragma once

#include "block.h"

namespace {

class Values : public Block {
 protected:
  Values(const Arguments& arguments, A* workspace) : Block(arguments, workspace), value_packing(V, group) {}

  // Sums up the run's values by the weights in `logits`, and stores the row's output where the run ends it. `factor`
  // corrects what earlier runs of the row left in acc, `scale` the result.
  void sum_values(const Run& run, const T* const* edges, int64_t b, const A* factor, const A* scale) {
    copy_heads(scales, scale);
    T* out = output(run.row, b);
    A* wide = wide_output(run.row, b);
    const A* bias = static_cast<const A*>(a.out_bias);
    const bool shared = a.value_is_key;
    for_head_strips(H, V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      using S = decltype(strip);
      const Segment segment = {gathered, h / group * V, edges, h * V, run.first, run.last, H};
      Vec<A> total_value[S::kVectors] = {};
      if (!run.begins) EACH_VECTOR total_value[k] = strip.load_at(acc + h * V, k) * heads.spread(factor, k);
      if (edges != nullptr) add_weighted<kNextToo, true>(strip, heads, logits, segment, total_value);
      else if (shared) add_weighted<kNow, false>(strip, heads, logits, segment, total_value);
      else add_weighted<kNextToo, false>(strip, heads, logits, segment, total_value);
      if (!run.ends) {
        EACH_VECTOR strip.store_at(acc + h * V, k, total_value[k]);
      } else {
        EACH_VECTOR {
          const Vec<A> result = total_value[k] * heads.spread(scales, k);
          strip.store_at(out + h * V, k, bias == nullptr ? result : result + strip.load_at(bias + h * V, k));
          if (wide != nullptr) strip.store_at(wide + h * V, k, result);
        }
      }
    });
  }

  // The output of a row whose parts are merged in acc.
  void store_output(int64_t i, int64_t b, const A* scale) {
    T* out = output(i, b);
    A* wide = wide_output(i, b);
    const A* bias = static_cast<const A*>(a.out_bias);
    for (int64_t h = 0; h < H; ++h) {
      const Vec<A> by = splat<Vec<A>>(scale[h]);
      for_strips(V, [&](auto strip) INLINE_LAMBDA {
        using S = decltype(strip);
        EACH_VECTOR {
          const Vec<A> result = strip.load_at(acc + h * V, k) * by;
          strip.store_at(out + h * V, k, bias == nullptr ? result : result + strip.load_at(bias + h * V, k));
          if (wide != nullptr) strip.store_at(wide + h * V, k, result);
        }
      });
    }
  }

  // ----------------------------------------------------------------------------------------------------------- backward

  // to[h] = <grad_out_i, out_i>, without the bias, which only the wide output lacks.
  void multiply_outputs(int64_t i, int64_t b, A* to) {
    const T* grad = grad_out_row(i, b);
    const A* bias = static_cast<const A*>(a.out_bias);
    memset(to, 0, size_t(H) * sizeof(A));
    for_head_strips(H, V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      using S = decltype(strip);
      Vec<A> products[S::kVectors];
      EACH_VECTOR {
        products[k] = strip.load_at(grad + h * V, k);
        if (a.out_wide != nullptr) products[k] *= strip.load_at(wide_output(i, b) + h * V, k);
        else if (bias == nullptr) products[k] *= strip.load_at(output(i, b) + h * V, k);
        else products[k] *= strip.load_at(output(i, b) + h * V, k) - strip.load_at(bias + h * V, k);
      }
      heads.add_sums(strip, products, H, to);
    });
  }

  // products = <grad_out_i, v_j + e_ij>; the rows of grad_out are gathered.
  void multiply_values(const Run* runs, int num_runs, int64_t b, int n) {
    static constexpr double kPlain[] = {1, 1, 0, 0};
    const Dot dot(kPlain);
    const T* const* edges = value_edges(b, n);
    memset(products, 0, size_t(n * H) * sizeof(A));
    for (int r = 0; r < num_runs; ++r) {
      const T* value = value_row(runs[r].row, b);
      for_head_strips(H, V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
        const T* own = value + h / group * V;
        const Segment segment = {gathered, h * V, edges, h * V, runs[r].first, runs[r].last, H};
        if (edges == nullptr) add_values<kSource, false, false>(dot, strip, heads, nullptr, own, segment, products);
        else add_values<kSource, true, false>(dot, strip, heads, nullptr, own, segment, products);
      });
    }
  }

  // From logits and products to the gradients of logits, and weights after dropout in place of the logits.
  void differentiate_weights(int64_t b, int n, const A* const* terms) {
    if (law.is_normalized) {  // otherwise, they are 0, 1 and 0
      for (int e = 0; e < n; ++e) {
        copy_heads(maxima + e * H, terms[e]);
        copy_heads(row_scales + e * H, terms[e] + H);
        copy_heads(deltas + e * H, terms[e] + 2 * H);
      }
      differentiate_weights_of<true>(b, n);
    } else {
      differentiate_weights_of<false>(b, n);
    }
  }
  template <bool kNormalized>
  void differentiate_weights_of(int64_t b, int n) {
    if (a.dropout) draw_dropout(b, n);
    if (a.grad_weights != nullptr) {
      memset(gradients, 0, size_t(n * H) * sizeof(A));
      add_edge_scalars(a.grad_weights, a.edges * H, b, n, gradients);
    }
    law.visit([&](auto rule) INLINE_LAMBDA {
      for (int64_t at = 0; at < n * H; at += W) {
        const Vec<A> logit = load(logits + at);
        Applied weight = rule(logit, kNormalized ? load(maxima + at) : Vec<A>{});
        if (kNormalized) weight = {weight.value * load(row_scales + at), weight.derivative * load(row_scales + at)};
        Vec<A> product = load(products + at), kept = weight.value;
        if (a.dropout) product *= load(keep + at), kept *= load(keep + at);
        if (a.grad_weights != nullptr) product += load(gradients + at);
        Vec<A> gradient = weight.derivative * (kNormalized ? product - load(deltas + at) : product);
        if (law.cap != 0) gradient *= law.cap_derivative(logit);
        store(gradients + at, gradient);
        store(logits + at, kept);
      }
    });
    if (a.grad_bias != nullptr) store_edge_scalars(a.grad_bias, b, n, gradients);
  }

  // acc += the sum of the run's weights times grad_out_i.
  void add_value_gradients(const Run& run) {
    for_head_strips(H, V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      using S = decltype(strip);
      const Segment segment = {gathered, h * V, nullptr, 0, run.first, run.last, H};
      A* to = acc + h / group * V;
      const bool anew = run.begins && h % group == 0;
      Vec<A> sum[S::kVectors];
      EACH_VECTOR sum[k] = anew ? Vec<A>{} : strip.load_at(to, k);
      add_weighted<kNow, false>(strip, heads, logits, segment, sum);
      EACH_VECTOR strip.store_at(to, k, sum[k]);
    });
  }

  // The gradients of the values of a run's edges: each edge is visited once, so they are written, not added.
  void store_edge_value_gradients(const Run& run, int64_t b) {
    if (a.grad_edge_value == nullptr) return;
    for (int e = run.first; e < run.last; ++e) {
      T* to = static_cast<T*>(a.grad_edge_value) + (b * a.edges + edge[e]) * H * V;
      for_head_strips(H, V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
        using S = decltype(strip);
        EACH_VECTOR {
          const Vec<A> grad_out = strip.load_at(gathered.row[e] + h * V, k);
          strip.store_at(to + h * V, k, grad_out * heads.spread(logits + e * H, k));
        }
      });
    }
  }

  const Packing value_packing;
};

}  // namespace
