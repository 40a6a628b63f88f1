// Attention on complete graphs and biases of distances, forward and backward, for one instruction set and one storage type.

#include "tiles.h"

#include "kernels.h"
#include "parallel.h"
#include "radial.h"

#ifndef GATTN_TILES
#define GATTN_TILES gattn_tiles
#endif

namespace {

int64_t forward(const Tiles& a) {
  const auto block = [](TilePass& pass, auto&&... of) { pass.forward(of...); };
  return in_parallel(a.threads, TilePass::forward_workspace(a), [&](A* memory) { run_blocks(a, memory, block); });
}
int64_t weights(const Tiles& a) {
  const auto block = [](TilePass& pass, auto&&... of) { pass.write_weights(of...); };
  return in_parallel(a.threads, TilePass::forward_workspace(a), [&](A* memory) { run_blocks(a, memory, block); });
}
int64_t backward(const Tiles& a) {
  return in_parallel(a.threads, TilePass::backward_workspace(a), [&](A* memory) { run_tiles_backward(a, memory); });
}

int64_t column_products(const void* a, const void* b, void* c, int64_t rows, int64_t left, int64_t right, int64_t a_row,
                        int64_t b_row, int64_t threads) {
  ColumnProducts all{static_cast<const A*>(a), static_cast<const A*>(b), static_cast<A*>(c), rows, left, right, a_row, b_row};
  all.cut();
  A* sums = static_cast<A*>(malloc(size_t(all.sums_of_parts()) * sizeof(A) + 1));
  if (sums == nullptr) return -3;
  const int64_t status = in_parallel(threads, all.workspace(), [&](A* memory) { all.run(memory, sums); });
  free(sums);
  return status;
}

}  // namespace

extern const TileKernels GATTN_TILES;
const TileKernels GATTN_TILES = {W, forward, weights, backward, column_products, radial, radial_backward};
