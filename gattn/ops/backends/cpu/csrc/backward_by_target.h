// Backward, by target: what the gradients of logits mean for the query.
#pragma once

#include "scores.h"

namespace {

template <class F>
class ByTarget : Scores<F> {
  using Base = Scores<F>;
  using Base::a, Base::H, Base::acc, Base::gradients, Base::query_width;

 public:
  ByTarget(const Arguments& arguments, A* workspace) : Base(arguments, workspace, kBlock) {}

  NOINLINE void run(const Task& task, int64_t b) {
    this->start_vector_gradient();
    this->for_blocks(a.by_target, task, [&](int64_t p, int n, Runs runs) {
      run_block(b, p, n, runs);
    });
    if (task.slot >= 0) {
      this->add_target_to_vector_gradient(task.first_row, b, acc);
      memcpy(partial(b, task.slot), acc, size_t(query_width()) * sizeof(A));
    }
    this->store_vector_gradient(&task - a.by_target.tasks, b);
  }

  // Adds up the parts of a row.
  NOINLINE void merge(int64_t split, int64_t b) {
    const Rows& rows = a.by_target;
    memset(acc, 0, size_t(query_width()) * sizeof(A));
    for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot) {
      const A* from = partial(b, slot);
      for (int64_t c = 0; c < query_width(); ++c) acc[c] += from[c];
    }
    if (a.grad_query != nullptr) this->store_query_gradient(rows.split_row[split], b, acc);
  }

 private:
  A* partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_target.num_slots + slot) * query_width();
  }

  NOINLINE void run_block(int64_t b, int64_t p, int n, Runs runs) {
    const A* terms = static_cast<const A*>(a.edge_terms) + b * a.edges * H;
    const int32_t* position = a.source_position + p;
    for (int e = 0; e < n; ++e) {
      __builtin_prefetch(terms + position[e + kBlock] * H);
      this->copy_heads(gradients + e * H, terms + position[e] * H);
    }
    if (this->has_record) {
      for (int e = 0; e < n; ++e) this->signs[e] = this->recorded_signs(p + e, b);
    } else {
      this->load_keys(b, p, n);
    }
    this->add_query_gradients(runs, b);
    for (int r = 0; r < runs.count; ++r) {
      const Run& run = runs[r];
      if (!run.ends) continue;
      A* const sums = this->query_sums(run, r, b);
      this->add_target_to_vector_gradient(run.row, b, sums);
      if (a.grad_query != nullptr) this->store_query_gradient(run.row, b, sums);
    }
  }
};

}  // namespace
