// Attention over the edges of a graph, forward and backward, for one instruction set.
//
// A block is up to kBlock edges of one row. Logits and weights of a block lie head by head, [H][kBlock], so that a
// softmax runs along vectors; rows of nodes are read in strips of channels that fit into registers. Nothing of size
// [E, H, C] is ever stored. Work is cut into tasks that depend on the graph alone, and partial results are added up in
// a fixed order: the bits of the result do not depend on the number of threads.
//
// Forward, by target: logits, a running softmax, the weighted sum.
// Backward, by source: weights again, d = <grad_out_i, v_j>, gradients of logits alpha (d - delta_i) with
// delta_i = <grad_out_i, out_i>, and what they mean for key and value; then by target: what they mean for the query.

#include <omp.h>

#include <cstdlib>

#include "arguments.h"
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

// ----------------------------------------------------------------------------------------------------- blocks of rows

// The rows of a block's other ends, and of those that come next.
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

// A per-edge term's rows. `base` null: there are none.
template <class T>
INLINE void gather_edges(const T** rows, const T* base, int64_t stride, const int64_t* edge, int n) {
  for (int e = 0; e < n; ++e) rows[e] = base + edge[e] * stride;
}

enum Prefetch { kNow, kNextToo };

// out[e] = <x, row_e + edge_e> over one strip, added to out.
template <Prefetch P, bool kEdge, class S, class T, class A>
INLINE void dot_rows(S strip, const A* x, const Gathered<T>& rows, const T* const* edges, int64_t offset, int n,
                     A* out) {
  Vec<A> fixed[S::kVectors];
  EACH_VECTOR fixed[k] = strip.load_at(x, k);
  for (int e = 0; e < n; ++e) {
    if constexpr (P == kNextToo) strip.prefetch(rows.ahead[e] + offset);
    Vec<A> sum = {};
    EACH_VECTOR {
      Vec<A> other = strip.load_at(rows.row[e] + offset, k);
      if constexpr (kEdge) other += strip.load_at(edges[e], k);
      sum += fixed[k] * other;
    }
    out[e] += sum_lanes(sum);
  }
}

// acc += sum over e of factor_e (row_e + edge_e), one strip.
template <Prefetch P, bool kEdge, class S, class T, class A>
INLINE void add_rows(S strip, const A* factor, const Gathered<T>& rows, const T* const* edges, int64_t offset, int n,
                     A* acc) {
  Vec<A> sum[S::kVectors];
  EACH_VECTOR sum[k] = strip.load_at(acc, k);
  for (int e = 0; e < n; ++e) {
    if constexpr (P == kNextToo) strip.prefetch(rows.ahead[e] + offset);
    Vec<A> weight = splat<Vec<A>>(factor[e]);
    EACH_VECTOR {
      Vec<A> other = strip.load_at(rows.row[e] + offset, k);
      if constexpr (kEdge) other += strip.load_at(edges[e], k);
      sum[k] += weight * other;
    }
  }
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

// out[e] = <vector, activation(x + row_e + edge_e)> over one strip, added to out. With kSigns the signs of the
// activation's inputs are kept in signs[e].
template <Family kFamily, Prefetch P, bool kEdge, bool kSigns, class S, class T, class A>
INLINE void additive_rows(S strip, const A* vector, const A* x, A slope, const Gathered<T>& rows,
                          const T* const* edges, int64_t offset, int n, A* out, uint8_t* signs, int64_t signs_stride) {
  Vec<A> fixed[S::kVectors], weight[S::kVectors];
  EACH_VECTOR fixed[k] = strip.load_at(x, k), weight[k] = strip.load_at(vector, k);
  for (int e = 0; e < n; ++e) {
    if constexpr (P == kNextToo) strip.prefetch(rows.ahead[e] + offset);
    Vec<A> sum = {};
    EACH_VECTOR {
      Vec<A> hidden = fixed[k] + strip.load_at(rows.row[e] + offset, k);
      if constexpr (kEdge) hidden += strip.load_at(edges[e], k);
      if constexpr (kSigns) {
        LaneBits bits = positive_bits(hidden);
        memcpy(signs + e * signs_stride + strip.first / 8 + k * int(sizeof bits), &bits, sizeof bits);
      }
      sum += weight[k] * activate<kFamily>(hidden, slope);
    }
    out[e] += sum_lanes(sum);
  }
}

// acc += sum over e of factor_e activation'(x + row_e + edge_e), and total += sum of factor_e activation(...).
template <Family kFamily, bool kEdge, class S, class T, class A>
INLINE void add_derivatives(S strip, const A* x, A slope, const A* factor, const Gathered<T>& rows,
                            const T* const* edges, int64_t offset, int n, A* acc, A* total) {
  Vec<A> fixed[S::kVectors], sum[S::kVectors], outputs[S::kVectors];
  EACH_VECTOR {
    fixed[k] = strip.load_at(x, k), sum[k] = strip.load_at(acc, k);
    outputs[k] = total == nullptr ? Vec<A>{} : strip.load_at(total, k);
  }
  for (int e = 0; e < n; ++e) {
    Vec<A> weight = splat<Vec<A>>(factor[e]);
    EACH_VECTOR {
      Vec<A> hidden = fixed[k] + strip.load_at(rows.row[e] + offset, k);
      if constexpr (kEdge) hidden += strip.load_at(edges[e], k);
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

// The same for a LeakyReLU whose inputs' signs were kept: acc += sum over e of factor_e (1 or slope).
template <class S, class A>
INLINE void add_slopes(S strip, A slope, const A* factor, const uint8_t* const* signs, int64_t offset, int n, A* acc) {
  if constexpr (kHasBits<A>) {
    Vec<A> sum[S::kVectors];
    EACH_VECTOR sum[k] = strip.load_at(acc, k);
    for (int e = 0; e < n; ++e) {
      Vec<A> weight = splat<Vec<A>>(factor[e]), sloped = weight * slope;
      EACH_VECTOR {
        LaneBits bits;
        memcpy(&bits, signs[e] + offset + strip.first / 8 + k * int(sizeof bits), sizeof bits);
        sum[k] += select_bits(bits, weight, sloped);
      }
    }
    EACH_VECTOR strip.store_at(acc, k, sum[k]);
  }
}

// ------------------------------------------------------------------------------------------------------------ dropout

INLINE uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x45d9f3bu;
  x = (x ^ x >> 16) * 0x45d9f3bu;
  return x ^ x >> 16;
}

// ---------------------------------------------------------------------------------------------------------- the kernel

template <class T, Family kFamily>
class Kernel {
  using A = Compute<T>;
  static constexpr bool kScalar = kFamily == kGAT;
  static constexpr bool kAdditive = kFamily == kLeakyReLU || kFamily == kTanh;

 public:
  static int64_t workspace_elements(const Arguments& a) {
    int64_t wide = a.heads * max(a.channels, a.value_channels) + kLanes<A>;
    return 6 * a.heads * kBlock + 8 * (a.heads + kLanes<A>) + 6 * wide + 16 * kLanes<A>;
  }

  Kernel(const Arguments& arguments, A* workspace) : a(arguments), H(a.heads), C(a.channels), V(a.value_channels) {
    auto take = [&](int64_t elements) {
      A* taken = workspace;
      workspace += (elements + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
      return taken;
    };
    logits = take(H * kBlock), gradients = take(H * kBlock), slopes = take(H * kBlock);
    keep = take(H * kBlock), deltas = take(H * kBlock), products = take(H * kBlock);
    maximum = take(H), sum = take(H), factor = take(H), scalars = take(H);
    const int64_t wide = H * max(C, V);
    x = take(wide), y = take(wide), acc = take(wide), acc_key = take(wide), total = take(wide);
    group = a.key_heads > 0 ? H / a.key_heads : 1;
    use_signs = a.record_bytes > 0;
    signs_bytes = (C + 15) / 16 * 2;
  }

  // ------------------------------------------------------------------------------------------------------------ forward

  void forward(const Task& task, int64_t b) {
    const Rows& rows = a.by_target;
    for (int64_t i = task.first_row; i < task.last_row; ++i) {
      int64_t first = rows.start[i], last = rows.start[i + 1];
      if (task.slot >= 0) first = task.first_edge, last = task.last_edge;
      load_target(i, b);
      for (int64_t h = 0; h < H; ++h) maximum[h] = -INFINITY, sum[h] = 0;
      memset(acc, 0, size_t(H * V) * sizeof(A));
      for (int64_t p = first; p < last; p += kBlock) forward_block(b, p, int(min(kBlock, last - p)), p == first);
      if (task.slot < 0) {
        finish_forward(i, b);
      } else {
        A* partial = forward_partial(b, task.slot);
        memcpy(partial, maximum, size_t(H) * sizeof(A));
        memcpy(partial + H, sum, size_t(H) * sizeof(A));
        memcpy(partial + 2 * H, acc, size_t(H * V) * sizeof(A));
      }
    }
  }

  void merge_forward(int64_t split, int64_t b) {
    const Rows& rows = a.by_target;
    for (int64_t h = 0; h < H; ++h) maximum[h] = -INFINITY, sum[h] = 0;
    memset(acc, 0, size_t(H * V) * sizeof(A));
    for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot) {
      const A* partial = forward_partial(b, slot);
      for (int64_t h = 0; h < H; ++h) {
        A most = partial[h] > maximum[h] ? partial[h] : maximum[h], base = finite_base(most);
        A old_factor = exp_of(maximum[h] - base), new_factor = exp_of(partial[h] - base);
        sum[h] = sum[h] * old_factor + partial[H + h] * new_factor;
        maximum[h] = most;
        for (int64_t c = h * V; c < (h + 1) * V; ++c)
          acc[c] = acc[c] * old_factor + partial[2 * H + c] * new_factor;
      }
    }
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
        for (int64_t h = 0; h < H; ++h) weight[h] = exp_of(weight[h] - row[h]) * row[H + h];
      }
    }
  }

  // ----------------------------------------------------------------------------------------------------------- backward

  // What the gradient of an edge needs of its target: maximum, reciprocal sum, delta, query (for GAT).
  void fill_node_terms(int64_t i, int64_t b) {
    A* terms = node_terms(i, b);
    memcpy(terms, stats(i, b), size_t(2 * H) * sizeof(A));
    const T* grad = static_cast<const T*>(a.grad_out) + (b * a.targets + i) * H * V;
    const T* out = static_cast<const T*>(a.out) + (b * a.targets + i) * H * V;
    const A* wide = a.out_wide == nullptr ? nullptr : static_cast<const A*>(a.out_wide) + (b * a.targets + i) * H * V;
    for (int64_t h = 0; h < H; ++h) {
      Vec<A> product = {};
      for_strips<A>(V, [&](auto strip) INLINE_LAMBDA {
        using S = decltype(strip);
        EACH_VECTOR product += strip.load_at(grad + h * V, k) *
                               (wide == nullptr ? strip.load_at(out + h * V, k) : strip.load_at(wide + h * V, k));
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
      for (int64_t h = 0; h < H; ++h) terms[3 * H + h] = a.query == nullptr ? A(0) : scalar_query(i, b)[h];
    }
  }

  void backward_by_source(const Task& task, int64_t b) {
    const Rows& rows = a.by_source;
    start_vector_gradient();
    for (int64_t j = task.first_row; j < task.last_row; ++j) {
      int64_t first = rows.start[j], last = rows.start[j + 1];
      if (task.slot >= 0) first = task.first_edge, last = task.last_edge;
      load_row(value_row(j, b), a.key_heads * V, y);
      if constexpr (kScalar) memcpy(scalars, scalar_key(j, b), size_t(H) * sizeof(A));
      else load_row(key_row(j, b), a.key_heads * C, x);
      memset(acc, 0, size_t(a.key_heads * V) * sizeof(A));
      memset(acc_key, 0, size_t(key_width()) * sizeof(A));
      for (int64_t p = first; p < last; p += kBlock) source_block(b, p, int(min(kBlock, last - p)));
      if (use_signs && a.grad_vector != nullptr) multiply_add(total, x, acc_key, H * C);
      if (task.slot < 0) {
        finish_source(j, b);
      } else {
        A* partial = source_partial(b, task.slot);
        memcpy(partial, acc, size_t(a.key_heads * V) * sizeof(A));
        memcpy(partial + a.key_heads * V, acc_key, size_t(key_width()) * sizeof(A));
      }
    }
    store_vector_gradient(a.by_target.num_tasks + (&task - rows.tasks), b);
  }

  void merge_source(int64_t split, int64_t b) {
    const Rows& rows = a.by_source;
    memset(acc, 0, size_t(a.key_heads * V) * sizeof(A));
    memset(acc_key, 0, size_t(key_width()) * sizeof(A));
    for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot) {
      const A* partial = source_partial(b, slot);
      for (int64_t c = 0; c < a.key_heads * V; ++c) acc[c] += partial[c];
      for (int64_t c = 0; c < key_width(); ++c) acc_key[c] += partial[a.key_heads * V + c];
    }
    finish_source(rows.split_row[split], b);
  }

  void backward_by_target(const Task& task, int64_t b) {
    const Rows& rows = a.by_target;
    start_vector_gradient();
    for (int64_t i = task.first_row; i < task.last_row; ++i) {
      int64_t first = rows.start[i], last = rows.start[i + 1];
      if (task.slot >= 0) first = task.first_edge, last = task.last_edge;
      if constexpr (!kScalar) load_row(query_row(i, b), H * C, x);
      memset(acc, 0, size_t(query_width()) * sizeof(A));
      for (int64_t p = first; p < last; p += kBlock) target_block(b, p, int(min(kBlock, last - p)));
      if (use_signs && a.grad_vector != nullptr) multiply_add(total, x, acc, H * C);
      if (task.slot < 0) finish_target(i, b);
      else memcpy(target_partial(b, task.slot), acc, size_t(query_width()) * sizeof(A));
    }
    store_vector_gradient(&task - rows.tasks, b);
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
  // ---------------------------------------------------------------------------------------------- where things are

  const T* query_row(int64_t i, int64_t b) const {
    return static_cast<const T*>(a.query) + b * a.query_batch + i * a.query_row;
  }
  const T* key_row(int64_t j, int64_t b) const {
    return static_cast<const T*>(a.key) + b * a.key_batch + j * a.key_row;
  }
  const T* value_row(int64_t j, int64_t b) const {
    if (a.value == nullptr) return key_row(j, b);
    return static_cast<const T*>(a.value) + b * a.value_batch + j * a.value_row;
  }
  int64_t value_stride() const { return a.value == nullptr ? a.key_row : a.value_row; }
  // GAT's query and key come in the type that is computed in.
  const A* scalar_query(int64_t i, int64_t b) const {
    return static_cast<const A*>(a.query) + b * a.query_batch + i * a.query_row;
  }
  const A* scalar_key(int64_t j, int64_t b) const {
    return static_cast<const A*>(a.key) + b * a.key_batch + j * a.key_row;
  }
  A* stats(int64_t i, int64_t b) const { return static_cast<A*>(a.stats) + (b * a.targets + i) * 2 * H; }
  A* node_terms(int64_t i, int64_t b) const { return static_cast<A*>(a.node_terms) + (b * a.targets + i) * 4 * H; }
  int64_t key_width() const { return kScalar ? H : a.key_heads * C; }
  int64_t query_width() const { return kScalar ? H : H * C; }
  A* forward_partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_target.num_slots + slot) * (2 * H + H * V);
  }
  A* source_partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_source.num_slots + slot) * (a.key_heads * V + key_width());
  }
  A* target_partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_target.num_slots + slot) * query_width();
  }
  int64_t edge_of(int64_t target_position) const {
    return a.edge_of_target_position == nullptr ? target_position : a.edge_of_target_position[target_position];
  }
  const T* edge_terms_of(int64_t b) const {
    return kScalar || a.edge == nullptr ? nullptr : static_cast<const T*>(a.edge) + b * a.edge_batch;
  }
  const T* edge_values_of(int64_t b) const {
    return a.edge_value == nullptr ? nullptr : static_cast<const T*>(a.edge_value) + b * a.edge_value_batch;
  }
  uint8_t* record(int64_t target_position, int64_t b) const {
    return a.record + (b * a.edges + target_position) * a.record_bytes;
  }
  static A finite_base(A most) { return most == -A(INFINITY) ? A(0) : most; }
  static A exp_of(A value) { return vector_exp(splat<Vec<A>>(value))[0]; }

  static void load_row(const T* row, int64_t width, A* to) {
    for_strips<A>(width, [&](auto strip) INLINE_LAMBDA {
      using S = decltype(strip);
      EACH_VECTOR strip.store_at(to, k, strip.load_at(row, k));
    });
  }
  static void multiply_add(A* to, const A* first, const A* second, int64_t width) {
    for (int64_t c = 0; c < width; ++c) to[c] += first[c] * second[c];
  }
  void load_target(int64_t i, int64_t b) {
    if constexpr (!kScalar) load_row(query_row(i, b), H * C, x);
    else if (a.query == nullptr) memset(scalars, 0, size_t(H) * sizeof(A));
    else memcpy(scalars, scalar_query(i, b), size_t(H) * sizeof(A));
  }

  // -------------------------------------------------------------------------------------------------- parts of a block

  // Adds bias and mask to the block's logits.
  void finish_logits(int64_t b, int n) {
    if (a.bias != nullptr) {
      const A* bias = static_cast<const A*>(a.bias) + b * a.bias_batch;
      for (int e = 0; e < n; ++e)
        for (int64_t h = 0; h < H; ++h) logits[h * kBlock + e] += bias[edge[e] * H + h];
    }
    if (a.mask != nullptr) {
      const uint8_t* mask = a.mask + b * a.mask_batch;
      for (int e = 0; e < n; ++e)
        for (int64_t h = 0; h < H; ++h)
          if (!mask[edge[e] * a.mask_edge + h * a.mask_head]) logits[h * kBlock + e] = -INFINITY;
    }
  }

  // keep[h][e]: 0 or 1 / (1 - p), by the definition in gattn/ops/dropout.py.
  void draw_dropout(int64_t b, int n) {
    const uint32_t low_seed = uint32_t(a.seed), high_seed = uint32_t(uint64_t(a.seed) >> 32);
    const A scale = A(a.keep_scale);
    const uint64_t threshold = uint64_t(a.threshold);
    for (int64_t h = 0; h < H; ++h) {
      for (int e = 0; e < n; ++e) {
        const uint64_t number = uint64_t((b * a.edges + edge[e]) * H + h);
        const uint32_t random = mix(mix(uint32_t(number) ^ low_seed) ^ uint32_t(number >> 32) ^ high_seed);
        keep[h * kBlock + e] = random >= threshold ? scale : A(0);
      }
    }
  }

  // Logits of vector scores: `x` is fixed, `others` holds the rows of the edges' other ends.
  template <bool kFromTarget>
  void vector_logits(const Gathered<T>& others, int64_t b, int n) {
    const T* edges[kBlock];
    const T* edge_base = edge_terms_of(b);
    memset(logits, 0, size_t(H * kBlock) * sizeof(A));
    for (int64_t h = 0; h < H; ++h) {
      // Grouped queries: the key's head.
      const int64_t g = h / group;
      const int64_t other = (kFromTarget ? g : h) * C, own = (kFromTarget ? h : g) * C;
      if (edge_base != nullptr) gather_edges(edges, edge_base + h * C, H * C, edge, n);
      for_strips<A>(C, [&](auto strip) INLINE_LAMBDA {
        A* out = logits + h * kBlock;
        if constexpr (kFamily == kDot) {
          if (edge_base == nullptr) dot_rows<kNextToo, false>(strip, x + own, others, edges, other, n, out);
          else if (kFromTarget) dot_rows<kNextToo, true>(strip, x + own, others, edges, other, n, out);
          else dot_rows_moved(strip, x + own, others, edges, other, n, out);
        } else {
          const A* vector = static_cast<const A*>(a.vector) + h * C;
          const A slope = A(a.negative_slope);
          uint8_t* signs = kFromTarget && use_signs ? signs_of_block + h * signs_bytes : nullptr;
          if (edge_base != nullptr)
            additive_rows<kFamily, kNextToo, true, false>(strip, vector, x + own, slope, others, edges, other, n, out,
                                                          nullptr, 0);
          else if (kHasBits<A> && kFamily == kLeakyReLU && signs != nullptr)
            additive_rows<kFamily, kNextToo, false, kHasBits<A>>(strip, vector, x + own, slope, others, edges, other, n,
                                                                 out, signs, a.record_bytes);
          else
            additive_rows<kFamily, kNextToo, false, false>(strip, vector, x + own, slope, others, edges, other, n, out,
                                                           nullptr, 0);
        }
      });
      if constexpr (kFamily == kDot)
        for (int e = 0; e < n; ++e) logits[h * kBlock + e] *= A(a.scale);
    }
  }

  // <x + edge_e, row_e>: the edge term belongs to the key, which is fixed here.
  template <class S>
  static INLINE void dot_rows_moved(S strip, const A* key, const Gathered<T>& rows, const T* const* edges,
                                    int64_t offset, int n, A* out) {
    Vec<A> fixed[S::kVectors];
    EACH_VECTOR fixed[k] = strip.load_at(key, k);
    for (int e = 0; e < n; ++e) {
      strip.prefetch(rows.ahead[e] + offset);
      Vec<A> dot = {};
      EACH_VECTOR dot += (fixed[k] + strip.load_at(edges[e], k)) * strip.load_at(rows.row[e] + offset, k);
      out[e] += sum_lanes(dot);
    }
  }

  void forward_block(int64_t b, int64_t p, int n, bool first) {
    const int32_t* node = a.by_target.node + p;
    for (int e = 0; e < n; ++e) edge[e] = edge_of(p + e);
    if constexpr (kScalar) {
      for (int e = 0; e < n; ++e) {
        const A* key = scalar_key(node[e], b);
        for (int64_t h = 0; h < H; ++h) logits[h * kBlock + e] = scalars[h] + key[h];
      }
      finish_scalar_logits(b, n);
    } else {
      gathered.gather(key_row(0, b), a.key_row, node, n);
      if (use_signs) signs_of_block = record(p, b) + H * sizeof(A);
      vector_logits<true>(gathered, b, n);
    }
    finish_logits(b, n);
    if (use_signs) {
      for (int e = 0; e < n; ++e) {
        A* kept = reinterpret_cast<A*>(record(p + e, b));
        for (int64_t h = 0; h < H; ++h) kept[h] = logits[h * kBlock + e];
      }
    }
    if (a.weights != nullptr) {
      A* weights = static_cast<A*>(a.weights) + b * a.edges * H;
      for (int e = 0; e < n; ++e)
        for (int64_t h = 0; h < H; ++h) weights[edge[e] * H + h] = logits[h * kBlock + e];
    }
    running_softmax(n);
    if (a.dropout) {
      draw_dropout(b, n);
      for (int64_t h = 0; h < H; ++h)
        for (int e = 0; e < n; ++e) logits[h * kBlock + e] *= keep[h * kBlock + e];
    }
    if (!first) scale_rows(acc, factor);
    const bool shared = a.value == nullptr && !kScalar;
    if (!shared) gathered.gather(value_row(0, b), value_stride(), node, n);
    const T* edges[kBlock];
    const T* edge_base = edge_values_of(b);
    for (int64_t h = 0; h < H; ++h) {
      if (edge_base != nullptr) gather_edges(edges, edge_base + h * V, H * V, edge, n);
      for_strips<A>(V, [&](auto strip) INLINE_LAMBDA {
        const A* weights = logits + h * kBlock;
        const int64_t offset = h / group * V;
        if (edge_base != nullptr) add_rows<kNextToo, true>(strip, weights, gathered, edges, offset, n, acc + h * V);
        else if (shared) add_rows<kNow, false>(strip, weights, gathered, edges, offset, n, acc + h * V);
        else add_rows<kNextToo, false>(strip, weights, gathered, edges, offset, n, acc + h * V);
      });
    }
  }

  // GAT's edge terms and activation; slopes[h][e] is its derivative.
  void finish_scalar_logits(int64_t b, int n) {
    const A slope = A(a.negative_slope);
    if (a.edge != nullptr) {
      const A* terms = static_cast<const A*>(a.edge) + b * a.edge_batch;
      for (int e = 0; e < n; ++e)
        for (int64_t h = 0; h < H; ++h) logits[h * kBlock + e] += terms[edge[e] * H + h];
    }
    for (int64_t h = 0; h < H; ++h) {
      A* row = logits + h * kBlock;
      A* row_slopes = slopes + h * kBlock;
      for (int e = 0; e < n; ++e) {
        row_slopes[e] = row[e] > 0 ? A(1) : slope;
        row[e] *= row_slopes[e];
      }
    }
  }

  // Turns the block's logits into exp(logit - maximum), and brings maximum, sum and factor up to date.
  void running_softmax(int n) {
    constexpr int W = kLanes<A>;
    for (int64_t h = 0; h < H; ++h) {
      A* row = logits + h * kBlock;
      for (int e = n; e < (n + W - 1) / W * W; ++e) row[e] = -INFINITY;
      Vec<A> most = load(row);
      for (int e = W; e < n; e += W) {
        Vec<A> other = load(row + e);
        most = other > most ? other : most;
      }
      A highest = max_lanes(most);
      highest = highest > maximum[h] ? highest : maximum[h];
      const A base = finite_base(highest);
      factor[h] = maximum[h] == highest ? A(1) : exp_of(maximum[h] - base);
      maximum[h] = highest;
      Vec<A> total_weight = {};
      for (int e = 0; e < n; e += W) {
        Vec<A> weight = vector_exp(load(row + e) - base);
        store(row + e, weight);
        total_weight += weight;
      }
      sum[h] = sum[h] * factor[h] + sum_lanes(total_weight);
    }
  }

  void scale_rows(A* rows, const A* by) {
    for (int64_t h = 0; h < H; ++h) {
      if (by[h] == A(1)) continue;
      for (int64_t c = h * V; c < (h + 1) * V; ++c) rows[c] *= by[h];
    }
  }

  void finish_forward(int64_t i, int64_t b) {
    A* row = stats(i, b);
    for (int64_t h = 0; h < H; ++h) {
      row[h] = finite_base(maximum[h]);
      // Only exact zeros are replaced, so that a NaN shows in the whole row.
      row[H + h] = sum[h] == 0 ? A(0) : 1 / sum[h];
    }
    T* out = static_cast<T*>(a.out) + (b * a.targets + i) * H * V;
    A* wide = a.out_wide == nullptr ? nullptr : static_cast<A*>(a.out_wide) + (b * a.targets + i) * H * V;
    for (int64_t h = 0; h < H; ++h) {
      const Vec<A> scale = splat<Vec<A>>(row[H + h]);
      for_strips<A>(V, [&](auto strip) INLINE_LAMBDA {
        using S = decltype(strip);
        EACH_VECTOR {
          Vec<A> result = strip.load_at(acc + h * V, k) * scale;
          strip.store_at(out + h * V, k, result);
          if (wide != nullptr) strip.store_at(wide + h * V, k, result);
        }
      });
    }
  }

  // ------------------------------------------------------------------------------------------------ backward, by source

  void source_block(int64_t b, int64_t p, int n) {
    const int32_t* node = a.by_source.node + p;
    const int32_t* position = a.target_position + p;
    for (int e = 0; e < n; ++e) {
      edge[e] = edge_of(position[e]);
      __builtin_prefetch(node_terms(node[e + kAhead], b));
    }
    gathered.gather(static_cast<const T*>(a.grad_out) + b * a.targets * H * V, H * V, node, n);

    const uint8_t* signs[kBlock];
    if (use_signs) {
      for (int e = 0; e < n; ++e) {
        const uint8_t* kept = record(position[e], b);
        __builtin_prefetch(record(position[e + kAhead], b));
        for (int64_t h = 0; h < H; ++h) memcpy(logits + h * kBlock + e, kept + h * sizeof(A), sizeof(A));
        signs[e] = kept + H * sizeof(A);
      }
    } else if constexpr (kScalar) {
      for (int e = 0; e < n; ++e) {
        const A* query = node_terms(node[e], b) + 3 * H;
        for (int64_t h = 0; h < H; ++h) logits[h * kBlock + e] = query[h] + scalars[h];
      }
      finish_scalar_logits(b, n);
      finish_logits(b, n);
    } else {
      queries.gather(query_row(0, b), a.query_row, node, n);
      vector_logits<false>(queries, b, n);
      finish_logits(b, n);
    }

    // products = <grad_out_i, v_j + e_ij>
    const T* value_edges[kBlock];
    const T* value_base = edge_values_of(b);
    memset(products, 0, size_t(H * kBlock) * sizeof(A));
    for (int64_t h = 0; h < H; ++h) {
      if (value_base != nullptr) gather_edges(value_edges, value_base + h * V, H * V, edge, n);
      const int64_t g = h / group;
      for_strips<A>(V, [&](auto strip) INLINE_LAMBDA {
        if (value_base == nullptr)
          dot_rows<kNextToo, false>(strip, y + g * V, gathered, value_edges, h * V, n, products + h * kBlock);
        else dot_rows_moved(strip, y + g * V, gathered, value_edges, h * V, n, products + h * kBlock);
      });
    }
    logit_gradients(b, p, n, node);

    for (int64_t h = 0; h < H; ++h) {
      const int64_t g = h / group;
      for_strips<A>(V, [&](auto strip) INLINE_LAMBDA {
        add_rows<kNow, false>(strip, logits + h * kBlock, gathered, value_edges, h * V, n, acc + g * V);
      });
    }
    if constexpr (!kScalar) key_gradients(b, n, signs);
    edge_gradients(b, n);
  }

  // From logits and products to gradients[h][e] (of the score), and weights after dropout in logits[h][e].
  void logit_gradients(int64_t b, int64_t p, int n, const int32_t* node) {
    constexpr int W = kLanes<A>;
    for (int e = 0; e < n; ++e) {
      const A* terms = node_terms(node[e], b);
      for (int64_t h = 0; h < H; ++h) {
        logits[h * kBlock + e] -= terms[h];
        gradients[h * kBlock + e] = terms[H + h];
        deltas[h * kBlock + e] = terms[2 * H + h];
      }
    }
    if (a.dropout) draw_dropout(b, n);
    if (a.grad_weights != nullptr) {
      const A* grads = static_cast<const A*>(a.grad_weights) + b * a.edges * H;
      for (int e = 0; e < n; ++e)
        for (int64_t h = 0; h < H; ++h) deltas[h * kBlock + e] -= grads[edge[e] * H + h];
    }
    for (int64_t h = 0; h < H; ++h) {
      const int64_t row = h * kBlock;
      for (int e = n; e < (n + W - 1) / W * W; ++e) logits[row + e] = gradients[row + e] = deltas[row + e] = keep[row + e] = 0;
      for (int e = 0; e < n; e += W) {
        Vec<A> weight = vector_exp(load(logits + row + e)) * load(gradients + row + e);
        Vec<A> kept = a.dropout ? load(keep + row + e) : splat<Vec<A>>(A(1));
        store(gradients + row + e, weight * (load(products + row + e) * kept - load(deltas + row + e)));
        store(logits + row + e, weight * kept);
      }
    }
    if (a.grad_bias != nullptr) store_edge_scalars(static_cast<A*>(a.grad_bias), b, n);
    if constexpr (kScalar) {
      for (int64_t h = 0; h < H; ++h)
        for (int e = 0; e < n; ++e) {
          gradients[h * kBlock + e] *= slopes[h * kBlock + e];
          acc_key[h] += gradients[h * kBlock + e];
        }
      if (a.grad_edge != nullptr) store_edge_scalars(static_cast<A*>(a.grad_edge), b, n);
    }
    if (a.edge_terms != nullptr) {
      A* terms = static_cast<A*>(a.edge_terms) + (b * a.edges + p) * H;
      for (int e = 0; e < n; ++e)
        for (int64_t h = 0; h < H; ++h) terms[e * H + h] = gradients[h * kBlock + e];
    }
  }

  void store_edge_scalars(A* to, int64_t b, int n) {
    to += b * a.edges * H;
    for (int e = 0; e < n; ++e)
      for (int64_t h = 0; h < H; ++h) to[edge[e] * H + h] = gradients[h * kBlock + e];
  }

  void key_gradients(int64_t b, int n, const uint8_t* const* signs) {
    const T* edges[kBlock];
    const T* edge_base = edge_terms_of(b);
    const A slope = A(a.negative_slope);
    for (int64_t h = 0; h < H; ++h) {
      const int64_t g = h / group;
      const A* factors = gradients + h * kBlock;
      if (edge_base != nullptr) gather_edges(edges, edge_base + h * C, H * C, edge, n);
      for_strips<A>(C, [&](auto strip) INLINE_LAMBDA {
        A* to = acc_key + g * C;
        if constexpr (kFamily == kDot) {
          add_rows<kNow, false>(strip, factors, queries, edges, h * C, n, to);
        } else if (use_signs) {
          add_slopes(strip, slope, factors, signs, h * signs_bytes, n, to);
        } else {
          A* outputs = a.grad_vector == nullptr ? nullptr : total + h * C;
          if (edge_base == nullptr)
            add_derivatives<kFamily, false>(strip, x + h * C, slope, factors, queries, edges, h * C, n, to, outputs);
          else add_derivatives<kFamily, true>(strip, x + h * C, slope, factors, queries, edges, h * C, n, to, outputs);
        }
      });
    }
  }

  // Gradients of the per-edge vectors: each edge is visited once, so they are written, not added.
  void edge_gradients(int64_t b, int n) {
    T* grad_edge = kScalar ? nullptr : static_cast<T*>(a.grad_edge);
    T* grad_value = static_cast<T*>(a.grad_edge_value);
    if (grad_edge == nullptr && grad_value == nullptr) return;
    const bool same = grad_edge == grad_value;
    const T* edge_base = edge_terms_of(b);
    const A slope = A(a.negative_slope);
    for (int64_t h = 0; h < H; ++h) {
      const int64_t g = h / group;
      if (grad_value != nullptr && !same) {
        for_strips<A>(V, [&](auto strip) INLINE_LAMBDA {
          using S = decltype(strip);
          for (int e = 0; e < n; ++e) {
            T* to = grad_value + ((b * a.edges + edge[e]) * H + h) * V;
            EACH_VECTOR strip.store_at(to, k, strip.load_at(gathered.row[e] + h * V, k) * logits[h * kBlock + e]);
          }
        });
      }
      if constexpr (!kScalar) {
        if (grad_edge == nullptr) continue;
        for_strips<A>(C, [&](auto strip) INLINE_LAMBDA {
          using S = decltype(strip);
          for (int e = 0; e < n; ++e) {
            T* to = grad_edge + ((b * a.edges + edge[e]) * H + h) * C;
            const A gradient = gradients[h * kBlock + e];
            EACH_VECTOR {
              Vec<A> query = strip.load_at(queries.row[e] + h * C, k), result;
              if constexpr (kFamily == kDot) {
                result = query * (gradient * A(a.scale));
              } else {
                Vec<A> hidden = strip.load_at(x + g * C, k) + query +
                                strip.load_at(edge_base + (edge[e] * H + h) * C, k);
                Vec<A> output = activate<kFamily>(hidden, slope);
                result = strip.load_at(static_cast<const A*>(a.vector) + h * C, k) *
                         derivative<kFamily>(hidden, output, slope) * gradient;
              }
              if (same) result += strip.load_at(gathered.row[e] + h * V, k) * logits[h * kBlock + e];
              strip.store_at(to, k, result);
            }
          }
        });
      }
    }
  }

  void finish_source(int64_t j, int64_t b) {
    const int64_t row = b * a.sources + j, G = a.key_heads;
    if constexpr (kScalar) {
      if (a.grad_key != nullptr) memcpy(static_cast<A*>(a.grad_key) + row * H, acc_key, size_t(H) * sizeof(A));
    } else {
      scale_score_gradient(acc_key, G * C);
      if (a.value == nullptr)
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

  // ------------------------------------------------------------------------------------------------ backward, by target

  void target_block(int64_t b, int64_t p, int n) {
    const A* terms = static_cast<const A*>(a.edge_terms) + b * a.edges * H;
    const int32_t* position = a.source_position + p;
    for (int e = 0; e < n; ++e) {
      __builtin_prefetch(terms + position[e + kAhead] * H);
      const A* term = terms + position[e] * H;
      for (int64_t h = 0; h < H; ++h) {
        if constexpr (kScalar) acc[h] += term[h];
        else gradients[h * kBlock + e] = term[h];
      }
    }
    if constexpr (kScalar) return;
    const uint8_t* signs[kBlock];
    if (use_signs) {
      for (int e = 0; e < n; ++e) signs[e] = record(p + e, b) + H * sizeof(A);
    } else {
      for (int e = 0; e < n; ++e) edge[e] = edge_of(p + e);
      gathered.gather(key_row(0, b), a.key_row, a.by_target.node + p, n);
    }
    const T* edges[kBlock];
    const T* edge_base = edge_terms_of(b);
    const A slope = A(a.negative_slope);
    for (int64_t h = 0; h < H; ++h) {
      const int64_t g = h / group;
      const A* factors = gradients + h * kBlock;
      if (edge_base != nullptr) gather_edges(edges, edge_base + h * C, H * C, edge, n);
      for_strips<A>(C, [&](auto strip) INLINE_LAMBDA {
        A* to = acc + h * C;
        if constexpr (kFamily == kDot) {
          if (edge_base == nullptr) add_rows<kNextToo, false>(strip, factors, gathered, edges, g * C, n, to);
          else add_rows<kNextToo, true>(strip, factors, gathered, edges, g * C, n, to);
        } else if (use_signs) {
          add_slopes(strip, slope, factors, signs, h * signs_bytes, n, to);
        } else if constexpr (kAdditive) {
          if (edge_base == nullptr)
            add_derivatives<kFamily, false>(strip, x + h * C, slope, factors, gathered, edges, h * C, n, to,
                                            static_cast<A*>(nullptr));
          else
            add_derivatives<kFamily, true>(strip, x + h * C, slope, factors, gathered, edges, h * C, n, to,
                                           static_cast<A*>(nullptr));
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

  // The additive score's vector: one partial sum a task.

  void start_vector_gradient() {
    if (kAdditive && a.grad_vector != nullptr) memset(total, 0, size_t(H * C) * sizeof(A));
  }
  void store_vector_gradient(int64_t task, int64_t b) {
    if (!kAdditive || a.grad_vector == nullptr) return;
    A* to = static_cast<A*>(a.grad_vector) + (task * a.batch + b) * H * C;
    memcpy(to, total, size_t(H * C) * sizeof(A));
  }

  const Arguments& a;
  const int64_t H, C, V;
  int64_t group, signs_bytes;
  bool use_signs;
  A *logits, *gradients, *slopes, *keep, *deltas, *products;
  A *maximum, *sum, *factor, *scalars;
  A *x, *y, *acc, *acc_key, *total;
  uint8_t* signs_of_block = nullptr;
  int64_t edge[kBlock];
  Gathered<T> gathered, queries;
};

// ------------------------------------------------------------------------------------------------------------- drivers

// Gives each thread a kernel with a workspace of its own. Returns 0, or -3 if memory ran out.
template <class K, class A, class F>
int64_t in_parallel(const Arguments& a, F&& f) {
  const size_t bytes = size_t(K::workspace_elements(a)) * sizeof(A) + kVectorBytes;
  int64_t failed = 0;
#pragma omp parallel num_threads(int(a.threads)) if (a.threads > 1) reduction(+ : failed)
  {
    void* memory = malloc(bytes);
    failed += memory == nullptr;
#pragma omp barrier
    if (memory != nullptr) {
      uintptr_t aligned = (reinterpret_cast<uintptr_t>(memory) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
      K kernel(a, reinterpret_cast<A*>(aligned));
      f(kernel);
    }
    free(memory);
  }
  return failed > 0 ? -3 : 0;
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
    if (a.edge_terms == nullptr) return;
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
