// Weights and values: the sum that attention gives, and its gradients. Nothing here depends on how the ends compare.
#pragma once

#include "block.h"

namespace {

inline Dot plain_dot() {
  static constexpr double kConstants[] = {1, 1, 0, 0};
  return Dot(kConstants);
}

class Values : public Block {
 public:
  static int64_t workspace_elements(const Arguments& a) {
    return Block::workspace_elements(a) + RowSums::workspace_elements(a.heads);
  }

  // Weights were written as logits.
  NOINLINE void finish_weights(const Task& task, int64_t b) {
    A* weights = static_cast<A*>(a.weights) + b * a.edges * H;
    law.visit([&](auto rule) INLINE_LAMBDA {
      for (int64_t i = task.first_row; i < task.last_row; ++i) {
        const A* row = stats(i, b);
        int64_t first = a.by_target.start[i], last = a.by_target.start[i + 1];
        if (task.slot >= 0) first = task.first_edge, last = task.last_edge;
        for (int64_t p = first; p < last; ++p) {
          A* weight = weights + edge_of(p) * H;
          for_vectors(H, [&](auto heads) INLINE_LAMBDA {
            using S = decltype(heads);
            EACH_VECTOR {
              const Applied applied = rule(heads.load_at(weight, k), heads.load_at(row, k));
              heads.store_at(weight, k, applied.value * heads.load_at(row + H, k));
            }
          });
        }
      }
    });
  }

 protected:
  NOINLINE Values(const Arguments& arguments, A* workspace)
      : Block(arguments, workspace), value_packing(V, group), sums(arguments, rest) {}

  // ------------------------------------------------------------------------------------------------------------ forward

  // From a block's logits to weights, and to what they add to the output.
  NOINLINE void sum_block(int64_t b, int64_t p, int n, const Run* runs, int num_runs) {
    if (has_record)
      for (int e = 0; e < n; ++e) copy_heads(reinterpret_cast<A*>(record(p + e, b)), logits + e * H);
    if (a.weights != nullptr) store_edge_scalars(a.weights, b, n, logits);

    for (int r = 0; r < num_runs; ++r) sums.add_run(runs[r], logits, stats(runs[r].row, b));
    if (a.dropout) {
      draw_dropout(b, n);
      for (int64_t at = 0; at < n * H; at += W) store(logits + at, load(logits + at) * load(keep + at));
    }

    // Keys that are values have been gathered for the score.
    if (!a.value_is_key) gathered.gather(value_row(0, b), a.value_row, a.by_target.node + p, n);
    const T* const* edges = value_edges(b, n);
    for (int r = 0; r < num_runs; ++r) sum_values(runs[r], edges, b, sums.factor(), sums.scales(stats(runs[r].row, b)));
  }

  // A part of a row leaves its sums.
  NOINLINE void save_sums(int64_t slot, int64_t b) {
    A* to = sums_of_part(b, slot);
    sums.save(to);
    memcpy(to + RowSums::kState * H, acc, size_t(H * V) * sizeof(A));
  }
  // Adds up the parts of a row, and stores its output.
  NOINLINE void merge_sums(int64_t split, int64_t b) {
    const Rows& rows = a.by_target;
    sums.start_merging();
    memset(acc, 0, size_t(H * V) * sizeof(A));
    for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot) {
      const A* from = sums_of_part(b, slot);
      sums.merge(from, from + RowSums::kState * H, V, acc);
    }
    A* row = stats(rows.split_row[split], b);
    sums.finish_merging(row);
    store_output(rows.split_row[split], b, sums.scales(row));
  }

  // Sums up the run's values by the weights in `logits`, and stores the row's output where the run ends it. `factor`
  // corrects what earlier runs of the row left in acc, `scale` the result.
  NOINLINE void sum_values(const Run& run, const T* const* edges, int64_t b, const A* factor, const A* scale) {
    copy_heads(scales, scale);
    T* out = output(run.row, b);
    A* wide = wide_output(run.row, b);
    const A* bias = static_cast<const A*>(a.out_bias);
    const bool is_first = edges != nullptr || !a.value_is_key;  // rows of keys have been read for the logits
    for_head_strips(H, V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      using S = decltype(strip);
      const Segment segment = {gathered, h / group * V, edges, h * V, run.first, run.last, H, is_first};
      Vec<A> total_value[S::kVectors] = {};
      if (!run.begins) EACH_VECTOR total_value[k] = strip.load_at(acc + h * V, k) * heads.spread(factor, k);
      if (edges != nullptr) add_weighted<kOwnRows>(strip, heads, logits, segment, total_value);
      else add_weighted<kNone>(strip, heads, logits, segment, total_value);
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
  NOINLINE void store_output(int64_t i, int64_t b, const A* scale) {
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
  NOINLINE void multiply_outputs(int64_t i, int64_t b, A* to) {
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

  // products = <grad_out_i, v_j + e_ij>, and acc = the gradient of v_j: the sum of weights, in `logits`, times
  // grad_out_i. The rows of grad_out are gathered; each is loaded once. acc has a row for each run.
  NOINLINE void multiply_values(const Run* runs, int num_runs, int64_t b, int n) {
    const T* const* edges = value_edges(b, n);
    memset(products, 0, size_t(n * H) * sizeof(A));
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      const T* value = value_row(run.row, b);
      for_head_strips(H, V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
        const int64_t own = own_head(kSource, h) * V;
        const Segment segment = {gathered, h * V, edges, h * V, run.first, run.last, H};
        const bool anew = begins_sum(kSource, h, run);
        A* to = acc + r * G * V + own;
        if (edges == nullptr)
          add_products_and_weighted<kNone>(strip, heads, value + own, logits, segment, anew, products, to);
        else
          add_products_and_weighted<kOwnRows>(strip, heads, value + own, logits, segment, anew, products, to);
      });
    }
  }

  // to_e += the products of the run's own row, at the end `end`, and the edges' other ends, `width` channels per head.
  template <class F>
  NOINLINE void add_row_products(const F& family, End end, const Run& run, const T* row, const Gathered& others,
                                 const T* const* edges, int64_t width, const Packing& packing, A* to) const {
    for_head_strips(H, width, packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      const T* own = row + own_head(end, h) * width;
      const Segment segment = {others, other_head(end, h) * width, edges, h * width, run.first, run.last, H};
      if (edges == nullptr) add_values<kTarget, kNone, false>(family, strip, heads, nullptr, own, segment, to);
      else if (end == kTarget) add_values<kTarget, kOwnRows, false>(family, strip, heads, nullptr, own, segment, to);
      else add_values<kSource, kOwnRows, false>(family, strip, heads, nullptr, own, segment, to);
    });
  }

  // From products to the gradients of weights before dropout, which is drawn.
  NOINLINE void finish_products(int64_t b, int n) {
    if (a.dropout) {
      for (int64_t at = 0; at < n * H; at += W) store(products + at, load(products + at) * load(keep + at));
    }
    if (a.grad_weights != nullptr) add_edge_scalars(a.grad_weights, a.edges * H, b, n, products);
  }

  // From logits to weights after dropout, in their place, and the derivatives of weights before it.
  NOINLINE void weigh_again(int n, const A* const* terms) {
    if (law.is_normalized) {
      for (int e = 0; e < n; ++e) {
        copy_heads(maxima + e * H, terms[e]);
        copy_heads(row_scales + e * H, terms[e] + H);
        copy_heads(deltas + e * H, terms[e] + 2 * H);
      }
    } else {
      for (int64_t at = 0; at < n * H; at += W)
        store(maxima + at, Vec<A>{}), store(row_scales + at, splat<Vec<A>>(A(1))), store(deltas + at, Vec<A>{});
    }
    law.visit([&](auto rule) INLINE_LAMBDA {
      for (int64_t at = 0; at < n * H; at += W) {
        const Vec<A> logit = load(logits + at);
        const Applied weight = rule(logit, load(maxima + at));
        const Vec<A> scale = load(row_scales + at), derivative = weight.derivative * scale;
        const Vec<A> kept = weight.value * scale;
        store(derivatives + at, law.cap == 0 ? derivative : derivative * law.cap_derivative(logit));
        store(logits + at, a.dropout ? kept * load(keep + at) : kept);
      }
    });
  }
  // From products to the gradients of logits.
  NOINLINE void differentiate_weights(int64_t b, int n) {
    finish_products(b, n);
    for (int64_t at = 0; at < n * H; at += W)
      store(gradients + at, load(derivatives + at) * (load(products + at) - load(deltas + at)));
    if (a.grad_bias != nullptr) store_edge_scalars(a.grad_bias, b, n, gradients);
  }

  // to += the sum of the run's factors times the rows at the other ends; the run's own row is at the end `end`.
  NOINLINE void add_weighted_rows(End end, const Run& run, const Gathered& others, int64_t width, const Packing& packing,
                                  const A* factor, bool is_first, A* to) const {
    for_head_strips(H, width, packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      using S = decltype(strip);
      const Segment segment = {others, other_head(end, h) * width, nullptr, 0, run.first, run.last, H, is_first};
      A* acc_h = to + own_head(end, h) * width;
      const bool anew = begins_sum(end, h, run);
      Vec<A> sum[S::kVectors];
      EACH_VECTOR sum[k] = anew ? Vec<A>{} : strip.load_at(acc_h, k);
      add_weighted<kNone>(strip, heads, factor, segment, sum);
      EACH_VECTOR strip.store_at(acc_h, k, sum[k]);
    });
  }

  // The gradients of the values of a run's edges: each edge is visited once, so they are written, not added.
  NOINLINE void store_edge_value_gradients(const Run& run, int64_t b) {
    if (a.grad_edge_value == nullptr) return;
    for (int e = run.first; e < run.last; ++e) {
      T* to = static_cast<T*>(a.grad_edge_value) + (b * a.edges + edge[e]) * H * V;
      for_head_vectors(H, V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
        using S = decltype(strip);
        EACH_VECTOR {
          const Vec<A> grad_out = strip.load_at(gathered.row[e] + h * V, k);
          strip.store_at(to + h * V, k, grad_out * heads.spread(logits + e * H, k));
        }
      });
    }
  }

  const Packing value_packing;
  RowSums sums;

 private:
  A* sums_of_part(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_target.num_slots + slot) * (RowSums::kState * H + H * V);
  }
};

}  // namespace
