// Laws of whole rows: which edges have weight, and which have none, depends on all logits of a row.
//
// The logits are rewritten where they lie, so that each weight becomes a function of its own number: sparsemax and entmax
// subtract the row's threshold, and top-k puts minus infinity where there is no weight and leaves the rest to the softmax.
#pragma once

#include "distribution.h"

namespace {

class Thresholds : protected Heads {
 public:
  explicit Thresholds(const Arguments& a)
      : Heads(a.heads),
        law(a.distribution),
        num_kept(law == kTopK ? int64_t(a.distribution_constants[0]) : 0) {}

  // Rewrites the logits of a row, H for each of its `count` edges.
  NOINLINE void rewrite(A* logits, int64_t count) const {
    if (law == kSparsemax) return for_columns(logits, count, subtract_threshold<Sparsemax>);
    if (law == kEntmax15) return for_columns(logits, count, subtract_threshold<Entmax15>);
    if (count > num_kept)
      for_columns(logits, count, [&](const Column& column) INLINE_LAMBDA { keep_largest(column, num_kept); });
  }

 protected:
  using Bits = LaneVec<A>;

  // The logits of as many heads as a vector has lanes: a vector for each edge, or, where H divides the lanes, for several
  // edges. There are `last` logits in the last vector and `lanes` in the others; they read as `beside` after these.
  struct Column {
    const Heads& heads;
    A* logits;
    int64_t count, stride, vectors;
    int lanes, last;
    Vec<A> beside = splat<Vec<A>>(-A(INFINITY));

    INLINE int lanes_at(int64_t i) const { return i + 1 < vectors ? lanes : last; }
    INLINE Vec<A> at(int64_t i) const {
      const int n = lanes_at(i);
      if (n == W) return load(logits + i * stride);
      return first_lanes_of<A>(load_part(logits + i * stride, n), beside, n);
    }
    template <class F>
    INLINE void map(F&& f) const {
      for (int64_t i = 0; i < vectors; ++i) {
        const int n = lanes_at(i);
        if (n == W) store(logits + i * stride, f(at(i)));
        else store_part(logits + i * stride, f(at(i)), n);
      }
    }
    // Combines the results of f for each head, in all lanes of the head.
    template <class V, class F, class Combine>
    INLINE V reduce(V total, F&& f, Combine&& combine) const {
      // In runs, because a long sum would lose digits.
      for (int64_t first = 0; first < vectors; first += kRun) {
        V part = f(at(first));
        for (int64_t i = first + 1; i < min(vectors, first + kRun); ++i) part = combine(part, f(at(i)));
        total = combine(total, part);
      }
      return stride == W ? heads.fold_heads(total, combine) : total;
    }
  };
  static constexpr int64_t kRun = 64;

  template <class F>
  INLINE void for_columns(A* logits, int64_t count, F&& f) const {
    if (count == 0) return;
    if (is_cyclic) {
      const int64_t numbers = count * H, vectors = (numbers + W - 1) / W;
      return f(Column{*this, logits, count, W, vectors, W, int(numbers - (vectors - 1) * W)});
    }
    for (int64_t h = 0; h < H; h += W) {
      const int lanes = int(min(W, H - h));
      f(Column{*this, logits + h, count, H, count, lanes, lanes});
    }
  }

  // The largest logit of each head; 0 if all are minus infinity, of which -inf + inf must not be made.
  static INLINE Vec<A> base_of(const Column& column) {
    const Vec<A> most = column.reduce(
        splat<Vec<A>>(-A(INFINITY)), [](Vec<A> x) INLINE_LAMBDA { return x; },
        [](Vec<A> x, Vec<A> y) INLINE_LAMBDA { return x > y ? x : y; });
    return most == -A(INFINITY) ? Vec<A>{} : most;
  }

 private:
  // Finds the t for which the weights F(logit - t) sum to one by Newton's iteration. It starts below t, and never steps
  // beyond: the sum, for entmax its root, is a convex function of t.
  template <class F>
  static INLINE void subtract_threshold(const Column& column) {
    const Vec<A> base = base_of(column);
    column.map([&](Vec<A> x) INLINE_LAMBDA { return F::kFactor * (x - base); });
    Vec<A> threshold = splat<Vec<A>>(A(-1)), next;
    while (true) {
      const Applied sums = column.reduce(
          Applied{}, [&](Vec<A> z) INLINE_LAMBDA { return F::apply(z - threshold); },
          [](Applied x, Applied y) INLINE_LAMBDA { return x + y; });
      next = threshold + F::step(sums.value, sums.derivative == A(0) ? splat<Vec<A>>(A(1)) : sums.derivative);
      const Bits grows = next > threshold;
      if (!any_lane(grows)) break;
      threshold = grows ? next : threshold;
    }
    threshold = next == next ? threshold : next;  // a NaN shows in the whole row
    // At the threshold, a derivative may jump: rounding must not decide about it.
    const A error = 4 * (sizeof(A) == 4 ? A(1.1920929e-7) : A(2.220446e-16));
    column.map([&](Vec<A> z) INLINE_LAMBDA {
      z -= threshold;
      return (z < error) & (z > -error) ? Vec<A>{} : z;
    });
  }

  // Numbers as integers in the same order, and back. NaN becomes infinity, as both show in the softmax of the whole row.
  static INLINE Bits bits_of(Vec<A> x) {
    Bits bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  static INLINE Vec<A> of_bits(Bits bits) {
    Vec<A> x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }
  static INLINE Bits flipped(Bits bits) { return bits ^ (bits < 0 ? splat<Bits>(kLargest) : Bits{}); }
  static INLINE Bits to_order(Vec<A> x) {
    return flipped(bits_of(x == x ? x + A(0) : splat<Vec<A>>(A(INFINITY))));  // -0 becomes 0
  }
  static INLINE Vec<A> from_order(Bits order) { return of_bits(flipped(order)); }
  static constexpr LaneInt<A> kLargest = LaneInt<A>(~uint64_t(0) >> (65 - 8 * sizeof(A)));

  // Keeps the k largest logits, of equal ones the first: the k-th lies in [low, high), found by counting.
  static INLINE void keep_largest(Column column, int64_t k) {
    column.map([](Vec<A> x) INLINE_LAMBDA { return of_bits(to_order(x)); });
    column.beside = of_bits(to_order(column.beside));
    Bits low = column.reduce(splat<Bits>(kLargest), bits_of, [](Bits x, Bits y) INLINE_LAMBDA { return x < y ? x : y; });
    Bits high = 1 + column.reduce(low, bits_of, [](Bits x, Bits y) INLINE_LAMBDA { return x > y ? x : y; });
    const LaneInt<A> wanted = LaneInt<A>(k);
    Bits num_low = splat<Bits>(LaneInt<A>(column.count)), num_high = {};  // how many are at least low, or high
    for (bool interpolates = true;; interpolates = !interpolates) {
      if (!any_lane((num_low != wanted) & (low + 1 != high))) break;
      Bits middle = (low & high) + ((low ^ high) >> 1);
      if (interpolates) {
        const Vec<A> part = __builtin_convertvector(num_low - wanted, Vec<A>) /
                            __builtin_convertvector(num_low - num_high, Vec<A>);
        const Vec<A> from = from_order(low);
        const Bits guess = to_order(from + part * (from_order(high - 1) - from));
        middle = guess > low ? (guess < high ? guess : high - 1) : low + 1;
      }
      const Bits count = column.reduce(
          Bits{}, [&](Vec<A> x) INLINE_LAMBDA { return Bits{} - (bits_of(x) >= middle); },
          [](Bits x, Bits y) INLINE_LAMBDA { return x + y; });
      const Bits is_low = count >= wanted;
      low = is_low ? middle : low, num_low = is_low ? count : num_low;
      high = is_low ? high : middle, num_high = is_low ? num_high : count;
    }
    column.map([&](Vec<A> x) INLINE_LAMBDA {
      return bits_of(x) >= low ? from_order(bits_of(x)) : splat<Vec<A>>(-A(INFINITY));
    });
    if (!any_lane(num_low != wanted)) return;
    for (int lane = 0; lane < min(column.lanes, column.heads.H); ++lane) {
      LaneInt<A> left = wanted - num_high[lane];
      if (num_low[lane] == wanted) continue;
      const A equal = from_order(low)[lane];
      for (int64_t e = 0; e < column.count; ++e) {
        A& logit = column.logits[e * column.heads.H + lane];
        if (logit == equal && left-- <= 0) logit = -A(INFINITY);
      }
    }
  }

  const int64_t law, num_kept;
};

}  // namespace
