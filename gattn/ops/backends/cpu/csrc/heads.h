// Scalars of edges, H of them side by side: logits, weights and their gradients.
#pragma once

#include "rows.h"

namespace {

// A run of a block's edges in one row. `begins` and `ends`: whether they are the row's first and last.
struct Run {
  int64_t row;
  int first, last;
  bool begins, ends;
};
// Those of a block: short rows, or a part of a long one.
struct Runs {
  const Run* first;
  int count;

  const Run* begin() const { return first; }
  const Run* end() const { return first + count; }
  const Run& operator[](int r) const { return first[r]; }
  const Run& back() const { return first[count - 1]; }
};

// Where H divides the lanes of a vector (`is_cyclic`), vectors of several edges are taken at once: lane l belongs to
// head l % H, and a row of H numbers is repeated.
class Heads {
 public:
  explicit Heads(int64_t heads) : H(heads), is_cyclic(heads > 0 && heads <= W && W % heads == 0) {}

  const int64_t H;
  const bool is_cyclic;

  template <class F>
  INLINE void for_heads(F&& f) const {
    for_strips(H, static_cast<F&&>(f));
  }
  template <class F>
  INLINE void for_edges_and_heads(const Run& run, F&& f) const {
    for (int e = run.first; e < run.last; ++e)
      for (int64_t h = 0; h < H; ++h) f(e, h);
  }
  INLINE void copy_heads(A* to, const A* from) const {
    switch (H) {
      case 1: *to = *from; break;
      case 4: memcpy(to, from, 4 * sizeof(A)); break;
      case 8: memcpy(to, from, 8 * sizeof(A)); break;
      default: copy_many_heads(to, from);
    }
  }
  NOINLINE void copy_many_heads(A* to, const A* from) const {
    for (int64_t h = 0; h < H; ++h) to[h] = from[h];
  }
  INLINE Vec<A> repeat_heads(const A* row) const {
    A lanes[W + 8];  // room that GCC asks for: it does not see that H <= W
    for (int64_t at = 0; at < W; at += H) copy_heads(lanes + at, row);
    return load(lanes);
  }
  // Combines the lanes of each head, in all of them.
  template <class V, class F>
  INLINE V fold_heads(V v, F&& combine) const {
    for (int64_t shift = W / 2; shift >= H; shift /= 2) v = combine(v, rotate_lanes<A>(v, int(shift)));
    return v;
  }
  // Calls f(position, lanes) on vectors of a run's numbers, and on the rest of less than a vector.
  template <class F>
  INLINE void for_run(const Run& run, F&& f) const {
    const int64_t first = run.first * H, last = run.last * H;
    int64_t at = first;
    for (; at + W <= last; at += W) f(at, Whole{});
    if (at < last) f(at, Part{int(last - at)});
  }

  // numbers_e += x for the run's edges.
  NOINLINE void add_to_run(const Run& run, const A* x, A* numbers) const {
    if (is_cyclic) {
      const Vec<A> repeated = repeat_heads(x);
      for_run(run, [&](int64_t at, auto lanes) INLINE_LAMBDA {
        lanes.store_to(numbers + at, load(numbers + at) + repeated);
      });
    } else {
      for (int e = run.first; e < run.last; ++e)
        for (int64_t h = 0; h < H; ++h) numbers[e * H + h] += x[h];
    }
  }
  // to_e = numbers_e times x for the run's edges; x has a vector of repeated numbers if H is cyclic.
  INLINE void multiply_run(const Run& run, const A* x, const A* numbers, A* to) const {
    if (is_cyclic) {
      const Vec<A> repeated = load(x);
      for_run(run, [&](int64_t at, auto lanes) INLINE_LAMBDA {
        lanes.store_to(to + at, load(numbers + at) * repeated);
      });
    } else {
      for (int e = run.first; e < run.last; ++e)
        for (int64_t h = 0; h < H; ++h) to[e * H + h] = numbers[e * H + h] * x[h];
    }
  }
  // to += the sum of the run's numbers, or replacing it where the run begins a row.
  NOINLINE void sum_run(const Run& run, const A* numbers, A* to) const {
    if (is_cyclic) {
      Vec<A> sum = {};
      for_run(run, [&](int64_t at, auto lanes) INLINE_LAMBDA { sum += lanes.load_or(numbers + at, Vec<A>{}); });
      sum = fold_heads(sum, [](Vec<A> x, Vec<A> y) INLINE_LAMBDA { return x + y; });
      if (!run.begins) sum += repeat_heads(to);
      store_part(to, sum, int(H));
      return;
    }
    for_heads([&](auto heads) INLINE_LAMBDA {
      using S = decltype(heads);
      EACH_VECTOR {
        Vec<A> sum = {};
        if (!run.begins) sum = heads.load_at(to, k);
        for (int e = run.first; e < run.last; ++e) sum += heads.load_at(numbers + e * H, k);
        heads.store_at(to, k, sum);
      }
    });
  }

 private:
  struct Whole {
    INLINE Vec<A> load_or(const A* p, Vec<A>) const { return load(p); }
    INLINE void store_to(A* p, Vec<A> v) const { store(p, v); }
  };
  struct Part {
    int lanes;
    INLINE Vec<A> load_or(const A* p, Vec<A> other) const { return first_lanes_of<A>(load(p), other, lanes); }
    INLINE void store_to(A* p, Vec<A> v) const { store_part(p, v, lanes); }
  };
};

}  // namespace
