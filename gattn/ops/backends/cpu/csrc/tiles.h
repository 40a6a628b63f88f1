// Attention on complete graphs, by tiles of pairs: a few targets times a panel of sources, whose logits and weights stay
// in the first-level cache.
//
// Forward, a task is a block of a head's targets. It walks over the panels of sources that some of its targets see, and
// keeps a running maximum, raised only where a logit exceeds it by kSlack, a sum and the output of each target.
// Backward, a task is a part of a head's sources. It computes weights again, and has a gradient of the queries of its
// own. Tasks depend on sizes alone, so bits do not depend on the number of threads.
//
// All five products are made by `multiply`.
#pragma once

#include <algorithm>
#include <type_traits>

#include "distribution.h"
#include "dropout.h"
#include "products.h"
#include "tiles_arguments.h"

namespace {

constexpr int64_t kPanel = 64;     // sources of a tile
constexpr int64_t kGroup = 12;     // targets of a tile, forward
constexpr int64_t kTargets = 192;  // targets of a task, forward
constexpr int64_t kKeysAhead = 16;
constexpr int64_t kFew = 4;        // with as many targets, rows are read where they lie: to pack them costs more
constexpr int64_t kBackRows = 48;  // targets of a tile, backward
#if defined(__AVX512F__)
constexpr int64_t kAtOnce = 16;    // buckets
#else
constexpr int64_t kAtOnce = 8;
#endif
constexpr int kTableParts = 4;  // of the sums of a bucket, so that an addition need not wait for the one before it
constexpr int64_t kDiagonals = kBackRows + kPanel;
constexpr A kSlack = 8;

INLINE int64_t whole_vectors(int64_t n) { return (n + W - 1) / W * W; }

// W vectors as rows of a matrix become its columns.
INLINE void transpose(Vec<A>* v) {
  const LaneVec<A> lane = lane_numbers<A>();
#pragma GCC unroll 4
  for (int step = 1; step < W; step *= 2) {
    const LaneVec<A> odd = (lane & LaneInt<A>(step)) != 0;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      if (i & step) continue;
      const Vec<A> x = v[i], y = v[i | step];
      v[i] = odd ? shuffle(y, lane ^ LaneInt<A>(step)) : x;
      v[i | step] = odd ? y : shuffle(x, lane ^ LaneInt<A>(step));
    }
  }
}

// Rows of channels, of any strides; kept in float, whatever they are stored in.
struct RowsOf {
  const T* from;
  int64_t row, channel, channels;

  INLINE Vec<A> vector(int64_t r, int64_t c) const {
    const T* p = from + r * row + c * channel;
    const int64_t left = channels - c;
    if (channel == 1) return left >= W ? load(p) : load_part(p, int(left));
    Vec<A> x = {};
    for (int i = 0; i < W && i < left; ++i) x[i] = to_compute(p[i * channel]);
    return x;
  }
  // [count][whole vectors of channels], times a factor; whether all numbers are finite.
  NOINLINE bool copy(int64_t first, int64_t count, A factor, A* to) const {
    const int64_t width = whole_vectors(channels);
    Vec<A> seen = {};
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t c = 0; c < width; c += W) {
        const Vec<A> x = vector(first + r, c);
        seen += x * A(0);
        store(to + r * width + c, x * factor);
      }
    }
    return sum_lanes(seen) == A(0);
  }
  INLINE void prefetch(int64_t r) const {
    const char* p = reinterpret_cast<const char*>(from + r * row);
    for (int64_t at = 0; at < channels * int64_t(sizeof(T)); at += 64) __builtin_prefetch(p + at);
  }
  // Whether rows are what `multiply` reads.
  bool is_packed() const { return std::is_same_v<T, A> && channel == 1 && channels % W == 0; }
  // The products of `count` queries, [count][whole vectors of channels], and these rows: [count][kPanel].
  NOINLINE void multiplied(const A* queries, int64_t count, int64_t first, int64_t from, int64_t to, A* products,
                           const RowsOf& values) const {
    const int64_t width = whole_vectors(channels);
    for (int64_t j = from; j < to; j += W)
      for (int64_t r = 0; r < count; ++r) {
        const A* query = queries + r * width;
        Vec<A> sums[W] = {};
        int64_t c = 0;
        if (channel == 1 && j + W <= to) {
          const T* p = this->from + (first + j) * row;
          if (r == 0) {
            for (int i = 0; i < W; ++i) {
              prefetch(first + j + i + kKeysAhead);
              values.prefetch(first + j + i);
            }
          }
          for (; c + W <= channels; c += W)
#pragma GCC unroll 16
            for (int i = 0; i < W; ++i) sums[i] += load(query + c) * load(p + i * row + c);
        }
        for (; c < width; c += W)
          for (int64_t i = 0; i < W && j + i < to; ++i) sums[i] += load(query + c) * vector(first + j + i, c);
        store(products + r * kPanel + j, sum_each<W, A>(sums));
      }
  }
  // [channels][kPanel]
  NOINLINE void transposed(int64_t first, int64_t count, A* to) const {
    Vec<A> square[W];
    for (int64_t c = 0; c < channels; c += W) {
      for (int64_t r = 0; r < count; r += W) {
        for (int64_t i = 0; i < W; ++i) square[i] = r + i < count ? vector(first + r + i, c) : Vec<A>{};
        transpose(square);
        for (int64_t i = 0; i < W && c + i < channels; ++i) store(to + (c + i) * kPanel + r, square[i]);
      }
    }
  }
};

// Lanes whose number is in [first, last).
INLINE LaneVec<A> lanes_within(int64_t first, int64_t last) {
  const LaneVec<A> lane = lane_numbers<A>();
  const LaneInt<A> from = LaneInt<A>(first < 0 ? 0 : first > W ? W : first);
  const LaneInt<A> to = LaneInt<A>(last < 0 ? 0 : last > W ? W : last);
  return (lane >= from) & (lane < to);
}

INLINE bool any(LaneVec<A> lanes) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)lanes) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)lanes) != 0;
#else
  bool found = false;
  for (int i = 0; i < W; ++i) found |= lanes[i] != 0;
  return found;
#endif
}

class TilePass {
 public:
  explicit TilePass(const Tiles& a)
      : a(a),
        law(law_of(a)),
        C(a.channels),
        D(a.value_channels),
        width(whole_vectors(C)),
        value_width(whole_vectors(D)),
        has_slope(a.slope != 1),
        has_clamp(a.clamp < double(INFINITY)) {}

  static int64_t forward_workspace(const Tiles& a) {
    const int64_t c = whole_vectors(a.channels), d = whole_vectors(a.value_channels);
    return kTargets * (c + d + W + W) + kPanel * (c + d) + (kGroup + 1) * kPanel + W + kTargets;
  }
  static int64_t backward_workspace(const Tiles& a) {
    const int64_t c = whole_vectors(a.channels), d = whole_vectors(a.value_channels);
    return kPanel * (3 * c + 2 * d) + kBackRows * (c + d + 2 * kPanel) + 5 * kPanel + kDiagonals + 2 * W + a.targets;
  }
  // The heads of a task forward: several, whose keys share a source's row, if there are few targets and enough tasks.
  int64_t heads_of_task(const TileElement& e) const {
    const int64_t sharing = a.heads / a.key_heads;
    const auto fits = [&](int64_t heads) {
      const bool is_even = a.heads % heads == 0 && (heads % sharing == 0 || sharing % heads == 0);
      return is_even && heads * e.targets <= kTargets && a.num_elements * a.heads / heads >= a.threads;
    };
    int64_t heads = e.targets > kFew || a.tiles != nullptr ? 1 : a.heads;
    while (heads > 1 && !fits(heads)) --heads;
    return heads;
  }
  static int64_t blocks_of(const TileElement& e) { return (e.targets + kTargets - 1) / kTargets; }

  // Forward: a block of targets of one element and head.
  void forward(const TileElement& e, int64_t head, int64_t block, A* memory);
  // The weights of the same, once `stats` is known.
  void write_weights(const TileElement& e, int64_t head, int64_t block, A* memory);
  // Backward: a part of the sources of one element and head of keys.
  void backward(const TileElement& e, int64_t key_head, int64_t part, A* memory);

 private:
  static Law law_of(const Tiles& a) {
    Arguments of = {};
    of.distribution = a.distribution;
    of.distribution_constants[0] = a.distribution_constants[0];
    of.distribution_constants[1] = a.distribution_constants[1];
    return Law(of);
  }
  static RowsOf rows(const void* from, const TileStrides& strides, int64_t batch, int64_t head, int64_t channels) {
    const T* p = static_cast<const T*>(from) + batch * strides.batch + head * strides.head;
    return {p, strides.row, strides.channel, channels};
  }
  int64_t row_number(const TileElement& e, int64_t head, int64_t i) const {
    return ((e.batch * a.targets) + e.first_target + i) * a.heads + head;
  }

  // The sources that target i sees, [first, last).
  int64_t first_source(const TileElement& e, int64_t i) const {
    const int64_t first = i + e.offset - a.left;
    return first < 0 ? 0 : first > e.sources ? e.sources : first;
  }
  int64_t last_source(const TileElement& e, int64_t i) const {
    const int64_t last = i + e.offset + a.right + 1;
    return last < 0 ? 0 : last > e.sources ? e.sources : last;
  }

  // The columns of a panel of n sources that some of these targets see, [first, last).
  struct Columns {
    int64_t first, last;
  };
  Columns columns(const TileElement& e, int64_t head, int64_t i, int64_t count, int64_t panel, int64_t n) const {
    const int64_t first = first_source(e, i) - panel, last = last_source(e, i + count - 1) - panel;
    Columns all{first < 0 ? 0 : first, last < n ? last : n};
    if (a.tiles == nullptr) return all;
    const auto is_seen = [&](int64_t column) {
      for (int64_t block = i / a.block; block <= (i + count - 1) / a.block; ++block)
        if (tile_of(e, head, block, (panel + column) / a.block) >= 0) return true;
      return false;
    };
    while (all.first < all.last && !is_seen(all.first))
      all.first = (panel + all.first) / a.block * a.block + a.block - panel;
    while (all.first < all.last && !is_seen(all.last - 1)) all.last = (panel + all.last - 1) / a.block * a.block - panel;
    return all;
  }
  int32_t tile_of(const TileElement& e, int64_t head, int64_t targets, int64_t sources) const {
    const TileStrides& s = a.tiles_strides;
    return a.tiles[e.term * s.batch + head * s.head + targets * s.row + sources * s.channel];
  }
  // Asks for the rows that come after these, where other blocks come between: no row tells the processor of the next one.
  NOINLINE void prefetch_targets(const TileElement& e, int64_t head, int64_t source, int64_t i, int64_t end,
                                 const RowsOf& query, const RowsOf& grad_out, const A* grad_query) const {
    const int64_t column = source / a.block;
    while (i < end && tile_of(e, head, i / a.block, column) < 0) i = i / a.block * a.block + a.block;
    const int64_t last = i + together(i, kBackRows) < end ? i + together(i, kBackRows) : end;
    for (; i < last; ++i) {
      query.prefetch(e.first_target + i);
      grad_out.prefetch(e.first_target + i);
      const char* p = reinterpret_cast<const char*>(grad_query + row_number(e, head, i) * width);
      for (int64_t at = 0; at < width * int64_t(sizeof(A)); at += 64) __builtin_prefetch(p + at, 1);
    }
  }
  NOINLINE void prefetch_sources(const TileElement& e, int64_t head, int64_t i, int64_t targets, int64_t panel, int64_t end,
                                 const RowsOf& key, const RowsOf& value) const {
    for (; panel < end; panel += kPanel) {
      const int64_t n = end - panel < kPanel ? end - panel : kPanel;
      const auto [from, to] = columns(e, head, i, targets, panel, n);
      if (from >= to) continue;
      for (int64_t j = from; j < to; ++j) key.prefetch(e.first_source + panel + j), value.prefetch(e.first_source + panel + j);
      return;
    }
  }
  // How many targets from this one on are computed together: those of one block.
  int64_t together(int64_t i, int64_t most) const {
    if (a.tiles == nullptr) return most;
    const int64_t left = a.block - i % a.block;
    return left < most ? left : most;
  }

  // What the dropout of a row begins with; see gattn/ops/dropout.py.
  struct RowKey {
    uint32_t first, second;
  };
  RowKey row_key(const TileElement& e, int64_t head, int64_t i) const {
    const uint64_t number = uint64_t((e.batch * a.heads + head) * a.targets + e.first_target + i);
    const uint32_t high = uint32_t(number >> 32) ^ uint32_t(uint64_t(a.seed) >> 32);
    const uint32_t first = mix(mix(uint32_t(number) ^ uint32_t(a.seed)) ^ high);
    return {first, mix(first ^ 0x9e3779b9u)};
  }
  NOINLINE void keep_factors(RowKey key, int64_t source, int64_t count, A* to) const {
    const uint32_t threshold = uint32_t(a.threshold), from = uint32_t(source) + key.first, second = key.second;
    const A factor = A(a.keep_scale);
    for (int64_t j = 0; j < count; ++j) {
      uint32_t x = from + uint32_t(j);
      x = (x ^ x >> 16) * 0x45d9f3bu ^ second;
      x = (x ^ x >> 16) * 0x45d9f3bu;
      to[j] = (x ^ x >> 16) >= threshold ? factor : A(0);
    }
  }

  // One row of a tile, whose columns [from, to) some of its targets see, and [first, last) this one.
  struct Listed {
    int64_t first, last, origin;  // the source of column 0 among those of the pairs
  };
  struct Row {
    int64_t head, i, source;        // the source of column 0
    int64_t from, to, first, last;  // columns
    Listed pairs;                   // that have a bias
  };
  bool has_terms() const {
    const bool has_bias = a.bias != nullptr && a.bias_kind != kOfListed;
    return has_slope || has_clamp || has_bias || a.mask != nullptr || has_hidden_blocks() || law.cap != 0;
  }
  // Whether a panel may be one of several blocks, of which some are hidden.
  bool has_hidden_blocks() const { return a.tiles != nullptr && a.block % kPanel != 0; }
  // Whether a row's products are not its logits yet, and whether some of these may be minus infinity.
  bool is_unfinished(const Row& row) const { return has_terms() || !is_whole(row); }
  bool may_hide(const Row& row) const {
    const bool has_bias = a.bias_kind == kOfListed ? row.pairs.first < row.pairs.last : a.bias != nullptr;
    return has_bias || a.mask != nullptr || has_hidden_blocks() || !is_whole(row);
  }

  // A row of a tile, whose columns [from, to) some of its targets see. Biases of listed pairs are added to its products;
  // what reads these much later need not wait for them. `cursor` is how many of its pairs lie in earlier panels, or fewer.
  Row row_of(const TileElement& e, int64_t head, int64_t i, int64_t panel, int64_t from, int64_t to, A* products,
             int32_t& cursor) const {
    Row row{head, i, panel, from, to, first_source(e, i) - panel, last_source(e, i) - panel, {0, 0, 0}};
    if (a.tiles != nullptr) {  // whose other columns are not those of blocks that it sees
      row.first = row.first < from ? from : row.first;
      row.last = row.last < to ? row.last : to;
    }
    if (a.bias_kind != kOfListed || a.bias == nullptr) return row;
    const int64_t* starts = a.pair_starts + e.bias_at + i;
    const int64_t origin = e.bias_step + panel;
    const int32_t *const end = a.pair_sources + starts[1];
    const int32_t* first = not_before(a.pair_sources + starts[0] + cursor, end, origin + from);
    const bool adds = !has_slope && !has_clamp;
    const int32_t* after = adds ? add_before(head, first, end, origin, to, products) : not_before(first, end, origin + to);
    row.pairs = {first - a.pair_sources, after - a.pair_sources, origin};
    cursor = int32_t(row.pairs.last - starts[0]);
    return row;
  }
  // The first of ascending sources that is not before this one, which is often the first of all.
  static INLINE const int32_t* not_before(const int32_t* first, const int32_t* end, int64_t source) {
    if (first == end || *first >= source) return first;
    return std::lower_bound(first, end, source);
  }
  // Adds the biases of pairs from this one on, which lie before a column, to a row's logits, and returns the next pair.
  INLINE const int32_t* add_before(int64_t head, const int32_t* pair, const int32_t* end, int64_t origin, int64_t column,
                                   A* logits) const {
    const TileStrides& s = a.bias_strides;
    const A* number = static_cast<const A*>(a.bias) + head * s.head + (pair - a.pair_sources) * s.channel;
    for (; pair < end && *pair < origin + column; ++pair, number += s.channel) logits[*pair - origin] += *number;
    return pair;
  }
  // The buckets of a row; whatever they were when they were checked, they have a number now.
  template <class Bucket>
  INLINE void read_buckets(const TileElement& e, const Row& row, uint32_t* buckets) const {
    const int64_t place = e.bias_at + row.i * e.bias_step + row.source, low = row.from / W * W, to = row.to;
    const Bucket* from = static_cast<const Bucket*>(a.buckets) + place;
    prefetch(from, e.bias_step, 1, row, e.targets);
    using Wide = std::conditional_t<sizeof(Bucket) == 8, uint64_t, uint32_t>;
    typedef Bucket Narrow __attribute__((vector_size(kAtOnce * sizeof(Bucket))));
    typedef uint32_t Words __attribute__((vector_size(kAtOnce * sizeof(uint32_t))));
    const Wide last = Wide(a.bias_count - 1);
    int64_t j = low;
    for (; sizeof(Bucket) < 8 && j + kAtOnce <= to; j += kAtOnce) {
      Narrow narrow;
      memcpy(&narrow, from + j, sizeof narrow);
      Words x = __builtin_convertvector(narrow, Words);
      const Words most = Words{} + uint32_t(last);
#if defined(__AVX512F__)
      if (sizeof(Bucket) == 1) x = (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
#elif defined(__AVX2__)  // GCC would convert bytes one by one
      if (sizeof(Bucket) == 1) x = (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + j)));
#endif
      const Words bounded = x < most ? x : most;
      memcpy(buckets + j, &bounded, sizeof bounded);
    }
    for (; j < to; ++j) buckets[j] = uint32_t(Wide(from[j]) < last ? Wide(from[j]) : last);
  }
  NOINLINE void buckets_of(const TileElement& e, const Row& row, uint32_t* buckets) const {
    switch (a.bucket_bytes) {
      case 1: return read_buckets<uint8_t>(e, row, buckets);
      case 2: return read_buckets<uint16_t>(e, row, buckets);
      case 4: return read_buckets<uint32_t>(e, row, buckets);
      default: read_buckets<uint64_t>(e, row, buckets);
    }
  }
#if defined(__AVX512F__)
  static INLINE Vec<float> look_up_held(const Vec<float>* held, const uint32_t* buckets) {
    const __m512i at = _mm512_loadu_si512(buckets);
    const auto half = [&](int k) { return _mm512_permutex2var_ps((__m512)held[k], at, (__m512)held[k + 1]); };
    return (Vec<float>)_mm512_mask_blend_ps(_mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), half(0), half(2));
  }
#elif defined(__AVX2__)
  static INLINE Vec<float> look_up_held(const Vec<float>* held, const uint32_t* buckets) {
    const __m256i at = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(buckets));
    const __m256 of_8 = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)), of_16 = _mm256_castsi256_ps(_mm256_slli_epi32(at, 27));
    const auto part = [&](int k) { return _mm256_permutevar8x32_ps((__m256)held[k], at); };
    const __m256 low = _mm256_blendv_ps(part(0), part(1), of_8), high = _mm256_blendv_ps(part(2), part(3), of_8);
    return (Vec<float>)_mm256_blendv_ps(low, high, of_16);
  }
#endif
  // Adds the numbers of a row's buckets to its logits.
  NOINLINE void add_of_buckets(const TileElement& e, const Row& row, const A* numbers, A* logits) const {
    const int64_t low = row.from / W * W;
    uint32_t buckets[kPanel];
    buckets_of(e, row, buckets);
#if defined(__AVX2__)
    if (sizeof(A) == 4 && a.bias_count <= 4 * W) {  // few numbers fit into registers
      float* to = reinterpret_cast<float*>(logits);
      Vec<float> held[4];
      for (int k = 0; k < 4; ++k) {
        const int64_t left = a.bias_count - k * W;
        held[k] = load_part(reinterpret_cast<const float*>(numbers) + k * W, int(left < 0 ? 0 : left < W ? left : W));
      }
      for (int64_t j = low; j < row.to; j += W) store(to + j, load(to + j) + look_up_held(held, buckets + j));
      return;
    }
#endif
#pragma GCC unroll 4
    for (int64_t j = low; j < row.to; ++j) logits[j] += numbers[buckets[j]];
  }
  // Asks for what a later row of the same columns will read: rows are too far apart for the processor to foresee it.
  template <class N>
  INLINE void prefetch(const N* row, int64_t step, int64_t channel, const Row& of, int64_t targets) const {
    if (step == 0 || channel != 1 || of.i + kGroup >= targets) return;
    const char* p = reinterpret_cast<const char*>(row + kGroup * step + of.from);
    for (int64_t at = 0; at < (of.to - of.from) * int64_t(sizeof(N)); at += 64) __builtin_prefetch(p + at);
  }
  // Where a row of biases by distance begins among the numbers of its head.
  int64_t first_distance(const TileElement& e, const Row& row) const {
    return row.source - row.i - e.offset - a.first_distance;
  }
  // The biases of a row, of all pairs or of distances: number `column` lies at p + column * stride, maybe in `room`.
  struct RowBias {
    const A* p;
    int64_t stride;
  };
  RowBias bias_of(const TileElement& e, const Row& row, const A* bias, A* room) const {
    const TileStrides& s = a.bias_strides;
    if (a.bias_kind == kOfAll) {
      bias += e.term * s.batch + row.i * s.row + row.source * s.channel;
      prefetch(bias, s.row, s.channel, row, e.targets);
      return {bias, s.channel};
    }
    const int64_t low = row.from / W * W, first = first_distance(e, row);
    if (first + low >= 0 && first + row.to <= a.bias_count) return {bias + first, 1};
    for (int64_t j = low; j < row.to; ++j) {  // what is hidden may have no number
      const int64_t at = first + j;
      room[j] = bias[at < 0 ? 0 : at < a.bias_count ? at : a.bias_count - 1];
    }
    return {room, 1};
  }
  INLINE Vec<A> number_at(const A* p, int64_t stride, int64_t column, int64_t last) const {
    if (stride == 0) return splat<Vec<A>>(*p);
    if (stride == 1) return last - column >= W ? load(p + column) : load_part(p + column, int(last - column));
    Vec<A> x = {};
    for (int i = 0; i < W && column + i < last; ++i) x[i] = p[(column + i) * stride];
    return x;
  }
  INLINE LaneVec<A> is_allowed(const uint8_t* mask, int64_t stride, int64_t column, int64_t last) const {
#if defined(__AVX2__)
    if (sizeof(A) == 4 && stride == 1 && last - column >= W) {
      const uint8_t* p = mask + column;
#if defined(__AVX512F__)
      return (LaneVec<A>)(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))) != 0;
#else
      return (LaneVec<A>)(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))) != 0;
#endif
    }
#endif
    A allowed[W];
    for (int i = 0; i < W; ++i) allowed[i] = column + i < last ? A(mask[(column + i) * stride]) : A(0);
    return load(allowed) != A(0);
  }
  NOINLINE void bound_products(A* logits, int64_t low, int64_t to, A* of_score) const {
    const A slope = A(a.slope), clamp = A(a.clamp);
    const Vec<A> one = splat<Vec<A>>(A(1));
    for (int64_t at = low; at < to; at += W) {
      Vec<A> x = load(logits + at), derivative = one;
      if (has_slope) derivative = x > A(0) ? one : splat<Vec<A>>(slope), x *= derivative;
      if (has_clamp) {
        derivative = (x > clamp) | (x < -clamp) ? Vec<A>{} : derivative;
        x = x > clamp ? splat<Vec<A>>(clamp) : x < -clamp ? splat<Vec<A>>(-clamp) : x;
      }
      if (of_score != nullptr) store(of_score + at, derivative);
      store(logits + at, x);
    }
  }
  NOINLINE void add_bias(const TileElement& e, const Row& row, A* logits) const {
    const A* numbers = static_cast<const A*>(a.bias) + row.head * a.bias_strides.head;
    if (a.bias_kind == kOfBuckets) return add_of_buckets(e, row, numbers, logits);
    if (a.bias_kind == kOfListed) {
      if (has_slope || has_clamp)
        add_before(row.head, a.pair_sources + row.pairs.first, a.pair_sources + row.pairs.last, row.pairs.origin, row.to, logits);
      return;
    }
    A room[kPanel];
    const RowBias bias = bias_of(e, row, numbers, room);
    int64_t at = row.from / W * W;
    if (bias.stride == 1)
      for (; at + W <= row.to; at += W) store(logits + at, load(logits + at) + load(bias.p + at));
    for (; at < row.to; at += W) store(logits + at, load(logits + at) + number_at(bias.p, bias.stride, at, row.to));
  }
  NOINLINE void cap_sums(A* logits, int64_t low, int64_t to, A* of_cap) const {
    const A inverse = A(1) / law.cap;
    for (int64_t at = low; at < to; at += W) {
      const Vec<A> x = load(logits + at), part = vector_tanh(x * inverse);
      if (of_cap != nullptr) store(of_cap + at, A(1) - part * part);
      store(logits + at, x == -A(INFINITY) ? x : law.cap * part);
    }
  }
  NOINLINE void hide_masked(const TileElement& e, const Row& row, A* logits) const {
    const TileStrides& s = a.mask_strides;
    const uint8_t* mask = a.mask + e.term * s.batch + row.head * s.head + row.i * s.row + row.source * s.channel;
    prefetch(mask, s.row, s.channel, row, e.targets);
    const Vec<A> lowest = splat<Vec<A>>(-A(INFINITY));
    for (int64_t at = row.from / W * W; at < row.to; at += W)
      store(logits + at, is_allowed(mask, s.channel, at, row.to) ? load(logits + at) : lowest);
  }
  NOINLINE void hide_blocks(const TileElement& e, const Row& row, A* logits) const {
    for (int64_t j = row.first < 0 ? 0 : row.first; j < row.last;) {
      const int64_t source = row.source + j, next = source / a.block * a.block + a.block - row.source;
      const int64_t end = next < row.last ? next : row.last, tile = tile_of(e, row.head, row.i / a.block, source / a.block);
      const uint8_t* mask = a.mask;
      if (mask != nullptr && tile >= 0) mask += (tile * a.block + row.i % a.block) * a.block + source % a.block;
      if (mask != nullptr && tile >= 0)
        for (; j + W <= end; j += W, mask += W)
          store(logits + j, is_allowed(mask, 1, 0, W) ? load(logits + j) : splat<Vec<A>>(-A(INFINITY)));
      for (; j < end && (tile < 0 || mask != nullptr); ++j)
        if (tile < 0 || !*mask++) logits[j] = -A(INFINITY);
      j = end;
    }
  }
  // Products become finished logits, hidden ones minus infinity. With `of_score`, the derivative by the product is written
  // there, and with `of_cap`, that by the sum of score and bias. Each term has a loop of its own, without branches.
  void finish(const TileElement& e, const Row& row, A* logits, A* of_score, A* of_cap) const {
    const int64_t low = row.from / W * W;
    if (has_slope || has_clamp) bound_products(logits, low, row.to, of_score);
    if (a.bias != nullptr) add_bias(e, row, logits);
    if (law.cap != 0) cap_sums(logits, low, row.to, of_cap);
    if (a.tiles != nullptr) hide_blocks(e, row, logits);
    else if (a.mask != nullptr) hide_masked(e, row, logits);
    if (is_whole(row)) return;
    for (int64_t at = low; at < row.to; at += W)
      if (at < row.first || at + W > row.last) {
        const Vec<A> lowest = splat<Vec<A>>(-A(INFINITY));
        store(logits + at, lanes_within(row.first - at, row.last - at) ? load(logits + at) : lowest);
      }
  }
  bool is_whole(const Row& row) const { return row.from % W == 0 && row.to % W == 0 && row.first <= row.from && row.last >= row.to; }

  void backward_row(const TileElement& e, const Row& row, int64_t low, A* weights, A* slopes, A* of_score, A* of_cap,
                    A* kept, A* diagonal, double* table) const;
  // Adds a row's gradients to those of the bias, of which those of distances begin at `diagonal`.
  NOINLINE void add_to_bias(const TileElement& e, const Row& row, int64_t low, const A* slopes, A* diagonal,
                            double* table) const {
    const TileStrides& s = a.grad_bias_strides;
    if (a.bias_kind == kOfDistances) {
      for (int64_t at = low; at < row.to; at += W) store(diagonal + at, load(diagonal + at) + load(slopes + at));
      return;
    }
    if (a.bias_kind == kOfBuckets) {
      uint32_t buckets[kPanel];
      buckets_of(e, row, buckets);
      const int64_t count = a.bias_count;
      double* const parts[kTableParts] = {table, table + count, table + 2 * count, table + 3 * count};
      int64_t j = row.from;
      for (; j + kTableParts <= row.to; j += kTableParts)
#pragma GCC unroll 4
        for (int k = 0; k < kTableParts; ++k) parts[k][buckets[j + k]] += double(slopes[j + k]);
      for (; j < row.to; ++j) table[buckets[j]] += double(slopes[j]);
      return;
    }
    A* to = static_cast<A*>(a.grad_bias) + row.head * s.head;
    if (a.bias_kind == kOfListed) {
      const Listed& pairs = row.pairs;
      for (int64_t k = pairs.first; k < pairs.last; ++k) to[k * s.channel] += slopes[a.pair_sources[k] - pairs.origin];
      return;
    }
    to += e.term * s.batch + row.i * s.row + row.source * s.channel;
    Vec<A> sum = {};
    for (int64_t at = low; at < row.to; at += W) {
      const Vec<A> x = load(slopes + at);
      const int64_t left = row.to - at;
      if (s.channel == 0) sum += x;
      else if (left >= W) store(to + at, load(to + at) + x);
      else store_part(to + at, load_part(to + at, int(left)) + x, int(left));
    }
    if (s.channel == 0) *to += sum_lanes(sum);
  }

  // A row of logits becomes weights. `base` is raised where a logit exceeds it by kSlack; their sum in lanes, `total`, and
  // the output so far, `sums`, are relative to it.
  INLINE void weigh(const Row& row, int64_t low, A* logits, A& base, A* total, A* sums) const {
    Vec<A> added = load(total);
    if (law.is_exponential) {
      Vec<A> highest = splat<Vec<A>>(-A(INFINITY));
      for (int64_t at = low; at < row.to; at += W) {
        const Vec<A> x = load(logits + at);
        highest = x > highest ? x : highest;
      }
      if (any(highest > base + kSlack)) {
        A top = highest[0];
        for (int l = 1; l < W; ++l) top = highest[l] > top ? highest[l] : top;
        if (base != -A(INFINITY)) {
          const A by = exp_of(base - top);
          for (int64_t c = 0; c < value_width; c += W) store(sums + c, load(sums + c) * by);
          added *= by;
        }
        base = top;
      }
      const bool is_empty = base == -A(INFINITY), may_be_hidden = is_empty || may_hide(row);
      const A shift = is_empty ? A(0) : base;
      for (int64_t at = low; at < row.to; at += W) {
        const Vec<A> weight = weight_of(load(logits + at) - shift, may_be_hidden);
        added += weight;
        store(logits + at, weight);
      }
    } else {
      law.visit([&](auto of) INLINE_LAMBDA {
        for (int64_t at = low; at < row.to; at += W) {
          const Vec<A> weight = of(load(logits + at), Vec<A>{}).value;
          added += weight;
          store(logits + at, weight);
        }
      });
    }
    store(total, added);
  }

  // exp(x), at most about exp(kSlack); if nothing is hidden, that of -inf may be the smallest number instead of zero.
  static INLINE Vec<float> weight_of(Vec<float> x, bool may_be_hidden) {
    // 2^n 2^r, |r| <= 1/2, with a minimax fit of 2^r to a relative 1e-7.
    const float shift = 12582912.0f + 127.0f;  // adding it puts n + 127 into the low bits
    const Vec<float> y = bounded(x * 1.44269504f, splat<Vec<float>>(-126.0f), splat<Vec<float>>(127.0f));
    const Vec<float> shifted = y + shift, r = y - (shifted - shift);
    Vec<float> p = r * 1.3264727e-3f + 9.6715130e-3f;
    p = p * r + 5.5507336e-2f;
    p = p * r + 2.4022242e-1f;
    p = p * r + 6.9314700e-1f;
    p = p * r + 1.0f;
    const Vec<float> weight = p * (Vec<float>)((VecInt)shifted << 23);
    return may_be_hidden ? (y <= -126.0f ? Vec<float>{} : weight) : weight;
  }
  static INLINE Vec<double> weight_of(Vec<double> x, bool) { return vector_exp(x); }
  static A exp_of(A x) { return weight_of(splat<Vec<A>>(x), true)[0]; }
  static float log_of(float x) { return logf(x); }
  static double log_of(double x) { return log(x); }

  const Tiles& a;
  const Law law;
  const int64_t C, D, width, value_width;
  const bool has_slope, has_clamp;
};

// The output's sums over a panel for pairs that are hidden in it: not even zeros times what is not finite. With
// `has_holes`, whatever has no weight was hidden.
inline void multiply_seen(const A* weights, const A* values, int64_t first, int64_t last, int64_t count, bool has_holes,
                          A* to) {
  for (int64_t j = first; j < last; ++j)
    for (int64_t c = 0; c < count && !(has_holes && weights[j] == 0); ++c) to[c] += weights[j] * values[j * count + c];
}

inline void TilePass::forward(const TileElement& e, int64_t head, int64_t block, A* memory) {
  const int64_t start = block * kTargets, targets = e.targets - start < kTargets ? e.targets - start : kTargets;
  const int64_t heads = heads_of_task(e);
  if (head % heads != 0) return;  // the task of an earlier one computes it
  const int64_t count = heads * targets, sharing = a.heads / a.key_heads;
  const int64_t rows_of_keys = (heads < sharing ? heads : sharing) * targets;
  const bool is_few = targets <= kFew && a.tiles == nullptr;
  // Rows are those of one head after another, if there are several.
  const auto head_of = [&](int64_t r) { return heads == 1 ? head : head + r / targets; };
  const auto target_of = [&](int64_t r) { return start + (heads == 1 ? r : r % targets); };
  A* queries = memory;
  A* sums = queries + kTargets * width;          // of values
  A* total = sums + kTargets * value_width;      // of weights, in lanes
  A* most = total + kTargets * W;
  A* keys = most + kTargets * W;
  A* values = keys + kPanel * width;
  A* tile = values + kPanel * value_width;
  A* kept = tile + kGroup * kPanel;
  int32_t* cursors = reinterpret_cast<int32_t*>(kept + kPanel + W);
  memset(cursors, 0, size_t(count) * sizeof(int32_t));
  for (int64_t h = 0; h < heads; ++h)
    rows(a.query, a.query_strides, e.batch, head + h, C)
        .copy(e.first_target + start, targets, A(a.scale), queries + h * targets * width);
  memset(sums, 0, size_t(count * value_width) * sizeof(A));
  memset(total, 0, size_t(count * W) * sizeof(A));
  for (int64_t r = 0; r < count; ++r) most[r] = -A(INFINITY);

  const int64_t end = last_source(e, start + targets - 1);
  for (int64_t panel = first_source(e, start); panel < end; panel += kPanel) {
    const int64_t n = end - panel < kPanel ? end - panel : kPanel;
    if (a.tiles != nullptr) {
      const auto [from, to] = columns(e, head, start, targets, panel, n);
      if (from >= to) continue;
      const int64_t key_head = head / sharing;
      prefetch_sources(e, head, start, targets, panel + kPanel, end, rows(a.key, a.key_strides, e.batch, key_head, C),
                       rows(a.value, a.value_strides, e.batch, key_head, D));
    }
    for (int64_t of_keys = 0; of_keys < count; of_keys += rows_of_keys) {
      const int64_t key_head = head_of(of_keys) / sharing;
      const RowsOf key = rows(a.key, a.key_strides, e.batch, key_head, C);
      const RowsOf value = rows(a.value, a.value_strides, e.batch, key_head, D);
      if (!is_few) key.transposed(e.first_source + panel, n, keys);
      const bool is_copied = !is_few || !value.is_packed();
      const bool is_finite = is_copied && value.copy(e.first_source + panel, n, A(1), values);
      const int64_t last_row = of_keys + rows_of_keys;
      for (int64_t group = of_keys, size; group < last_row; group += size) {
        size = together(start + group, last_row - group < kGroup ? last_row - group : kGroup);
        const int64_t i = is_few ? start : start + group, last = is_few ? start + targets - 1 : i + size - 1;
        const auto [from, to] = columns(e, head_of(group), i, last - i + 1, panel, n);
        if (from >= to) continue;
        const int64_t low = from / W * W, vectors = (to - low + W - 1) / W;
        if (is_few) key.multiplied(queries + group * width, size, e.first_source + panel, low, n, tile, value);
        else multiply(size, vectors, queries + group * width, width, 1, keys + low, kPanel, C, tile + low, kPanel, false);
        Row of_tile[kGroup];
        for (int64_t r = 0; r < size; ++r)
          of_tile[r] =
              row_of(e, head_of(group + r), target_of(group + r), panel, from, to, tile + r * kPanel, cursors[group + r]);
        for (int64_t r = 0; r < size; ++r) {
          A* logits = tile + r * kPanel;
          const Row& row = of_tile[r];
          if (is_unfinished(row)) finish(e, row, logits, nullptr, nullptr);
          weigh(row, low, logits, most[group + r], total + (group + r) * W, sums + (group + r) * value_width);
          if (a.dropout) {
            keep_factors(row_key(e, row.head, row.i), e.first_source + panel + low, to - low, kept + low);
            for (int64_t at = low; at < to; at += W) store(logits + at, load(logits + at) * load(kept + at));
          }
        }
        if (!is_copied) {
          const A* seen = reinterpret_cast<const A*>(value.from) + (e.first_source + panel) * value.row;
          for (int64_t r = 0; r < size; ++r) {
            const auto [first, after] = columns(e, head_of(group + r), target_of(group + r), 1, panel, n);
            multiply(1, value_width / W, tile + r * kPanel + first, kPanel, 1, seen + first * value.row, value.row,
                     after - first, sums + (group + r) * value_width, value_width, true);
          }
        } else if (is_finite || (a.tiles == nullptr && first_source(e, last) - panel <= from && last_source(e, i) - panel >= to)) {
          multiply(size, value_width / W, tile + from, kPanel, 1, values + from * value_width, value_width, to - from,
                   sums + group * value_width, value_width, true);
        } else {
          for (int64_t r = 0; r < size; ++r) {
            const auto [first, after] = columns(e, head_of(group + r), target_of(group + r), 1, panel, n);
            multiply_seen(tile + r * kPanel, values, first, after, value_width, a.tiles != nullptr,
                          sums + (group + r) * value_width);
          }
        }
      }
    }
  }

  const A* sink = static_cast<const A*>(a.sink);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t of_head = head_of(r), number = row_number(e, of_head, target_of(r));
    A sum = sum_lanes(load(total + r * W)), factor = 1, stat = 1;
    if (law.is_exponential) {
      const bool is_empty = most[r] == -A(INFINITY);
      A base = is_empty ? A(0) : most[r];
      if (sink != nullptr && sink[of_head] != -A(INFINITY)) {
        const A above = is_empty ? sink[of_head] : sink[of_head] - base;
        if (is_empty) {
          base = sink[of_head], sum += 1;
        } else if (above > 40) {  // what was summed up is small beside it
          const A by = exp_of(-above);
          sum = sum * by + 1, base = sink[of_head], factor = by;
        } else {
          sum += exp_of(above);
        }
      }
      stat = sum == 0 ? -A(INFINITY) : base + log_of(sum);
      factor = sum == 0 ? A(0) : factor / sum;
    } else if (law.divides) {
      sum += law.epsilon;
      stat = factor = sum == 0 ? A(0) : A(1) / sum;
    }
    static_cast<A*>(a.stats)[number] = stat;
    T* out = static_cast<T*>(a.out) + number * D;
    A* wide = a.wide == nullptr ? nullptr : static_cast<A*>(a.wide) + number * D;
    for (int64_t c = 0; c < D; c += W) {
      const Vec<A> x = load(sums + r * value_width + c) * factor;
      const int left = int(D - c < W ? D - c : W);
      store_part(out + c, x, left);
      if (wide != nullptr) store_part(wide + c, x, left);
    }
  }
}

inline void TilePass::write_weights(const TileElement& e, int64_t head, int64_t block, A* memory) {
  const int64_t start = block * kTargets, count = e.targets - start < kTargets ? e.targets - start : kTargets;
  A* queries = memory;
  A* keys = queries + kTargets * width;
  A* tile = keys + kPanel * width;
  A* kept = tile + kGroup * kPanel;
  rows(a.query, a.query_strides, e.batch, head, C).copy(e.first_target + start, count, A(a.scale), queries);
  const RowsOf key = rows(a.key, a.key_strides, e.batch, head / (a.heads / a.key_heads), C);
  for (int64_t panel = 0; panel < e.sources; panel += kPanel) {
    const int64_t n = e.sources - panel < kPanel ? e.sources - panel : kPanel;
    key.transposed(e.first_source + panel, n, keys);
    for (int64_t i = start; i < start + count; i += kGroup) {
      const int64_t size = start + count - i < kGroup ? start + count - i : kGroup;
      const auto [from, to] = columns(e, head, i, size, panel, n);
      A* out = static_cast<A*>(a.weights) + e.weights_at + head * e.weights_head + i * e.weights_row + panel;
      const int64_t low = from < to ? from / W * W : n, vectors = from < to ? (to - low + W - 1) / W : 0;
      multiply(size, vectors, queries + (i - start) * width, width, 1, keys + low, kPanel, C, tile + low, kPanel, false);
      for (int64_t r = 0; r < size; ++r, out += e.weights_row) {
        A* logits = tile + r * kPanel;
        for (int64_t j = 0; j < low; ++j) out[j] = 0;
        if (from >= to) continue;
        for (int64_t j = to; j < n; ++j) out[j] = 0;
        int32_t cursor = 0;
        const Row row = row_of(e, head, i + r, panel, from, to, logits, cursor);
        if (is_unfinished(row)) finish(e, row, logits, nullptr, nullptr);
        const A stat = static_cast<const A*>(a.stats)[row_number(e, head, i + r)];
        const A base = stat == -A(INFINITY) ? A(INFINITY) : stat;
        const bool drops = a.dropout && a.dropped;
        if (drops) keep_factors(row_key(e, head, i + r), e.first_source + panel + low, to - low, kept + low);
        const auto put = [&](int64_t at, Vec<A> weight) INLINE_LAMBDA {
          if (drops) weight *= load(kept + at);
          store_part(out + at, weight, int(to - at < W ? to - at : W));
        };
        if (law.is_exponential) {
          for (int64_t at = low; at < to; at += W) put(at, weight_of(load(logits + at) - base, true));
        } else {
          law.visit([&](auto of) INLINE_LAMBDA {
            for (int64_t at = low; at < to; at += W) put(at, of(load(logits + at), Vec<A>{}).value * stat);
          });
        }
      }
    }
  }
}

// A row's products become its weights, and gradients of weights those of products.
inline void TilePass::backward_row(const TileElement& e, const Row& row, int64_t low, A* weights, A* slopes, A* of_score,
                                   A* of_cap, A* kept, A* diagonal, double* table) const {
  const bool is_partial = !is_whole(row);
  if (is_unfinished(row)) finish(e, row, weights, of_score, of_cap);
  if (a.dropout) keep_factors(row_key(e, row.head, row.i), e.first_source + row.source + low, row.to - low, kept + low);
  const int64_t number = row_number(e, row.head, row.i);
  const A stat = static_cast<const A*>(a.stats)[number], delta = static_cast<const A*>(a.delta)[number];
  const Vec<A> lowest = splat<Vec<A>>(-A(INFINITY));
  const bool caps = law.cap != 0, scores = has_slope || has_clamp;
  const A* of_weights = static_cast<const A*>(a.grad_weights);
  if (of_weights != nullptr) {
    of_weights += e.weights_at + row.head * e.weights_head + row.i * e.weights_row + row.source;
    if (!a.dropout || a.dropped)
      for (int64_t at = low; at < row.to; at += W) store(slopes + at, load(slopes + at) + number_at(of_weights, 1, at, row.to));
  }
  const auto put = [&](int64_t at, Vec<A> logit, Vec<A> weight, Vec<A> derivative) INLINE_LAMBDA {
    Vec<A> slope = load(slopes + at);
    if (a.dropout) {
      const Vec<A> factor = load(kept + at);
      slope *= factor, weight *= factor;
      if (of_weights != nullptr && !a.dropped) slope += number_at(of_weights, 1, at, row.to);
    }
    slope = derivative * (slope - delta);
    if (caps) slope *= load(of_cap + at);
    // NaN in the rest of the row does not reach what is hidden.
    store(slopes + at, logit == lowest ? Vec<A>{} : slope);
    if (is_partial) weight = lanes_within(row.first - at, row.last - at) ? weight : Vec<A>{};
    store(weights + at, weight);
  };
  if (law.is_exponential) {
    const bool is_empty = stat == -A(INFINITY), may_be_hidden = is_empty || may_hide(row);
    const A base = is_empty ? A(INFINITY) : stat;
    for (int64_t at = low; at < row.to; at += W) {
      const Vec<A> logit = load(weights + at), weight = weight_of(logit - base, may_be_hidden);
      put(at, logit, weight, weight);
    }
  } else {
    law.visit([&](auto of) INLINE_LAMBDA {
      for (int64_t at = low; at < row.to; at += W) {
        const Vec<A> logit = load(weights + at);
        const Applied y = of(logit, Vec<A>{});
        put(at, logit, y.value * stat, y.derivative * stat);
      }
    });
  }
  if (a.grad_bias != nullptr || table != nullptr) add_to_bias(e, row, low, slopes, diagonal, table);
  if (scores)
    for (int64_t at = low; at < row.to; at += W) store(slopes + at, load(slopes + at) * load(of_score + at));
}

inline void TilePass::backward(const TileElement& e, int64_t key_head, int64_t part, A* memory) {
  A* keys = memory;                         // [width][kPanel]
  A* values = keys + kPanel * width;        // [value_width][kPanel]
  A* key_rows = values + kPanel * value_width;
  A* grad_keys = key_rows + kPanel * width;
  A* grad_values = grad_keys + kPanel * width;
  A* queries = grad_values + kPanel * value_width;
  A* grads = queries + kBackRows * width;  // of the output
  A* tile = grads + kBackRows * value_width;
  A* slopes = tile + kBackRows * kPanel;  // gradients of weights, then of products
  A* of_score = slopes + kBackRows * kPanel;
  A* of_cap = of_score + kPanel;
  A* kept = of_cap + kPanel;
  A* diagonals = kept + kPanel;  // gradients of distances: that of the last row and first column comes first
  int32_t* cursors = reinterpret_cast<int32_t*>(diagonals + kDiagonals + 2 * W);
  memset(cursors, 0, size_t(e.targets) * sizeof(int32_t));
  const int64_t group = a.heads / a.key_heads, place = a.shared_elements ? 0 : &e - a.elements;
  const RowsOf key = rows(a.key, a.key_strides, e.batch, key_head, C);
  const RowsOf value = rows(a.value, a.value_strides, e.batch, key_head, D);
  const A scale = A(a.scale);
  // Parts begin at whole panels.
  const int64_t panels = (e.sources + kPanel - 1) / kPanel;
  const int64_t first_panel = panels * part / e.parts, last_panel = panels * (part + 1) / e.parts;
  for (int64_t panel = first_panel * kPanel; panel < last_panel * kPanel && panel < e.sources; panel += kPanel) {
    const int64_t n = e.sources - panel < kPanel ? e.sources - panel : kPanel;
    key.transposed(e.first_source + panel, n, keys);
    value.transposed(e.first_source + panel, n, values);
    const bool keys_finite = key.copy(e.first_source + panel, n, scale, key_rows);
    memset(grad_keys, 0, size_t(n * width) * sizeof(A));
    memset(grad_values, 0, size_t(n * value_width) * sizeof(A));
    // Targets that see a source of the panel.
    int64_t begin = panel - a.right - e.offset, end = panel + n + a.left - e.offset;
    begin = begin < 0 ? 0 : begin, end = end > e.targets ? e.targets : end;
    for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      const RowsOf query = rows(a.query, a.query_strides, e.batch, head, C);
      const TileStrides of_out = {a.targets * a.heads * D, D, a.heads * D, 1};
      const RowsOf grad_out = rows(a.grad_out, of_out, e.batch, head, D);
      double* table = a.grad_table;
      const int64_t sums = a.bias_kind == kOfBuckets ? kTableParts * a.bias_count : a.bias_count;
      if (table != nullptr) table += ((place * a.heads + head) * a.parts + part) * sums;
      for (int64_t i = begin, size; i < end; i += size) {
        size = together(i, end - i < kBackRows ? end - i : kBackRows);
        const auto [from, to] = columns(e, head, i, size, panel, n);
        if (from >= to) continue;
        const int64_t low = from / W * W, vectors = (to - low + W - 1) / W;
        if (a.tiles != nullptr)
          prefetch_targets(e, head, panel, i + size, end, query, grad_out,
                           static_cast<const A*>(a.grad_query) + part * a.batch * a.targets * a.heads * width);
        const bool queries_finite = query.copy(e.first_target + i, size, scale, queries);
        const bool grads_finite = grad_out.copy(e.first_target + i, size, A(1), grads);
        multiply(size, vectors, queries, width, 1, keys + low, kPanel, C, tile + low, kPanel, false);
        multiply(size, vectors, grads, value_width, 1, values + low, kPanel, D, slopes + low, kPanel, false);
        const bool has_diagonals = table != nullptr && a.bias_kind == kOfDistances;
        if (has_diagonals) memset(diagonals, 0, size_t(kDiagonals) * sizeof(A));
        Row of_tile[kBackRows];
        for (int64_t r = 0; r < size; ++r) {
          int32_t cursor = cursors[i + r];  // which other heads need, too
          of_tile[r] = row_of(e, head, i + r, panel, from, to, tile + r * kPanel, cursor);
          if (head == (key_head + 1) * group - 1) cursors[i + r] = cursor;
        }
        for (int64_t r = 0; r < size; ++r)
          backward_row(e, of_tile[r], low, tile + r * kPanel, slopes + r * kPanel, of_score, of_cap, kept,
                       diagonals + (size - 1 - r), table);
        if (has_diagonals) {
          const int64_t first = first_distance(e, of_tile[size - 1]);
          for (int64_t k = low < -first ? -first : low; k < to + size - 1 && first + k < a.bias_count; ++k)
            table[first + k] += double(diagonals[k]);
        }
        A* grad_query = static_cast<A*>(a.grad_query) + part * a.batch * a.targets * a.heads * width +
                        row_number(e, head, i) * width;
        const int64_t columns = to - from;
        const bool all_seen = a.tiles == nullptr && first_source(e, i + size - 1) - panel <= from && last_source(e, i) - panel >= to;
        if (all_seen || (keys_finite && queries_finite && grads_finite)) {
          multiply(columns, value_width / W, tile + from, 1, kPanel, grads, value_width, size,
                   grad_values + from * value_width, value_width, true);
          multiply(columns, width / W, slopes + from, 1, kPanel, queries, width, size, grad_keys + from * width, width, true);
          multiply(size, width / W, slopes + from, kPanel, 1, key_rows + from * width, width, columns, grad_query,
                   a.heads * width, true);
        } else {
          for (int64_t r = 0; r < size; ++r) {
            int64_t first = first_source(e, i + r) - panel, last = last_source(e, i + r) - panel;
            first = first < from ? from : first, last = last < to ? last : to;
            multiply_seen(slopes + r * kPanel, key_rows, first, last, width, a.tiles != nullptr,
                          grad_query + r * a.heads * width);
            for (int64_t j = first; j < last; ++j) {
              if (a.tiles != nullptr && tile[r * kPanel + j] == 0 && slopes[r * kPanel + j] == 0) continue;
              for (int64_t c = 0; c < value_width; ++c)
                grad_values[j * value_width + c] += tile[r * kPanel + j] * grads[r * value_width + c];
              for (int64_t c = 0; c < width; ++c) grad_keys[j * width + c] += slopes[r * kPanel + j] * queries[r * width + c];
            }
          }
        }
      }
    }
    const int64_t to = ((e.batch * a.sources) + e.first_source + panel) * a.key_heads + key_head;
    for (int64_t j = 0; j < n; ++j) {
      memcpy(static_cast<A*>(a.grad_key) + (to + j * a.key_heads) * width, grad_keys + j * width, size_t(width) * sizeof(A));
      memcpy(static_cast<A*>(a.grad_value) + (to + j * a.key_heads) * value_width, grad_values + j * value_width,
             size_t(value_width) * sizeof(A));
    }
  }
}

// The tasks of either pass; `pass` is a thread's own.
template <class F>
void for_tile_tasks(int64_t count, F&& f) {
#pragma omp for schedule(dynamic, 1)
  for (int64_t t = 0; t < count; ++t) f(t);
}

// Calls f(pass, element, head, block, memory) for all blocks of targets.
template <class F>
inline void run_blocks(const Tiles& a, A* memory, F&& f) {
  TilePass pass(a);
  int64_t blocks = 0;
  for (int64_t e = 0; e < a.num_elements; ++e) {
    const int64_t count = TilePass::blocks_of(a.elements[e]);
    blocks = count > blocks ? count : blocks;
  }
  for_tile_tasks(a.num_elements * a.heads * blocks, [&](int64_t t) {
    const TileElement& e = a.elements[t / (a.heads * blocks)];
    if (t % blocks < TilePass::blocks_of(e)) f(pass, e, t / blocks % a.heads, t % blocks, memory);
  });
}

// Elements and heads that share gradients of the bias are one task's, one after the other.
inline void run_tiles_backward(const Tiles& a, A* memory) {
  TilePass pass(a);
  const int64_t elements = a.shared_elements ? 1 : a.num_elements, heads = a.shared_heads ? 1 : a.key_heads;
  for_tile_tasks(elements * heads * a.parts, [&](int64_t t) {
    const int64_t part = t % a.parts, head = t / a.parts % heads, element = t / a.parts / heads;
    for (int64_t e = element; e < (a.shared_elements ? a.num_elements : element + 1); ++e)
      for (int64_t h = head; h < (a.shared_heads ? a.key_heads : head + 1); ++h)
        if (part < a.elements[e].parts) pass.backward(a.elements[e], h, part, memory);
  });
}

}  // namespace
