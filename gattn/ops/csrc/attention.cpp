// Attention over the edges of a graph, forward and backward, for one instruction set.
//
// A block is up to kBlock edges, of several short rows or of one. Its logits and weights, [kBlock, H], stay in the
// first-level cache; rows of nodes are read in strips of channels that fit into registers. Nothing of size [E, H, C] is
// ever stored. Work is cut into tasks that depend on the graph alone, and partial results are added up in
// a fixed order: the bits of the result do not depend on the number of threads.
//
// Forward, by target: logits, a running softmax, the weighted sum.
// Backward, by source: weights again, d = <grad_out_i, v_j>, gradients of logits alpha (d - delta_i) with
// delta_i = <grad_out_i, out_i>, and what they mean for key and value; then by target: what they mean for the query.

#include <omp.h>

#include <atomic>
#include <cstdlib>

#include "arguments.h"
#include "dropout.h"
#include "simd.h"

#ifndef GATTN_ISA
#define GATTN_ISA baseline
#endif
#define INLINE_LAMBDA __attribute__((always_inline))
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace {

constexpr int kBlock = 32;
constexpr int kAhead = 16;
static_assert(kBlock + kAhead <= kPadding, "prefetching reads that many indices ahead");

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// ---------------------------------------------------------------------------------------------- strips of channels

// Some channels of a row, as kVectors vectors in registers; the last strip of a row may be part of one vector.
template <class A, int kVectors_, bool kPart>
struct Strip {
  static constexpr int kVectors = kVectors_;
  int64_t first;
  int channels;

  template <class T>
  INLINE Vec<A> load_at(const T* row, int k) const {
    if constexpr (kPart) return load_part(row + first, channels);
    else return load(row + first + k * kLanes<A>);
  }
  template <class T>
  INLINE void store_at(T* row, int k, Vec<A> v) const {
    if constexpr (kPart) store_part(row + first, v, channels);
    else store(row + first + k * kLanes<A>, v);
  }
  template <class T>
  INLINE void prefetch(const T* row) const {
    constexpr int kLine = 64 / int(sizeof(T));
#pragma GCC unroll 8
    for (int c = 0; c < (kPart ? 1 : kVectors * kLanes<A>); c += kLine) __builtin_prefetch(row + first + c);
  }
};

template <class A, class F>
INLINE void for_strips(int64_t channels, F&& f) {
  constexpr int W = kLanes<A>;
  int64_t c = 0;
  for (; c + 4 * W <= channels; c += 4 * W) f(Strip<A, 4, false>{c, 4 * W});
  if (c + 2 * W <= channels) f(Strip<A, 2, false>{c, 2 * W}), c += 2 * W;
  if (c + W <= channels) f(Strip<A, 1, false>{c, W}), c += W;
  if (c < channels) f(Strip<A, 1, true>{c, int(channels - c)});
}

#define EACH_VECTOR _Pragma("GCC unroll 4") for (int k = 0; k < S::kVectors; ++k)

// ------------------------------------------------------------------------------------------------- rows of one segment
//
// A segment is a run of edges that share one end, whose row is fixed; the rows of the other ends are gathered. Scalars
// of an edge (logits, weights, their gradients) lie H apart.

// Whether the rows that come next are fetched, too: by whoever reads rows first.
enum Prefetch { kNow, kNextToo };

template <class T>
struct Gathered {
  const T* row[kBlock];
  const T* ahead[kBlock];

  INLINE void gather(const T* base, int64_t stride, const int32_t* node, int n) {
    for (int e = 0; e < n; ++e) {
      row[e] = base + node[e] * stride;
      ahead[e] = base + node[e + kAhead] * stride;
    }
  }
};

// The edges [first, last) of a block, `others` from `offset` on, and per-edge rows or null.
template <class T>
struct Segment {
  const Gathered<T>& others;
  int64_t offset;
  const T* const* edges;
  int64_t edge_offset;
  int first, last;
  int64_t heads;

  template <bool kEdge, class S>
  INLINE auto load(S strip, int e, int k) const {
    auto row = strip.load_at(others.row[e] + offset, k);
    if constexpr (kEdge) row += strip.load_at(edges[e] + edge_offset, k);
    return row;
  }
  template <Prefetch P, class S>
  INLINE void prefetch(S strip, int e) const {
    if constexpr (P == kNextToo) strip.prefetch(others.ahead[e] + offset);
  }
};

// Which heads the channels of a strip belong to: all to one, or, with few channels, those of a vector to several.
template <class A>
struct OneHead {
  static constexpr bool kPacked = false;
  int64_t head;
  INLINE Vec<A> spread(const A* scalars, int) const { return splat<Vec<A>>(scalars[head]); }
};
// How several heads of few channels share a vector.
template <class A>
struct Packing {
  bool possible;
  int channels, per_vector, shift;  // channels = 2^shift
  LaneVec<A> spread, gather;

  Packing(int64_t width, int64_t group)
      : possible(group == 1 && width > 0 && width < kLanes<A> && kLanes<A> % width == 0),
        channels(possible ? int(width) : 1),
        per_vector(kLanes<A> / channels),
        shift(__builtin_ctz(unsigned(channels))),
        spread(lane_numbers<A>() >> shift),
        gather(lane_numbers<A>() << shift & (kLanes<A> - 1)) {}
};
template <class A>
struct PackedHeads {
  static constexpr bool kPacked = true;
  const Packing<A>& packing;
  int64_t head;
  // `scalars` can be read for a vector's length.
  INLINE Vec<A> spread(const A* scalars, int k) const {
    return shuffle(load(scalars + head + k * packing.per_vector), packing.spread);
  }
  // The sum over each head's channels.
  INLINE void gather(Vec<A> v, int k, int64_t heads, A* scalars) const {
    for (int distance = packing.channels / 2; distance > 0; distance /= 2)
      v += shuffle(v, lane_numbers<A>() ^ LaneInt<A>(distance));
    const int64_t first = head + k * packing.per_vector;
    store_part(scalars + first, shuffle(v, packing.gather), int(min(packing.per_vector, heads - first)));
  }
};

// out_e += <x, row_e>. kEdge adds edge_e to row_e, kMoved to x.
template <Prefetch P, bool kEdge, bool kMoved, class S, class Heads, class T, class A>
INLINE void dot_rows(S strip, Heads heads, const T* x, const Segment<T>& segment, A* out) {
  Vec<A> fixed[S::kVectors];
  EACH_VECTOR fixed[k] = strip.load_at(x, k);
  for (int e = segment.first; e < segment.last; ++e) {
    segment.template prefetch<P>(strip, e);
    A* scalars = out + e * segment.heads;
    Vec<A> sum = {};
    EACH_VECTOR {
      Vec<A> product;
      if constexpr (kMoved)
        product = (fixed[k] + strip.load_at(segment.edges[e] + segment.edge_offset, k)) *
                  segment.template load<false>(strip, e, k);
      else
        product = fixed[k] * segment.template load<kEdge>(strip, e, k);
      if constexpr (Heads::kPacked) heads.gather(product, k, segment.heads, scalars);
      else sum += product;
    }
    if constexpr (!Heads::kPacked) scalars[heads.head] += sum_lanes(sum);
  }
}

// sum += factor_e (row_e + edge_e).
template <Prefetch P, bool kEdge, class S, class Heads, class T, class A>
INLINE void add_weighted(S strip, Heads heads, const A* factor, const Segment<T>& segment, Vec<A>* sum) {
  for (int e = segment.first; e < segment.last; ++e) {
    segment.template prefetch<P>(strip, e);
    EACH_VECTOR sum[k] += heads.spread(factor + e * segment.heads, k) * segment.template load<kEdge>(strip, e, k);
  }
}

// The same, added to acc in memory, or (`anew`) replacing it.
template <Prefetch P, bool kEdge, class S, class Heads, class T, class A>
INLINE void add_rows(S strip, Heads heads, const A* factor, const Segment<T>& segment, bool anew, A* acc) {
  Vec<A> sum[S::kVectors];
  EACH_VECTOR sum[k] = anew ? Vec<A>{} : strip.load_at(acc, k);
  add_weighted<P, kEdge>(strip, heads, factor, segment, sum);
  EACH_VECTOR strip.store_at(acc, k, sum[k]);
}

template <Family kFamily, class A>
INLINE Vec<A> activate(Vec<A> x, A slope) {
  if constexpr (kFamily == kTanh) return vector_tanh(x);
  else return x > A(0) ? x : x * slope;
}

// The activation's derivative, given its input and its output.
template <Family kFamily, class A>
INLINE Vec<A> derivative(Vec<A> x, Vec<A> y, A slope) {
  if constexpr (kFamily == kTanh) return A(1) - y * y;
  else return x > A(0) ? splat<Vec<A>>(A(1)) : splat<Vec<A>>(slope);
}

// out_e += <vector, activation(x + row_e + edge_e)>. With kSigns the signs of the activation's inputs are kept.
template <Family kFamily, bool kEdge, bool kSigns, class S, class T, class A>
INLINE void additive_rows(S strip, const A* vector, const T* x, A slope, const Segment<T>& segment, A* out,
                          uint8_t* signs, int64_t signs_stride) {
  Vec<A> fixed[S::kVectors], weight[S::kVectors];
  EACH_VECTOR fixed[k] = strip.load_at(x, k), weight[k] = strip.load_at(vector, k);
  for (int e = segment.first; e < segment.last; ++e) {
    segment.template prefetch<kNextToo>(strip, e);
    Vec<A> sum = {};
    EACH_VECTOR {
      Vec<A> hidden = fixed[k] + segment.template load<kEdge>(strip, e, k);
      if constexpr (kSigns) {
        LaneBits bits = positive_bits(hidden);
        memcpy(signs + e * signs_stride + strip.first / 8 + k * int(sizeof bits), &bits, sizeof bits);
      }
      sum += weight[k] * activate<kFamily>(hidden, slope);
    }
    out[e * segment.heads] += sum_lanes(sum);
  }
}

// acc += sum of factor_e activation'(x + row_e + edge_e), and total += sum of factor_e activation(...).
template <Family kFamily, Prefetch P, bool kEdge, class S, class T, class A>
INLINE void add_derivatives(S strip, const T* x, A slope, const A* factor, const Segment<T>& segment, bool anew,
                            A* acc, A* total) {
  Vec<A> fixed[S::kVectors], sum[S::kVectors], outputs[S::kVectors];
  EACH_VECTOR {
    fixed[k] = strip.load_at(x, k), sum[k] = anew ? Vec<A>{} : strip.load_at(acc, k);
    outputs[k] = total == nullptr ? Vec<A>{} : strip.load_at(total, k);
  }
  for (int e = segment.first; e < segment.last; ++e) {
    segment.template prefetch<P>(strip, e);
    const Vec<A> weight = splat<Vec<A>>(factor[e * segment.heads]);
    EACH_VECTOR {
      Vec<A> hidden = fixed[k] + segment.template load<kEdge>(strip, e, k);
      Vec<A> output = activate<kFamily>(hidden, slope);
      sum[k] += weight * derivative<kFamily>(hidden, output, slope);
      outputs[k] += weight * output;
    }
  }
  EACH_VECTOR {
    strip.store_at(acc, k, sum[k]);
    if (total != nullptr) strip.store_at(total, k, outputs[k]);
  }
}

// acc += sum of factor_e (1 or slope), for a LeakyReLU whose inputs' signs were kept.
template <class S, class T, class A>
INLINE void add_slopes(S strip, A slope, const A* factor, const uint8_t* const* signs, int64_t signs_offset,
                       const Segment<T>& segment, bool anew, A* acc) {
  if constexpr (kHasBits<A>) {
    Vec<A> sum[S::kVectors];
    EACH_VECTOR sum[k] = anew ? Vec<A>{} : strip.load_at(acc, k);
    for (int e = segment.first; e < segment.last; ++e) {
      const Vec<A> weight = splat<Vec<A>>(factor[e * segment.heads]), sloped = weight * slope;
      EACH_VECTOR {
        LaneBits bits;
        memcpy(&bits, signs[e] + signs_offset + strip.first / 8 + k * int(sizeof bits), sizeof bits);
        sum[k] += select_bits(bits, weight, sloped);
      }
    }
    EACH_VECTOR strip.store_at(acc, k, sum[k]);
  }
}

// ---------------------------------------------------------------------------------------------------------- the kernel

template <class T, Family kFamily>
class Kernel {
  using A = Compute<T>;
  static constexpr int W = kLanes<A>;
  static constexpr bool kScalar = kFamily == kGAT;
  static constexpr bool kAdditive = kFamily == kLeakyReLU || kFamily == kTanh;

  // A run of a block's edges in one row. `begins` and `ends`: whether they are the row's first and last.
  struct Run {
    int64_t row;
    int first, last;
    bool begins, ends;
  };

 public:
  static int64_t workspace_elements(const Arguments& a) {
    int64_t wide = a.heads * max(a.channels, a.value_channels);
    return 11 * (round_up(a.heads * kBlock) + W) + 4 * (round_up(a.heads) + W) + 3 * round_up(wide);
  }

  Kernel(const Arguments& arguments, A* workspace)
      : a(arguments),
        H(a.heads),
        C(a.channels),
        V(a.value_channels),
        G(a.key_heads),
        group(G > 0 ? H / G : 1),
        value_packing(V, group),
        key_packing(C, group) {
    auto take = [&](int64_t elements) {
      A* taken = workspace;
      workspace += round_up(elements);
      return taken;
    };
    const int64_t scalars = H * kBlock + W;  // vectors of them may begin at any edge
    logits = take(scalars), gradients = take(scalars), slopes = take(scalars), keep = take(scalars);
    products = take(scalars), maxima = take(scalars), reciprocals = take(scalars), deltas = take(scalars);
    low_number = reinterpret_cast<uint32_t*>(take(scalars));
    high_number = reinterpret_cast<uint32_t*>(take(scalars));
    is_cyclic = H > 0 && H <= W && W % H == 0;
    maximum = take(H + W), sum = take(H + W), factor = take(H + W), scales = take(H + W);
    const int64_t wide = H * max(C, V);
    acc = take(wide), acc_key = take(wide), total = take(wide);
    use_signs = a.record_bytes > 0;
    signs_bytes = (C + 15) / 16 * 2;
    numbers_needed = a.dropout || a.bias || a.mask || a.edge || a.edge_value || a.weights || a.grad_weights ||
                     a.grad_bias || a.grad_edge || a.grad_edge_value;
  }

  // ------------------------------------------------------------------------------------------------------------ forward

  void forward(const Task& task, int64_t b) {
    for_blocks(a.by_target, task, [&](int64_t p, int n, const Run* runs, int num_runs) {
      forward_block(b, p, n, runs, num_runs);
    });
    if (task.slot >= 0) {
      A* partial = forward_partial(b, task.slot);
      memcpy(partial, maximum, size_t(H) * sizeof(A));
      memcpy(partial + H, sum, size_t(H) * sizeof(A));
      memcpy(partial + 2 * H, acc, size_t(H * V) * sizeof(A));
    }
  }

  void merge_forward(int64_t split, int64_t b) {
    const Rows& rows = a.by_target;
    for (int64_t h = 0; h < H; ++h) maximum[h] = -INFINITY, sum[h] = 0;
    memset(acc, 0, size_t(H * V) * sizeof(A));
    for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot) {
      const A* partial = forward_partial(b, slot);
      for (int64_t h = 0; h < H; ++h) {
        const A most = partial[h] > maximum[h] ? partial[h] : maximum[h], base = finite_base(most);
        const A old_factor = exp_of(maximum[h] - base), new_factor = exp_of(partial[h] - base);
        sum[h] = sum[h] * old_factor + partial[H + h] * new_factor;
        maximum[h] = most;
        for (int64_t c = h * V; c < (h + 1) * V; ++c)
          acc[c] = acc[c] * old_factor + partial[2 * H + c] * new_factor;
      }
    }
    finish_stats(rows.split_row[split], b);
    finish_forward(rows.split_row[split], b);
  }

  // Weights were written as logits.
  void finish_weights(const Task& task, int64_t b) {
    A* weights = static_cast<A*>(a.weights) + b * a.edges * H;
    for (int64_t i = task.first_row; i < task.last_row; ++i) {
      const A* row = stats(i, b);
      int64_t first = a.by_target.start[i], last = a.by_target.start[i + 1];
      if (task.slot >= 0) first = task.first_edge, last = task.last_edge;
      for (int64_t p = first; p < last; ++p) {
        A* weight = weights + edge_of(p) * H;
        for_heads([&](auto heads) INLINE_LAMBDA {
          using S = decltype(heads);
          EACH_VECTOR {
            Vec<A> logit = heads.load_at(weight, k) - heads.load_at(row, k);
            heads.store_at(weight, k, vector_exp(logit) * heads.load_at(row + H, k));
          }
        });
      }
    }
  }

  // ----------------------------------------------------------------------------------------------------------- backward

  // What the gradient of an edge needs of its target: maximum, reciprocal sum, delta, query (for GAT).
  void fill_node_terms(int64_t i, int64_t b) {
    A* terms = node_terms(i, b);
    memcpy(terms, stats(i, b), size_t(2 * H) * sizeof(A));
    const int64_t row = b * a.targets + i;
    const T* grad = static_cast<const T*>(a.grad_out) + row * H * V;
    for (int64_t h = 0; h < H; ++h) {
      Vec<A> product = {};
      for_strips<A>(V, [&](auto strip) INLINE_LAMBDA {
        using S = decltype(strip);
        if (a.out_wide == nullptr) {
          const T* out = static_cast<const T*>(a.out) + (row * H + h) * V;
          EACH_VECTOR product += strip.load_at(grad + h * V, k) * strip.load_at(out, k);
        } else {
          const A* out = static_cast<const A*>(a.out_wide) + (row * H + h) * V;
          EACH_VECTOR product += strip.load_at(grad + h * V, k) * strip.load_at(out, k);
        }
      });
      terms[2 * H + h] = sum_lanes(product);
    }
    if (a.grad_weights != nullptr) {
      const A* weights = static_cast<const A*>(a.weights) + b * a.edges * H;
      const A* grads = static_cast<const A*>(a.grad_weights) + b * a.edges * H;
      for (int64_t p = a.by_target.start[i]; p < a.by_target.start[i + 1]; ++p) {
        const int64_t at = edge_of(p) * H;
        for (int64_t h = 0; h < H; ++h) terms[2 * H + h] += weights[at + h] * grads[at + h];
      }
    }
    if constexpr (kScalar) {
      if (a.query == nullptr) memset(terms + 3 * H, 0, size_t(H) * sizeof(A));
      else memcpy(terms + 3 * H, scalar_query(i, b), size_t(H) * sizeof(A));
    }
  }

  void backward_by_source(const Task& task, int64_t b) {
    start_vector_gradient();
    for_blocks(a.by_source, task, [&](int64_t p, int n, const Run* runs, int num_runs) {
      source_block(b, p, n, runs, num_runs);
    });
    if (task.slot >= 0) {
      add_to_vector_gradient(key_row(task.first_row, b), acc_key);
      A* partial = source_partial(b, task.slot);
      memcpy(partial, acc, size_t(G * V) * sizeof(A));
      memcpy(partial + G * V, acc_key, size_t(key_width()) * sizeof(A));
    }
    store_vector_gradient(a.by_target.num_tasks + (&task - a.by_source.tasks), b);
  }

  void merge_source(int64_t split, int64_t b) {
    const Rows& rows = a.by_source;
    memset(acc, 0, size_t(G * V) * sizeof(A));
    memset(acc_key, 0, size_t(key_width()) * sizeof(A));
    for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot) {
      const A* partial = source_partial(b, slot);
      for (int64_t c = 0; c < G * V; ++c) acc[c] += partial[c];
      for (int64_t c = 0; c < key_width(); ++c) acc_key[c] += partial[G * V + c];
    }
    finish_source(rows.split_row[split], b);
  }

  void backward_by_target(const Task& task, int64_t b) {
    start_vector_gradient();
    for_blocks(a.by_target, task, [&](int64_t p, int n, const Run* runs, int num_runs) {
      target_block(b, p, n, runs, num_runs);
    });
    if (task.slot >= 0) {
      add_to_vector_gradient(query_row(task.first_row, b), acc);
      memcpy(target_partial(b, task.slot), acc, size_t(query_width()) * sizeof(A));
    }
    store_vector_gradient(&task - a.by_target.tasks, b);
  }

  void merge_target(int64_t split, int64_t b) {
    const Rows& rows = a.by_target;
    memset(acc, 0, size_t(query_width()) * sizeof(A));
    for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot) {
      const A* partial = target_partial(b, slot);
      for (int64_t c = 0; c < query_width(); ++c) acc[c] += partial[c];
    }
    finish_target(rows.split_row[split], b);
  }

 private:
  // -------------------------------------------------------------------------------------------------- where things are

  static int64_t round_up(int64_t elements) { return (elements + W - 1) / W * W; }
  const T* query_row(int64_t i, int64_t b) const {
    return static_cast<const T*>(a.query) + b * a.query_batch + i * a.query_row;
  }
  const T* key_row(int64_t j, int64_t b) const {
    return static_cast<const T*>(a.key) + b * a.key_batch + j * a.key_row;
  }
  const T* value_row(int64_t j, int64_t b) const {
    if (a.value_is_key) return key_row(j, b);
    return static_cast<const T*>(a.value) + b * a.value_batch + j * a.value_row;
  }
  // GAT's query and key come in the type that is computed in.
  const A* scalar_query(int64_t i, int64_t b) const {
    return static_cast<const A*>(a.query) + b * a.query_batch + i * a.query_row;
  }
  const A* scalar_key(int64_t j, int64_t b) const {
    return static_cast<const A*>(a.key) + b * a.key_batch + j * a.key_row;
  }
  T* output(int64_t i, int64_t b) const { return static_cast<T*>(a.out) + (b * a.targets + i) * H * V; }
  A* wide_output(int64_t i, int64_t b) const {
    return a.out_wide == nullptr ? nullptr : static_cast<A*>(a.out_wide) + (b * a.targets + i) * H * V;
  }
  A* stats(int64_t i, int64_t b) const { return static_cast<A*>(a.stats) + (b * a.targets + i) * 2 * H; }
  A* node_terms(int64_t i, int64_t b) const { return static_cast<A*>(a.node_terms) + (b * a.targets + i) * 4 * H; }
  int64_t key_width() const { return kScalar ? H : G * C; }
  int64_t query_width() const { return kScalar ? H : H * C; }
  A* forward_partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_target.num_slots + slot) * (2 * H + H * V);
  }
  A* source_partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_source.num_slots + slot) * (G * V + key_width());
  }
  A* target_partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_target.num_slots + slot) * query_width();
  }
  int64_t edge_of(int64_t target_position) const {
    return a.edge_of_target_position == nullptr ? target_position : a.edge_of_target_position[target_position];
  }
  uint8_t* record(int64_t target_position, int64_t b) const {
    return a.record + (b * a.edges + target_position) * a.record_bytes;
  }
  static A finite_base(A most) { return most == -A(INFINITY) ? A(0) : most; }
  static A exp_of(A value) { return vector_exp(splat<Vec<A>>(value))[0]; }

  template <class F>
  INLINE void for_heads(F&& f) const {
    for_strips<A>(H, static_cast<F&&>(f));
  }

  // ------------------------------------------------------------------------------------------------ scalars of each head
  //
  // Edges of a run lie side by side, H numbers each. Where H divides the lanes of a vector, vectors of several edges are
  // taken at once: lane l belongs to head l % H, and a row of H numbers is repeated.

  INLINE void copy_heads(A* to, const A* from) const {
    switch (H) {
      case 1: *to = *from; break;
      case 4: memcpy(to, from, 4 * sizeof(A)); break;
      case 8: memcpy(to, from, 8 * sizeof(A)); break;
      default:
        for (int64_t h = 0; h < H; ++h) to[h] = from[h];
    }
  }
  INLINE Vec<A> repeat_heads(const A* row) const {
    A lanes[W + 8];  // room that GCC asks for: it does not see that H <= W
    for (int64_t at = 0; at < W; at += H) copy_heads(lanes + at, row);
    return load(lanes);
  }
  // Calls f(strip, heads, first head) on strips of [H, width] channels.
  template <class F>
  INLINE void for_head_strips(int64_t width, const Packing<A>& packing, F&& f) const {
    if (packing.possible) {
      for_strips<A>(H * width, [&](auto strip) INLINE_LAMBDA {
        f(strip, PackedHeads<A>{packing, strip.first >> packing.shift}, int64_t(0));
      });
    } else {
      for (int64_t h = 0; h < H; ++h)
        for_strips<A>(width, [&](auto strip) INLINE_LAMBDA { f(strip, OneHead<A>{h}, h); });
    }
  }
  static INLINE void fetch(const T* row, int64_t bytes) {
    const char* p = reinterpret_cast<const char*>(row);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
  }
  // Combines the lanes of each head, in all of them.
  template <class F>
  INLINE Vec<A> fold_heads(Vec<A> v, F&& combine) const {
    for (int64_t shift = W / 2; shift >= H; shift /= 2) v = combine(v, rotate_lanes<A>(v, int(shift)));
    return v;
  }
  // Calls f(pointer, lanes) on vectors of a run's numbers, and f of the rest of less than a vector.
  template <class F>
  INLINE void for_run(const Run& run, F&& f) const {
    const int64_t first = run.first * H, last = run.last * H;
    int64_t at = first;
    for (; at + W <= last; at += W) f(at, Whole{});
    if (at < last) f(at, Part{int(last - at)});
  }
  struct Whole {
    template <class P>
    INLINE Vec<A> load_or(const P* p, Vec<A>) const { return load(p); }
    INLINE void store_to(A* p, Vec<A> v) const { store(p, v); }
  };
  struct Part {
    int lanes;
    INLINE Vec<A> load_or(const A* p, Vec<A> other) const { return first_lanes_of<A>(load(p), other, lanes); }
    INLINE void store_to(A* p, Vec<A> v) const { store_part(p, v, lanes); }
  };

  // -------------------------------------------------------------------------------------------------- cutting into blocks

  // Calls f(first position, number of edges, runs, number of runs). Short rows share a block, long ones have several.
  template <class F>
  INLINE void for_blocks(const Rows& rows, const Task& task, F&& f) {
    if (task.slot >= 0) {
      const Run run = {task.first_row, 0, 0, true, false};
      cut_row(run, task.first_edge, task.last_edge, f);
      return;
    }
    Run runs[kBlock];
    int num_runs = 0, n = 0;
    int64_t begin = rows.start[task.first_row];
    for (int64_t row = task.first_row; row < task.last_row; ++row) {
      const int64_t first = rows.start[row], last = rows.start[row + 1];
      if (num_runs == kBlock || last - first > kBlock - n) {
        if (num_runs > 0) f(begin, n, runs, num_runs);
        num_runs = n = 0;
        begin = first;
      }
      if (last - first > kBlock) {
        cut_row({row, 0, 0, true, true}, first, last, f);
        begin = last;
      } else {
        runs[num_runs++] = {row, n, n + int(last - first), true, true};
        n += int(last - first);
      }
    }
    if (num_runs > 0) f(begin, n, runs, num_runs);
  }

  template <class F>
  INLINE void cut_row(const Run& whole, int64_t first, int64_t last, F&& f) {
    for (int64_t p = first; p < last; p += kBlock) {
      const int n = int(min(kBlock, last - p));
      const Run run = {whole.row, 0, n, p == first, whole.ends && p + n == last};
      f(p, n, &run, 1);
    }
  }

  // ---------------------------------------------------------------------------------------------------- parts of a block

  // The rows of per-edge vectors of head 0; null where there are none.
  const T* const* edge_rows(const void* base, int64_t batch_stride, int64_t b, int64_t width, int n, const T** rows) {
    if (base == nullptr) return nullptr;
    for (int e = 0; e < n; ++e) rows[e] = static_cast<const T*>(base) + b * batch_stride + edge[e] * H * width;
    return rows;
  }
  const T* const* score_edges(int64_t b, int n) {
    if constexpr (kScalar) return nullptr;
    else return edge_rows(a.edge, a.edge_batch, b, C, n, score_edge);
  }
  const T* const* value_edges(int64_t b, int n) {
    return edge_rows(a.edge_value, a.edge_value_batch, b, V, n, value_edge);
  }

  // to_e += from[edge e], H numbers.
  void add_edge_scalars(const void* from, int64_t batch_stride, int64_t b, int n, A* to) {
    const A* base = static_cast<const A*>(from) + b * batch_stride;
    for (int e = 0; e < n; ++e) {
      const A* row = base + edge[e] * H;
      for_heads([&](auto heads) INLINE_LAMBDA {
        using S = decltype(heads);
        EACH_VECTOR heads.store_at(to + e * H, k, heads.load_at(to + e * H, k) + heads.load_at(row, k));
      });
    }
  }
  void store_edge_scalars(void* to, int64_t b, int n, const A* from) {
    for (int e = 0; e < n; ++e)
      copy_heads(static_cast<A*>(to) + (b * a.edges + edge[e]) * H, from + e * H);
  }

  // Adds bias and mask to the block's logits.
  void finish_logits(int64_t b, int n) {
    if (a.bias != nullptr) add_edge_scalars(a.bias, a.bias_batch, b, n, logits);
    if (a.mask != nullptr) {
      const uint8_t* mask = a.mask + b * a.mask_batch;
      for (int e = 0; e < n; ++e)
        for (int64_t h = 0; h < H; ++h)
          if (!mask[edge[e] * a.mask_edge + h * a.mask_head]) logits[e * H + h] = -INFINITY;
    }
  }

  // GAT's edge term and activation; slopes are the activation's derivative.
  void finish_scalar_logits(int64_t b, int n) {
    if (a.edge != nullptr) add_edge_scalars(a.edge, a.edge_batch, b, n, logits);
    const A slope = A(a.negative_slope);
    for (int64_t at = 0; at < n * H; at += W) {
      const Vec<A> x = load(logits + at);
      const Vec<A> by = x > A(0) ? splat<Vec<A>>(A(1)) : splat<Vec<A>>(slope);
      store(slopes + at, by);
      store(logits + at, x * by);
    }
  }

  // keep: 0 or 1 / (1 - p) for each weight, by the definition in gattn/ops/dropout.py.
  void draw_dropout(int64_t b, int n) {
    const uint32_t low_seed = uint32_t(a.seed), high_seed = uint32_t(uint64_t(a.seed) >> 32);
    const A scale = A(a.keep_scale);
    for (int e = 0; e < n; ++e) {
      const uint64_t number = uint64_t((b * a.edges + edge[e]) * H);
      for (int64_t h = 0; h < H; ++h) {
        low_number[e * H + h] = uint32_t(number + uint64_t(h));
        high_number[e * H + h] = uint32_t((number + uint64_t(h)) >> 32);
      }
    }
    const uint32_t threshold = uint32_t(a.threshold);
    for (int64_t at = 0; at < n * H; ++at)
      keep[at] = is_kept(low_number[at] ^ low_seed, high_number[at] ^ high_seed, threshold) ? scale : A(0);
  }

  // Logits of vector scores: the run's own row is fixed, `others` are the rows of the edges' other ends.
  template <bool kFromTarget>
  void vector_logits(const Gathered<T>& others, int64_t b, int n, const Run* runs, int num_runs) {
    const T* const* edges = score_edges(b, n);
    const A slope = A(a.negative_slope);
    memset(logits, 0, size_t(n * H) * sizeof(A));
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      const T* own = kFromTarget ? query_row(run.row, b) : key_row(run.row, b);
      auto segment_of = [&](int64_t h) {
        return Segment<T>{others, (kFromTarget ? h / group : h) * C, edges, h * C, run.first, run.last, H};
      };
      auto own_head = [&](int64_t h) { return own + (kFromTarget ? h : h / group) * C; };
      if constexpr (kFamily == kDot) {
        for_head_strips(C, key_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
          const Segment<T> segment = segment_of(h);
          if (edges == nullptr) dot_rows<kNextToo, false, false>(strip, heads, own_head(h), segment, logits);
          else dot_rows<kNextToo, kFromTarget, !kFromTarget>(strip, heads, own_head(h), segment, logits);
        });
      } else {
        for (int64_t h = 0; h < H; ++h) {
          const Segment<T> segment = segment_of(h);
          const T* x = own_head(h);
          const A* vector = static_cast<const A*>(a.vector) + h * C;
          A* out = logits + h;
          for_strips<A>(C, [&](auto strip) INLINE_LAMBDA {
            if (edges != nullptr) {
              additive_rows<kFamily, true, false>(strip, vector, x, slope, segment, out, nullptr, 0);
            } else if (kFromTarget && use_signs) {
              uint8_t* signs = signs_of_block + h * signs_bytes;
              additive_rows<kFamily, false, kHasBits<A> && kFamily == kLeakyReLU>(strip, vector, x, slope, segment, out,
                                                                                  signs, a.record_bytes);
            } else {
              additive_rows<kFamily, false, false>(strip, vector, x, slope, segment, out, nullptr, 0);
            }
          });
        }
      }
    }
    if constexpr (kFamily == kDot)
      for (int64_t at = 0; at < n * H; at += W) store(logits + at, load(logits + at) * A(a.scale));
  }

  // ------------------------------------------------------------------------------------------------------------- forward

  void forward_block(int64_t b, int64_t p, int n, const Run* runs, int num_runs) {
    const int32_t* node = a.by_target.node + p;
    if (numbers_needed)
      for (int e = 0; e < n; ++e) edge[e] = edge_of(p + e);
    if constexpr (kScalar) {
      // Rows are on their way while the softmax is computed.
      const int64_t row_bytes = G * V * int64_t(sizeof(T));
      for (int e = 0; e < n; ++e) {
        copy_heads(logits + e * H, scalar_key(node[e], b));
        fetch(value_row(node[e], b), row_bytes);
      }
      if (a.query != nullptr)
        for (int r = 0; r < num_runs; ++r) add_to_run(runs[r], scalar_query(runs[r].row, b));
      finish_scalar_logits(b, n);
    } else {
      gathered.gather(key_row(0, b), a.key_row, node, n);
      if (use_signs) signs_of_block = record(p, b) + H * int64_t(sizeof(A));
      vector_logits<true>(gathered, b, n, runs, num_runs);
    }
    finish_logits(b, n);
    if (use_signs)
      for (int e = 0; e < n; ++e) copy_heads(reinterpret_cast<A*>(record(p + e, b)), logits + e * H);
    if (a.weights != nullptr) store_edge_scalars(a.weights, b, n, logits);

    for (int r = 0; r < num_runs; ++r) softmax(runs[r], b);
    if (a.dropout) {
      draw_dropout(b, n);
      for (int64_t at = 0; at < n * H; at += W) store(logits + at, load(logits + at) * load(keep + at));
    }

    const bool shared = a.value_is_key;
    if (!shared) gathered.gather(value_row(0, b), a.value_is_key ? a.key_row : a.value_row, node, n);
    const T* const* edges = value_edges(b, n);
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      copy_heads(scales, stats(run.row, b) + H);
      T* out = output(run.row, b);
      A* wide = wide_output(run.row, b);
      for_head_strips(V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
        using S = decltype(strip);
        const Segment<T> segment = {gathered, h / group * V, edges, h * V, run.first, run.last, H};
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
            strip.store_at(out + h * V, k, result);
            if (wide != nullptr) strip.store_at(wide + h * V, k, result);
          }
        }
      });
    }
  }

  // x[h] added to the run's logits.
  void add_to_run(const Run& run, const A* x) {
    if (is_cyclic) {
      const Vec<A> repeated = repeat_heads(x);
      for_run(run, [&](int64_t at, auto lanes) INLINE_LAMBDA { lanes.store_to(logits + at, load(logits + at) + repeated); });
    } else {
      for (int e = run.first; e < run.last; ++e)
        for (int64_t h = 0; h < H; ++h) logits[e * H + h] += x[h];
    }
  }

  // Turns the run's logits into exp(logit - maximum), and brings the row's maximum, sum and factor up to date.
  void softmax(const Run& run, int64_t b) {
    A* row = stats(run.row, b);
    if (!is_cyclic) {
      subtract_maximum(run, row);
      for (int64_t at = run.first * H; at < run.last * H; ++at) logits[at] = exp_of(logits[at]);
      add_weights(run, row);
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
      store_part(factor, by, int(H));
    }
    if (run.ends) {
      store_part(row, base, int(H));
      store_part(row + H, reciprocal(total_weight), int(H));
    } else {
      store_part(maximum, most, int(H));
      store_part(sum, total_weight, int(H));
    }
  }

  // The same where H does not divide the lanes.
  void subtract_maximum(const Run& run, A* row) {
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
        if (!run.begins) heads.store_at(factor, k, vector_exp(before - base));
        heads.store_at(maximum, k, most);
        if (run.ends) heads.store_at(row, k, base);
        for (int e = run.first; e < run.last; ++e)
          heads.store_at(logits + e * H, k, heads.load_at(logits + e * H, k) - base);
      }
    });
  }
  void add_weights(const Run& run, A* row) {
    for_heads([&](auto heads) INLINE_LAMBDA {
      using S = decltype(heads);
      EACH_VECTOR {
        Vec<A> total_weight = {};
        if (!run.begins) total_weight = heads.load_at(sum, k) * heads.load_at(factor, k);
        for (int e = run.first; e < run.last; ++e) total_weight += heads.load_at(logits + e * H, k);
        heads.store_at(sum, k, total_weight);
        if (run.ends) heads.store_at(row + H, k, reciprocal(total_weight));
      }
    });
  }

  // Only exact zeros are replaced, so that a NaN shows in the whole row.
  static INLINE Vec<A> reciprocal(Vec<A> x) { return x == A(0) ? Vec<A>{} : A(1) / x; }

  void finish_stats(int64_t i, int64_t b) {
    A* row = stats(i, b);
    for (int64_t h = 0; h < H; ++h) {
      row[h] = finite_base(maximum[h]);
      row[H + h] = sum[h] == 0 ? A(0) : 1 / sum[h];
    }
  }

  void finish_forward(int64_t i, int64_t b) {
    const A* scales = stats(i, b) + H;
    T* out = output(i, b);
    A* wide = wide_output(i, b);
    for (int64_t h = 0; h < H; ++h) {
      const Vec<A> scale = splat<Vec<A>>(scales[h]);
      for_strips<A>(V, [&](auto strip) INLINE_LAMBDA {
        using S = decltype(strip);
        EACH_VECTOR {
          const Vec<A> result = strip.load_at(acc + h * V, k) * scale;
          strip.store_at(out + h * V, k, result);
          if (wide != nullptr) strip.store_at(wide + h * V, k, result);
        }
      });
    }
  }

  // ------------------------------------------------------------------------------------------------- backward, by source

  void source_block(int64_t b, int64_t p, int n, const Run* runs, int num_runs) {
    const int32_t* node = a.by_source.node + p;
    const int32_t* position = a.target_position + p;
    const A* terms[kBlock];
    for (int e = 0; e < n; ++e) {
      terms[e] = node_terms(node[e], b);
      __builtin_prefetch(node_terms(node[e + kAhead], b));
    }
    if (numbers_needed)
      for (int e = 0; e < n; ++e) edge[e] = edge_of(position[e]);
    gathered.gather(static_cast<const T*>(a.grad_out) + b * a.targets * H * V, H * V, node, n);

    const uint8_t* signs[kBlock];
    if (use_signs) {
      for (int e = 0; e < n; ++e) {
        const uint8_t* kept = record(position[e], b);
        __builtin_prefetch(record(position[e + kAhead], b));
        copy_heads(logits + e * H, reinterpret_cast<const A*>(kept));
        signs[e] = kept + H * int64_t(sizeof(A));
      }
    } else {
      if constexpr (kScalar) {
        for (int e = 0; e < n; ++e) copy_heads(logits + e * H, terms[e] + 3 * H);
        for (int r = 0; r < num_runs; ++r) add_to_run(runs[r], scalar_key(runs[r].row, b));
        finish_scalar_logits(b, n);
      } else {
        queries.gather(query_row(0, b), a.query_row, node, n);
        vector_logits<false>(queries, b, n, runs, num_runs);
      }
      finish_logits(b, n);
    }

    // products = <grad_out_i, v_j + e_ij>
    const T* const* edges = value_edges(b, n);
    memset(products, 0, size_t(n * H) * sizeof(A));
    for (int r = 0; r < num_runs; ++r) {
      const T* value = value_row(runs[r].row, b);
      for_head_strips(V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
        const Segment<T> segment = {gathered, h * V, edges, h * V, runs[r].first, runs[r].last, H};
        if (edges == nullptr) dot_rows<kNextToo, false, false>(strip, heads, value + h / group * V, segment, products);
        else dot_rows<kNextToo, false, true>(strip, heads, value + h / group * V, segment, products);
      });
    }
    logit_gradients(b, p, n, terms);

    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      for_head_strips(V, value_packing, [&](auto strip, auto heads, int64_t h) INLINE_LAMBDA {
        const Segment<T> segment = {gathered, h * V, nullptr, 0, run.first, run.last, H};
        add_rows<kNow, false>(strip, heads, logits, segment, run.begins && h % group == 0, acc + h / group * V);
      });
      if constexpr (kScalar) add_gradients(run, acc_key);
      else key_gradients(run, b, n, signs);
      if (a.grad_edge != nullptr || a.grad_edge_value != nullptr) edge_gradients(run, b);
      if (run.ends) {
        add_to_vector_gradient(key_row(run.row, b), acc_key);
        finish_source(run.row, b);
      }
    }
  }

  // to[h] += the run's sum of gradients.
  void add_gradients(const Run& run, A* to) {
    if (is_cyclic) {
      Vec<A> total_gradient = {};
      for_run(run, [&](int64_t at, auto lanes) INLINE_LAMBDA { total_gradient += lanes.load_or(gradients + at, Vec<A>{}); });
      total_gradient = fold_heads(total_gradient, [](Vec<A> x, Vec<A> y) INLINE_LAMBDA { return x + y; });
      if (!run.begins) total_gradient += repeat_heads(to);
      store_part(to, total_gradient, int(H));
      return;
    }
    for (int64_t h = 0; h < H; ++h) {
      A total_gradient = run.begins ? A(0) : to[h];
      for (int e = run.first; e < run.last; ++e) total_gradient += gradients[e * H + h];
      to[h] = total_gradient;
    }
  }

  // From logits and products to gradients (of the logits), and weights after dropout in place of the logits.
  void logit_gradients(int64_t b, int64_t p, int n, const A* const* terms) {
    for (int e = 0; e < n; ++e) {
      copy_heads(maxima + e * H, terms[e]);
      copy_heads(reciprocals + e * H, terms[e] + H);
      copy_heads(deltas + e * H, terms[e] + 2 * H);
    }
    if (a.dropout) draw_dropout(b, n);
    if (a.grad_weights != nullptr) {
      memset(gradients, 0, size_t(n * H) * sizeof(A));
      add_edge_scalars(a.grad_weights, a.edges * H, b, n, gradients);
    }
    for (int64_t at = 0; at < n * H; at += W) {
      Vec<A> weight = vector_exp(load(logits + at) - load(maxima + at)) * load(reciprocals + at);
      Vec<A> product = load(products + at), kept = weight;
      if (a.dropout) product *= load(keep + at), kept *= load(keep + at);
      if (a.grad_weights != nullptr) product += load(gradients + at);
      store(gradients + at, weight * (product - load(deltas + at)));
      store(logits + at, kept);
    }
    if (a.grad_bias != nullptr) store_edge_scalars(a.grad_bias, b, n, gradients);
    if constexpr (kScalar) {
      for (int64_t at = 0; at < n * H; at += W) store(gradients + at, load(gradients + at) * load(slopes + at));
      if (a.grad_edge != nullptr) store_edge_scalars(a.grad_edge, b, n, gradients);
    }
    if (a.target_pass && n > 0)
      memcpy(static_cast<A*>(a.edge_terms) + (b * a.edges + p) * H, gradients, size_t(n * H) * sizeof(A));
  }

  void key_gradients(const Run& run, int64_t b, int n, const uint8_t* const* signs) {
    const T* const* edges = score_edges(b, n);
    const A slope = A(a.negative_slope);
    for (int64_t h = 0; h < H; ++h) {
      const int64_t g = h / group;
      const A* factors = gradients + h;
      A* to = acc_key + g * C;
      const Segment<T> segment = {queries, h * C, edges, h * C, run.first, run.last, H};
      for_strips<A>(C, [&](auto strip) INLINE_LAMBDA {
        if constexpr (kFamily == kDot) {
          add_rows<kNow, false>(strip, OneHead<A>{h}, gradients, segment, run.begins && h % group == 0, to);
        } else if (use_signs) {
          add_slopes(strip, slope, factors, signs, h * signs_bytes, segment, run.begins, to);
        } else {
          const T* x = key_row(run.row, b) + h * C;
          A* outputs = a.grad_vector == nullptr ? nullptr : total + h * C;
          if (edges == nullptr) add_derivatives<kFamily, kNow, false>(strip, x, slope, factors, segment, run.begins, to, outputs);
          else add_derivatives<kFamily, kNow, true>(strip, x, slope, factors, segment, run.begins, to, outputs);
        }
      });
    }
  }

  // Gradients of the per-edge vectors: each edge is visited once, so they are written, not added.
  void edge_gradients(const Run& run, int64_t b) {
    T* grad_edge = kScalar ? nullptr : static_cast<T*>(a.grad_edge);
    T* grad_value = static_cast<T*>(a.grad_edge_value);
    const bool same = grad_edge == grad_value;
    const A slope = A(a.negative_slope);
    for (int e = run.first; e < run.last; ++e) {
      for (int64_t h = 0; h < H; ++h) {
        const int64_t row = (b * a.edges + edge[e]) * H + h;
        const T* grad_out = gathered.row[e] + h * V;
        const A weight = logits[e * H + h];
        if (grad_value != nullptr && !same) {
          for_strips<A>(V, [&](auto strip) INLINE_LAMBDA {
            using S = decltype(strip);
            EACH_VECTOR strip.store_at(grad_value + row * V, k, strip.load_at(grad_out, k) * weight);
          });
        }
        if constexpr (!kScalar) {
          if (grad_edge == nullptr) continue;
          const A gradient = gradients[e * H + h];
          const T* query = queries.row[e] + h * C;
          for_strips<A>(C, [&](auto strip) INLINE_LAMBDA {
            using S = decltype(strip);
            EACH_VECTOR {
              Vec<A> result;
              if constexpr (kFamily == kDot) {
                result = strip.load_at(query, k) * (gradient * A(a.scale));
              } else {
                const T* key = key_row(run.row, b) + h * C;
                const Vec<A> hidden =
                    strip.load_at(key, k) + strip.load_at(query, k) + strip.load_at(score_edge[e] + h * C, k);
                const Vec<A> output = activate<kFamily>(hidden, slope);
                result = strip.load_at(static_cast<const A*>(a.vector) + h * C, k) *
                         derivative<kFamily>(hidden, output, slope) * gradient;
              }
              if (same) result += strip.load_at(grad_out, k) * weight;
              strip.store_at(grad_edge + row * C, k, result);
            }
          });
        }
      }
    }
  }

  void finish_source(int64_t j, int64_t b) {
    const int64_t row = b * a.sources + j;
    if constexpr (kScalar) {
      if (a.grad_key != nullptr) memcpy(static_cast<A*>(a.grad_key) + row * H, acc_key, size_t(H) * sizeof(A));
    } else {
      scale_score_gradient(acc_key, G * C);
      if (a.value_is_key)
        for (int64_t c = 0; c < G * C; ++c) acc_key[c] += acc[c];
      if (a.grad_key != nullptr) store_row(static_cast<T*>(a.grad_key) + row * G * C, acc_key, G * C);
    }
    if (a.grad_value != nullptr) store_row(static_cast<T*>(a.grad_value) + row * G * V, acc, G * V);
  }

  // From the sum over edges of (activation' or the other end) times the logit's gradient.
  void scale_score_gradient(A* row, int64_t width) const {
    const A* vector = static_cast<const A*>(a.vector);
    for (int64_t c = 0; c < width; ++c) row[c] *= kFamily == kDot ? A(a.scale) : vector[c];
  }

  static void store_row(T* to, const A* row, int64_t width) {
    for_strips<A>(width, [&](auto strip) INLINE_LAMBDA {
      using S = decltype(strip);
      EACH_VECTOR strip.store_at(to, k, strip.load_at(row, k));
    });
  }

  // ------------------------------------------------------------------------------------------------- backward, by target

  void target_block(int64_t b, int64_t p, int n, const Run* runs, int num_runs) {
    const A* terms = static_cast<const A*>(a.edge_terms) + b * a.edges * H;
    const int32_t* position = a.source_position + p;
    for (int e = 0; e < n; ++e) {
      __builtin_prefetch(terms + position[e + kAhead] * H);
      copy_heads(gradients + e * H, terms + position[e] * H);
    }
    const uint8_t* signs[kBlock];
    if (use_signs) {
      for (int e = 0; e < n; ++e) signs[e] = record(p + e, b) + H * int64_t(sizeof(A));
    } else if constexpr (!kScalar) {
      if (numbers_needed)
        for (int e = 0; e < n; ++e) edge[e] = edge_of(p + e);
      gathered.gather(key_row(0, b), a.key_row, a.by_target.node + p, n);
    }
    for (int r = 0; r < num_runs; ++r) {
      if constexpr (kScalar) add_gradients(runs[r], acc);
      else query_gradients(runs[r], b, n, signs);
      if (runs[r].ends) {
        add_to_vector_gradient(query_row(runs[r].row, b), acc);
        finish_target(runs[r].row, b);
      }
    }
  }

  void query_gradients(const Run& run, int64_t b, int n, const uint8_t* const* signs) {
    const T* const* edges = score_edges(b, n);
    const A slope = A(a.negative_slope);
    for (int64_t h = 0; h < H; ++h) {
      const A* factors = gradients + h;
      A* to = acc + h * C;
      const Segment<T> segment = {gathered, h / group * C, edges, h * C, run.first, run.last, H};
      for_strips<A>(C, [&](auto strip) INLINE_LAMBDA {
        if constexpr (kFamily == kDot) {
          const OneHead<A> head = {h};
          if (edges == nullptr) add_rows<kNextToo, false>(strip, head, gradients, segment, run.begins, to);
          else add_rows<kNextToo, true>(strip, head, gradients, segment, run.begins, to);
        } else if (use_signs) {
          add_slopes(strip, slope, factors, signs, h * signs_bytes, segment, run.begins, to);
        } else {
          const T* x = query_row(run.row, b) + h * C;
          A* none = nullptr;
          if (edges == nullptr) add_derivatives<kFamily, kNextToo, false>(strip, x, slope, factors, segment, run.begins, to, none);
          else add_derivatives<kFamily, kNextToo, true>(strip, x, slope, factors, segment, run.begins, to, none);
        }
      });
    }
  }

  void finish_target(int64_t i, int64_t b) {
    if (a.grad_query == nullptr) return;
    const int64_t row = b * a.targets + i;
    if constexpr (kScalar) {
      memcpy(static_cast<A*>(a.grad_query) + row * H, acc, size_t(H) * sizeof(A));
    } else {
      scale_score_gradient(acc, H * C);
      store_row(static_cast<T*>(a.grad_query) + row * H * C, acc, H * C);
    }
  }

  // The additive score's vector: one partial sum a task. With kept signs, sum of ds LeakyReLU(q + k) is taken apart into
  // <q, sum of ds LeakyReLU'> for each target and <k, the same> for each source.

  void start_vector_gradient() {
    if (kAdditive && a.grad_vector != nullptr) memset(total, 0, size_t(H * C) * sizeof(A));
  }
  void add_to_vector_gradient(const T* row, const A* derivatives) {
    if (!kAdditive || !use_signs || a.grad_vector == nullptr) return;
    for_strips<A>(H * C, [&](auto strip) INLINE_LAMBDA {
      using S = decltype(strip);
      EACH_VECTOR strip.store_at(
          total, k, strip.load_at(total, k) + strip.load_at(row, k) * strip.load_at(derivatives, k));
    });
  }
  void store_vector_gradient(int64_t task, int64_t b) {
    if (!kAdditive || a.grad_vector == nullptr) return;
    A* to = static_cast<A*>(a.grad_vector) + (task * a.batch + b) * H * C;
    memcpy(to, total, size_t(H * C) * sizeof(A));
  }

  const Arguments& a;
  const int64_t H, C, V, G, group;
  const Packing<A> value_packing, key_packing;
  int64_t signs_bytes;
  bool use_signs, numbers_needed;
  bool is_cyclic;
  A *logits, *gradients, *slopes, *keep, *products, *maxima, *reciprocals, *deltas;
  uint32_t *low_number, *high_number;
  A *maximum, *sum, *factor, *scales;
  A *acc, *acc_key, *total;
  uint8_t* signs_of_block = nullptr;
  int64_t edge[kBlock];
  const T *score_edge[kBlock], *value_edge[kBlock];
  Gathered<T> gathered, queries;
};

// ------------------------------------------------------------------------------------------------------------- drivers

// Gives each thread a kernel with a workspace of its own. Returns 0, or -3 if memory ran out.
template <class K, class A, class F>
int64_t in_parallel(const Arguments& a, F&& f) {
  const size_t bytes = size_t(K::workspace_elements(a)) * sizeof(A) + kVectorBytes;
  std::atomic<bool> failed{false};
#pragma omp parallel num_threads(int(a.threads)) if (a.threads > 1)
  {
    void* memory = malloc(bytes);
    if (memory == nullptr) failed = true;
    // All threads work or none: those at work wait for each other.
#pragma omp barrier
    if (!failed) {
      uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
      K kernel(a, reinterpret_cast<A*>(aligned));
      f(kernel);
    }
    free(memory);
  }
  return failed ? -3 : 0;
}

#define FOR_TASKS _Pragma("omp for schedule(dynamic, 1)")

template <class T, Family kFamily>
int64_t forward(const Arguments& a) {
  using K = Kernel<T, kFamily>;
  return in_parallel<K, Compute<T>>(a, [&](K& kernel) {
    const int64_t tasks = a.by_target.num_tasks, split = a.by_target.num_split;
    FOR_TASKS for (int64_t t = 0; t < tasks * a.batch; ++t) kernel.forward(a.by_target.tasks[t % tasks], t / tasks);
    if (split > 0) {
      FOR_TASKS for (int64_t t = 0; t < split * a.batch; ++t) kernel.merge_forward(t % split, t / split);
    }
    if (a.weights != nullptr) {
      FOR_TASKS for (int64_t t = 0; t < tasks * a.batch; ++t)
        kernel.finish_weights(a.by_target.tasks[t % tasks], t / tasks);
    }
  });
}

template <class T, Family kFamily>
int64_t backward(const Arguments& a) {
  using K = Kernel<T, kFamily>;
  return in_parallel<K, Compute<T>>(a, [&](K& kernel) {
    const int64_t rows = a.targets * a.batch;
    FOR_TASKS for (int64_t chunk = 0; chunk < (rows + 255) / 256; ++chunk)
      for (int64_t r = chunk * 256; r < min(rows, (chunk + 1) * 256); ++r)
        kernel.fill_node_terms(r % a.targets, r / a.targets);
    int64_t tasks = a.by_source.num_tasks, split = a.by_source.num_split;
    FOR_TASKS for (int64_t t = 0; t < tasks * a.batch; ++t)
      kernel.backward_by_source(a.by_source.tasks[t % tasks], t / tasks);
    if (split > 0) {
      FOR_TASKS for (int64_t t = 0; t < split * a.batch; ++t) kernel.merge_source(t % split, t / split);
    }
    if (!a.target_pass) return;
    tasks = a.by_target.num_tasks, split = a.by_target.num_split;
    FOR_TASKS for (int64_t t = 0; t < tasks * a.batch; ++t)
      kernel.backward_by_target(a.by_target.tasks[t % tasks], t / tasks);
    if (split > 0) {
      FOR_TASKS for (int64_t t = 0; t < split * a.batch; ++t) kernel.merge_target(t % split, t / split);
    }
  });
}

template <class T>
int64_t run_family(const Arguments& a, bool is_forward) {
  switch (a.family) {
    case kGAT: return is_forward ? forward<T, kGAT>(a) : backward<T, kGAT>(a);
    case kLeakyReLU: return is_forward ? forward<T, kLeakyReLU>(a) : backward<T, kLeakyReLU>(a);
    case kTanh: return is_forward ? forward<T, kTanh>(a) : backward<T, kTanh>(a);
    default: return is_forward ? forward<T, kDot>(a) : backward<T, kDot>(a);
  }
}

}  // namespace

int64_t JOIN(gattn_run_, GATTN_ISA)(const Arguments& a, bool is_forward) {
  switch (a.type) {
    case kFloat64: return run_family<double>(a, is_forward);
    case kBFloat16: return run_family<BFloat16>(a, is_forward);
    case kFloat16: return run_family<Float16>(a, is_forward);
    default: return run_family<float>(a, is_forward);
  }
}

// Whether the backward pass of the LeakyReLU score can use kept signs.
bool JOIN(gattn_keeps_signs_, GATTN_ISA)(int64_t type) { return type != kFloat64 && kHasBits<float>; }
