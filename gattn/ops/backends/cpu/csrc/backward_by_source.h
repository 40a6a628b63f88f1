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
  static int64_t workspace_elements(const Arguments& a) { return Base::workspace_elements(a, kBlock); }
  BySource(const Arguments& arguments, A* workspace)
      : Base(arguments, workspace, kBlock),
        is_by_channel(F::kScalar && Base::has_channel_heads && a.grad_weights == nullptr) {}

  // What the gradient of an edge needs of its target: maximum, scale, delta, and the scalar score's query.
  NOINLINE void fill_node_terms(int64_t i, int64_t b) {
    A* terms = node_terms(i, b);
    this->fill_target_term(i, b, terms + 3 * H);
    if (!this->law.is_normalized) return;
    memcpy(terms, this->stats(i, b), size_t(RowSums::kStats * H) * sizeof(A));
    if (this->law.has_threshold) return;  // see means.h
    this->multiply_outputs(i, b, terms + 2 * H);
    if (a.grad_log_sum != nullptr) {
      const A* grads = static_cast<const A*>(a.grad_log_sum) + (b * a.targets + i) * H;
      for (int64_t h = 0; h < H; ++h) terms[2 * H + h] -= grads[h];
    }
    if (a.grad_weights != nullptr) {
      const A* weights = static_cast<const A*>(a.weights) + b * a.edges * H;
      const A* grads = static_cast<const A*>(a.grad_weights) + b * a.edges * H;
      for (int64_t p = a.by_target.start[i]; p < a.by_target.start[i + 1]; ++p) {
        const int64_t at = edge_of(p) * H;
        for (int64_t h = 0; h < H; ++h) terms[2 * H + h] += weights[at + h] * grads[at + h];
      }
    }
  }

  NOINLINE void run(const Task& task, int64_t b) {
    this->start_vector_gradient();
    this->projection.start_gradients(&task - a.by_source.tasks, b);
    this->for_blocks(a.by_source, task, [&](int64_t p, int n, Runs runs) {
      run_block(b, p, n, runs);
    });
    if (task.slot >= 0) {
      this->add_source_to_vector_gradient(task.first_row, b, acc_key);
      A* to = partial(b, task.slot);
      memcpy(to, acc, size_t(G * V) * sizeof(A));
      memcpy(to + G * V, acc_key, size_t(key_width()) * sizeof(A));
    }
    this->store_vector_gradient(a.by_target.num_tasks + (&task - a.by_source.tasks), b);
  }

  // Adds up the parts of a row.
  NOINLINE void merge(int64_t split, int64_t b) {
    const Rows& rows = a.by_source;
    memset(acc, 0, size_t(G * V) * sizeof(A));
    memset(acc_key, 0, size_t(key_width()) * sizeof(A));
    for (int64_t slot = rows.split[split]; slot < rows.split[split + 1]; ++slot) {
      const A* from = partial(b, slot);
      for (int64_t c = 0; c < G * V; ++c) acc[c] += from[c];
      for (int64_t c = 0; c < key_width(); ++c) acc_key[c] += from[G * V + c];
    }
    finish(rows.split_row[split], b, acc_key, acc);
  }

 private:
  A* partial(int64_t b, int64_t slot) const {
    return static_cast<A*>(a.partial) + (b * a.by_source.num_slots + slot) * (G * V + key_width());
  }

  NOINLINE void run_block(int64_t b, int64_t p, int n, Runs runs) {
    const int32_t* node = a.by_source.node + p;
    const int32_t* position = a.target_position + p;
    const A* terms[kBlock];
    const int64_t first_read = this->keeps_weights ? 2 * H : this->law.is_exponential ? 0 : H;
    const int64_t first_term = this->law.is_normalized ? first_read : 3 * H;
    const int64_t last_term = F::kScalar && a.query != nullptr ? 4 * H : 3 * H;
    for (int e = 0; e < n; ++e) {
      terms[e] = node_terms(node[e], b);
      const A* ahead = node_terms(node[e + kBlock], b);
      for (int64_t h = first_term; h < last_term; h += 64 / int64_t(sizeof(A))) __builtin_prefetch(ahead + h);
    }
    A* const edge_terms = static_cast<A*>(a.edge_terms) + (b * a.edges + p) * H;
    if (a.target_pass) prefetch_for_writing(edge_terms + n * H, kBlock * H * int64_t(sizeof(A)));
    this->number_edges(n, [&](int e) INLINE_LAMBDA { return edge_of(position[e]); });
    this->template prefetch_scalars<0>(a.bias, a.bias_batch, b, n);
    this->template prefetch_scalars<1>(a.grad_bias, a.edges * H, b, n);
    this->gathered.gather(this->grad_out_row(0, b), H * V, a.targets, node, n);
    if constexpr (F::kScalar)
      if (is_by_channel) return run_channels(b, p, n, runs, terms);

    if (this->has_record) {
      for (int e = 0; e < n; ++e) {
        __builtin_prefetch(record(position[e + kBlock], b));
        this->signs[e] = this->recorded_signs(position[e], b);
      }
    } else {
      this->source_logits(b, p, n, runs, terms);
      if (!this->keeps_logits) this->finish_logits(b, n);
    }
    if (this->keeps_logits) {
      for (int e = 0; e < n; ++e) {
        __builtin_prefetch(this->kept(position[e + kBlock], b));
        this->copy_heads(logits + e * H, this->kept(position[e], b));
      }
    }
    if (a.dropout) this->draw_dropout(b, n);
    this->weigh_again(n, terms);
    this->multiply_values(runs, b, n);
    this->differentiate_weights(b, n);
    this->finish_gradients(b, n);
    if (a.target_pass && n > 0)
      memcpy(edge_terms, gradients, size_t(n * H) * sizeof(A));

    this->add_key_gradients(runs, b);
    if (a.grad_edge != nullptr || a.grad_edge_value != nullptr || a.grad_edge_projection != nullptr) {
      for (const Run& run : runs) this->store_edge_gradients(run, b);
      this->finish_edge_gradients(b, n);
    }
    for (int r = 0; r < runs.count; ++r) {
      const Run& run = runs[r];
      if (!run.ends) continue;
      A* const key_sums = this->key_sums(run, r, b);
      this->add_source_to_vector_gradient(run.row, b, key_sums);
      finish(run.row, b, key_sums, this->value_sums(run, r, b));
    }
  }

  // What run_block does where every channel is a head and nothing else is asked for: the numbers of an edge stay in
  // registers, from its logits to their gradients.
  NOINLINE void run_channels(int64_t b, int64_t p, int n, Runs runs, const A* const* terms) {
    // Stand for what there is not. Neither is used by anything else here.
    A *const none = this->products, *const ones = this->maxima;
    for (int64_t h = 0; h < H; ++h) none[h] = 0, ones[h] = 1;
    const bool is_normalized = this->law.is_normalized;
    const A* edges = this->load_edge_scalars(a.edge, a.edge_batch, b, n, this->slopes);
    const A* biases = this->load_edge_scalars(a.bias, a.bias_batch, b, n, logits);
    A* const grad_edges = static_cast<A*>(a.grad_edge) + b * a.edges * H;
    A* const grad_biases = static_cast<A*>(a.grad_bias) + b * a.edges * H;
    A* const edge_terms = static_cast<A*>(a.edge_terms) + (b * a.edges + p) * H;
    this->law.visit([&](auto rule) INLINE_LAMBDA {
      for (const Run& run : runs) {
        const A* key = this->key(run.row, b);
        const T* value = this->value_row(run.row, b);
        for_strips(H, [&](auto strip) INLINE_LAMBDA {
          using S = decltype(strip);
          Vec<A> own_key[S::kVectors], own_value[S::kVectors], sum_key[S::kVectors], sum_value[S::kVectors];
          EACH_VECTOR {
            own_key[k] = strip.load_at(key, k), own_value[k] = strip.load_at(value, k);
            sum_key[k] = run.begins ? Vec<A>{} : strip.load_at(acc_key, k);
            sum_value[k] = run.begins ? Vec<A>{} : strip.load_at(acc, k);
          }
          for (int e = run.first; e < run.last; ++e) {
            const A* query = a.query == nullptr ? none : terms[e] + 3 * H;
            const A* edge = edges == nullptr ? none : edges + e * H;
            const A* bias = biases == nullptr ? none : biases + e * H;
            const A* scale = is_normalized ? terms[e] + H : ones;
            const A* delta = is_normalized ? terms[e] + 2 * H : none;
            const T* grad_out = this->gathered.row[e];
            strip.prefetch(this->gathered.ahead[e]);
            EACH_VECTOR {
              const Applied score = this->family.apply(own_key[k] + strip.load_at(query, k) + strip.load_at(edge, k));
              const Vec<A> base = is_normalized ? strip.load_at(terms[e], k) : Vec<A>{};
              const Applied weight = rule(score.value + strip.load_at(bias, k), base);
              const Vec<A> grad = strip.load_at(grad_out, k), by = strip.load_at(scale, k);
              sum_value[k] += weight.value * by * grad;
              const Vec<A> gradient = weight.derivative * by * (own_value[k] * grad - strip.load_at(delta, k));
              if (a.grad_bias != nullptr) strip.store_at(grad_biases + this->edge[e] * H, k, gradient);
              const Vec<A> of_ends = gradient * score.derivative;
              sum_key[k] += of_ends;
              if (a.grad_edge != nullptr) strip.store_at(grad_edges + this->edge[e] * H, k, of_ends);
              if (a.target_pass) strip.store_at(edge_terms + e * H, k, of_ends);
            }
          }
          EACH_VECTOR strip.store_at(acc_key, k, sum_key[k]), strip.store_at(acc, k, sum_value[k]);
        });
        if (run.ends) finish(run.row, b, acc_key, acc);
      }
    });
  }

  NOINLINE void finish(int64_t j, int64_t b, A* key_sums, const A* value_sums) {
    this->store_key_gradient(j, b, key_sums, value_sums);
    this->store_gradient(value_sums, a.grad_value, b * a.sources + j, G * V);
  }

  const bool is_by_channel;
};

}  // namespace
