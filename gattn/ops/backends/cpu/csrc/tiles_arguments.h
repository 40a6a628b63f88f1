// The arguments of attention by tiles; mirrored by `Tiles` in native.py.
#pragma once

#include <cstdint>

// Targets and sources that see each other. Targets and sources of a batch lie one after another in each of its entries.
struct TileElement {
  int64_t batch;  // the entry of the batch
  int64_t first_target, targets, first_source, sources;
  int64_t offset;  // target i has the position of source i + offset
  int64_t term;    // the entry of bias and mask
  // Of buckets: the first pair's place, and from a target to the next; of listed pairs: the first target, and source.
  int64_t bias_at, bias_step;
  int64_t weights_at, weights_head, weights_row;  // the first weight's place, and from one head and target to the next
  int64_t parts;   // of the sources, backward
};

// Strides, in numbers; 0 where a tensor is broadcast.
struct TileStrides {
  int64_t batch, head, row, channel;
};

// What numbers a bias has: of all pairs, of distances (source minus target), of buckets of pairs, or of listed pairs.
enum TileBias : int64_t { kOfAll, kOfDistances, kOfBuckets, kOfListed };

struct Tiles {
  int64_t type, threads, batch, heads, key_heads, channels, value_channels, targets, sources;
  const TileElement* elements;
  int64_t num_elements;
  // Products of query and key: times scale, times slope where negative, and at most clamp.
  double scale, slope, clamp;
  int64_t distribution;
  double distribution_constants[2];
  const void* sink;     // [heads]
  int64_t left, right;  // how far before and after its own position a target sees
  const void *query, *key, *value;
  TileStrides query_strides, key_strides, value_strides;
  const void* bias;  // of the type that is computed in; for strides, a target is a row, and a source a channel
  const uint8_t* mask;
  TileStrides bias_strides, mask_strides;
  // Of a graph of blocks, the tile of a block of targets and one of sources, or -1, where they do not see each other; for
  // strides, a block of targets is a row, and one of sources a channel. The mask is then [tiles, block, block].
  const int32_t* tiles;
  TileStrides tiles_strides;
  int64_t block;
  int64_t bias_kind, bias_count;  // how many numbers of a head
  int64_t first_distance;
  const void* buckets;
  int64_t bucket_bytes;
  const int64_t* pair_starts;  // of each target's pairs, whose sources ascend
  const int32_t* pair_sources;
  int64_t dropout, seed, threshold;
  double keep_scale;
  void* out;   // [batch, targets, heads, value_channels]
  void* wide;  // the same before it is rounded, or null
  void* stats;  // [batch, targets, heads]: the log-sum-exp of the softmax, or what weights are multiplied by
  void* weights;    // of the type that is computed in, and zeros where nothing is seen
  int64_t dropped;  // whether these weights are those after dropout
  // Backward. Gradients have their channels padded to whole vectors, and those of the query come in parts.
  const void* grad_out;
  const void* grad_weights;
  const void* delta;  // [batch, targets, heads]
  void *grad_query, *grad_key, *grad_value, *grad_bias;
  TileStrides grad_bias_strides;
  double* grad_table;                    // [elements or 1, heads, parts, bias_count]; of buckets four times
  int64_t parts;                         // of the element with most of them
  int64_t shared_elements, shared_heads;  // whether a gradient of the bias is a sum over them
};
