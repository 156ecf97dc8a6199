// What stands between two layers: silu, gelu, and gelu with tanh in place of the error function.
//
// All are x / (1 + exp(-L(x))): L(x) = x is silu, 2 sqrt(2 / pi) (x + 0.044715 x^3) makes gelu's
// tanh, and gelu.h has the third. Against float64: silu and tanh within 4e-6 of the value, 1e-15
// beside values so small; gelu as gelu.h says. NaN and minus infinity give NaN, as torch's do.
#pragma once

#include "config.h"
#include "gelu.h"

namespace qk {

QK_DEVICE f32 silu(f32 x) {
  constexpr f32 kLog2E = 1.4426950408889634f;
  const f32 below = 1.0f + approx_exp2(-x * kLog2E);
  return x * approx_reciprocal(below);
}

QK_DEVICE f32 tanh_gelu(f32 x) {
  // -2 sqrt(2 / pi) log2(e), and that times 0.044715.
  constexpr f32 kLinear = -2.302208198190674f, kCubic = -0.10294323958209598f;
  const f32 exponent = x * multiply_add(kCubic, x * x, kLinear);
  return x * approx_reciprocal(1.0f + approx_exp2(exponent));
}

/// kAct: of QK_ACT.
template <int kAct>
QK_DEVICE f32 activate(f32 x) {
  if constexpr (kAct == QK_SILU) return silu(x);
  if constexpr (kAct == QK_GELU) return times_gelu(1.0f, x);
  if constexpr (kAct == QK_TANH) return tanh_gelu(x);
  return x;
}

}  // namespace qk
