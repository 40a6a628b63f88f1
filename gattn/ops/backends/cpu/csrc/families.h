// Score families: how the two ends of an edge compare. A new one is a struct here and an entry in the list at the end.
//
// Every family has
//   kName       the name that Python asks for
//   kConstants  the names of its constants, separated by spaces, in the order of Arguments.constants
//   kScalar     whether an end is one number per head, instead of a row of channels
//   kHasVector  whether channels are weighted by a vector per head; then the edge's term is one of a sum
//   kKeepsSigns whether the forward pass can leave the signs of its inputs to the backward pass; see Additive
//   kIsSlow     whether a value takes so long that several vectors are computed by one call, and no loop is compiled for
//               each case, with an edge or without
//
// A scalar family's logit is that of x = query + key + edge:
//   apply(x)  the logit and its derivative
//
// Any other's is the sum over channels of a value, weighted by the vector, or else times scale() and, unless
// is_linear(), finish()ed. Without a vector a value is a product, whose derivative by one end is the other end. Key and edge may
// change places, so that the derivative by one is that by the other:
//   value<kOwn>(own, other, edge)  the value of a channel, given the channel of the end `kOwn`, that of the other end,
//                                  and the edge's, which may be `None`
//   apply<kOwn>(own, other, edge)  the same with its derivative by `own`
//
// A family is made of Arguments.constants: it has a constructor from them. An activation of an additive one has such a
// constructor, too, kConstants, kIsPiecewiseLinear (whether it is x times 1 or `slope`, a member; others are slow),
// apply(x) and, not slow, value(x), or slow, apply_all(x, derivatives, count).
#pragma once

#include <type_traits>

#include "simd.h"

namespace {

enum End { kSource, kTarget };

// Stands for the term of an edge that has none.
struct None {};
INLINE Vec<A> operator+(Vec<A> x, None) { return x; }

struct Applied {
  Vec<A> value, derivative;
};
INLINE Applied operator+(Applied x, Applied y) { return {x.value + y.value, x.derivative + y.derivative}; }
template <class A>
INLINE Applied rotate_lanes(Applied x, int shift) {
  return {rotate_lanes<A>(x.value, shift), rotate_lanes<A>(x.derivative, shift)};
}

// --------------------------------------------------------------------------------------------------------- activations

struct LeakyReLU {
  static constexpr const char* kConstants = "negative_slope";
  static constexpr bool kIsPiecewiseLinear = true;  // x times 1 where x > 0, times `slope` elsewhere
  A slope;

  explicit LeakyReLU(const double* constants) : slope(A(constants[0])) {}
  INLINE Vec<A> value(Vec<A> x) const { return x > A(0) ? x : x * slope; }
  INLINE Applied apply(Vec<A> x) const {
    return {value(x), x > A(0) ? splat<Vec<A>>(A(1)) : splat<Vec<A>>(slope)};
  }
};

// The smooth ones, whose names are known when the kernel runs.
enum SmoothName : int64_t { kSmoothTanh, kSmoothELU, kSmoothGELU, kSmoothSiLU };

INLINE Vec<A> logistic(Vec<A> x) { return A(1) / (bounded_exp(-x) + A(1)); }

// x[i] becomes the activation, and derivatives[i] its derivative, unless that is null. Several vectors at a time: the steps
// for one depend on each other, and would wait.
[[gnu::noinline]] inline void apply_smooth(int64_t name, Vec<A>* x, Vec<A>* derivatives, int count) {
  const auto each = [&](auto f) INLINE_LAMBDA {
    for (int i = 0; i < count; ++i) {
      const Applied y = f(x[i]);
      x[i] = y.value;
      if (derivatives != nullptr) derivatives[i] = y.derivative;
    }
  };
  switch (name) {
    case kSmoothELU:
      return each([](Vec<A> x) INLINE_LAMBDA -> Applied {
        const Vec<A> y = vector_exp_minus_one(x);
        return {x > A(0) ? x : y, x > A(0) ? splat<Vec<A>>(A(1)) : y + A(1)};
      });
    case kSmoothGELU:
      return each([](Vec<A> x) INLINE_LAMBDA -> Applied {
        const Vec<A> density = bounded_exp(A(-0.5) * x * x), below = vector_normal(x, density);
        return {x * below, below + x * (A(0.39894228040143268) * density)};
      });
    case kSmoothSiLU:
      return each([](Vec<A> x) INLINE_LAMBDA -> Applied {
        const Vec<A> y = logistic(x);
        return {x * y, y * (A(1) + x * (A(1) - y))};
      });
    default:
      return each([](Vec<A> x) INLINE_LAMBDA -> Applied {
        const Vec<A> y = vector_tanh(x);
        return {y, A(1) - y * y};
      });
  }
}

struct Smooth {
  static constexpr const char* kConstants = "activation";
  static constexpr bool kIsPiecewiseLinear = false;
  int64_t name;

  explicit Smooth(const double* constants) : name(int64_t(constants[0])) {}
  INLINE Applied apply(Vec<A> x) const {
    Vec<A> derivative;
    apply_smooth(name, &x, &derivative, 1);
    return {x, derivative};
  }
  INLINE void apply_all(Vec<A>* x, Vec<A>* derivatives, int count) const { apply_smooth(name, x, derivatives, count); }
};

// ------------------------------------------------------------------------------------------------------------ families

// activation(query + key + edge), one number per head.
template <class Activation>
struct Scalar : Activation {
  static constexpr bool kScalar = true, kHasVector = false, kKeepsSigns = false;
  using Activation::Activation;
};

// <vector, activation(query + key + edge)>. With kKeepsSigns the backward pass needs no input, but its sign:
// activation(x) is x times 1 or `slope`.
template <class Activation>
struct Additive : Activation {
  static constexpr bool kScalar = false, kHasVector = true, kKeepsSigns = Activation::kIsPiecewiseLinear;
  static constexpr bool kIsSlow = !kKeepsSigns;
  using Activation::Activation;
  static constexpr bool is_linear() { return true; }

  template <class Edge>
  static INLINE Vec<A> input(Vec<A> own, Vec<A> other, Edge edge) {
    return own + (other + edge);
  }
  template <End kOwn, class Edge>
  INLINE Vec<A> value(Vec<A> own, Vec<A> other, Edge edge) const {
    return Activation::value(input(own, other, edge));
  }
  template <End kOwn, class Edge>
  INLINE Applied apply(Vec<A> own, Vec<A> other, Edge edge) const {
    return Activation::apply(input(own, other, edge));
  }
};

struct GAT : Scalar<LeakyReLU> {
  static constexpr const char* kName = "gat";
  using Scalar::Scalar;
};

struct AdditiveLeakyReLU : Additive<LeakyReLU> {
  static constexpr const char* kName = "leaky_relu";
  using Additive::Additive;
};

struct AdditiveSmooth : Additive<Smooth> {
  static constexpr const char* kName = "smooth";
  using Additive::Additive;
};

// LeakyReLU(scale <query, key + edge>), of slope 1 without one, between -bound and bound unless that is 0; or the edge is
// multiplied.
struct Dot {
  static constexpr const char* kName = "dot";
  static constexpr const char* kConstants = "scale negative_slope multiplies bound";
  static constexpr bool kScalar = false, kHasVector = false, kKeepsSigns = false, kIsSlow = false;
  A factor, slope;
  bool multiplies;
  A bound;

  explicit Dot(const double* constants)
      : factor(A(constants[0])),
        slope(A(constants[1])),
        multiplies(constants[2] != 0),
        bound(constants[3] == 0 ? A(INFINITY) : A(constants[3])) {}
  A scale() const { return factor; }

  // What is done to the product, and its derivative.
  bool is_linear() const { return slope == 1 && bound == A(INFINITY); }
  INLINE Applied finish(Vec<A> product) const {
    const Vec<A> y = product > A(0) ? product : product * slope;
    const Vec<A> derivative = product > A(0) ? splat<Vec<A>>(A(1)) : splat<Vec<A>>(slope);
    const Vec<A> low = splat<Vec<A>>(-bound), high = splat<Vec<A>>(bound);
    return {y > high ? high : (y < low ? low : y), y > high ? Vec<A>{} : (y < low ? Vec<A>{} : derivative)};
  }

  static INLINE Vec<A> with_edge(Vec<A> x, None) { return x; }
  INLINE Vec<A> with_edge(Vec<A> x, Vec<A> edge) const { return multiplies ? x * edge : x + edge; }

  template <End kOwn, class Edge>
  INLINE Vec<A> value(Vec<A> own, Vec<A> other, Edge edge) const {
    if constexpr (kOwn == kTarget) return own * with_edge(other, edge);
    else return with_edge(own, edge) * other;
  }
  template <End kOwn, class Edge>
  INLINE Applied apply(Vec<A> own, Vec<A> other, Edge edge) const {
    const Vec<A> value_ = value<kOwn>(own, other, edge);
    if constexpr (kOwn == kTarget) return {value_, with_edge(other, edge)};
    else if constexpr (std::is_same_v<Edge, None>) return {value_, other};
    else return {value_, multiplies ? other * edge : other};
  }
};

template <class... F>
struct List {};

using Families = List<GAT, AdditiveLeakyReLU, AdditiveSmooth, Dot>;

}  // namespace
