// Forward, by target: logits, weights and their running sums, the weighted sum of values.
#pragma once

#include "scores.h"

namespace {

template <class F>
class Forward : Scores<F> {
  using Base = Scores<F>;
  using Base::a;

 public:
  using Base::finish_weights, Base::workspace_elements;
  Forward(const Arguments& arguments, A* workspace) : Base(arguments, workspace) {}

  NOINLINE void run(const Task& task, int64_t b) {
    this->sums.start(task.slot >= 0);
    this->for_blocks(a.by_target, task, [&](int64_t p, int n, const Run* runs, int num_runs) {
      run_block(b, p, n, runs, num_runs);
    });
    if (task.slot >= 0) this->save_sums(task.slot, b);
  }
  void merge(int64_t split, int64_t b) { this->merge_sums(split, b); }

 private:
  NOINLINE void run_block(int64_t b, int64_t p, int n, const Run* runs, int num_runs) {
    this->number_edges(n, [&](int e) INLINE_LAMBDA { return this->edge_of(p + e); });
    this->template prefetch_scalars<0>(a.bias, a.bias_batch, b, n);
    this->target_logits(b, p, n, runs, num_runs);
    this->finish_logits(b, n);
    this->sum_block(b, p, n, runs, num_runs);
  }
};

}  // namespace
