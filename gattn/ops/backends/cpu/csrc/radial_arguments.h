// The arguments of radial functions; mirrored by `Radial` in native.py.
#pragma once

#include <cstdint>

struct Radial {
  int64_t type, threads, batch, targets, sources, space, functions, heads, parts;
  int64_t is_bessel;
  double scale;
  const void *x, *y;    // [batch, targets or sources, space]
  const void* factor;   // [functions]
  const void* weight;   // [functions, heads]
  void* bias;           // [batch, heads, targets, sources]
  const void* grad;     // the same
  void* grad_x;         // [batch, parts, targets, space]
  void* grad_y;         // [batch, sources, space]
  double* grad_parameters;  // [batch, parts, functions * heads + functions]
};
