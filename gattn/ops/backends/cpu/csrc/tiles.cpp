// Attention on complete graphs, forward and backward, for one instruction set and one storage type.

#include "tiles.h"

#include "kernels.h"
#include "parallel.h"

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

}  // namespace

extern const TileKernels GATTN_TILES;
const TileKernels GATTN_TILES = {W, forward, weights, backward};
