// A block of edges: where its inputs and outputs are, its workspace, and its scalars, [kBlock, H].
#pragma once

#include "distribution.h"
#include "dropout.h"
#include "projection.h"

namespace {

class Block : public Heads {
 public:
  static int64_t workspace_elements(const Arguments& a, int64_t sums) {
    const int64_t wide = a.heads * max(max(a.channels, a.value_channels), 1);
    return 11 * (round_up(a.heads * kBlock) + W) + W * kBlock + 2 * round_up(sums * wide) + round_up(wide) +
           Projection::workspace_elements(a);
  }

 protected:
  // `workspace` is aligned; `rest` becomes what is left of it. There is room for the sums of so many rows.
  Block(const Arguments& arguments, A* workspace, int64_t sums)
      : Heads(arguments.heads),
        a(arguments),
        C(a.channels),
        V(a.value_channels),
        G(a.key_heads),
        group(G > 0 ? H / G : 1),
        law(a),
        has_record(a.record_bytes > 0),
        keeps_logits(has_record || a.logits != nullptr),
        keeps_weights(a.logits != nullptr && law.can_keep_weights),
        has_channel_heads(V == 1 && G == H && H >= W && !a.dropout && a.mask == nullptr && a.edge_value == nullptr &&
                          a.edge_channels == 0 && law.cap == 0 && !law.is_of_rows),
        numbers_needed(a.dropout || a.bias || a.mask || a.edge || a.edge_value || a.weights || a.grad_weights ||
                       a.grad_bias || a.grad_edge || a.grad_edge_value || a.grad_edge_projection),
        projection(arguments, workspace),
        rest(workspace + round_up(Projection::workspace_elements(arguments))) {
    auto take = [&](int64_t elements) {
      A* taken = rest;
      rest += round_up(elements);
      return taken;
    };
    const int64_t scalars = H * kBlock + W;  // vectors of them may begin at any edge
    logits = take(scalars), gradients = take(scalars), slopes = take(scalars), keep = take(scalars);
    products = take(scalars), maxima = take(scalars), row_scales = take(scalars + W * kBlock), deltas = take(scalars);
    derivatives = take(scalars);
    low_number = reinterpret_cast<uint32_t*>(take(scalars));
    high_number = reinterpret_cast<uint32_t*>(take(scalars));
    const int64_t wide = H * max(max(C, V), 1);  // sums of scalars need as much as those of one channel
    acc = take(sums * wide), acc_key = take(sums * wide), total = take(wide);
  }

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
  const T* grad_out_row(int64_t i, int64_t b) const {
    return static_cast<const T*>(a.grad_out) + (b * a.targets + i) * H * V;
  }
  T* output(int64_t i, int64_t b) const { return static_cast<T*>(a.out) + (b * a.targets + i) * H * V; }
  A* wide_output(int64_t i, int64_t b) const {
    return a.out_wide == nullptr ? nullptr : static_cast<A*>(a.out_wide) + (b * a.targets + i) * H * V;
  }
  A* stats(int64_t i, int64_t b) const { return static_cast<A*>(a.stats) + (b * a.targets + i) * 2 * H; }
  A* node_terms(int64_t i, int64_t b) const { return static_cast<A*>(a.node_terms) + (b * a.targets + i) * 4 * H; }
  // The heads of a query head's row at the end `end`, and at the other one: keys and values may have fewer heads.
  int64_t own_head(End end, int64_t h) const { return end == kTarget ? h : h / group; }
  int64_t other_head(End end, int64_t h) const { return end == kTarget ? h / group : h; }
  // Whether the sum of a run's own head begins with this query head.
  bool begins_sum(End end, int64_t h, const Run& run) const { return run.begins && (end == kTarget || h % group == 0); }
  // Where the gradients of a run's own row, `width` numbers, are added up: where they belong, if no other run adds to them.
  A* place_of_gradient(const Run& run, void* gradients, int64_t row, int64_t width, A* other) const {
    const bool is_whole = std::is_same_v<T, A> && run.begins && run.ends && gradients != nullptr;
    return is_whole ? static_cast<A*>(gradients) + row * width : other;
  }
  // Stores them there, unless they have been added up there.
  void store_gradient(const A* from, void* gradients, int64_t row, int64_t width) const {
    if (gradients == nullptr) return;
    T* const to = static_cast<T*>(gradients) + row * width;
    if (static_cast<const void*>(to) != from) store_row(to, from, width);
  }
  int64_t edge_of(int64_t target_position) const {
    return a.edge_of_target_position == nullptr ? target_position : a.edge_of_target_position[target_position];
  }
  // What the forward pass keeps of an edge: its logits or weights, and in a record also the signs of the score's inputs.
  uint8_t* record(int64_t target_position, int64_t b) const {
    return a.record + (b * a.edges + target_position) * a.record_bytes;
  }
  uint8_t* recorded_signs(int64_t target_position, int64_t b) const {
    return record(target_position, b) + H * int64_t(sizeof(A));
  }

  A* kept(int64_t target_position, int64_t b) const {
    return a.logits != nullptr ? kept_logits(target_position, b) : reinterpret_cast<A*>(record(target_position, b));
  }
  A* kept_logits(int64_t target_position, int64_t b) const {
    return static_cast<A*>(a.logits) + (b * a.edges + target_position) * H;
  }

  // -------------------------------------------------------------------------------------------------- cutting into blocks

  // Calls f(first position, number of edges, runs). Short rows share a block, long ones have several.
  template <class F>
  INLINE void for_blocks(const Rows& rows, const Task& task, F&& f) {
    if (task.slot >= 0) {
      const Run run = {task.first_row, 0, 0, true, false};
      cut_row(run, task.first_edge, task.last_edge, f);
      return;
    }
    Run runs[kBlock];
    int count = 0, n = 0;
    int64_t begin = rows.start[task.first_row];
    for (int64_t row = task.first_row; row < task.last_row; ++row) {
      const int64_t first = rows.start[row], last = rows.start[row + 1];
      if (count == kBlock || last - first > kBlock - n) {
        if (count > 0) f(begin, n, Runs{runs, count});
        count = n = 0;
        begin = first;
      }
      if (last - first > kBlock) {
        cut_row({row, 0, 0, true, true}, first, last, f);
        begin = last;
      } else {
        runs[count++] = {row, n, n + int(last - first), true, true};
        n += int(last - first);
      }
    }
    if (count > 0) f(begin, n, Runs{runs, count});
  }

  template <class F>
  INLINE void cut_row(const Run& whole, int64_t first, int64_t last, F&& f) {
    for (int64_t p = first; p < last; p += kBlock) {
      const int n = int(min(kBlock, last - p));
      const Run run = {whole.row, 0, n, p == first, whole.ends && p + n == last};
      f(p, n, Runs{&run, 1});
    }
  }

  // ---------------------------------------------------------------------------------------------------- parts of a block

  // The rows of per-edge vectors of head 0; null where there are none.
  NOINLINE const T* const* edge_rows(const void* base, int64_t batch_stride, int64_t b, int64_t width, int n, const T** rows) {
    if (base == nullptr) return nullptr;
    for (int e = 0; e < n; ++e) rows[e] = static_cast<const T*>(base) + b * batch_stride + edge[e] * H * width;
    return rows;
  }
  NOINLINE const T* const* score_edges(int64_t b, int n) {
    if (a.edge_channels == 0) return edge_rows(a.edge, a.edge_batch, b, C, n, score_edge);
    if (a.edge_type != nullptr) {
      for (int e = 0; e < n; ++e) score_edge[e] = projection.row_of_type<T>(e);
      return score_edge;
    }
    const T* rows = projection.projected<T>(n);
    for (int e = 0; e < n; ++e) score_edge[e] = rows + e * H * C;
    return score_edge;
  }
  NOINLINE const T* const* value_edges(int64_t b, int n) {
    if (a.edge_channels > 0 && a.edge_value != nullptr) return score_edges(b, n);  // the only edge values with features
    return edge_rows(a.edge_value, a.edge_value_batch, b, V, n, value_edge);
  }

  // Notes the numbers of the block's edges, where they are needed: number(e) for the edge e.
  template <class F>
  INLINE void number_edges(int n, F&& number) {
    if (!numbers_needed) return;
    for (int e = 0; e < n; ++e) edge[e] = number(e);
    if (a.edge_channels > 0) projection.gather(edge, n);
  }

  // Scalars of the block's edges, which lie anywhere, all set out at once.
  template <int kForWriting>
  void prefetch_scalars(const void* of_edges, int64_t batch_stride, int64_t b, int n) const {
    if (of_edges == nullptr) return;
    const int64_t bytes = H * int64_t(sizeof(A));
    const char* rows = static_cast<const char*>(of_edges) + b * batch_stride * int64_t(sizeof(A));
    for (int e = 0; e < n; ++e)
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows + edge[e] * bytes + at, kForWriting);
  }

  // Whole rows at once, as they come from afar. Returns `to`, or null if there are none.
  NOINLINE const A* load_edge_scalars(const void* from, int64_t batch_stride, int64_t b, int n, A* to) {
    if (from == nullptr) return nullptr;
    for (int e = 0; e < n; ++e) copy_heads(to + e * H, static_cast<const A*>(from) + b * batch_stride + edge[e] * H);
    return to;
  }
  // to_e += from[edge e], H numbers. They are copied first: a part of a vector that was stored can't be read at once.
  NOINLINE void add_edge_scalars(const void* from, int64_t batch_stride, int64_t b, int n, A* to) {
    load_edge_scalars(from, batch_stride, b, n, gradients);
    for (int64_t at = 0; at < n * H; at += W) store(to + at, load(to + at) + load(gradients + at));
  }
  NOINLINE void store_edge_scalars(void* to, int64_t b, int n, const A* from) {
    for (int e = 0; e < n; ++e)
      copy_heads(static_cast<A*>(to) + (b * a.edges + edge[e]) * H, from + e * H);
  }

  // Adds bias, cap and mask to the block's logits.
  NOINLINE void finish_logits(int64_t b, int n) {
    if (a.bias != nullptr) add_edge_scalars(a.bias, a.bias_batch, b, n, logits);
    law.cap_logits(logits, n * H);
    if (a.mask != nullptr) {
      const uint8_t* mask = a.mask + b * a.mask_batch;
      for (int e = 0; e < n; ++e)
        for (int64_t h = 0; h < H; ++h)
          if (!mask[edge[e] * a.mask_edge + h * a.mask_head]) logits[e * H + h] = -INFINITY;
    }
  }

  // keep: 0 or 1 / (1 - p) for each weight.
  NOINLINE void draw_dropout(int64_t b, int n) {
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

  const Arguments& a;
  const int64_t C, V, G, group;
  const Law law;
  const bool has_record;
  const bool keeps_logits, keeps_weights;  // whether the forward pass keeps logits, and whether these have become weights
  const bool has_channel_heads;  // whether each channel is a head, and nothing else is special
  const bool numbers_needed;
  Projection projection;
  A* rest;
  A *logits, *gradients, *slopes, *keep, *products, *maxima, *row_scales, *deltas, *derivatives;
  uint32_t *low_number, *high_number;
  A *acc, *acc_key, *total;
  int64_t edge[kBlock];
  const T *score_edge[kBlock], *value_edge[kBlock];
  const uint8_t* signs[kBlock];
  Gathered gathered, queries;
};

}  // namespace
