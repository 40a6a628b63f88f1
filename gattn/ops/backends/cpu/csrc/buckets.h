// Biases by bucket on a matrix of logits, as complete graphs have it.
#pragma once

#include <cstdint>

// A bucket of each pair, [elements, rows, columns], and numbers of each pair and head, [elements, heads, rows, columns].
// Mirrored by `Buckets` in native.py.
struct Buckets {
  const void* buckets;
  int64_t bytes;           // of each, 1, 2, 4 or 8
  int64_t element_stride;  // 0 if all elements share them
  int64_t row_stride;
  int64_t count;  // of buckets; others count as the last one
  int64_t elements, heads, rows, columns, threads;
};

namespace {

// Sums of one bucket are kept in as many parts, so that an addition need not wait for the one before it.
constexpr int64_t kParts = 4;

// Calls f(head, bucket(column), numbers of the row) for all rows; each head is one thread's, in order.
template <class A, class F>
void for_bucket_rows(const Buckets& b, A* numbers, F&& f) {
  const auto visit = [&](auto type, int64_t head, int64_t element, int64_t row) {
    using Bucket = decltype(type);
    const Bucket* from = static_cast<const Bucket*>(b.buckets) + element * b.element_stride + row * b.row_stride;
    const uint64_t last = uint64_t(b.count - 1);
    const auto bucket = [=](int64_t column) {
      const uint64_t number = uint64_t(from[column]);
      return number < last ? number : last;  // whatever they were when they were checked
    };
    f(head, bucket, numbers + ((element * b.heads + head) * b.rows + row) * b.columns);
  };
#pragma omp parallel for num_threads(int(b.threads)) if (b.threads > 1)
  for (int64_t head = 0; head < b.heads; ++head) {
    for (int64_t element = 0; element < b.elements; ++element) {
      for (int64_t row = 0; row < b.rows; ++row) {
        switch (b.bytes) {
          case 1: visit(uint8_t(), head, element, row); break;
          case 2: visit(uint16_t(), head, element, row); break;
          case 4: visit(uint32_t(), head, element, row); break;
          default: visit(uint64_t(), head, element, row);
        }
      }
    }
  }
}

// Adds each pair's entry of the table, [heads, count], to its logit.
template <class A>
void add_buckets(const Buckets& b, const A* table, A* logits) {
  for_bucket_rows(b, logits, [&](int64_t head, auto bucket, A* to) {
    const A* of_head = table + head * b.count;
    for (int64_t j = 0; j < b.columns; ++j) to[j] += of_head[bucket(j)];
  });
}

// Adds up the gradients of the pairs in each bucket, [heads, kParts, count], as doubles: each is a sum of very many.
template <class A>
void sum_buckets(const Buckets& b, double* sums, A* gradients) {
  for_bucket_rows(b, gradients, [&](int64_t head, auto bucket, const A* from) {
    double* of_head = sums + head * kParts * b.count;
    for (int64_t j = 0; j < b.columns; ++j) of_head[(j % kParts) * b.count + bucket(j)] += double(from[j]);
  });
}

}  // namespace
