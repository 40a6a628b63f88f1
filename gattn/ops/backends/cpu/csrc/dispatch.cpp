// The C interface: picks the instruction set, and runs the kernels that are compiled for it and for the storage type.

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels.h"
#include "pair_roots.h"

#ifdef GATTN_HAS_baseline
#define IF_BASELINE(F) F(baseline)
#else
#define IF_BASELINE(F)
#endif
#ifdef GATTN_HAS_avx2
#define IF_AVX2(F) F(avx2)
#else
#define IF_AVX2(F)
#endif
#ifdef GATTN_HAS_avx512
#define IF_AVX512(F) F(avx512)
#else
#define IF_AVX512(F)
#endif
#define FOR_EACH_ISA(F) IF_BASELINE(F) IF_AVX2(F) IF_AVX512(F)

#define DECLARE(isa) \
  extern const Kernels gattn_##isa##_float, gattn_##isa##_double, gattn_##isa##_BFloat16, gattn_##isa##_Float16; \
  extern const TileKernels gattn_tiles_##isa##_float, gattn_tiles_##isa##_double, gattn_tiles_##isa##_BFloat16,   \
      gattn_tiles_##isa##_Float16;
FOR_EACH_ISA(DECLARE)

namespace {

struct InstructionSet {
  const char* name;
  bool (*supported)();
  const Kernels* of_type[4];  // by StorageType
  const TileKernels* tiles[4];
};

[[maybe_unused]] bool supports_baseline() { return true; }
#if defined(__x86_64__)
[[maybe_unused]] bool supports_avx2() {
  // Clang 14 cannot ask for f16c, which every processor with AVX2 has.
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
[[maybe_unused]] bool supports_avx512() {
  return supports_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

#define TYPES(isa) {&gattn_##isa##_float, &gattn_##isa##_double, &gattn_##isa##_BFloat16, &gattn_##isa##_Float16}
#define TILES(isa) \
  {&gattn_tiles_##isa##_float, &gattn_tiles_##isa##_double, &gattn_tiles_##isa##_BFloat16, &gattn_tiles_##isa##_Float16}
#define ENTRY(isa) {#isa, supports_##isa, TYPES(isa), TILES(isa)},
const InstructionSet kInstructionSets[] = {FOR_EACH_ISA(ENTRY)};
const int kNumInstructionSets = int(sizeof(kInstructionSets) / sizeof(kInstructionSets[0]));

int best() {
  int found = 0;
  for (int i = 0; i < kNumInstructionSets; ++i)
    if (kInstructionSets[i].supported()) found = i;
  return found;
}

int chosen = best();

const Kernels& kernels(int64_t type) { return *kInstructionSets[chosen].of_type[type]; }

template <class A>
void transpose(const A* from, int64_t rows, int64_t columns, A* to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) to[j * rows + i] = from[i * columns + j];
}

// Runs kernels that read a projection by features and by channels, of which Python passes the latter.
template <class Run>
int64_t with_transposed(const Arguments& a, Run run) {
  if (a.edge_projection_rows == nullptr) return run(a);
  const int64_t width = a.heads * a.channels, bytes = a.type == kFloat64 ? 8 : 4;
  const std::unique_ptr<char[]> memory(new (std::nothrow) char[size_t(width * a.edge_channels * bytes)]);
  if (memory == nullptr) return -3;
  if (a.type == kFloat64)
    transpose(static_cast<const double*>(a.edge_projection_rows), width, a.edge_channels,
              reinterpret_cast<double*>(memory.get()));
  else
    transpose(static_cast<const float*>(a.edge_projection_rows), width, a.edge_channels,
              reinterpret_cast<float*>(memory.get()));
  Arguments b = a;
  b.edge_projection = memory.get();
  return run(b);
}

// The first part becomes the sum, in an order that compilers vectorise.
template <class A>
void sum_parts(A* parts, int64_t tasks, int64_t channels, int64_t width, A* to) {
  const int64_t size = channels * width;
  for (int64_t t = 1; t < tasks; ++t)
    for (int64_t i = 0; i < size; ++i) parts[i] += parts[t * size + i];
  transpose(parts, channels, width, to);
}

}  // namespace

extern "C" {

// The instruction set in use, and (for tests) another one: returns 0 if this machine or build doesn't have it.
const char* gattn_instruction_set() { return kInstructionSets[chosen].name; }
int64_t gattn_use_instruction_set(const char* name) {
  for (int i = 0; i < kNumInstructionSets; ++i) {
    if (strcmp(kInstructionSets[i].name, name) == 0 && kInstructionSets[i].supported()) {
      chosen = i;
      return 1;
    }
  }
  return 0;
}

// Guards against a library of another version: both must agree on Arguments.
int64_t gattn_arguments_bytes() { return sizeof(Arguments); }

// Fresh memory comes in small pages, each of which costs a fault when it is first written to; large ones cost a tenth.
int64_t gattn_use_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 1 << 21, begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + page - 1) / page * page, last = (begin + uintptr_t(bytes)) / page * page;
  if (first < last) return madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
  return 0;
}

// The number of the family of scores, or of the distribution, with this name, or -1; and the names of a family's
// constants, separated by spaces, in the order of Arguments.constants.
int64_t gattn_family(const char* name) { return kernels(kFloat32).family(name); }
int64_t gattn_distribution(const char* name) { return kernels(kFloat32).distribution(name); }
const char* gattn_constants(int64_t family) { return kernels(kFloat32).constants(family); }

// Bytes per edge that the forward pass keeps for the backward pass (logits and the signs of the score's inputs).
int64_t gattn_record_bytes(int64_t family, int64_t type, int64_t heads, int64_t channels, int64_t has_edge) {
  return kernels(type).record_bytes(family, heads, channels, has_edge != 0);
}

// Whether the forward pass keeps logits for the backward pass, in memory of their own. Laws of rows need it with any family
// (-1).
int64_t gattn_keeps_logits_of(int64_t family, int64_t distribution) {
  return kernels(kFloat32).keeps_logits(family, distribution);
}

int64_t gattn_forward(const Arguments* a) {
  return with_transposed(*a, [](const Arguments& b) { return kernels(b.type).forward(b); });
}
int64_t gattn_backward(const Arguments* a) {
  return with_transposed(*a, [](const Arguments& b) { return kernels(b.type).backward(b); });
}

// The gradient of a projection, [H, C, D], from the partial sums of tasks, [tasks, D, H, C], which are overwritten.
void gattn_sum_parts(void* parts, int64_t tasks, int64_t channels, int64_t width, void* to, int64_t type) {
  if (type == kFloat64)
    sum_parts(static_cast<double*>(parts), tasks, channels, width, static_cast<double*>(to));
  else
    sum_parts(static_cast<float*>(parts), tasks, channels, width, static_cast<float*>(to));
}

// Attention on complete graphs: see tiles.h. Rows of gradients are padded to whole vectors, of so many numbers.
int64_t gattn_tile_lanes(int64_t type) { return kInstructionSets[chosen].tiles[type]->lanes; }
int64_t gattn_tiles_bytes() { return sizeof(Tiles); }
int64_t gattn_tiles_forward(const Tiles* a) { return kInstructionSets[chosen].tiles[a->type]->forward(*a); }
int64_t gattn_tiles_weights(const Tiles* a) { return kInstructionSets[chosen].tiles[a->type]->weights(*a); }
int64_t gattn_tiles_backward(const Tiles* a) { return kInstructionSets[chosen].tiles[a->type]->backward(*a); }

// Products of the columns of two matrices: see products.h.
int64_t gattn_column_products(const void* a, const void* b, void* c, int64_t rows, int64_t left, int64_t right,
                              int64_t a_row, int64_t b_row, int64_t threads) {
  return kInstructionSets[chosen].tiles[kFloat32]->column_products(a, b, c, rows, left, right, a_row, b_row, threads);
}

// Weights of a matrix of logits, or gradients of logits: see matrix.h. Of the arguments, type, threads and distribution
// count.
void gattn_matrix_rows(const Arguments* a, const void* weights, void* numbers, int64_t rows, int64_t columns) {
  kernels(a->type).matrix_rows(*a, weights, numbers, rows, columns);
}

// The features of pairs, or their gradients: see pair_roots.h. The type is float or double.
int64_t gattn_pair_roots(const PairRoots* p, int64_t type) {
  return type == kFloat32 ? pair_roots<float>(*p) : pair_roots<double>(*p);
}
int64_t gattn_pair_roots_backward(const PairRoots* p, int64_t type) {
  return type == kFloat32 ? pair_roots_backward<float>(*p) : pair_roots_backward<double>(*p);
}

// Biases of distances, or their gradients: see radial.h. The type is float or double.
int64_t gattn_radial(const Radial* a) { return kInstructionSets[chosen].tiles[a->type]->radial(*a); }
int64_t gattn_radial_backward(const Radial* a) { return kInstructionSets[chosen].tiles[a->type]->radial_backward(*a); }

// y = x with elements dropped, the others times scale.
void gattn_drop(const void* x, void* y, int64_t size, int64_t type, int64_t seed, int64_t threshold, double scale,
                int64_t threads) {
  kernels(type).drop(x, y, size, seed, threshold, scale, threads);
}

}  // extern "C"
