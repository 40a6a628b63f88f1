// Forward, by target: logits, weights and their running sums, the weighted sum of values.
#pragma once

#include "scores.h"

namespace {

template <class F>
class Forward : Scores<F> {
  using Base = Scores<F>;
  using Base::a, Base::H, Base::V, Base::acc, Base::keep, Base::logits, Base::record, Base::stats;

 public:
  static int64_t workspace_elements(const Arguments& a) {
    return Base::workspace_elements(a) + RowSums::workspace_elements(a.heads);
  }
  Forward(const Arguments& arguments, A* workspace) : Base(arguments, workspace), sums(arguments, Base::rest) {}

  void run(const Task& task, int64_t b) {
    sums.start(task.slot >= 0);
    this->for_blocks(a.by_target, task, [&](int64_t p, int n, const Run* runs, int num_runs) {
      run_block(b, p, n, runs, num_runs);
    });
    if (task.slot >= 0) {
      A* to = partial(b, task.slot);
      sums.save(to);
      memcpy(to + RowSums::kState * H, acc, size_t(H * V) * sizeof(A));
    }
  }

  // Adds up the parts of a row.
  void merge(int64_t split, int64_t b) {
    const Rows& rows = a.by_target;
    sums.start_merging();
    memset(acc, 0, size_t(H * V) * sizeof(A));
    for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot) {
      const A* from = partial(b, slot);
      sums.merge(from, from + RowSums::kState * H, V, acc);
    }
    A* row = stats(rows.split_row[split], b);
    sums.finish_merging(row);
    this->store_output(rows.split_row[split], b, sums.scales(row));
  }

  // Weights were written as logits.
  void finish_weights(const Task& task, int64_t b) {
    A* weights = static_cast<A*>(a.weights) + b * a.edges * H;
    this->law.visit([&](auto rule) INLINE_LAMBDA {
      for (int64_t i = task.first_row; i < task.last_row; ++i) {
        const A* row = stats(i, b);
        int64_t first = a.by_target.start[i], last = a.by_target.start[i + 1];
        if (task.slot >= 0) first = task.first_edge, last = task.last_edge;
        for (int64_t p = first; p < last; ++p) {
          A* weight = weights + this->edge_of(p) * H;
          this->for_heads([&](auto heads) INLINE_LAMBDA {
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

 private:
  A* partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_target.num_slots + slot) * (RowSums::kState * H + H * V);
  }

  void run_block(int64_t b, int64_t p, int n, const Run* runs, int num_runs) {
    this->number_edges(n, [&](int e) INLINE_LAMBDA { return this->edge_of(p + e); });
    this->template prefetch_scalars<0>(a.bias, a.bias_batch, b, n);
    this->target_logits(b, p, n, runs, num_runs);
    this->finish_logits(b, n);
    if (this->has_record)
      for (int e = 0; e < n; ++e) this->copy_heads(reinterpret_cast<A*>(record(p + e, b)), logits + e * H);
    if (a.weights != nullptr) this->store_edge_scalars(a.weights, b, n, logits);

    for (int r = 0; r < num_runs; ++r) sums.add_run(runs[r], logits, stats(runs[r].row, b));
    if (a.dropout) {
      this->draw_dropout(b, n);
      for (int64_t at = 0; at < n * H; at += W) store(logits + at, load(logits + at) * load(keep + at));
    }

    // Keys that are values have been gathered for the score.
    if (!a.value_is_key) this->gathered.gather(this->value_row(0, b), a.value_row, a.by_target.node + p, n);
    const T* const* edges = this->value_edges(b, n);
    for (int r = 0; r < num_runs; ++r)
      this->sum_values(runs[r], edges, b, sums.factor(), sums.scales(stats(runs[r].row, b)));
  }

  RowSums sums;
};

}  // namespace
