// Rows of channels: read in strips that fit into registers, gathered from the other ends of edges, and summed up.
#pragma once

#include "arguments.h"
#include "families.h"

namespace {

constexpr int kBlock = 32;  // edges
// Rows are fetched so many edges ahead, or, if all of them take more than kFar bytes, further.
constexpr int kAhead = 8, kFarAhead = 16;
constexpr int64_t kFar = 1 << 22;
static_assert(kBlock + kFarAhead <= kPadding && 2 * kBlock <= kPadding, "prefetching reads that many indices ahead");

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// Memory that will be written soon.
INLINE void prefetch_for_writing(const void* first, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(first) + at, 1);
}

// ---------------------------------------------------------------------------------------------- strips of channels

// Some channels of a row, as kVectors vectors in registers; the last strip of a row may be part of one vector.
template <int kVectors_, bool kPart>
struct Strip {
  static constexpr int kVectors = kVectors_;
  int64_t first;
  int channels;

  template <class X>
  INLINE Vec<A> load_at(const X* row, int k) const {
    if constexpr (kPart) return load_part(row + first, channels);
    else return load(row + first + k * W);
  }
  template <class X>
  INLINE void store_at(X* row, int k, Vec<A> v) const {
    if constexpr (kPart) store_part(row + first, v, channels);
    else store(row + first + k * W, v);
  }
  template <class X>
  INLINE void prefetch(const X* row) const {
    constexpr int kLine = 64 / int(sizeof(X));
#pragma GCC unroll 8
    for (int c = 0; c < (kPart ? 1 : kVectors * W); c += kLine) __builtin_prefetch(row + first + c);
  }
};

template <class F>
INLINE void for_strips(int64_t channels, F&& f) {
  int64_t c = 0;
  for (; c + 4 * W <= channels; c += 4 * W) f(Strip<4, false>{c, 4 * W});
  if (c + 2 * W <= channels) f(Strip<2, false>{c, 2 * W}), c += 2 * W;
  if (c + W <= channels) f(Strip<1, false>{c, W}), c += W;
  if (c < channels) f(Strip<1, true>{c, int(channels - c)});
}

// The same, vector by vector: less code, for loops that have enough to do for one.
template <class F>
INLINE void for_vectors(int64_t channels, F&& f) {
  int64_t c = 0;
  for (; c + W <= channels; c += W) f(Strip<1, false>{c, W});
  if (c < channels) f(Strip<1, true>{c, int(channels - c)});
}

// A number that is known when the code is compiled.
template <int kValue_>
struct Count {
  static constexpr int kValue = kValue_;
};

#define EACH_VECTOR _Pragma("GCC unroll 8") for (int k = 0; k < S::kVectors; ++k)

// ------------------------------------------------------------------------------------------------- rows of one segment
//
// A segment is a run of edges that share one end, whose row is fixed; the rows of the other ends are gathered. Scalars
// of an edge (logits, weights, their gradients) lie H apart.

struct Gathered {
  const T* row[kBlock];
  const T* ahead[kBlock];

  INLINE void gather(const T* base, int64_t stride, int64_t rows, const int32_t* node, int n) {
    const int distance = rows * stride * int64_t(sizeof(T)) > kFar ? kFarAhead : kAhead;
    for (int e = 0; e < n; ++e) {
      row[e] = base + node[e] * stride;
      ahead[e] = base + node[e + distance] * stride;
    }
  }
};

// Whether edges have rows of their own; kPerhaps: the kernel finds out when it runs, and adds them to the other end's.
enum EdgeRows { kNone, kOwnRows, kPerhaps };

// The edges [first, last) of a block, `others` from `offset` on, and per-edge rows or null. Who reads rows first fetches
// those that come next, too.
struct Segment {
  const Gathered& others;
  int64_t offset;
  const T* const* edges;
  int64_t edge_offset;
  int first, last;
  int64_t heads;
  bool is_first = true;

  // The other end's row.
  template <EdgeRows kRows = kNone, class S>
  INLINE void load_other(S strip, int e, Vec<A>* other) const {
    EACH_VECTOR other[k] = strip.load_at(others.row[e] + offset, k);
    if constexpr (kRows == kPerhaps)
      if (edges != nullptr) EACH_VECTOR other[k] += strip.load_at(edges[e] + edge_offset, k);
  }
  template <EdgeRows kRows, class S>
  INLINE auto edge(S strip, int e, int k) const {
    if constexpr (kRows == kOwnRows) return strip.load_at(edges[e] + edge_offset, k);
    else return None{};
  }
  // Calls f(inputs, first edge, number of edges) on the sums of `own` and the other ends' rows, `kMost` vectors at a time.
  template <int kMost, class S, class F>
  INLINE void for_inputs(S strip, const T* own, F&& f) const {
    constexpr int kEdges = kMost / S::kVectors;
    Vec<A> fixed[S::kVectors], inputs[kMost];
    EACH_VECTOR fixed[k] = strip.load_at(own, k);
    for (int e = first; e < last; e += kEdges) {
      const int n = int(min(kEdges, last - e));
      for (int i = 0; i < n; ++i) {
        prefetch(strip, e + i);
        load_other<kPerhaps>(strip, e + i, inputs + i * S::kVectors);
        EACH_VECTOR inputs[i * S::kVectors + k] += fixed[k];
      }
      f(inputs, e, n);
    }
  }
  template <class S>
  INLINE void prefetch(S strip, int e) const {
    if (is_first) strip.prefetch(others.ahead[e] + offset);
  }
};

// Which heads the channels of a strip belong to: all to one, each few vectors to one, or, with few channels, those of a
// vector to several. spread() gives each channel of vector k its head's scalar; add_sums() adds up each head's channels,
// to what `scalars` holds if the strip is a part of a head.
struct OneHead {
  int64_t head;
  INLINE Vec<A> spread(const A* scalars, int) const { return splat<Vec<A>>(scalars[head]); }
  template <class S>
  INLINE void add_sums(S, const Vec<A>* values, int64_t, A* scalars) const {
    Vec<A> sum = {};
    EACH_VECTOR sum += values[k];
    scalars[head] += sum_lanes(sum);
  }
};
template <int kPerHead>
struct WholeHeads {
  int64_t head;
  INLINE Vec<A> spread(const A* scalars, int k) const { return splat<Vec<A>>(scalars[head + k / kPerHead]); }
  template <class S>
  INLINE void add_sums(S, const Vec<A>* values, int64_t, A* scalars) const {
    constexpr int kHeads = S::kVectors / kPerHead;
    Vec<A> sums[kHeads] = {};
    EACH_VECTOR sums[k / kPerHead] += values[k];
    if constexpr (kHeads <= W) {
      const Vec<A> total = sum_each<kHeads, A>(sums);
      memcpy(scalars + head, &total, kHeads * sizeof(A));
    } else {
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) scalars[head + h] = sum_lanes(sums[h]);
    }
  }
};
// How several heads of few channels share a vector, or several vectors of one strip belong to several heads.
struct Packing {
  bool possible;
  int vectors_per_head;  // 0: channels do not fill vectors
  int channels, per_vector, shift;  // channels = 2^shift
  LaneVec<A> spread, gather;

  Packing(int64_t width, int64_t group)
      : possible(group == 1 && width > 0 && width < W && W % width == 0),
        vectors_per_head(group == 1 && width % W == 0 ? int(width / W) : 0),
        channels(possible ? int(width) : 1),
        per_vector(W / channels),
        shift(__builtin_ctz(unsigned(channels))),
        spread(lane_numbers<A>() >> shift),
        gather(lane_numbers<A>() << shift & (W - 1)) {}
};
// With kChannels the number of channels is known when the code is compiled.
template <int kChannels = 0>
struct PackedHeads {
  const Packing packing;  // a copy, which stays in registers
  int64_t head;
  // `scalars` can be read for a vector's length.
  INLINE Vec<A> spread(const A* scalars, int k) const {
    if constexpr (kChannels >= 4)  // one vector has the scalars of a whole strip
      return shuffle(load(scalars + head), lane_numbers<A>() / kChannels + LaneInt<A>(k * (W / kChannels)));
    return shuffle(load(scalars + head + k * packing.per_vector), packing.spread);
  }
  template <class S>
  INLINE void add_sums(S, const Vec<A>* values, int64_t heads, A* scalars) const {
    if constexpr (S::kVectors == 4 && kChannels >= 4) {
      constexpr int kPerVector = W / kChannels;
      const LaneVec<A> lane = lane_numbers<A>();
      Vec<A> sums[] = {values[0], values[1], values[2], values[3]};
      Vec<A> total = sum_each<4, A>(sums, kChannels);  // vector n's are in lanes n, n + kChannels and so on
      total = shuffle(total, (lane % kPerVector * kChannels + lane / kPerVector) & (W - 1));
      memcpy(scalars + head, &total, 4 * kPerVector * sizeof(A));
      return;
    }
    EACH_VECTOR {
      Vec<A> v = values[k];
      for (int distance = packing.channels / 2; distance > 0; distance /= 2)
        v += shuffle(v, lane_numbers<A>() ^ LaneInt<A>(distance));
      const int64_t first = head + k * packing.per_vector;
      store_part(scalars + first, shuffle(v, packing.gather), int(min(packing.per_vector, heads - first)));
    }
  }
};

// Calls f(strip, heads, 0) on strips of several heads, and returns how many heads they cover.
template <int kMost, int kPerHead, class F>
INLINE int64_t for_whole_heads(int64_t heads, F&& f) {
  int64_t head = 0;
  auto go = [&](auto vectors) INLINE_LAMBDA {
    constexpr int kVectors = decltype(vectors)::kValue, kHeads = kVectors / kPerHead;
    if constexpr (kHeads > 1)
      for (; head + kHeads <= heads; head += kHeads)
        f(Strip<kVectors, false>{head * kPerHead * W, kVectors * W}, WholeHeads<kPerHead>{head}, int64_t(0));
  };
  go(Count<kMost>{});
  go(Count<kMost / 2>{});
  return head;
}

// Calls f(strip, heads, first head) on strips of [heads, width] channels; a strip's first channel counts from that head.
constexpr int kMostVectors = kVectorBytes == 64 ? 8 : 4;  // leave some registers free
template <int kMost = kMostVectors, class F>
INLINE void for_head_strips(int64_t heads, int64_t width, const Packing& packing, F&& f) {
  const auto go = [&](auto channels) INLINE_LAMBDA {
    for_strips(heads * width, [&](auto strip) INLINE_LAMBDA {
      f(strip, PackedHeads<decltype(channels)::kValue>{packing, strip.first >> packing.shift}, int64_t(0));
    });
  };
  if constexpr (W > 8)
    if (packing.channels == 8) return go(Count<8>{});
  if constexpr (W > 4)
    if (packing.channels == 4) return go(Count<4>{});
  if (packing.possible) return go(Count<0>{});
  int64_t head = 0;
  if constexpr (kVectorBytes >= 32) {  // short vectors gain nothing
    if (packing.vectors_per_head == 1) head = for_whole_heads<kMost, 1>(heads, f);
    if (packing.vectors_per_head == 2) head = for_whole_heads<kMost, 2>(heads, f);
    if (packing.vectors_per_head == 4) head = for_whole_heads<kMost, 4>(heads, f);
  }
  for (; head < heads; ++head)
    for_strips(width, [&](auto strip) INLINE_LAMBDA { f(strip, OneHead{head}, head); });
}

// The same, vector by vector: less code.
template <class F>
INLINE void for_head_vectors(int64_t heads, int64_t width, const Packing& packing, F&& f) {
  if (packing.possible) {
    for_vectors(heads * width, [&](auto strip) INLINE_LAMBDA {
      f(strip, PackedHeads<>{packing, strip.first >> packing.shift}, int64_t(0));
    });
    return;
  }
  for (int64_t head = 0; head < heads; ++head)
    for_vectors(width, [&](auto strip) INLINE_LAMBDA { f(strip, OneHead{head}, head); });
}

// Where the signs of a strip's inputs are kept: rows of bits, `stride` bytes apart. A vector's bits are whole bytes; heads
// that share vectors share these, too.
struct Signs {
  uint8_t* bits;
  int64_t stride;
};
INLINE int64_t bytes_of_signs(int64_t channels) { return (channels + W - 1) / W * int64_t(sizeof(LaneBits)); }
INLINE int64_t bytes_of_signs(int64_t heads, int64_t channels) {
  return Packing(channels, 1).possible ? bytes_of_signs(heads * channels) : heads * bytes_of_signs(channels);
}

// out_e += the sum over channels of the family's values, with the row `own` at the end kOwn. With kSigns the signs of
// the family's inputs are kept, if there is a place for them. `vector` is read if the family has one.
template <End kOwn, EdgeRows kRows, bool kSigns, class F, class S, class Heads>
INLINE void add_values(const F& family, S strip, Heads heads, const A* vector, const T* own, const Segment& segment,
                       A* out, Signs signs = {}) {
  Vec<A> fixed[S::kVectors], weight[S::kVectors];
  EACH_VECTOR {
    fixed[k] = strip.load_at(own, k);
    if constexpr (F::kHasVector) weight[k] = strip.load_at(vector, k);
  }
  for (int e = segment.first; e < segment.last; ++e) {
    segment.prefetch(strip, e);
    Vec<A> other[S::kVectors], values[S::kVectors];
    segment.template load_other<kRows>(strip, e, other);
    if constexpr (kSigns) {
      if (kRows == kNone || signs.bits != nullptr) {
        EACH_VECTOR {
          const LaneBits bits = positive_bits(F::input(fixed[k], other[k], segment.template edge<kRows>(strip, e, k)));
          memcpy(signs.bits + e * signs.stride + strip.first / 8 + k * int(sizeof bits), &bits, sizeof bits);
        }
      }
    }
    EACH_VECTOR {  // without a branch, which would keep GCC from contracting products and sums
      values[k] = family.template value<kOwn>(fixed[k], other[k], segment.template edge<kRows>(strip, e, k));
      if constexpr (F::kHasVector) values[k] *= weight[k];
    }
    heads.add_sums(strip, values, segment.heads, out + e * segment.heads);
  }
}

// acc += the sum of factor_e times the derivative of the family's values by `own`, or (`anew`) replacing it; and,
// unless `total` is null, total += the sum of factor_e times the values.
template <End kOwn, EdgeRows kRows, class F, class S, class Heads>
INLINE void add_derivatives(const F& family, S strip, Heads heads, const T* own, const A* factor,
                            const Segment& segment, bool anew, A* acc, A* total) {
  Vec<A> fixed[S::kVectors], sum[S::kVectors], values[S::kVectors];
  EACH_VECTOR {
    fixed[k] = strip.load_at(own, k), sum[k] = anew ? Vec<A>{} : strip.load_at(acc, k);
    values[k] = total == nullptr ? Vec<A>{} : strip.load_at(total, k);
  }
  for (int e = segment.first; e < segment.last; ++e) {
    segment.prefetch(strip, e);
    Vec<A> other[S::kVectors];
    segment.template load_other<kRows>(strip, e, other);
    EACH_VECTOR {
      const Vec<A> weight = heads.spread(factor + e * segment.heads, k);
      const auto edge = segment.template edge<kRows>(strip, e, k);
      const Applied applied = family.template apply<kOwn>(fixed[k], other[k], edge);
      sum[k] += weight * applied.derivative;
      values[k] += weight * applied.value;
    }
  }
  EACH_VECTOR {
    strip.store_at(acc, k, sum[k]);
    if (total != nullptr) strip.store_at(total, k, values[k]);
  }
}

// The same two for slow families without signs, several vectors at a time.

constexpr int kTogether = 8;

template <class F, class S, class Heads>
INLINE void add_slow_values(const F& family, S strip, Heads heads, const A* vector, const T* own, const Segment& segment,
                            A* out) {
  Vec<A> weight[S::kVectors];
  EACH_VECTOR weight[k] = strip.load_at(vector, k);
  segment.for_inputs<kTogether>(strip, own, [&](Vec<A>* values, int first, int n) INLINE_LAMBDA {
    family.apply_all(values, nullptr, n * S::kVectors);
    for (int e = 0; e < n; ++e, values += S::kVectors) {
      EACH_VECTOR values[k] *= weight[k];
      heads.add_sums(strip, values, segment.heads, out + (first + e) * segment.heads);
    }
  });
}

template <class F, class S, class Heads>
INLINE void add_slow_derivatives(const F& family, S strip, Heads heads, const T* own, const A* factor,
                                 const Segment& segment, bool anew, A* acc, A* total) {
  Vec<A> sum[S::kVectors], sum_values[S::kVectors];
  EACH_VECTOR {
    sum[k] = anew ? Vec<A>{} : strip.load_at(acc, k);
    sum_values[k] = total == nullptr ? Vec<A>{} : strip.load_at(total, k);
  }
  segment.for_inputs<kTogether>(strip, own, [&](Vec<A>* values, int first, int n) INLINE_LAMBDA {
    Vec<A> derivatives[kTogether];
    family.apply_all(values, derivatives, n * S::kVectors);
    for (int e = 0; e < n; ++e) {
      EACH_VECTOR {
        const Vec<A> weight = heads.spread(factor + (first + e) * segment.heads, k);
        sum[k] += weight * derivatives[e * S::kVectors + k];
        sum_values[k] += weight * values[e * S::kVectors + k];
      }
    }
  });
  EACH_VECTOR {
    strip.store_at(acc, k, sum[k]);
    if (total != nullptr) strip.store_at(total, k, sum_values[k]);
  }
}

// The same as add_derivatives without `total`, from the signs of a family's inputs: its derivative is 1 or slope.
template <class S, class Heads>
INLINE void add_slopes(S strip, Heads heads, A slope, const A* factor, const uint8_t* const* signs,
                       int64_t signs_offset, const Segment& segment, bool anew, A* acc) {
  if constexpr (kHasBits<A>) {
    Vec<A> sum[S::kVectors];
    EACH_VECTOR sum[k] = anew ? Vec<A>{} : strip.load_at(acc, k);
    for (int e = segment.first; e < segment.last; ++e) {
      EACH_VECTOR {
        const Vec<A> weight = heads.spread(factor + e * segment.heads, k), sloped = weight * slope;
        LaneBits bits;
        memcpy(&bits, signs[e] + signs_offset + strip.first / 8 + k * int(sizeof bits), sizeof bits);
        sum[k] += select_bits(bits, weight, sloped);
      }
    }
    EACH_VECTOR strip.store_at(acc, k, sum[k]);
  }
}

// sum += factor_e (row_e + edge_e).
template <EdgeRows kRows, class S, class Heads>
INLINE void add_weighted(S strip, Heads heads, const A* factor, const Segment& segment, Vec<A>* sum) {
  for (int e = segment.first; e < segment.last; ++e) {
    segment.prefetch(strip, e);
    Vec<A> other[S::kVectors];
    segment.load_other(strip, e, other);
    EACH_VECTOR {
      const auto edge = segment.template edge<kRows>(strip, e, k);
      sum[k] += heads.spread(factor + e * segment.heads, k) * (other[k] + edge);
    }
  }
}

// products_e += <own + edge_e, row_e>, and acc += the sum of factor_e row_e, or (`anew`) replacing it.
template <EdgeRows kRows, class S, class Heads>
INLINE void add_products_and_weighted(S strip, Heads heads, const T* own, const A* factor, const Segment& segment,
                                      bool anew, A* products, A* acc) {
  Vec<A> fixed[S::kVectors], sum[S::kVectors];
  EACH_VECTOR fixed[k] = strip.load_at(own, k), sum[k] = anew ? Vec<A>{} : strip.load_at(acc, k);
  for (int e = segment.first; e < segment.last; ++e) {
    segment.prefetch(strip, e);
    Vec<A> other[S::kVectors];
    segment.load_other(strip, e, other);
    EACH_VECTOR sum[k] += heads.spread(factor + e * segment.heads, k) * other[k];
    EACH_VECTOR other[k] *= fixed[k] + segment.template edge<kRows>(strip, e, k);
    heads.add_sums(strip, other, segment.heads, products + e * segment.heads);
  }
  EACH_VECTOR strip.store_at(acc, k, sum[k]);
}

// to = row, rounded to the type that is stored.
[[maybe_unused]] NOINLINE void store_row(T* to, const A* row, int64_t width) {
  for_strips(width, [&](auto strip) INLINE_LAMBDA {
    using S = decltype(strip);
    EACH_VECTOR strip.store_at(to, k, strip.load_at(row, k));
  });
}

}  // namespace
