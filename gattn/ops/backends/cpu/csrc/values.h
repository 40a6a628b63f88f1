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
  static int64_t workspace_elements(const Arguments& a, int64_t sums) {
    return Block::workspace_elements(a, sums) + RowSums::workspace_elements(a.heads);
  }

  // Whether weights are left for a user, or for the backward pass.
  bool leaves_weights() const { return a.weights != nullptr || keeps_weights; }
  // What was left in the places of a row's weights becomes these: exponentials, and from `first_logit` on logits.
  NOINLINE void finish_weights(int64_t row, int64_t first, int64_t first_logit, int64_t last, int64_t b) {
    const A *const base = stats(row, b), *const scale = base + H;
    for_heads([&](auto heads) INLINE_LAMBDA {
      using S = decltype(heads);
      EACH_VECTOR heads.store_at(slopes, k, vector_exp(-heads.load_at(base, k)) * heads.load_at(scale, k));
    });
    const auto finish = [&](auto place) INLINE_LAMBDA {
      constexpr bool kApart = !std::is_pointer_v<decltype(place)>;
      for (int64_t p = first; p < last; p += kBlock) {
        const int n = int(min(kBlock, last - p));
        A* weights = products;
        if constexpr (kApart) {
          for (int e = 0; e < n; ++e) copy_heads(weights + e * H, place(p + e));
        } else {
          weights = place + p * H;
        }
        if (p < first_logit)
          multiply_numbers(weights, n, base, slopes, [](Vec<A> x, Vec<A>) INLINE_LAMBDA -> Applied { return {x, x}; });
        else
          law.visit([&](auto rule) INLINE_LAMBDA { multiply_numbers(weights, n, base, scale, rule); });
        if constexpr (kApart)
          for (int e = 0; e < n; ++e) copy_heads(place(p + e), weights + e * H);
      }
    };
    if (a.weights != nullptr)
      finish([&](int64_t p) INLINE_LAMBDA { return static_cast<A*>(a.weights) + (b * a.edges + edge_of(p)) * H; });
    if (keeps_weights) finish(kept_logits(0, b));
  }

 private:
  // numbers_e becomes rule(numbers_e, base) scale.
  template <class F>
  INLINE void multiply_numbers(A* numbers, int n, const A* base, const A* scale, F&& rule) {
    if (is_cyclic) {
      const Vec<A> of_base = repeat_heads(base), of_scale = repeat_heads(scale);
      for_strips(n * H, [&](auto strip) INLINE_LAMBDA {
        using S = decltype(strip);
        EACH_VECTOR strip.store_at(numbers, k, rule(strip.load_at(numbers, k), of_base).value * of_scale);
      });
      return;
    }
    for_heads([&](auto heads) INLINE_LAMBDA {
      using S = decltype(heads);
      for (A* x = numbers; x < numbers + n * H; x += H)
        EACH_VECTOR {
          const Applied weight = rule(heads.load_at(x, k), heads.load_at(base, k));
          heads.store_at(x, k, weight.value * heads.load_at(scale, k));
        }
    });
  }

 protected:
  NOINLINE Values(const Arguments& arguments, A* workspace, int64_t sums_of_rows)
      : Block(arguments, workspace, sums_of_rows), value_packing(V, group), sums(arguments, rest) {}

  // ------------------------------------------------------------------------------------------------------------ forward

  // From a block's logits to weights, and to what they add to the output.
  NOINLINE void sum_block(int64_t b, int64_t p, int n, Runs runs) {
    if (keeps_logits && !keeps_weights) keep_scalars(b, p, n, logits);
    A* const weights = gradients;
    A* const normal = leaves_weights() ? products : nullptr;
    sums.add_runs(runs, logits, weights, stats(runs[0].row, b), row_scales, normal);
    if (normal != nullptr) leave_weights(b, p, n, runs[0], normal);
    if (a.dropout) {
      draw_dropout(b, n);
      for (int64_t at = 0; at < n * H; at += W) store(weights + at, load(weights + at) * load(keep + at));
    }

    // Keys that are values have been gathered for the score.
    if (!a.value_is_key) gathered.gather(value_row(0, b), a.value_row, a.sources, a.by_target.node + p, n);
    const T* const* edges = value_edges(b, n);
    sum_values(runs, edges, b, weights, sums.factor(), row_scales);
  }

  // Scalars of the block's edges, for the backward pass.
  void keep_scalars(int64_t b, int64_t p, int n, const A* scalars) {
    if (a.logits == nullptr) {
      for (int e = 0; e < n; ++e) copy_heads(kept(p + e, b), scalars + e * H);
      return;
    }
    memcpy(kept(p, b), scalars, size_t(n * H) * sizeof(A));
    prefetch_for_writing(kept(p + n, b), kBlock * H * int64_t(sizeof(A)));
  }
  // Leaves what add_runs() made of a block's weights, and finishes those of a longer row that ends here.
  NOINLINE void leave_weights(int64_t b, int64_t p, int n, const Run& run, const A* normal) {
    if (run.begins) first_logit = kNever;
    if (first_logit == kNever && !sums.has_weights()) first_logit = p;
    if (a.weights != nullptr) store_edge_scalars(a.weights, b, n, normal);
    if (keeps_weights) keep_scalars(b, p, n, normal);
    const int32_t* start = a.by_target.start + run.row;
    if (!run.begins && run.ends) finish_weights(run.row, start[0], first_logit, start[1], b);
  }

  // A part of a row leaves its sums.
  NOINLINE void save_sums(int64_t slot, int64_t first_edge, int64_t b) {
    A* to = sums_of_part(b, slot);
    sums.save(to);
    memcpy(to + RowSums::kState * H, acc, size_t(H * V) * sizeof(A));
    to[RowSums::kState * H + H * V] = first_logit == kNever ? A(kNever) : A(first_logit - first_edge);
  }
  // Finishes the weights of a part, after the row.
  void finish_part(const Task& task, int64_t b) {
    const A first = sums_of_part(b, task.slot)[RowSums::kState * H + H * V];
    const int64_t logit = first == A(kNever) ? kNever : task.first_edge + int64_t(first);
    finish_weights(task.first_row, task.first_edge, logit, task.last_edge, b);
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
    store_output(rows.split_row[split], b, row + H);
  }

  // Sums up the values of each run by their weights, and stores a row's output where it ends. `factor` corrects what
  // earlier runs of the row left in acc, `scales` the results.
  NOINLINE void sum_values(Runs runs, const T* const* edges, int64_t b, const A* weights, const A* factor,
                           const A* scales) {
    const A* bias = static_cast<const A*>(a.out_bias);
    const bool is_first = edges != nullptr || !a.value_is_key;  // rows of keys have been read for the logits
    for_head_strips(H, V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      using S = decltype(strip);
      const A* scale = scales;
      for (const Run& run : runs) {
        const Segment segment = {gathered, h / group * V, edges, h * V, run.first, run.last, H, is_first};
        Vec<A> sum[S::kVectors] = {};
        if (!run.begins) EACH_VECTOR sum[k] = strip.load_at(acc + h * V, k) * heads.spread(factor, k);
        if (edges != nullptr) add_weighted<kOwnRows>(strip, heads, weights, segment, sum);
        else add_weighted<kNone>(strip, heads, weights, segment, sum);
        if (!run.ends) {
          EACH_VECTOR strip.store_at(acc + h * V, k, sum[k]);
          continue;
        }
        T* const out = output(run.row, b);
        A* const wide = wide_output(run.row, b);
        EACH_VECTOR {
          const Vec<A> result = sum[k] * heads.spread(scale, k);
          strip.store_at(out + h * V, k, bias == nullptr ? result : result + strip.load_at(bias + h * V, k));
          if (wide != nullptr) strip.store_at(wide + h * V, k, result);
        }
        scale += sums.scale_stride();
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

  // Where the gradient of the value is added up, which belongs to run r.
  A* value_sums(const Run& run, int r, int64_t b) const {
    return place_of_gradient(run, a.grad_value, b * a.sources + run.row, G * V, acc + r * G * V);
  }
  // products = <grad_out_i, v_j + e_ij>, and acc = the gradient of v_j: the sum of weights, in `logits`, times
  // grad_out_i. The rows of grad_out are gathered; each is loaded once.
  NOINLINE void multiply_values(Runs runs, int64_t b, int n) {
    const T* const* edges = value_edges(b, n);
    memset(products, 0, size_t(n * H) * sizeof(A));
    for_head_strips(H, V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      const int64_t own = own_head(kSource, h) * V;
      for (int r = 0; r < runs.count; ++r) {
        const Run& run = runs[r];
        const T* value = value_row(run.row, b) + own;
        A* to = value_sums(run, r, b) + own;
        const Segment segment = {gathered, h * V, edges, h * V, run.first, run.last, H};
        const bool anew = begins_sum(kSource, h, run);
        if (edges == nullptr)
          add_products_and_weighted<kNone>(strip, heads, value, logits, segment, anew, products, to);
        else
          add_products_and_weighted<kOwnRows>(strip, heads, value, logits, segment, anew, products, to);
      }
    });
  }

  // to_e += the products of the runs' own rows, row_of(its number) at the end `end`, and the edges' other ends, `width`
  // channels per head.
  template <class F, class R>
  NOINLINE void add_row_products(const F& family, End end, Runs runs, R&& row_of, const Gathered& others,
                                 const T* const* edges, int64_t width, const Packing& packing, A* to) const {
    for_head_strips(H, width, packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      for (const Run& run : runs) {
        const T* own = row_of(run.row) + own_head(end, h) * width;
        const Segment segment = {others, other_head(end, h) * width, edges, h * width, run.first, run.last, H};
        if (edges == nullptr) add_values<kTarget, kNone, false>(family, strip, heads, nullptr, own, segment, to);
        else if (end == kTarget) add_values<kTarget, kOwnRows, false>(family, strip, heads, nullptr, own, segment, to);
        else add_values<kSource, kOwnRows, false>(family, strip, heads, nullptr, own, segment, to);
      }
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
    if (keeps_weights) {
      for (int e = 0; e < n; ++e) copy_heads(deltas + e * H, terms[e] + 2 * H);
      if (!a.dropout) return;
      for (int64_t at = 0; at < n * H; at += W) {
        const Vec<A> weight = load(logits + at);
        store(derivatives + at, weight), store(logits + at, weight * load(keep + at));
      }
      return;
    }
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
    const A* const derivative = keeps_weights && !a.dropout ? logits : derivatives;  // of a weight, which is its own
    for (int64_t at = 0; at < n * H; at += W)
      store(gradients + at, load(derivative + at) * (load(products + at) - load(deltas + at)));
    if (a.grad_bias != nullptr) store_edge_scalars(a.grad_bias, b, n, gradients);
  }

  // sums_of(run, its number) += the sum of the run's factors times the rows at the other ends; its own row is at the
  // end `end`.
  template <class R>
  NOINLINE void add_weighted_rows(End end, Runs runs, const Gathered& others, int64_t width, const Packing& packing,
                                  const A* factor, bool is_first, R&& sums_of) const {
    for_head_strips(H, width, packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      using S = decltype(strip);
      for (int r = 0; r < runs.count; ++r) {
        const Run& run = runs[r];
        const Segment segment = {others, other_head(end, h) * width, nullptr, 0, run.first, run.last, H, is_first};
        A* const to = sums_of(run, r) + own_head(end, h) * width;
        const bool anew = begins_sum(end, h, run);
        Vec<A> sum[S::kVectors];
        EACH_VECTOR sum[k] = anew ? Vec<A>{} : strip.load_at(to, k);
        add_weighted<kNone>(strip, heads, factor, segment, sum);
        EACH_VECTOR strip.store_at(to, k, sum[k]);
      }
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
  static constexpr int64_t kNever = int64_t(1) << 40;
  int64_t first_logit = kNever;  // of the current row, among what is left of its weights

 private:
  A* sums_of_part(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_target.num_slots + slot) * (RowSums::kState * H + H * V + 1);
  }
};

}  // namespace
