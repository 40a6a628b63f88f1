// Forward, by target: logits, weights and their running sums, the weighted sum of values.
#pragma once

#include "scores.h"
#include "thresholds.h"

namespace {

template <class F>
class Forward : Scores<F> {
  using Base = Scores<F>;
  using Base::a, Base::H, Base::logits;

 public:
  using Base::finish_weights, Base::workspace_elements;
  Forward(const Arguments& arguments, A* workspace) : Base(arguments, workspace), thresholds(arguments) {}

  bool is_of_rows() const { return this->law.is_of_rows; }

  NOINLINE void run(const Task& task, int64_t b) {
    this->sums.start(task.slot >= 0);
    this->for_blocks(a.by_target, task, [&](int64_t p, int n, const Run* runs, int num_runs) {
      run_block(b, p, n, runs, num_runs);
    });
    if (task.slot >= 0 && !is_of_rows()) this->save_sums(task.slot, b);
  }
  void merge(int64_t split, int64_t b) { this->merge_sums(split, b); }

  // Laws of rows wait for all parts of a row: then its logits are rewritten, and the parts' sums follow.
  void rewrite(int64_t split, int64_t b) { rewrite_row(a.by_target.split_row[split], b); }
  NOINLINE void sum_part(const Task& task, int64_t b) {
    this->sums.start(true);
    this->for_blocks(a.by_target, task, [&](int64_t p, int n, const Run* run, int) { sum_rewritten(b, p, n, *run); });
    this->save_sums(task.slot, b);
  }

 private:
  NOINLINE void run_block(int64_t b, int64_t p, int n, const Run* runs, int num_runs) {
    number_edges(p, n);
    this->template prefetch_scalars<0>(a.bias, a.bias_batch, b, n);
    this->target_logits(b, p, n, runs, num_runs);
    this->finish_logits(b, n);
    if (is_of_rows() && !rewrite_block(b, p, n, runs, num_runs)) return;
    if (a.logits != nullptr) memcpy(this->kept_logits(p, b), logits, size_t(n * H) * sizeof(A));
    this->sum_block(b, p, n, runs, num_runs);
  }
  void number_edges(int64_t p, int n) {
    Base::number_edges(n, [&](int e) INLINE_LAMBDA { return this->edge_of(p + e); });
  }

  // Rewrites logits of whole rows. Those of a longer row are kept until its end, and then summed here.
  bool rewrite_block(int64_t b, int64_t p, int n, const Run* runs, int num_runs) {
    const Run& last = runs[num_runs - 1];
    const bool is_whole = runs[0].begins && last.ends;
    for (int r = 0; r < num_runs && is_whole; ++r)
      thresholds.rewrite(logits + runs[r].first * H, runs[r].last - runs[r].first);
    if (is_whole) return true;
    memcpy(this->kept_logits(p, b), logits, size_t(n * H) * sizeof(A));
    if (!last.ends) return false;
    rewrite_row(last.row, b);
    const int32_t* start = a.by_target.start + last.row;
    this->cut_row({last.row, 0, 0, true, true}, start[0], start[1],
                  [&](int64_t p, int n, const Run* run, int) { sum_rewritten(b, p, n, *run); });
    return false;
  }
  void rewrite_row(int64_t row, int64_t b) {
    const int32_t* start = a.by_target.start + row;
    thresholds.rewrite(this->kept_logits(start[0], b), start[1] - start[0]);
  }
  NOINLINE void sum_rewritten(int64_t b, int64_t p, int n, const Run& run) {
    number_edges(p, n);
    memcpy(logits, this->kept_logits(p, b), size_t(n * H) * sizeof(A));
    if (a.value_is_key) this->gathered.gather(this->value_row(0, b), a.key_row, a.by_target.node + p, n);
    this->sum_block(b, p, n, &run, 1);
  }

  const Thresholds thresholds;
};

}  // namespace
