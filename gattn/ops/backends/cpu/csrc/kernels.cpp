// Attention over the edges of a graph, forward and backward, for one instruction set and one storage type.
//
// A block is up to kBlock edges, of several short rows or of one. Its logits and weights, [kBlock, H], stay in the
// first-level cache; rows of nodes are read in strips of channels that fit into registers. Nothing of size [E, H, C] is
// ever stored. Work is cut into tasks that depend on the graph alone, and partial results are added up in
// a fixed order: the bits of the result do not depend on the number of threads.
//
//   simd.h        vectors of one instruction set, storage types
//   families.h    how the ends of an edge compare: one struct per family
//   rows.h        loops over the rows of channels at the other ends of edges
//   heads.h       scalars of edges, H numbers each
//   distribution.h how logits become weights
//   projection.h  features of edges, projected block by block
//   block.h       where a block's inputs, outputs and scratch are
//   values.h      weighted sums of values, and their gradients
//   scores.h      a family's logits, and their gradients
//   thresholds.h  laws that look at whole rows
//   matrix.h      the same on matrices
//   forward.h, means.h, backward_by_source.h, backward_by_target.h: the passes

#include "kernels.h"

#include "backward_by_source.h"
#include "backward_by_target.h"
#include "forward.h"
#include "matrix.h"
#include "means.h"
#include "parallel.h"

#ifndef GATTN_KERNELS
#define GATTN_KERNELS gattn_kernels
#endif

namespace {

#define FOR_TASKS _Pragma("omp for schedule(dynamic, 1)")

// Calls f(task, element of the batch) for all tasks, or f(split row, element) for all rows that were split.
template <class F>
void for_tasks(const Rows& rows, int64_t batch, F&& f) {
  const int64_t tasks = rows.num_tasks;
  FOR_TASKS for (int64_t t = 0; t < tasks * batch; ++t) f(rows.tasks[t % tasks], t / tasks);
}
template <class F>
void for_split(const Rows& rows, int64_t batch, F&& f) {
  const int64_t split = rows.num_split;
  if (split == 0) return;
  FOR_TASKS for (int64_t t = 0; t < split * batch; ++t) f(t % split, t / split);
}

// Runs a pass over all rows of a batch, and merges those that were split.
template <class Pass>
void run(Pass& pass, const Rows& rows, int64_t batch) {
  for_tasks(rows, batch, [&](const Task& task, int64_t b) { pass.run(task, b); });
  for_split(rows, batch, [&](int64_t split, int64_t b) { pass.merge(split, b); });
}

template <class F>
int64_t forward(const Arguments& a) {
  return in_parallel(a.threads, Forward<F>::workspace_elements(a), [&](A* workspace) {
    Forward<F> pass(a, workspace);
    const Rows& rows = a.by_target;
    for_tasks(rows, a.batch, [&](const Task& task, int64_t b) { pass.run(task, b); });
    if (pass.is_of_rows() && rows.num_split > 0) {
      for_split(rows, a.batch, [&](int64_t split, int64_t b) { pass.rewrite(split, b); });
      for_tasks(rows, a.batch, [&](const Task& task, int64_t b) {
        if (task.slot >= 0) pass.sum_part(task, b);
      });
    }
    for_split(rows, a.batch, [&](int64_t split, int64_t b) { pass.merge(split, b); });
    if (pass.leaves_weights() && rows.num_split > 0)
      for_tasks(rows, a.batch, [&](const Task& task, int64_t b) {
        if (task.slot >= 0) pass.finish_part(task, b);
      });
  });
}

template <class F>
int64_t backward(const Arguments& a) {
  return in_parallel(a.threads, BySource<F>::workspace_elements(a), [&](A* workspace) {
    BySource<F> by_source(a, workspace);
    const int64_t rows = a.targets * a.batch;
    FOR_TASKS for (int64_t chunk = 0; chunk < (rows + 255) / 256; ++chunk)
      for (int64_t r = chunk * 256; r < min(rows, (chunk + 1) * 256); ++r)
        by_source.fill_node_terms(r % a.targets, r / a.targets);
    if (Law(a).has_threshold) {
      Means means(a, workspace);  // in the same memory: the passes take turns
      run(means, a.by_target, a.batch);
    }
    run(by_source, a.by_source, a.batch);
    if (!a.target_pass) return;
    ByTarget<F> by_target(a, workspace);
    run(by_target, a.by_target, a.batch);
  });
}

template <class F>
int64_t record_bytes_of(int64_t heads, int64_t channels, bool has_edge) {
  if (!F::kKeepsSigns || !kHasBits<A> || has_edge) return 0;
  int64_t bytes = heads * 4 + bytes_of_signs(heads, channels);
  for (int64_t power = 8; power <= 64; power *= 2)
    if (bytes <= power) return power;  // never across more cache lines than needed
  return (bytes + 63) / 64 * 64;
}

// Whether the backward pass reads logits, since it takes longer to compute them again; a record has them already.
template <class F>
constexpr bool keeps_logits_of() {
  return !F::kScalar && !F::kKeepsSigns;
}

template <class... X>
int64_t number_of(const char* name, List<X...>) {
  constexpr const char* names[] = {X::kName...};
  int64_t number = 0;
  for (const char* known : names) {
    if (strcmp(name, known) == 0) return number;
    ++number;
  }
  return -1;
}

template <class List>
struct Table;
template <class... F>
struct Table<List<F...>> {
  static constexpr const char* kConstants[] = {F::kConstants...};
  static constexpr int64_t (*kForward[])(const Arguments&) = {forward<F>...};
  static constexpr int64_t (*kBackward[])(const Arguments&) = {backward<F>...};
  static constexpr int64_t (*kRecordBytes[])(int64_t, int64_t, bool) = {record_bytes_of<F>...};
  static constexpr bool kKeepsLogits[] = {keeps_logits_of<F>()...};
};
using All = Table<Families>;

int64_t run_forward(const Arguments& a) { return All::kForward[a.family](a); }
int64_t run_backward(const Arguments& a) { return All::kBackward[a.family](a); }
int64_t family(const char* name) { return number_of(name, Families()); }
int64_t distribution(const char* name) { return number_of(name, Laws()); }
const char* constants(int64_t family) { return All::kConstants[family]; }
int64_t record_bytes(int64_t family, int64_t heads, int64_t channels, bool has_edge) {
  return All::kRecordBytes[family](heads, channels, has_edge);
}

bool keeps_logits(int64_t family, int64_t distribution) {
  Arguments a = {};
  a.distribution = distribution;
  if (Law(a).is_of_rows) return true;
  return family >= 0 && All::kKeepsLogits[family];
}

}  // namespace

extern const Kernels GATTN_KERNELS;
const Kernels GATTN_KERNELS = {run_forward,  run_backward, matrix_rows, drop,        family,
                               distribution, constants,    record_bytes, keeps_logits};
