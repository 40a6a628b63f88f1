// Logits of a block by a family of scores, and their gradients.
//
// ScalarScores and VectorScores have the same members: those of a family whose ends are numbers, and of one whose ends
// are rows of channels.
#pragma once

#include "values.h"

namespace {

template <class F>
class ScalarScores : public Values {
 protected:
  ScalarScores(const Arguments& arguments, A* workspace, int64_t sums)
      : Values(arguments, workspace, sums), family(a.constants) {}

  int64_t key_width() const { return H; }
  int64_t query_width() const { return H; }

  // Logits of edges with the same target in each run, but for bias, cap and mask.
  NOINLINE void target_logits(int64_t b, int64_t p, int n, Runs runs) {
    const int32_t* node = a.by_target.node + p;
    for (int e = 0; e < n; ++e) copy_heads(logits + e * H, key(node[e], b));
    if (a.query != nullptr)
      for (const Run& run : runs) add_to_run(run, query(run.row, b), logits);
    apply(b, n);
  }

  // Logits of edges with the same source in each run, the same way.
  NOINLINE void source_logits(int64_t b, int64_t, int n, Runs runs, const A* const* terms) {
    for (int e = 0; e < n; ++e) copy_heads(logits + e * H, terms[e] + 3 * H);
    for (const Run& run : runs) add_to_run(run, key(run.row, b), logits);
    apply(b, n);
  }

  // What source_logits needs of a target.
  void fill_target_term(int64_t i, int64_t b, A* term) const {
    if (a.query == nullptr) memset(term, 0, size_t(H) * sizeof(A));
    else memcpy(term, query(i, b), size_t(H) * sizeof(A));
  }

  // Turns gradients of logits into those of the ends' sum.
  void finish_gradients(int64_t b, int n) {
    for (int64_t at = 0; at < n * H; at += W) store(gradients + at, load(gradients + at) * load(slopes + at));
    if (a.edge_channels > 0) projection.add_gradients(edge, b, n, gradients, nullptr);
    else if (a.grad_edge != nullptr) store_edge_scalars(a.grad_edge, b, n, gradients);
  }

  // Where the gradient of the key or query is added up, which belongs to run r, and adding them.
  A* key_sums(const Run&, int r, int64_t) const { return acc_key + r * H; }
  A* query_sums(const Run&, int r, int64_t) const { return acc + r * H; }
  void add_key_gradients(Runs runs, int64_t) {
    for (int r = 0; r < runs.count; ++r) sum_run(runs[r], gradients, acc_key + r * H);
  }
  void load_keys(int64_t, int64_t, int) {}
  void add_query_gradients(Runs runs, int64_t) {
    for (int r = 0; r < runs.count; ++r) sum_run(runs[r], gradients, acc + r * H);
  }

  NOINLINE void store_edge_gradients(const Run& run, int64_t b) { store_edge_value_gradients(run, b); }
  void finish_edge_gradients(int64_t, int) {}
  NOINLINE void store_key_gradient(int64_t j, int64_t b, const A* sums, const A*) {
    if (a.grad_key == nullptr) return;
    memcpy(static_cast<A*>(a.grad_key) + (b * a.sources + j) * H, sums, size_t(H) * sizeof(A));
  }
  NOINLINE void store_query_gradient(int64_t i, int64_t b, const A* sums) {
    memcpy(static_cast<A*>(a.grad_query) + (b * a.targets + i) * H, sums, size_t(H) * sizeof(A));
  }

  // There is no vector.
  void start_vector_gradient() {}
  void add_source_to_vector_gradient(int64_t, int64_t, const A*) {}
  void add_target_to_vector_gradient(int64_t, int64_t, const A*) {}
  void store_vector_gradient(int64_t, int64_t) {}

  // Query, key and edge come in the type that is computed in.
  const A* query(int64_t i, int64_t b) const {
    return static_cast<const A*>(a.query) + b * a.query_batch + i * a.query_row;
  }
  const A* key(int64_t j, int64_t b) const {
    return static_cast<const A*>(a.key) + b * a.key_batch + j * a.key_row;
  }

  const F family;

 private:
  // From the sum of both ends to logits, and their derivatives in slopes.
  NOINLINE void apply(int64_t b, int n) {
    if (a.edge_channels > 0) {
      const A* terms = projection.projected<A>(n);
      for (int64_t at = 0; at < n * H; at += W) store(logits + at, load(logits + at) + load(terms + at));
    } else if (a.edge != nullptr) {
      add_edge_scalars(a.edge, a.edge_batch, b, n, logits);
    }
    for (int64_t at = 0; at < n * H; at += W) {
      const Applied applied = family.apply(load(logits + at));
      store(slopes + at, applied.derivative);
      store(logits + at, applied.value);
    }
  }
};

template <class F>
class VectorScores : public Values {
 protected:
  VectorScores(const Arguments& arguments, A* workspace, int64_t sums)
      : Values(arguments, workspace, sums), family(a.constants), key_packing(C, group), signs_bytes(bytes_of_signs(C)) {}

  int64_t key_width() const { return G * C; }
  int64_t query_width() const { return H * C; }

  NOINLINE void target_logits(int64_t b, int64_t p, int n, Runs runs) {
    gathered.gather(key_row(0, b), a.key_row, a.sources, a.by_target.node + p, n);
    vector_logits(kTarget, gathered, b, n, runs, has_record ? recorded_signs(p, b) : nullptr);
  }
  NOINLINE void source_logits(int64_t b, int64_t p, int n, Runs runs, const A* const*) {
    queries.gather(query_row(0, b), a.query_row, a.targets, a.by_source.node + p, n);
    if (needs_no_logits()) edges = score_edges(b, n);
    else vector_logits(kSource, queries, b, n, runs, nullptr);
  }

  void fill_target_term(int64_t, int64_t, A*) const {}
  void finish_gradients(int64_t, int n) {
    if constexpr (!F::kHasVector) {
      for (int64_t at = 0; at < n * H; at += W) {
        const Vec<A> gradient = load(gradients + at) * family.scale();
        store(gradients + at, family.is_linear() ? gradient : gradient * load(slopes + at));
      }
    }
  }

  // Rows that are read again stay in the workspace.
  A* key_sums(const Run& run, int r, int64_t b) const {
    A* const sums = acc_key + r * key_width();
    return F::kHasVector ? sums : place_of_gradient(run, a.grad_key, b * a.sources + run.row, key_width(), sums);
  }
  A* query_sums(const Run& run, int r, int64_t b) const {
    A* const sums = acc + r * query_width();
    return F::kHasVector ? sums : place_of_gradient(run, a.grad_query, b * a.targets + run.row, query_width(), sums);
  }
  void add_key_gradients(Runs runs, int64_t b) {
    A* outputs = F::kHasVector && a.grad_vector != nullptr ? total : nullptr;
    add_gradients(kSource, runs, b, queries, outputs);
  }
  void load_keys(int64_t b, int64_t p, int n) {
    number_edges(n, [&](int e) INLINE_LAMBDA { return edge_of(p + e); });
    edges = score_edges(b, n);
    gathered.gather(key_row(0, b), a.key_row, a.sources, a.by_target.node + p, n);
  }
  void add_query_gradients(Runs runs, int64_t b) { add_gradients(kTarget, runs, b, gathered, nullptr); }

  // Each edge is visited once, so its gradients are written, not added. Those of projected edges stay in the block
  // until all are there.
  NOINLINE void store_edge_gradients(const Run& run, int64_t b) {
    const bool is_value = a.edge_channels > 0 ? a.edge_value != nullptr : a.grad_edge == a.grad_edge_value;
    for_edges_and_heads(run, [&](int e, int64_t h) INLINE_LAMBDA {
      if (a.edge_channels > 0) {
        A* to = projection.gradient_of_row(e) + h * C;
        if (is_value) store_edge_gradient<true, false>(run, e, h, b, to);
        else store_edge_gradient<false, false>(run, e, h, b, to);
        return;
      }
      T* to = static_cast<T*>(a.grad_edge) + ((b * a.edges + edge[e]) * H + h) * C;
      if (is_value) return store_edge_gradient<true, true>(run, e, h, b, to);
      if (a.grad_edge != nullptr) store_edge_gradient<false, true>(run, e, h, b, to);
    });
    if (!is_value && a.edge_channels == 0) store_edge_value_gradients(run, b);
  }
  void finish_edge_gradients(int64_t b, int n) {
    if (a.edge_channels == 0 || (a.grad_edge == nullptr && a.grad_edge_projection == nullptr)) return;
    projection.add_gradients(edge, b, n, projection.gradient_of_row(0), F::kHasVector ? vector() : nullptr);
  }

  NOINLINE void store_key_gradient(int64_t j, int64_t b, A* sums, const A* value_sums) {
    weigh(sums, G * C);
    if (a.value_is_key)
      for (int64_t c = 0; c < G * C; ++c) sums[c] += value_sums[c];
    store_gradient(sums, a.grad_key, b * a.sources + j, G * C);
  }
  NOINLINE void store_query_gradient(int64_t i, int64_t b, A* sums) {
    weigh(sums, H * C);
    store_gradient(sums, a.grad_query, b * a.targets + i, H * C);
  }

  // The vector's gradient: one partial sum per task. With kept signs, the sum of ds activation(q + k) is taken apart
  // into <q, sum of ds activation'> for each target and <k, the same> for each source.

  void start_vector_gradient() {
    if (F::kHasVector && a.grad_vector != nullptr) memset(total, 0, size_t(H * C) * sizeof(A));
  }
  void add_source_to_vector_gradient(int64_t j, int64_t b, const A* sums) { add_to_vector_gradient(key_row(j, b), sums); }
  void add_target_to_vector_gradient(int64_t i, int64_t b, const A* sums) {
    add_to_vector_gradient(query_row(i, b), sums);
  }
  void store_vector_gradient(int64_t task, int64_t b) {
    if (!F::kHasVector || a.grad_vector == nullptr) return;
    A* to = static_cast<A*>(a.grad_vector) + (task * a.batch + b) * H * C;
    memcpy(to, total, size_t(H * C) * sizeof(A));
  }

 private:
  // Then the backward pass has a record, unless edges have rows of their own, or there are none.
  static constexpr bool kSigns = F::kKeepsSigns && kHasBits<A>;

  // Kept logits are computed again only where their derivatives need it.
  bool needs_no_logits() const { return a.logits != nullptr && family.is_linear(); }
  const A* vector() const { return static_cast<const A*>(a.vector); }

  // The run's own row is at the end `end`, `others` are the rows of the edges' other ends. `kept` is where the signs of
  // the block's edges go, or null.
  NOINLINE void vector_logits(End end, const Gathered& others, int64_t b, int n, Runs runs,
                              uint8_t* kept) {
    edges = score_edges(b, n);
    memset(logits, 0, size_t(n * H) * sizeof(A));
    const auto own_row = [&](int64_t row) { return end == kTarget ? query_row(row, b) : key_row(row, b); };
    if constexpr (!F::kHasVector) {
      add_row_products(family, end, runs, own_row, others, edges, C, key_packing, logits);
    } else {
      for_head_strips(H, C, key_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
        const A* vector_h = vector() + h * C;
        const Signs to = {kept == nullptr ? nullptr : kept + h * signs_bytes, a.record_bytes};
        for (const Run& run : runs) {
          const T* x = own_row(run.row) + own_head(end, h) * C;
          const Segment segment = {others, other_head(end, h) * C, edges, h * C, run.first, run.last, H};
          if constexpr (F::kIsSlow)
            add_slow_values(family, strip, heads, vector_h, x, segment, logits);
          else if (edges != nullptr)
            add_values<kTarget, kOwnRows, kSigns>(family, strip, heads, vector_h, x, segment, logits, to);
          else if (kSigns && kept != nullptr)
            add_values<kTarget, kNone, kSigns>(family, strip, heads, vector_h, x, segment, logits, to);
          else
            add_values<kTarget, kNone, false>(family, strip, heads, vector_h, x, segment, logits);
        }
      });
    }
    if constexpr (!F::kHasVector) {
      for (int64_t at = 0; at < n * H; at += W) store(logits + at, load(logits + at) * family.scale());
      if (family.is_linear()) return;
      for (int64_t at = 0; at < n * H; at += W) {
        const Applied applied = family.finish(load(logits + at));
        store(slopes + at, applied.derivative);
        store(logits + at, applied.value);
      }
    }
  }

  // The sums of the runs += those of the logits' gradients times their derivatives by the runs' own rows, but for the
  // vector or scale; outputs, unless null, += that of the gradients times the values.
  NOINLINE void add_gradients(End end, Runs runs, int64_t b, const Gathered& others, A* outputs) {
    const bool is_first = end == kTarget || needs_no_logits();  // otherwise queries have been read for the logits
    const auto sums_of = [&](const Run& run, int r) INLINE_LAMBDA {
      return end == kTarget ? query_sums(run, r, b) : key_sums(run, r, b);
    };
    const auto segment_of = [&](const Run& run, int64_t h) INLINE_LAMBDA -> Segment {
      return {others, other_head(end, h) * C, edges, h * C, run.first, run.last, H, is_first};
    };
    if constexpr (kSigns) {
      if (has_record) {
        for_head_strips(H, C, key_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
          for (int r = 0; r < runs.count; ++r)
            add_slopes(strip, heads, family.slope, gradients, signs, h * signs_bytes, segment_of(runs[r], h),
                       begins_sum(end, h, runs[r]), sums_of(runs[r], r) + own_head(end, h) * C);
        });
        return;
      }
    }
    if constexpr (!F::kHasVector)
      if (edges == nullptr) return add_weighted_rows(end, runs, others, C, key_packing, gradients, is_first, sums_of);
    const auto add = [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
      A* outputs_h = !F::kHasVector || outputs == nullptr ? nullptr : outputs + h * C;
      for (int r = 0; r < runs.count; ++r) {
        const Segment segment = segment_of(runs[r], h);
        const bool anew = begins_sum(end, h, runs[r]);
        const T* own = (end == kTarget ? query_row(runs[r].row, b) : key_row(runs[r].row, b)) + own_head(end, h) * C;
        A* to = sums_of(runs[r], r) + own_head(end, h) * C;
        if constexpr (F::kIsSlow) {
          add_slow_derivatives(family, strip, heads, own, gradients, segment, anew, to, outputs_h);
        } else if (F::kHasVector && !kSigns && edges == nullptr) {
          if (end == kTarget)
            add_derivatives<kTarget, kNone>(family, strip, heads, own, gradients, segment, anew, to, nullptr);
          else
            add_derivatives<kSource, kNone>(family, strip, heads, own, gradients, segment, anew, to, outputs_h);
        } else if (end == kTarget) {
          add_derivatives<kTarget, kOwnRows>(family, strip, heads, own, gradients, segment, anew, to, nullptr);
        } else {
          add_derivatives<kSource, kOwnRows>(family, strip, heads, own, gradients, segment, anew, to, outputs_h);
        }
      }
    };
    // Rows of edges, which are read but once, take longer than what longer strips save.
    if constexpr (kSigns) for_head_vectors(H, C, key_packing, add);
    else if constexpr (F::kIsSlow) for_head_strips<4>(H, C, key_packing, add);
    else for_head_strips(H, C, key_packing, add);
  }

  // The gradient of an edge's term for one head; of one that is projected (not kIsWhole), but for the vector. With
  // kIsValue the term is also added to the edge's value.
  template <bool kIsValue, bool kIsWhole, class X>
  INLINE void store_edge_gradient(const Run& run, int e, int64_t h, int64_t b, X* to) {
    const T* grad_out = gathered.row[e] + h * V;
    const A weight = logits[e * H + h], gradient = gradients[e * H + h];
    const T* query = has_record ? nullptr : queries.row[e] + h * C;
    const T* key = key_row(run.row, b) + h / group * C;
    for_vectors(C, [&](auto strip) INLINE_LAMBDA {
      using S = decltype(strip);
      EACH_VECTOR {
        Vec<A> of_value;
        if constexpr (kIsValue) of_value = strip.load_at(grad_out, k) * weight;
        Vec<A> derivative;
        if (kIsWhole || !has_record) {
          // Key and edge may change places.
          derivative = family.template apply<kSource>(strip.load_at(score_edge[e] + h * C, k), strip.load_at(query, k),
                                                      strip.load_at(key, k)).derivative;
        } else {
          derivative = recorded_derivative(strip, signs[e], h, k);
        }
        Vec<A> result;
        if constexpr (!F::kHasVector) result = derivative * gradient;
        else if constexpr (kIsWhole) result = strip.load_at(vector() + h * C, k) * derivative * gradient;
        else result = derivative * gradient;
        if constexpr (kIsValue) result += of_value;
        strip.store_at(to, k, result);
      }
    });
  }

  template <class S>
  INLINE Vec<A> recorded_derivative(S strip, const uint8_t* row, int64_t h, int k) const {
    if constexpr (kSigns) {
      LaneBits bits;
      if (key_packing.possible) {
        memcpy(&bits, row + h * C / W * int(sizeof bits), sizeof bits);
        bits = LaneBits(bits >> h * C % W);
      } else {
        memcpy(&bits, row + h * signs_bytes + strip.first / 8 + k * int(sizeof bits), sizeof bits);
      }
      return select_bits(bits, splat<Vec<A>>(A(1)), splat<Vec<A>>(family.slope));
    } else {
      return Vec<A>{};
    }
  }

  // Multiplies a sum of derivatives by the vector.
  NOINLINE void weigh(A* row, int64_t width) const {
    if constexpr (F::kHasVector)
      for (int64_t c = 0; c < width; ++c) row[c] *= vector()[c];
  }

  NOINLINE void add_to_vector_gradient(const T* row, const A* derivatives) {
    if constexpr (F::kKeepsSigns) {
      if (!has_record || a.grad_vector == nullptr) return;
      for_strips(H * C, [&](auto strip) INLINE_LAMBDA {
        using S = decltype(strip);
        EACH_VECTOR strip.store_at(
            total, k, strip.load_at(total, k) + strip.load_at(row, k) * strip.load_at(derivatives, k));
      });
    }
  }

  const F family;
  const Packing key_packing;
  const int64_t signs_bytes;
  const T* const* edges = nullptr;  // the block's, as soon as they are asked for; with a record they never are
};

template <class F, bool kScalar>
struct ScoresOf {
  using type = VectorScores<F>;
};
template <class F>
struct ScoresOf<F, true> {
  using type = ScalarScores<F>;
};
template <class F>
using Scores = typename ScoresOf<F, F::kScalar>::type;

}  // namespace
