// What Python hands over: plain structures, mirrored field by field in gattn/ops/backends/cpu/native.py.
//
// N targets, M sources, E edges, H heads, G key heads, C channels of query and key, V channels of value, B batch.
#pragma once

#include <cstdint>

enum StorageType : int64_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

// A task is a range of rows, or a part of one long row, whose partial result then has a slot.
struct Task {
  int32_t first_row, last_row, first_edge, last_edge, slot;
};

// The edges of each row, side by side; `node` is the other end. Positions count edges in this order.
struct Rows {
  const int32_t* start;  // [rows + 1]
  const int32_t* node;   // [E], followed by kPadding zeros
  const Task* tasks;
  int64_t num_tasks;
  const int32_t* split;  // [S + 1] first slot of each split row, with its row number in split_row
  const int32_t* split_row;
  int64_t num_split;
  int64_t num_slots;
};

// Prefetching reads indices of edges that lie this far ahead.
constexpr int kPadding = 64;

struct Arguments {
  int64_t targets, sources, edges, heads, key_heads, channels, value_channels, batch;
  int64_t family, type, threads;  // the family's number is gattn_family's, the type a StorageType
  double constants[4];  // of the family, in the order in which it names them
  int64_t distribution;               // its number is gattn_distribution's
  double distribution_constants[2];  // the softmax's cap of logits (0: none); top-k's k; gates': whether normalized, epsilon
  const void* sink;                   // [H], logits without an edge, or null

  Rows by_target, by_source;
  const int32_t* edge_of_target_position;  // [E], null: edges are sorted by target already
  const int32_t* target_position;          // [E], of each position by source
  const int32_t* source_position;          // [E], of each position by target

  // Inputs. Rows of nodes are dense inside, `*_row` elements apart, batch elements `*_batch` elements.
  const void *query, *key, *value;
  int64_t value_is_key;
  int64_t query_row, query_batch, key_row, key_batch, value_row, value_batch;
  const void* vector;      // [H, C]
  const void* out_bias;    // [H, V] in the type that is computed in, added to the output; or null
  const void* edge;        // [E, H, C], of scalar scores [E, H], to be projected [E, D]; with types [D, H, C] or [D, H]
  const void* bias;        // [E, H]
  const uint8_t* mask;     // [E, H]
  const void* edge_value;  // [E, H, V]; may be the same as edge
  const void* edge_projection;       // [D, H, C], projects the edge's features
  const void* edge_projection_rows;  // [H, C, D], the same
  int64_t edge_channels;         // D, 0: nothing is projected
  const int64_t* edge_type;      // [E], which row of `edge` is an edge's; null: it has its own
  int64_t edge_batch, bias_batch, mask_batch, mask_edge, mask_head, edge_value_batch;

  // Dropout: weight n is kept, times keep_scale, where its random number, of 32 bits, is at least the threshold.
  int64_t dropout;
  int64_t seed;
  int64_t threshold;
  double keep_scale;

  // Forward.
  void* out;       // [B, N, H, V]
  void* out_wide;  // [B, N, H, V] in the type that is computed in; null: not wanted, or the same as out
  void* stats;     // [B, N, 2, H]: maximum and scale of each row
  uint8_t* record; // [B, E, record_bytes] by target: logits and signs, kept for the backward pass
  int64_t record_bytes;
  void* logits;    // [B, E, H] by target, kept for the backward pass: logits, maybe rewritten, or weights; or null
  void* weights;   // [B, E, H], null: not wanted
  void* partial;   // [B, slots, ...] scratch of split rows

  // Backward.
  const void* grad_out;      // [B, N, H, V]
  const void* grad_weights;  // [B, E, H] or null
  const void* grad_log_sum;  // [B, N, H] in the type that is computed in, or null
  void* node_terms;          // [B, N, 4, H] scratch
  void* edge_terms;          // [B, E, H] scratch: gradients of logits, by source; unused without target_pass
  int64_t target_pass;       // whether gradients of the target side are wanted
  void *grad_query, *grad_key, *grad_value;  // each possibly null
  void* grad_vector;       // [tasks by target + tasks by source, B, H, C] partial sums
  void* grad_edge;         // like edge; with the batch in front
  void* grad_edge_projection;  // [tasks by source, B, D, H, C] partial sums, but for the family's vector; or of types
  void* grad_bias;         // [B, E, H]
  void* grad_edge_value;   // like edge_value; with the batch in front
};
