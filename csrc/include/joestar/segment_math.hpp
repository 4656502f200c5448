#pragma once
// What pointwise steps of segment programs compute, number by number, without branches: loops over them vectorise.

#include <cmath>

#include "joestar/softmax.hpp"

namespace joestar::detail {

JOESTAR_INLINE double exponential_less_one(double x) { return std::expm1(x); }
JOESTAR_INLINE double hyperbolic_tangent(double x) { return std::tanh(x); }

// exp(x) - 1; near 0 by the polynomial of `exponential` without its 1, so that nothing is cancelled.
JOESTAR_INLINE float exponential_less_one(float x) {
  float p = 1.9875691500e-4f;
  p = p * x + 1.3981999507e-3f;
  p = p * x + 8.3334519073e-3f;
  p = p * x + 4.1665795894e-2f;
  p = p * x + 1.6666665459e-1f;
  p = p * x + 5.0000001201e-1f;
  const float near = (p * x) * x + x, far = exponential(x) - 1.0f;
  return (x > -0.34f) & (x < 0.34f) ? near : far;
}

// Cephes' polynomial near 0, exponentials elsewhere.
JOESTAR_INLINE float hyperbolic_tangent(float x) {
  const float size = std::fabs(x), z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float near = (p * z) * x + x, far = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
  return size < 0.625f ? near : std::copysign(far, x);
}

template <class A>
JOESTAR_INLINE A logistic(A x) {
  return A{1} / (A{1} + exponential(-x));
}

// Steps of two values; subgradients are PyTorch's.
struct AddStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A b, A) {
    return a + b;
  }
};
struct SubStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A b, A) {
    return a - b;
  }
};
struct MulStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A b, A) {
    return a * b;
  }
};
struct DivStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A b, A) {
    return a / b;
  }
};
struct MaximumStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A b, A) {
    return Largest::combine(a, b);
  }
};
struct MinimumStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A b, A) {
    return Smallest::combine(a, b);
  }
};
struct ReluGradStep {
  template <class A>
  static JOESTAR_INLINE A apply(A grad, A a, A) {
    return a <= A{0} ? A{0} : grad;
  }
};
struct LeakyReluGradStep {
  template <class A>
  static JOESTAR_INLINE A apply(A grad, A a, A slope) {
    const A low = grad * slope;
    return a > A{0} ? grad : low;
  }
};
struct EluGradStep {
  template <class A>
  static JOESTAR_INLINE A apply(A grad, A a, A alpha) {
    const A low = grad * alpha * exponential(a);
    return a > A{0} ? grad : low;
  }
};
struct SigmoidGradStep {
  template <class A>
  static JOESTAR_INLINE A apply(A grad, A y, A) {
    return grad * y * (A{1} - y);
  }
};
struct TanhGradStep {
  template <class A>
  static JOESTAR_INLINE A apply(A grad, A y, A) {
    return grad * (A{1} - y * y);
  }
};
struct AbsGradStep {
  template <class A>
  static JOESTAR_INLINE A apply(A grad, A a, A) {
    const A up = a > A{0} ? A{1} : A{0}, down = a < A{0} ? A{1} : A{0};
    return grad * (up - down);
  }
};
struct SiluGradStep {
  template <class A>
  static JOESTAR_INLINE A apply(A grad, A a, A) {
    return grad * logistic(a) * (A{1} + a * logistic(-a));
  }
};

// Steps of one value.
struct NegStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A) {
    return -a;
  }
};
struct ReluStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A) {
    return a <= A{0} ? A{0} : a;
  }
};
struct SigmoidStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A) {
    return logistic(a);
  }
};
struct TanhStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A) {
    return hyperbolic_tangent(a);
  }
};
struct ExpStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A) {
    return exponential(a);
  }
};
struct AbsStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A) {
    return std::fabs(a);
  }
};
struct SiluStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A) {
    return a * logistic(a);
  }
};
struct LeakyReluStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A slope) {
    const A low = a * slope;
    return a > A{0} ? a : low;
  }
};
struct EluStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A alpha) {
    const A low = alpha * exponential_less_one(a);
    return a > A{0} ? a : low;
  }
};
struct AddScalarStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A number) {
    return a + number;
  }
};
struct MulScalarStep {
  template <class A>
  static JOESTAR_INLINE A apply(A a, A number) {
    return a * number;
  }
};

}  // namespace joestar::detail
