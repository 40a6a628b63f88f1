// The least that attention over a list of edges does: each row of a neighbour is loaded, and multiplied. There are no
// scalars, no softmax and no other terms. `benchmarks/lists.py` compiles it.
#include <cstdint>
#include <cstring>

namespace {

typedef float Vec __attribute__((vector_size(64)));
constexpr int64_t W = 16;

inline Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

// out_i = the sum over edges of own_i * first_j + second_j / 2, n vectors at a time; both may be the same rows.
enum Kind { kSums, kSame, kTwo };
template <int n, Kind kind>
void rows(int64_t i, const int32_t* start, const int32_t* node, const float* own, const float* first,
          const float* second, float* out, int64_t width, int64_t ahead) {
  for (int64_t c = 0; c < width; c += n * W) {
    Vec mine[n], sum[n] = {};
#pragma GCC unroll 8
    for (int k = 0; k < n; ++k) mine[k] = load(own + i * width + c + k * W);
    for (int32_t e = start[i]; e < start[i + 1]; ++e) {
      const int64_t at = node[e] * width + c, soon = node[e + ahead] * width + c;
#pragma GCC unroll 8
      for (int k = 0; k < n; ++k) {
        if (kind == kTwo) __builtin_prefetch(first + soon + k * W);
        __builtin_prefetch(second + soon + k * W);
        const Vec row = load(second + at + k * W);
        if (kind == kTwo) sum[k] += mine[k] * load(first + at + k * W);
        if (kind == kSame) sum[k] += mine[k] * row;
        sum[k] += 0.5f * row;
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < n; ++k) store(out + i * width + c + k * W, sum[k]);
  }
}

template <int n>
void all_rows(int64_t i, const int32_t* start, const int32_t* node, const float* own, const float* first,
              const float* second, float* out, int64_t width, int64_t ahead) {
  if (first == nullptr) rows<n, kSums>(i, start, node, own, first, second, out, width, ahead);
  else if (first == second) rows<n, kSame>(i, start, node, own, first, second, out, width, ahead);
  else rows<n, kTwo>(i, start, node, own, first, second, out, width, ahead);
}

}  // namespace

// `node` is followed by as many zeros as are fetched ahead. Widths are multiples of 64.
extern "C" void bound(int64_t count, const int32_t* start, const int32_t* node, const float* own, const float* first,
                      const float* second, float* out, int64_t width, int64_t ahead, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) if (threads > 1) schedule(dynamic, 64)
  for (int64_t i = 0; i < count; ++i) {
    if (width % 128 == 0) all_rows<8>(i, start, node, own, first, second, out, width, ahead);
    else all_rows<4>(i, start, node, own, first, second, out, width, ahead);
  }
}
