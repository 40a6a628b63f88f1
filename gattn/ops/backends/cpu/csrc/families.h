// Score families: how the two ends of an edge compare. A new one is a struct here and an entry in the list at the end.
//
// Every family has
//   kName       the name that Python asks for
//   kConstants  the names of its constants, separated by spaces, in the order of Arguments.constants
//   kScalar     whether an end is one number per head, instead of a row of channels
//   kHasVector  whether channels are weighted by a vector per head
//   kKeepsSigns whether the forward pass can leave the signs of its inputs to the backward pass; see Additive
//
// A scalar family's logit is that of x = query + key + edge:
//   apply(x)  the logit and its derivative
//
// Any other's is the sum over channels of a value, weighted by the vector, or else times scale() and, where it is
// negative, times `slope`. The edge's term is always added to the key, so that the derivative by one is that by the other:
//   value<kOwn>(own, other, edge)  the value of a channel, given the channel of the end `kOwn`, that of the other end,
//                                  and the edge's, which may be `None`
//   apply<kOwn>(own, other, edge)  the same with its derivative by `own`
//
// A family is made of Arguments.constants: it has a constructor from them. An activation of an additive one has such a
// constructor, too, kConstants, kIsPiecewiseLinear (whether it is x times 1 or `slope`, a member), value(x) and apply(x).
#pragma once

#include "simd.h"

namespace {

enum End { kSource, kTarget };

// Stands for the term of an edge that has none.
struct None {};
INLINE Vec<A> operator+(Vec<A> x, None) { return x; }

struct Applied {
  Vec<A> value, derivative;
};

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

struct Tanh {
  static constexpr const char* kConstants = "";
  static constexpr bool kIsPiecewiseLinear = false;

  explicit Tanh(const double*) {}
  INLINE Vec<A> value(Vec<A> x) const { return vector_tanh(x); }
  INLINE Applied apply(Vec<A> x) const {
    const Vec<A> y = value(x);
    return {y, A(1) - y * y};
  }
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
  using Activation::Activation;

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

struct AdditiveTanh : Additive<Tanh> {
  static constexpr const char* kName = "tanh";
  using Additive::Additive;
};

// LeakyReLU(scale <query, key + edge>); of slope 1 without one.
struct Dot {
  static constexpr const char* kName = "dot";
  static constexpr const char* kConstants = "scale negative_slope";
  static constexpr bool kScalar = false, kHasVector = false, kKeepsSigns = false;
  A factor, slope;

  explicit Dot(const double* constants) : factor(A(constants[0])), slope(A(constants[1])) {}
  A scale() const { return factor; }

  template <End kOwn, class Edge>
  INLINE Vec<A> value(Vec<A> own, Vec<A> other, Edge edge) const {
    if constexpr (kOwn == kTarget) return own * (other + edge);
    else return (own + edge) * other;
  }
  template <End kOwn, class Edge>
  INLINE Applied apply(Vec<A> own, Vec<A> other, Edge edge) const {
    if constexpr (kOwn == kTarget) return {value<kOwn>(own, other, edge), other + edge};
    else return {value<kOwn>(own, other, edge), other};
  }
};

template <class... F>
struct List {};

using Families = List<GAT, AdditiveLeakyReLU, AdditiveTanh, Dot>;

}  // namespace
