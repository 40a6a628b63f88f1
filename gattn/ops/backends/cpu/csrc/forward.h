// Forward, by target: logits, weights and their running sums, the weighted sum of values.
#pragma once

#include "scores.h"
#include "thresholds.h"

namespace {

template <class F>
class Forward : Scores<F> {
  using Base = Scores<F>;
  using Base::a, Base::acc, Base::H, Base::logits;

 public:
  using Base::finish_part, Base::leaves_weights;
  static int64_t workspace_elements(const Arguments& a) { return Base::workspace_elements(a, 1); }
  Forward(const Arguments& arguments, A* workspace)
      : Base(arguments, workspace, 1),
        is_by_channel(F::kScalar && Base::has_channel_heads && !Base::law.is_exponential && a.weights == nullptr),
        thresholds(arguments) {}

  bool is_of_rows() const { return this->law.is_of_rows; }

  NOINLINE void run(const Task& task, int64_t b) {
    this->sums.start(task.slot >= 0);
    this->for_blocks(a.by_target, task, [&](int64_t p, int n, Runs runs) {
      run_block(b, p, n, runs);
    });
    if (task.slot >= 0 && !is_of_rows()) this->save_sums(task.slot, task.first_edge, b);
  }
  void merge(int64_t split, int64_t b) { this->merge_sums(split, b); }

  // Laws of rows wait for all parts of a row: then its logits are rewritten, and the parts' sums follow.
  void rewrite(int64_t split, int64_t b) { rewrite_row(a.by_target.split_row[split], b); }
  NOINLINE void sum_part(const Task& task, int64_t b) {
    this->sums.start(true);
    this->for_blocks(a.by_target, task, [&](int64_t p, int n, Runs runs) { sum_rewritten(b, p, n, runs); });
    this->save_sums(task.slot, task.first_edge, b);
  }

 private:
  NOINLINE void run_block(int64_t b, int64_t p, int n, Runs runs) {
    number_edges(p, n);
    this->template prefetch_scalars<0>(a.bias, a.bias_batch, b, n);
    if constexpr (F::kScalar)
      if (is_by_channel) return run_channels(b, p, n, runs);
    this->target_logits(b, p, n, runs);
    this->finish_logits(b, n);
    if (is_of_rows() && !rewrite_block(b, p, n, runs)) return;
    this->sum_block(b, p, n, runs);
  }
  // What run_block does for gates of channels: the numbers of an edge stay in registers, from its logits to the sums.
  NOINLINE void run_channels(int64_t b, int64_t p, int n, Runs runs) {
    A* const none = this->products;  // stands for what there is not
    for (int64_t h = 0; h < H; ++h) none[h] = 0;
    const int32_t* node = a.by_target.node + p;
    this->gathered.gather(this->value_row(0, b), a.value_row, a.sources, node, n);
    const A* edges = this->load_edge_scalars(a.edge, a.edge_batch, b, n, this->slopes);
    const A* biases = this->load_edge_scalars(a.bias, a.bias_batch, b, n, logits);
    const A* out_bias = a.out_bias == nullptr ? none : static_cast<const A*>(a.out_bias);
    this->law.visit([&](auto rule) INLINE_LAMBDA {
      for (const Run& run : runs) {
        const A* query = a.query == nullptr ? none : this->query(run.row, b);
        A *const stats = this->stats(run.row, b), *const sums = this->sums.sums(), *const wide = this->wide_output(run.row, b);
        T* const out = this->output(run.row, b);
        for_strips(H, [&](auto strip) INLINE_LAMBDA {
          using S = decltype(strip);
          Vec<A> own[S::kVectors], sum[S::kVectors], total[S::kVectors];
          EACH_VECTOR {
            own[k] = strip.load_at(query, k);
            sum[k] = run.begins ? Vec<A>{} : strip.load_at(sums, k);
            total[k] = run.begins ? Vec<A>{} : strip.load_at(acc, k);
          }
          for (int e = run.first; e < run.last; ++e) {
            const A* edge = edges == nullptr ? none : edges + e * H;
            const A* bias = biases == nullptr ? none : biases + e * H;
            strip.prefetch(this->key(node[e + kAhead], b));
            strip.prefetch(this->gathered.ahead[e]);
            EACH_VECTOR {
              const Vec<A> ends = own[k] + strip.load_at(this->key(node[e], b), k) + strip.load_at(edge, k);
              const Vec<A> weight = rule(this->family.apply(ends).value + strip.load_at(bias, k), Vec<A>{}).value;
              sum[k] += weight;
              total[k] += weight * strip.load_at(this->gathered.row[e], k);
            }
          }
          EACH_VECTOR {
            strip.store_at(sums, k, sum[k]), strip.store_at(acc, k, total[k]);
            if (!run.ends) continue;
            const Vec<A> scale = this->sums.scale_of(sum[k]), result = total[k] * scale;
            strip.store_at(stats, k, Vec<A>{}), strip.store_at(stats + H, k, scale);
            strip.store_at(out, k, result + strip.load_at(out_bias, k));
            if (wide != nullptr) strip.store_at(wide, k, result);
          }
        });
      }
    });
  }
  void number_edges(int64_t p, int n) {
    Base::number_edges(n, [&](int e) INLINE_LAMBDA { return this->edge_of(p + e); });
  }

  // Rewrites logits of whole rows. Those of a longer row are kept until its end, and then summed here.
  bool rewrite_block(int64_t b, int64_t p, int n, Runs runs) {
    const Run& last = runs.back();
    if (runs[0].begins && last.ends) {
      for (const Run& run : runs) thresholds.rewrite(logits + run.first * H, run.last - run.first);
      return true;
    }
    memcpy(this->kept_logits(p, b), logits, size_t(n * H) * sizeof(A));
    if (!last.ends) return false;
    rewrite_row(last.row, b);
    const int32_t* start = a.by_target.start + last.row;
    this->cut_row({last.row, 0, 0, true, true}, start[0], start[1],
                  [&](int64_t p, int n, Runs runs) { sum_rewritten(b, p, n, runs); });
    return false;
  }
  void rewrite_row(int64_t row, int64_t b) {
    const int32_t* start = a.by_target.start + row;
    thresholds.rewrite(this->kept_logits(start[0], b), start[1] - start[0]);
  }
  NOINLINE void sum_rewritten(int64_t b, int64_t p, int n, Runs runs) {
    number_edges(p, n);
    memcpy(logits, this->kept_logits(p, b), size_t(n * H) * sizeof(A));
    if (a.value_is_key) this->gathered.gather(this->value_row(0, b), a.key_row, a.sources, a.by_target.node + p, n);
    this->sum_block(b, p, n, runs);
  }

  const bool is_by_channel;
  const Thresholds thresholds;
};

}  // namespace
