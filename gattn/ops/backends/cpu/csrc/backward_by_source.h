// Backward, by source: weights again, d = <grad_out_i, v_j>, gradients of logits from alpha, d and
// delta_i = <grad_out_i, out_i>, and what they mean for key and value.
#pragma once

#include "scores.h"

namespace {

template <class F>
class BySource : Scores<F> {
  using Base = Scores<F>;
  using Base::a, Base::H, Base::G, Base::V, Base::acc, Base::acc_key, Base::edge_of, Base::gradients, Base::logits;
  using Base::key_width, Base::node_terms, Base::record;

 public:
  using Base::workspace_elements;
  BySource(const Arguments& arguments, A* workspace) : Base(arguments, workspace) {}

  // What the gradient of an edge needs of its target: maximum, scale, delta, and the scalar score's query.
  void fill_node_terms(int64_t i, int64_t b) {
    A* terms = node_terms(i, b);
    this->fill_target_term(i, b, terms + 3 * H);
    if (!this->law.is_normalized) return;  // no sum through which weights depend on each other
    memcpy(terms, this->stats(i, b), size_t(RowSums::kStats * H) * sizeof(A));
    this->multiply_outputs(i, b, terms + 2 * H);
    if (a.grad_weights != nullptr) {
      const A* weights = static_cast<const A*>(a.weights) + b * a.edges * H;
      const A* grads = static_cast<const A*>(a.grad_weights) + b * a.edges * H;
      for (int64_t p = a.by_target.start[i]; p < a.by_target.start[i + 1]; ++p) {
        const int64_t at = edge_of(p) * H;
        for (int64_t h = 0; h < H; ++h) terms[2 * H + h] += weights[at + h] * grads[at + h];
      }
    }
  }

  void run(const Task& task, int64_t b) {
    this->start_vector_gradient();
    this->projection.start_gradients(&task - a.by_source.tasks, b);
    this->for_blocks(a.by_source, task, [&](int64_t p, int n, const Run* runs, int num_runs) {
      run_block(b, p, n, runs, num_runs);
    });
    if (task.slot >= 0) {
      this->add_source_to_vector_gradient(task.first_row, b);
      A* to = partial(b, task.slot);
      memcpy(to, acc, size_t(G * V) * sizeof(A));
      memcpy(to + G * V, acc_key, size_t(key_width()) * sizeof(A));
    }
    this->store_vector_gradient(a.by_target.num_tasks + (&task - a.by_source.tasks), b);
  }

  // Adds up the parts of a row.
  void merge(int64_t split, int64_t b) {
    const Rows& rows = a.by_source;
    memset(acc, 0, size_t(G * V) * sizeof(A));
    memset(acc_key, 0, size_t(key_width()) * sizeof(A));
    for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot) {
      const A* from = partial(b, slot);
      for (int64_t c = 0; c < G * V; ++c) acc[c] += from[c];
      for (int64_t c = 0; c < key_width(); ++c) acc_key[c] += from[G * V + c];
    }
    finish(rows.split_row[split], b);
  }

 private:
  A* partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_source.num_slots + slot) * (G * V + key_width());
  }

  void run_block(int64_t b, int64_t p, int n, const Run* runs, int num_runs) {
    const int32_t* node = a.by_source.node + p;
    const int32_t* position = a.target_position + p;
    const A* terms[kBlock];
    for (int e = 0; e < n; ++e) {
      terms[e] = node_terms(node[e], b);
      const A* ahead = node_terms(node[e + kAhead], b);
      for (int64_t h = this->law.is_normalized ? 0 : 3 * H; h < 4 * H; h += 64 / int64_t(sizeof(A)))
        __builtin_prefetch(ahead + h);
    }
    this->number_edges(n, [&](int e) INLINE_LAMBDA { return edge_of(position[e]); });
    this->template prefetch_scalars<0>(a.bias, a.bias_batch, b, n);
    this->template prefetch_scalars<1>(a.grad_bias, a.edges * H, b, n);
    this->gathered.gather(this->grad_out_row(0, b), H * V, node, n);

    if (this->has_record) {
      for (int e = 0; e < n; ++e) {
        __builtin_prefetch(record(position[e + kAhead], b));
        this->copy_heads(logits + e * H, reinterpret_cast<const A*>(record(position[e], b)));
        this->signs[e] = this->recorded_signs(position[e], b);
      }
    } else {
      this->source_logits(b, p, n, runs, num_runs, terms);
      this->finish_logits(b, n);
    }
    this->multiply_values(runs, num_runs, b, n);
    this->differentiate_weights(b, n, terms);
    this->finish_gradients(b, n);
    if (a.target_pass && n > 0)
      memcpy(static_cast<A*>(a.edge_terms) + (b * a.edges + p) * H, gradients, size_t(n * H) * sizeof(A));

    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      this->add_value_gradients(run);
      this->add_key_gradients(run, b);
      if (a.grad_edge != nullptr || a.grad_edge_value != nullptr || a.grad_edge_projection != nullptr)
        this->store_edge_gradients(run, b);
      if (run.ends) {
        this->add_source_to_vector_gradient(run.row, b);
        finish(run.row, b);
      }
    }
    this->finish_edge_gradients(b, n);
  }

  void finish(int64_t j, int64_t b) {
    this->store_key_gradient(j, b);
    if (a.grad_value != nullptr) store_row(static_cast<T*>(a.grad_value) + (b * a.sources + j) * G * V, acc, G * V);
  }
};

}  // namespace
