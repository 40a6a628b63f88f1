// Rows of edges by counting sort: by target from an edge list, and by source from those.
//
// Edges are cut into pieces that are counted and placed side by side. Each piece knows where its edges go, so the result
// is that of a stable sort, whatever the number of threads.

#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "arguments.h"

namespace {

// A row with more edges is split; tasks have about that many.
constexpr int64_t kLongRow = 8192;
constexpr int64_t kLeastTask = 512;
constexpr int64_t kMostPieces = 16;
constexpr int64_t kEdgesPerPiece = 1 << 16;

int64_t pieces_of(int64_t edges, int64_t rows) {
  // Each piece has a counter for each row, so pieces should be larger than rows are many.
  int64_t pieces = edges / (kEdgesPerPiece + rows);
  return pieces < 1 ? 1 : pieces > kMostPieces ? kMostPieces : pieces;
}

// Turns counts [pieces][rows] into the places where each piece's edges of each row begin, and fills start.
void counts_to_places(int32_t* counts, int64_t pieces, int64_t rows, int32_t* start) {
  int32_t place = 0;
  for (int64_t row = 0; row < rows; ++row) {
    start[row] = place;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      int32_t count = counts[piece * rows + row];
      counts[piece * rows + row] = place;
      place += count;
    }
  }
  start[rows] = place;
}

int64_t task_size(int64_t edges) {
  int64_t size = edges / 128;
  return size < kLeastTask ? kLeastTask : size > kLongRow ? kLongRow : size;
}

// A table of rows lies in one piece of memory: start [rows + 1], lists of `room` numbers each, tasks, split and split_row.
int64_t most_split(int64_t edges) { return edges / kLongRow; }
int64_t most_tasks(int64_t edges, int64_t rows) {
  return (edges + rows) / kLeastTask + 3 * (most_split(edges) + 1) + 1;  // a long row has one before it, and its parts
}

// Cuts rows into tasks of about the same work, behind `lists` lists.
void cut_rows(int32_t* memory, int64_t num_rows, int64_t lists, int64_t most_edges, Rows* rows) {
  const int32_t* start = memory;
  int32_t* const node = memory + num_rows + 1;
  Task* const tasks = reinterpret_cast<Task*>(node + lists * (most_edges + kPadding));
  int32_t* const split = reinterpret_cast<int32_t*>(tasks + most_tasks(most_edges, num_rows));
  int32_t* const split_row = split + most_split(most_edges) + 1;
  const int64_t size = task_size(start[num_rows]);
  int64_t num_tasks = 0, num_split = 0, num_slots = 0;
  auto add = [&](int64_t first_row, int64_t last_row, int64_t first, int64_t last, int64_t slot) {
    tasks[num_tasks++] = {int32_t(first_row), int32_t(last_row), int32_t(first), int32_t(last), int32_t(slot)};
  };
  int64_t first_row = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t degree = start[row + 1] - start[row];
    if (degree > kLongRow) {
      if (first_row < row) add(first_row, row, start[first_row], start[row], -1);
      split[num_split] = int32_t(num_slots), split_row[num_split] = int32_t(row);
      ++num_split;
      int64_t parts = (degree + kLongRow - 1) / kLongRow;
      for (int64_t part = 0; part < parts; ++part)
        add(row, row + 1, start[row] + degree * part / parts, start[row] + degree * (part + 1) / parts, num_slots++);
      first_row = row + 1;
    } else if (start[row + 1] - start[first_row] + (row + 1 - first_row) >= size) {  // a row costs about an edge more
      add(first_row, row + 1, start[first_row], start[row + 1], -1);
      first_row = row + 1;
    }
  }
  if (first_row < num_rows) add(first_row, num_rows, start[first_row], start[num_rows], -1);
  split[num_split] = int32_t(num_slots);
  *rows = {start, node, tasks, num_tasks, split, split_row, num_split, num_slots};
}

// Spreads every bit of x over all bits: the finalizer of MurmurHash3.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

// Sorts an edge list by target. `source` and `target` have E elements, `stride` apart. With self-loops, edges that are
// loops are left out, and one for each of the first min(N, M) nodes comes after all others. Writes a table of two lists
// of up to E + min(N, M) + kPadding, node and edge (the numbers of edges).
//
// Returns the number of edges; -1 if an index is out of range, -2 if there are too many edges, -3 if memory ran out.
// edge_list becomes null if edge would be 0, 1, 2, ...
template <class Index>
int64_t rows_by_target(const Index* source, const Index* target, int64_t source_stride, int64_t target_stride,
                       int64_t num_edges, int64_t sources, int64_t targets, int64_t self_loops, int64_t threads,
                       int32_t* memory, Rows* rows, const int32_t** edge_list) {
  const int64_t loops = !self_loops ? 0 : sources < targets ? sources : targets;
  const int64_t limit = INT32_MAX - kPadding;
  if (num_edges + loops > limit || sources > limit || targets > limit) return -2;
  int32_t *const start = memory, *const node = start + targets + 1, *const edge = node + num_edges + loops + kPadding;
  const int64_t pieces = pieces_of(num_edges, targets);
  int32_t* counts = static_cast<int32_t*>(calloc(size_t(pieces * targets + 2 * pieces + 1), sizeof(int32_t)));
  if (counts == nullptr) return -3;
  int32_t* kept = counts + pieces * targets;  // edges of a piece that are not left out; then the number of the first
  int32_t* unsorted = kept + pieces;
  int64_t bad = 0;

#pragma omp parallel for num_threads(int(threads)) if (pieces > 1 && threads > 1) reduction(+ : bad) schedule(dynamic, 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int32_t* count = counts + piece * targets;
    int64_t first = num_edges * piece / pieces, last = num_edges * (piece + 1) / pieces;
    int64_t before = first > 0 ? target[(first - 1) * target_stride] : 0;
    int32_t number = 0, descents = 0;
    for (int64_t e = first; e < last; ++e) {
      int64_t j = source[e * source_stride], i = target[e * target_stride];
      if (uint64_t(j) >= uint64_t(sources) || uint64_t(i) >= uint64_t(targets)) {
        ++bad;
        break;
      }
      descents += i < before;
      before = i;
      if (loops > 0 && i == j) continue;
      ++count[i];
      ++number;
    }
    kept[piece] = number;
    unsorted[piece] = descents;
  }
  if (bad > 0) {
    free(counts);
    return -1;
  }
  int32_t number = 0;
  bool is_sorted = loops == 0;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int32_t more = kept[piece];
    kept[piece] = number;
    number += more;
    is_sorted = is_sorted && unsorted[piece] == 0;
  }
  int32_t* last_counts = counts + (pieces - 1) * targets;
  for (int64_t i = 0; i < loops; ++i) ++last_counts[i];  // loops come last
  counts_to_places(counts, pieces, targets, start);

#pragma omp parallel for num_threads(int(threads)) if (pieces > 1 && threads > 1) schedule(dynamic, 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int32_t* place = counts + piece * targets;
    int32_t next = kept[piece];
    int64_t first = num_edges * piece / pieces, last = num_edges * (piece + 1) / pieces;
    for (int64_t e = first; e < last; ++e) {
      int64_t j = source[e * source_stride], i = target[e * target_stride];
      if (loops > 0 && i == j) continue;
      int32_t at = place[i]++;
      node[at] = int32_t(j);
      edge[at] = next++;
    }
  }
  for (int64_t i = 0; i < loops; ++i) {
    int32_t at = last_counts[i]++;
    node[at] = int32_t(i);
    edge[at] = number + int32_t(i);
  }
  free(counts);
  const int64_t total = number + loops;
  memset(node + total, 0, kPadding * sizeof(int32_t));
  *edge_list = is_sorted ? nullptr : edge;
  cut_rows(memory, targets, 2, num_edges + loops, rows);
  return total;
}

}  // namespace

extern "C" {

// A hash of an edge list, whose order counts. Both rows have E elements, `stride` apart.
int64_t gattn_hash_edges(const int64_t* first, const int64_t* second, int64_t stride, int64_t num_edges, int64_t threads) {
  uint64_t hash = 0;
#pragma omp parallel for num_threads(int(threads)) if (num_edges > kEdgesPerPiece && threads > 1) reduction(+ : hash)
  for (int64_t e = 0; e < num_edges; ++e) {
    const uint64_t ends = uint64_t(first[e * stride]) * 0x9e3779b97f4a7c15ull + uint64_t(second[e * stride]);
    hash += mix(mix(ends) + uint64_t(e));
  }
  return int64_t(hash);
}

// How many numbers a table of rows takes, with so many lists of edges.
int64_t gattn_table_room(int64_t edges, int64_t rows, int64_t lists) {
  return rows + 1 + lists * (edges + kPadding) + 5 * most_tasks(edges, rows) + 2 * most_split(edges) + 1;
}

// rows_by_target of an edge list in 32 or 64 bits.
int64_t gattn_rows_by_target(const void* source, const void* target, int64_t bits, int64_t source_stride,
                             int64_t target_stride, int64_t num_edges, int64_t sources, int64_t targets,
                             int64_t self_loops, int64_t threads, int32_t* memory, Rows* rows,
                             const int32_t** edge_list) {
  auto sort = [&](auto* from, auto* to) {
    return rows_by_target(from, to, source_stride, target_stride, num_edges, sources, targets, self_loops, threads,
                          memory, rows, edge_list);
  };
  if (bits == 32) return sort(static_cast<const int32_t*>(source), static_cast<const int32_t*>(target));
  return sort(static_cast<const int64_t*>(source), static_cast<const int64_t*>(target));
}

// Rows by source from rows by target: a table of three lists of E + kPadding, node (targets), target_position of each
// position by source, and source_position of each position by target. Returns 0, or -3 if memory ran out.
int64_t gattn_rows_by_source(const Rows* by_target, int64_t sources, int64_t targets, int64_t threads, int32_t* memory,
                             Rows* rows) {
  const int32_t *const target_start = by_target->start, *const source_node = by_target->node;
  const int64_t num_edges = target_start[targets], room = num_edges + kPadding;
  int32_t *const start = memory, *const node = start + sources + 1;
  int32_t *const target_position = node + room, *const source_position = target_position + room;
  const int64_t pieces = pieces_of(num_edges, sources);
  int32_t* counts = static_cast<int32_t*>(calloc(size_t(pieces * sources + 1), sizeof(int32_t)));
  if (counts == nullptr) return -3;
#pragma omp parallel for num_threads(int(threads)) if (pieces > 1 && threads > 1) schedule(dynamic, 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int32_t* count = counts + piece * sources;
    int64_t first = num_edges * piece / pieces, last = num_edges * (piece + 1) / pieces;
    for (int64_t e = first; e < last; ++e) ++count[source_node[e]];
  }
  counts_to_places(counts, pieces, sources, start);
#pragma omp parallel for num_threads(int(threads)) if (pieces > 1 && threads > 1) schedule(dynamic, 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int32_t* place = counts + piece * sources;
    int64_t first = num_edges * piece / pieces, last = num_edges * (piece + 1) / pieces;
    // The last target whose edges begin at or before the piece.
    int64_t low = 0, high = targets;
    while (high - low > 1) {
      int64_t middle = (low + high) / 2;
      (target_start[middle] <= first ? low : high) = middle;
    }
    int64_t i = low;
    for (int64_t e = first; e < last; ++e) {
      while (target_start[i + 1] <= e) ++i;
      int32_t at = place[source_node[e]]++;
      node[at] = int32_t(i);
      target_position[at] = int32_t(e);
      source_position[e] = at;
    }
  }
  free(counts);
  memset(node + num_edges, 0, kPadding * sizeof(int32_t));
  memset(target_position + num_edges, 0, kPadding * sizeof(int32_t));
  memset(source_position + num_edges, 0, kPadding * sizeof(int32_t));
  cut_rows(memory, sources, 3, num_edges, rows);
  return 0;
}

}  // extern "C"
