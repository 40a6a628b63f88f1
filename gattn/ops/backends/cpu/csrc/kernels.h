// What is compiled for each instruction set and storage type.
#pragma once

#include "arguments.h"
#include "radial_arguments.h"
#include "tiles_arguments.h"

// Families of scores are numbered in the order of the list in families.h.
struct Kernels {
  int64_t (*forward)(const Arguments&);
  int64_t (*backward)(const Arguments&);
  void (*matrix_rows)(const Arguments&, const void* weights, void* numbers, int64_t rows, int64_t columns);
  void (*drop)(const void* from, void* to, int64_t size, int64_t seed, int64_t threshold, double scale,
               int64_t threads);
  // The number of the family, or the distribution, with this name, or -1; and the names of a family's constants.
  int64_t (*family)(const char* name);
  int64_t (*distribution)(const char* name);
  const char* (*constants)(int64_t family);
  // Bytes per edge that the forward pass keeps for the backward pass.
  int64_t (*record_bytes)(int64_t family, int64_t heads, int64_t channels, bool has_edge);
  // Whether it keeps logits; family -1: with any.
  bool (*keeps_logits)(int64_t family, int64_t distribution);
};

// The same for complete graphs, and for other products; see tiles.h, products.h and radial.h.
struct TileKernels {
  int64_t lanes;  // of a vector: gradients are padded to whole ones
  int64_t (*forward)(const Tiles&);
  int64_t (*weights)(const Tiles&);
  int64_t (*backward)(const Tiles&);
  int64_t (*column_products)(const void* a, const void* b, void* c, int64_t rows, int64_t left, int64_t right,
                             int64_t a_row, int64_t b_row, int64_t threads);
  int64_t (*radial)(const Radial&);
  int64_t (*radial_backward)(const Radial&);
};
