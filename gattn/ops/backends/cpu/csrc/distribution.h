// How the logits of a row become weights, and the derivatives of that.
//
// A weight is a function of its logit, the law, times a scale of the row. The softmax's law is exp(logit - maximum), and
// its scale the reciprocal of the row's sum. The other laws look at the logit alone; their scale is 1 or, if they are
// normalized, again that of the sum. Every kernel is compiled for all laws, and chooses among them outside of its loops.
#pragma once

#include "families.h"
#include "heads.h"

namespace {

// Laws, with their derivatives; kName is the name that Python asks for. A new one is a type here and in Laws.
//
// Some look at whole rows: these have rewritten the logits before they come here; see thresholds.h. The derivative is then
// that for a fixed threshold.

struct Exponential {
  static constexpr const char* kName = "softmax";
  static constexpr bool kHasBase = true;
  static INLINE Applied apply(Vec<A> logit) {
    const Vec<A> y = quick_exp(logit);  // less the maximum, or bounded by the sum of its row
    return {y, y};
  }
};
struct Logistic {
  static constexpr const char* kName = "sigmoid";
  static constexpr bool kHasBase = false;
  static INLINE Applied apply(Vec<A> logit) {
    const Vec<A> y = logistic(logit);
    return {y, y * (A(1) - y)};
  }
};
struct HyperbolicTangent {
  static constexpr const char* kName = "tanh";
  static constexpr bool kHasBase = false;
  static INLINE Applied apply(Vec<A> logit) {
    const Vec<A> y = vector_tanh(logit);
    return {y, A(1) - y * y};
  }
};
struct Linear {
  static constexpr const char* kName = "identity";
  static constexpr bool kHasBase = false;
  static INLINE Applied apply(Vec<A> logit) { return {logit, splat<Vec<A>>(A(1))}; }
};
// Logits as they are, minus infinity included.
struct Raw : Linear {
  static constexpr const char* kName = "logits";
};
struct Sparsemax {
  static constexpr const char* kName = "sparsemax";
  static constexpr bool kHasBase = false;
  static constexpr A kFactor = 1;
  static INLINE Applied apply(Vec<A> z) {
    return {z < A(0) ? Vec<A>{} : z, z > A(0) ? splat<Vec<A>>(A(1)) : Vec<A>{}};
  }
  // From the sums of a row's weights and derivatives to Newton's step towards a sum of 1.
  static INLINE Vec<A> step(Vec<A> value, Vec<A> derivative) { return (value - A(1)) / derivative; }
};
struct Entmax15 {
  static constexpr const char* kName = "entmax15";
  static constexpr bool kHasBase = false;
  static constexpr A kFactor = A(0.5);
  static INLINE Applied apply(Vec<A> z) {
    const Vec<A> root = z < A(0) ? Vec<A>{} : z;
    return {root * root, root};
  }
  static INLINE Vec<A> step(Vec<A> value, Vec<A> derivative) {
    const Vec<A> norm = vector_sqrt(value);
    return (norm - A(1)) * norm / derivative;
  }
};
struct TopK : Exponential {
  static constexpr const char* kName = "top_k";
};

using Laws = List<Exponential, Logistic, HyperbolicTangent, Linear, Raw, Sparsemax, Entmax15, TopK>;

template <class F, class... X>
constexpr int64_t place_of(List<X...>) {
  int64_t place = 0;
  (void)((!std::is_same_v<F, X> && ++place) && ...);
  return place;
}
constexpr int64_t kSoftmax = place_of<Exponential>(Laws()), kSparsemax = place_of<Sparsemax>(Laws()),
                  kEntmax15 = place_of<Entmax15>(Laws()), kTopK = place_of<TopK>(Laws());

// What there is to know of a weight without its row. The maximum of the row, `base`, is 0 for other laws than the
// softmax's. Minus infinity stands for no edge: its weight is 0.
class Law {
 public:
  explicit Law(const Arguments& a)
      : name(a.distribution),
        is_exponential(name == kSoftmax || name == kTopK),
        has_threshold(name == kSparsemax || name == kEntmax15),
        is_of_rows(has_threshold || name == kTopK),
        divides(is_exponential || (!has_threshold && a.distribution_constants[0] != 0)),
        is_normalized(divides || has_threshold),
        can_keep_weights(is_exponential && !is_of_rows && (name != kSoftmax || a.distribution_constants[0] == 0)),
        cap(name == kSoftmax ? A(a.distribution_constants[0]) : A(0)),
        epsilon(is_exponential ? A(0) : A(a.distribution_constants[1])) {}

  const int64_t name;
  const bool is_exponential, has_threshold;
  const bool is_of_rows;     // whether logits are rewritten, row by row
  const bool divides;        // whether weights are divided by the row's sum
  const bool is_normalized;  // whether weights depend on the others of the row
  const bool can_keep_weights;  // whether a weight is all that its derivative needs
  const A cap;               // of the logits; 0: none
  const A epsilon;           // is added to the sum of a row

  // Calls f(of), where of(logit, base) is the law's Applied.
  template <class F>
  INLINE void visit(F&& f) const {
    visit_from(Laws(), name, f);
  }

  // Logits become cap tanh(logit / cap); one of no edge stays what it is.
  NOINLINE void cap_logits(A* logits, int64_t count) const {
    if (cap == 0) return;
    for (int64_t at = 0; at < count; at += W) {
      const Vec<A> logit = load(logits + at);
      store(logits + at, logit == -A(INFINITY) ? logit : cap * vector_tanh(logit / cap));
    }
  }
  // The derivative of that, from what they became.
  INLINE Vec<A> cap_derivative(Vec<A> capped) const {
    const Vec<A> part = capped / cap;
    return capped == -A(INFINITY) ? Vec<A>{} : A(1) - part * part;
  }

 private:
  template <class First, class... Others, class F>
  INLINE void visit_from(List<First, Others...>, int64_t place, F& f) const {
    if constexpr (sizeof...(Others) > 0)
      if (place > 0) return visit_from(List<Others...>(), place - 1, f);
    f(Rule<First>());
  }
  template <class F>
  struct Rule {
    INLINE Applied operator()(Vec<A> logit, Vec<A> base) const {
      if constexpr (F::kHasBase) return F::apply(logit - base);
      if constexpr (std::is_same_v<F, Raw>) return F::apply(logit);
      const Applied y = F::apply(logit);
      const auto is_edge = logit != -A(INFINITY);
      return {is_edge ? y.value : Vec<A>{}, is_edge ? y.derivative : Vec<A>{}};
    }
  };
};

// The running sums of rows. A row's edges come in runs, and long rows in parts that are merged; its sum of weighted
// values is multiplied by the scale at the end. Maximum and scale of each row are kept for the backward pass.
class RowSums : Heads {
 public:
  // Numbers per head that are kept of a row, and those of a part of one; `state` is what a part leaves.
  static constexpr int64_t kStats = 2, kState = 2;
  static int64_t workspace_elements(int64_t heads) { return 3 * (heads + 2 * W); }

  // `workspace` is aligned.
  RowSums(const Arguments& a, A* workspace) : Heads(a.heads), law(a), sink(static_cast<const A*>(a.sink)) {
    const int64_t row = (H + 2 * W - 1) / W * W;
    maximum = workspace, sum = workspace + row, factor_ = workspace + 2 * row;
    for (int64_t h = 0; h < row; ++h) maximum[h] = 0, sum[h] = 0, factor_[h] = 1;
    if (sink != nullptr && is_cyclic) weight_of_sink = vector_exp(repeat_heads(sink));
  }

  // Whether the weights of the row so far are exponentials of its logits themselves.
  bool has_weights() const { return has_no_base; }
  // What earlier runs of the row summed up has to be multiplied by this.
  const A* factor() const { return factor_; }
  // The sums of the row so far, and what the values of a row with such sums are multiplied by.
  A* sums() { return sum; }
  INLINE Vec<A> scale_of(Vec<A> sums) const {
    return law.divides ? reciprocal(sums + law.epsilon) : splat<Vec<A>>(A(1));
  }

  // Begins a task: of a row's parts, none has the sink, which their merging adds.
  void start(bool is_part) { has_sink = sink != nullptr && !is_part; }

  // What the sums of the block's runs are multiplied by lies so far apart.
  int64_t scale_stride() const { return is_cyclic ? W : H; }
  // From the logits of a block's runs, which belong to rows one after another, to weights, and to what the sums of those
  // rows that end are multiplied by, in `scales`. Their stats are written, too. Unless `normal` is null, it gets what is left
  // for others to read: of rows that begin and end here, weights times their scale; of longer ones, weights without a base, or
  // logits.
  //
  // The base of exponentials, which is subtracted from logits, is 0 as long as their sum is neither huge nor tiny, and the
  // maximum so far in rows where it is.
  NOINLINE void add_runs(Runs runs, const A* logits, A* weights, A* stats, A* scales, A* normal) {
    const bool is_quick = law.is_exponential && is_cyclic && (runs[0].begins || has_no_base);
    LaneVec<A> inside = splat<LaneVec<A>>(LaneInt<A>(-1));
    if (is_quick) {
      for (int64_t at = 0; at < runs.back().last * H; at += W) store(weights + at, quick_exp(load(logits + at)));
      for (int r = 0; r < runs.count; ++r) {
        Vec<A> total = {};
        for_run(runs[r], [&](int64_t at, auto lanes) INLINE_LAMBDA { total += lanes.load_or(weights + at, Vec<A>{}); });
        total = fold_heads(total, [](Vec<A> x, Vec<A> y) INLINE_LAMBDA { return x + y; });
        if (!runs[r].begins) total += repeat_heads(sum);
        else if (has_sink) total += weight_of_sink;
        inside &= (total > kTiny) & (total < 1 / kTiny);
        store(scales + r * W, total);
      }
    }
    const bool are_inside = is_quick && !any_lane(~inside);
    for (int r = 0; r < runs.count; ++r) {
      const Run& run = runs[r];
      A *const scale = scales + r * scale_stride(), *const row = stats + r * kStats * H;
      if (are_inside || (is_quick && (run.first == run.last || is_inside(scale))))
        add_without_base(run, logits, weights, scale, row);
      else
        add_with_base(run, logits, weights, scale, row);
      if (normal == nullptr) continue;
      const A* const unfinished = is_quick && has_no_base ? weights : logits;
      if (run.begins && run.ends) multiply_run(run, scale, weights, normal);
      else memcpy(normal, unfinished, size_t(run.last * H) * sizeof(A));
    }
  }

 private:
  static constexpr A kTiny = A(1e-20);
  bool is_inside(const A* totals) const {
    bool is = true;
    for (int64_t h = 0; h < H; ++h) is = is && totals[h] > kTiny && totals[h] < 1 / kTiny;
    return is;
  }
  // `scale` holds the sum of the row so far.
  INLINE void add_without_base(const Run& run, const A* logits, A* weights, A* scale, A* stats) {
    has_no_base = true;
    if (run.last - run.first == 1 && run.begins && run.ends && !has_sink) {  // gets its edge's value, to the last bit
      const Vec<A> one = splat<Vec<A>>(A(1));
      store_part(weights + run.first * H, one, int(H));
      store(scale, one);
      store_part(stats, load(logits + run.first * H), int(H));
      store_part(stats + H, one, int(H));
      return;
    }
    if (!run.begins || !run.ends)
      for (int64_t h = 0; h < H; ++h) maximum[h] = 0, sum[h] = scale[h], factor_[h] = 1;
    const Vec<A> of_row = reciprocal(load(scale));
    store(scale, of_row);
    if (!run.ends) return;
    store_part(stats, Vec<A>{}, int(H));
    store_part(stats + H, of_row, int(H));
  }
  void add_with_base(const Run& run, const A* logits, A* weights, A* scale, A* stats) {
    memcpy(weights + run.first * H, logits + run.first * H, size_t((run.last - run.first) * H) * sizeof(A));
    has_no_base = false;
    add_run(run, weights, stats);
    if (!run.ends) return;
    if (is_cyclic) store(scale, repeat_heads(stats + H));
    else copy_heads(scale, stats + H);
  }
  // Turns the run's logits into weights, and brings the state up to date; the last run of a row writes its stats.
  NOINLINE void add_run(const Run& run, A* logits, A* stats) {
    if (!law.is_exponential) return add_run_of_law(run, logits, stats);
    if (!is_cyclic) {
      subtract_maximum(run, logits, stats);
      for_run(run, [&](int64_t at, auto lanes) INLINE_LAMBDA {
        lanes.store_to(logits + at, vector_exp(lanes.load_or(logits + at, Vec<A>{})));
      });
      add_weights(run, logits);
      if (run.ends) store_scales(stats);
      return;
    }
    const Vec<A> lowest = splat<Vec<A>>(-A(INFINITY));
    const bool begins_with_sink = run.begins && has_sink;
    const Vec<A> before = run.begins ? (has_sink ? repeat_heads(sink) : lowest) : repeat_heads(maximum);
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
    if (begins_with_sink) {
      total_weight += vector_exp(before - base);
    } else if (!run.begins) {
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

 public:
  // Parts of a row: their states are saved, and merged again, each head's with `width` sums of values. The last
  // step writes the row's stats.
  void save(A* state) const {
    memcpy(state, maximum, size_t(H) * sizeof(A));
    memcpy(state + H, sum, size_t(H) * sizeof(A));
  }
  void start_merging() {
    for (int64_t h = 0; h < H; ++h) {
      maximum[h] = sink != nullptr ? sink[h] : -A(INFINITY);
      sum[h] = sink != nullptr ? 1 : 0;
    }
  }
  NOINLINE void merge(const A* state, const A* part, int64_t width, A* acc) {
    for (int64_t h = 0; h < H; ++h) {
      const A most = state[h] > maximum[h] ? state[h] : maximum[h], base = finite_base(most);
      const A old_factor = exp_of(maximum[h] - base), new_factor = exp_of(state[h] - base);
      sum[h] = sum[h] * old_factor + state[H + h] * new_factor;
      maximum[h] = most;
      for (int64_t c = h * width; c < (h + 1) * width; ++c) acc[c] = acc[c] * old_factor + part[c] * new_factor;
    }
  }
  void finish_merging(A* stats) const {
    for (int64_t h = 0; h < H; ++h) stats[h] = finite_base(maximum[h]);
    store_scales(stats);
  }

 private:
  static A finite_base(A most) { return most == -A(INFINITY) ? A(0) : most; }
  // Only exact zeros are replaced, so that a NaN shows in the whole row.
  static INLINE Vec<A> reciprocal(Vec<A> x) { return x == A(0) ? Vec<A>{} : A(1) / x; }

  NOINLINE void store_scales(A* stats) const {
    for_heads([&](auto heads) INLINE_LAMBDA {
      using S = decltype(heads);
      EACH_VECTOR heads.store_at(stats + H, k, scale_of(heads.load_at(sum, k)));
    });
  }

  NOINLINE void add_run_of_law(const Run& run, A* logits, A* stats) {
    law.visit([&](auto of) INLINE_LAMBDA {
      for_run(run, [&](int64_t at, auto lanes) INLINE_LAMBDA {
        lanes.store_to(logits + at, of(lanes.load_or(logits + at, Vec<A>{}), Vec<A>{}).value);
      });
    });
    if (law.divides) sum_run(run, logits, sum);
    if (!run.ends) return;
    memset(stats, 0, size_t(H) * sizeof(A));  // for whoever reads them without a look at the law
    store_scales(stats);
  }

  // What add_run does, where H does not divide the lanes.
  NOINLINE void subtract_maximum(const Run& run, A* logits, A* stats) {
    for_heads([&](auto heads) INLINE_LAMBDA {
      using S = decltype(heads);
      EACH_VECTOR {
        Vec<A> before = splat<Vec<A>>(-A(INFINITY));
        if (!run.begins) before = heads.load_at(maximum, k);
        else if (has_sink) before = heads.load_at(sink, k);
        Vec<A> most = before;
        for (int e = run.first; e < run.last; ++e) {
          const Vec<A> logit = heads.load_at(logits + e * H, k);
          most = logit > most ? logit : most;
        }
        const Vec<A> base = most == -A(INFINITY) ? Vec<A>{} : most;
        // Of a row that begins, the sum so far is the sink's weight alone.
        if (!run.begins || has_sink) heads.store_at(factor_, k, vector_exp(before - base));
        heads.store_at(maximum, k, most);
        if (run.ends) heads.store_at(stats, k, base);
        for (int e = run.first; e < run.last; ++e)
          heads.store_at(logits + e * H, k, heads.load_at(logits + e * H, k) - base);
      }
    });
  }
  NOINLINE void add_weights(const Run& run, const A* logits) {
    for_heads([&](auto heads) INLINE_LAMBDA {
      using S = decltype(heads);
      EACH_VECTOR {
        Vec<A> total_weight = {};
        if (!run.begins) total_weight = heads.load_at(sum, k) * heads.load_at(factor_, k);
        else if (has_sink) total_weight = heads.load_at(factor_, k);
        for (int e = run.first; e < run.last; ++e) total_weight += heads.load_at(logits + e * H, k);
        heads.store_at(sum, k, total_weight);
      }
    });
  }

  const Law law;
  const A* const sink;
  bool has_sink = false, has_no_base = false;
  Vec<A> weight_of_sink = {};
  A *maximum, *sum, *factor_;
};

}  // namespace
