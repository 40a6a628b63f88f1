// Radial functions of the distances of all pairs of positions, times a matrix, and their gradients: see
// gattn/ops/radial.py.
//
// A strip of sources is computed at a time, whose functions stay in the first-level cache. Tasks of the backward pass
// are parts of the sources, so bits do not depend on the number of threads.
#pragma once

#include "parallel.h"
#include "products.h"
#include "radial_arguments.h"

namespace {

constexpr int64_t kStripPairs = 4 * W;
constexpr int64_t kRowsOfTask = 16;  // forward

// sin(x) and cos(x) by the polynomials of the Cephes library (S. Moshier) on [-pi/4, pi/4].
template <class V>
struct SineAndCosine {
  V sine, cosine;
};
INLINE SineAndCosine<Vec<float>> sine_and_cosine(Vec<float> x) {
  const Vec<float> size = x < 0.0f ? -x : x, far = splat<Vec<float>>(8192.0f);
  if (any_lane(~(size <= far))) {  // where the reduction would lose digits
    SineAndCosine<Vec<float>> y;
    for (int i = 0; i < kLanes<float>; ++i) y.sine[i] = float(sin(double(x[i]))), y.cosine[i] = float(cos(double(x[i])));
    return y;
  }
  const float shift = 12582912.0f;  // adding it rounds to an integer, held in the low bits
  const Vec<float> shifted = x * 0.636619772f + shift, n = shifted - shift;
  Vec<float> r = x - n * 1.5703125f;  // pi/2 in three parts, of which the first has few bits
  r = r - n * 4.83751296997e-4f;
  r = r - n * 7.54978995489e-8f;
  const Vec<float> z = r * r;
  Vec<float> s = z * -1.9515295891e-4f + 8.3321608736e-3f;
  s = (s * z - 1.6666654611e-1f) * z * r + r;
  Vec<float> c = z * 2.443315711809948e-5f - 1.388731625493765e-3f;
  c = (c * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
  const VecInt quadrant = (VecInt)shifted;
  const VecInt is_odd = (quadrant & 1) != 0, sine_falls = (quadrant & 2) != 0, cosine_falls = ((quadrant + 1) & 2) != 0;
  const Vec<float> sine = is_odd ? c : s, cosine = is_odd ? s : c;
  return {sine_falls ? -sine : sine, cosine_falls ? -cosine : cosine};
}
INLINE SineAndCosine<Vec<double>> sine_and_cosine(Vec<double> x) {
  SineAndCosine<Vec<double>> y;
  for (int i = 0; i < kLanes<double>; ++i) y.sine[i] = A(sin(x[i])), y.cosine[i] = A(cos(x[i]));
  return y;
}

class RadialPass {
 public:
  RadialPass(const Radial& a, A* memory)
      : a(a),
        functions(memory),
        of_functions(functions + a.functions * kStripPairs),
        derivatives(of_functions + a.functions * kStripPairs),
        rows(derivatives + a.functions * kStripPairs),
        sums(rows + a.heads * kStripPairs),
        factors(sums + (a.functions * a.heads + a.functions) * W),
        coordinates(factors + a.functions) {
    for (int64_t k = 0; k < a.functions; ++k) factors[k] = static_cast<const A*>(a.factor)[k];
  }
  static int64_t workspace(const Radial& a) {
    const int64_t columns = (a.sources + kStripPairs - 1) / kStripPairs * kStripPairs;
    return (3 * a.functions + a.heads) * kStripPairs + (a.functions * a.heads + a.functions) * W + a.functions +
           2 * a.space * columns;
  }

  // Positions of sources as rows of coordinates, which are zero behind the last.
  void read_sources(int64_t batch, int64_t first, int64_t count) {
    stride = (count + kStripPairs - 1) / kStripPairs * kStripPairs;
    const A* y = static_cast<const A*>(a.y) + (batch * a.sources + first) * a.space;
    for (int64_t s = 0; s < a.space; ++s)
      for (int64_t j = 0; j < stride; ++j) coordinates[s * stride + j] = j < count ? y[j * a.space + s] : A(0);
  }

  void forward(int64_t batch, int64_t i) {
    A* bias = static_cast<A*>(a.bias) + batch * a.heads * a.targets * a.sources + i * a.sources;
    for (int64_t j = 0; j < a.sources; j += kStripPairs) {
      const int64_t left = a.sources - j < kStripPairs ? a.sources - j : kStripPairs;
      fill(batch, i, j, false);
      if (left == kStripPairs) {
        biases(bias + j, a.targets * a.sources);
        continue;
      }
      biases(rows, kStripPairs);
      for (int64_t h = 0; h < a.heads; ++h)
        memcpy(bias + h * a.targets * a.sources + j, rows + h * kStripPairs, size_t(left) * sizeof(A));
    }
  }

  // Adds the gradients of target i and of the sources of a part, of `count` from `first`.
  void backward(int64_t batch, int64_t i, int64_t first, int64_t count, A* grad_x, A* grad_y) {
    const A* grad = static_cast<const A*>(a.grad) + batch * a.heads * a.targets * a.sources + i * a.sources + first;
    const A* x = static_cast<const A*>(a.x) + (batch * a.targets + i) * a.space;
    for (int64_t j = 0; j < count; j += kStripPairs) {
      const int64_t left = count - j < kStripPairs ? count - j : kStripPairs;
      fill(batch, i, j, true);
      const A* of_biases = grad + j;
      int64_t of_head = a.targets * a.sources;
      if (left < kStripPairs) {
        memset(rows, 0, size_t(a.heads * kStripPairs) * sizeof(A));
        for (int64_t h = 0; h < a.heads; ++h)
          memcpy(rows + h * kStripPairs, of_biases + h * of_head, size_t(left) * sizeof(A));
        of_biases = rows, of_head = kStripPairs;
      }
      multiply(a.functions, 4, static_cast<const A*>(a.weight), a.heads, 1, of_biases, of_head, a.heads, of_functions,
               kStripPairs, false);
      for (int64_t k = 0; k < a.functions; ++k) {
        const A* f = functions + k * kStripPairs;
        const Vec<A> first_one = load(f), second = load(f + W), third = load(f + 2 * W), fourth = load(f + 3 * W);
        A* sum = sums + k * a.heads * W;
        for (int64_t h = 0; h < a.heads; ++h, sum += W) {
          const A* g = of_biases + h * of_head;
          store(sum, load(sum) + ((first_one * load(g) + second * load(g + W)) +
                                  (third * load(g + 2 * W) + fourth * load(g + 3 * W))));
        }
      }
      for (int64_t v = 0; v < kStripPairs; v += W) add_to_positions(x, j + v, v, grad_x, grad_y);
    }
  }

  int64_t parameters() const { return a.functions * a.heads + a.functions; }
  void clear() { memset(sums, 0, size_t(parameters() * W) * sizeof(A)); }
  // The gradients of parameters that were summed: of the matrix, then of factors.
  void add_parameters(double* to) {
    for (int64_t n = 0; n < parameters(); ++n) to[n] += double(sum_lanes(load(sums + n * W)));
    clear();
  }

 private:
  INLINE Vec<A> squares(const A* x, int64_t j) const {
    Vec<A> sum = {};
    for (int64_t s = 0; s < a.space; ++s) {
      const Vec<A> difference = x[s] - load(coordinates + s * stride + j);
      sum += difference * difference;
    }
    return sum;
  }
  // The functions of target i and a strip of sources; backward, their derivatives, too.
  NOINLINE void fill(int64_t batch, int64_t i, int64_t first, bool is_backward) {
    const A* x = static_cast<const A*>(a.x) + (batch * a.targets + i) * a.space;
    for (int64_t v = 0; v < kStripPairs; v += W) {
      const Vec<A> square = squares(x, first + v), distance = vector_sqrt(square);
      if (a.is_bessel)
        fill_sines(distance, v, is_backward);
      else
        fill_gaussians(distance, v, is_backward);
    }
  }
  INLINE void fill_gaussians(Vec<A> distance, int64_t v, bool is_backward) {
    const A scale = A(a.scale);
    const Vec<A> least = splat<Vec<A>>(A(-50));
    for (int64_t k = 0; k < a.functions; ++k) {
      const Vec<A> step = (distance - factors[k]) * scale, exponent = -(step * step);
      // Smaller ones would be numbers that take many times as long.
      const Vec<A> y = bounded_exp(exponent < least ? least : exponent);
      store(functions + k * kStripPairs + v, y);
      if (is_backward)
        store(derivatives + k * kStripPairs + v, exponent < least ? Vec<A>{} : (-2 * scale) * step * y);
    }
  }
  // sin(f d) / d and, for a distance of zero, f.
  INLINE void fill_sines(Vec<A> distance, int64_t v, bool is_backward) {
    const A scale = A(a.scale);
    const Vec<A> inverse = scale / distance;
    for (int64_t k = 0; k < a.functions; ++k) {
      const auto y = sine_and_cosine(factors[k] * distance);
      const Vec<A> at_zero = splat<Vec<A>>(scale * factors[k]);
      store(functions + k * kStripPairs + v, distance == Vec<A>{} ? at_zero : y.sine * inverse);
      if (is_backward) store(derivatives + k * kStripPairs + v, y.cosine * scale);
    }
  }
  void biases(A* to, int64_t of_head) const {
    multiply(a.heads, 4, static_cast<const A*>(a.weight), 1, a.heads, functions, kStripPairs, a.functions, to, of_head,
             false);
  }
  // Gradients of factors and of the positions, of a vector of pairs.
  NOINLINE void add_to_positions(const A* x, int64_t j, int64_t v, A* grad_x, A* grad_y) {
    const Vec<A> square = squares(x, j), distance = vector_sqrt(square), zero = {};
    const LaneVec<A> is_same = square == zero;
    A* sum = sums + a.functions * a.heads * W;
    Vec<A> slope = {};
    for (int64_t k = 0; k < a.functions; ++k, sum += W) {
      const Vec<A> g = load(of_functions + k * kStripPairs + v), d = load(derivatives + k * kStripPairs + v);
      if (a.is_bessel) {  // d is the derivative by the factor
        store(sum, load(sum) + g * d);
        slope += g * (factors[k] * d - load(functions + k * kStripPairs + v));
      } else {
        store(sum, load(sum) - g * d);
        slope += g * d;
      }
    }
    if (a.is_bessel) slope = slope / distance;
    slope = is_same ? zero : slope / distance;
    for (int64_t s = 0; s < a.space; ++s) {
      const Vec<A> by = slope * (x[s] - load(coordinates + s * stride + j));
      grad_x[s] += sum_lanes(by);
      store(grad_y + s * stride + j, load(grad_y + s * stride + j) - by);
    }
  }

  const Radial& a;
  A *functions, *of_functions, *derivatives, *rows, *sums, *factors, *coordinates;
  int64_t stride = 0;
};

int64_t radial(const Radial& a) {
  return in_parallel(a.threads, RadialPass::workspace(a), [&](A* memory) {
    RadialPass pass(a, memory);
    const int64_t blocks = (a.targets + kRowsOfTask - 1) / kRowsOfTask;
    int64_t read = -1;
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < a.batch * blocks; ++t) {
      const int64_t batch = t / blocks, first = t % blocks * kRowsOfTask;
      if (batch != read) pass.read_sources(batch, 0, a.sources), read = batch;
      for (int64_t i = first; i < first + kRowsOfTask && i < a.targets; ++i) pass.forward(batch, i);
    }
  });
}

int64_t radial_backward(const Radial& a) {
  return in_parallel(a.threads, RadialPass::workspace(a), [&](A* memory) {
    RadialPass pass(a, memory);
    A* grad_y = memory + RadialPass::workspace(a) - a.space * ((a.sources + kStripPairs - 1) / kStripPairs * kStripPairs);
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < a.batch * a.parts; ++t) {
      const int64_t batch = t / a.parts, part = t % a.parts;
      const int64_t first = a.sources * part / a.parts, count = a.sources * (part + 1) / a.parts - first;
      const int64_t stride = (count + kStripPairs - 1) / kStripPairs * kStripPairs;
      pass.read_sources(batch, first, count);
      memset(grad_y, 0, size_t(a.space * stride) * sizeof(A));
      double* of_parameters = a.grad_parameters + t * pass.parameters();
      memset(of_parameters, 0, size_t(pass.parameters()) * sizeof(double));
      pass.clear();
      for (int64_t i = 0; i < a.targets; ++i) {
        A* grad_x = static_cast<A*>(a.grad_x) + (t * a.targets + i) * a.space;
        for (int64_t s = 0; s < a.space; ++s) grad_x[s] = 0;
        pass.backward(batch, i, first, count, grad_x, grad_y);
        if (i % kRowsOfTask == kRowsOfTask - 1 || i == a.targets - 1) pass.add_parameters(of_parameters);
      }
      A* to = static_cast<A*>(a.grad_y) + (batch * a.sources + first) * a.space;
      for (int64_t j = 0; j < count; ++j)
        for (int64_t s = 0; s < a.space; ++s) to[j * a.space + s] = grad_y[s * stride + j];
    }
  });
}

}  // namespace
