// Backward, before the other passes, for laws with a threshold: delta_i, what the threshold takes from each gradient of a
// logit. It is the mean of d = <grad_out_i, v_j> over a row, weighted by the derivatives of the weights.
#pragma once

#include "values.h"

namespace {

class Means : Values {
 public:
  Means(const Arguments& arguments, A* workspace) : Values(arguments, workspace, 1) {}

  NOINLINE void run(const Task& task, int64_t b) {
    for_blocks(a.by_target, task, [&](int64_t p, int n, Runs runs) {
      run_block(b, p, n, runs);
    });
    if (task.slot < 0) return;
    memcpy(partial(b, task.slot), acc, size_t(H) * sizeof(A));
    memcpy(partial(b, task.slot) + H, acc_key, size_t(H) * sizeof(A));
  }

  // Adds up the parts of a row.
  NOINLINE void merge(int64_t split, int64_t b) {
    const Rows& rows = a.by_target;
    for (int64_t h = 0; h < H; ++h) {
      acc[h] = acc_key[h] = 0;
      for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot)
        acc[h] += partial(b, slot)[h], acc_key[h] += partial(b, slot)[H + h];
    }
    finish(rows.split_row[split], b);
  }

 private:
  A* partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_target.num_slots + slot) * 2 * H;
  }

  NOINLINE void run_block(int64_t b, int64_t p, int n, Runs runs) {
    number_edges(n, [&](int e) INLINE_LAMBDA { return edge_of(p + e); });
    gathered.gather(value_row(0, b), a.value_is_key ? a.key_row : a.value_row, a.sources, a.by_target.node + p, n);
    const T* const* edges = value_edges(b, n);
    memset(products, 0, size_t(n * H) * sizeof(A));
    add_row_products(plain_dot(), kTarget, runs, [&](int64_t i) { return grad_out_row(i, b); }, gathered, edges, V,
                     value_packing, products);
    if (a.dropout) draw_dropout(b, n);
    finish_products(b, n);
    memcpy(logits, kept_logits(p, b), size_t(n * H) * sizeof(A));
    law.visit([&](auto rule) INLINE_LAMBDA {
      for (int64_t at = 0; at < n * H; at += W) {
        const Vec<A> derivative = rule(load(logits + at), Vec<A>{}).derivative;
        store(slopes + at, derivative);
        store(products + at, derivative * load(products + at));
      }
    });
    for (const Run& run : runs) {
      sum_run(run, products, acc);
      sum_run(run, slopes, acc_key);
      if (run.ends) finish(run.row, b);
    }
  }
  void finish(int64_t i, int64_t b) const {
    A* delta = node_terms(i, b) + 2 * H;
    for (int64_t h = 0; h < H; ++h) delta[h] = acc_key[h] == 0 ? A(0) : acc[h] / acc_key[h];
  }
};

}  // namespace
