// h * gelu(g), which GEGLU makes of an output and its gate.
//
// gelu(g) = g Phi(g), Phi(g) = 1 / (1 + exp(-L(g))), L the logit of Phi, which is odd and smooth:
// L(g) = g P(g^2) with P of degree 6 fitted on |g| <= 6 (Lawson's weights on scipy's log_ndtr),
// straight beyond, where Phi(-g) < 1e-9. Against float64 gelu: 1.8e-4 of the value for g > -3.5,
// less than half a place of f16; 1.2e-7 absolute before that. erff takes three times the
// instructions, and a difference of errors loses the small values of negative gates.
#pragma once

#include "platform.h"

namespace qk {

QK_DEVICE f32 times_gelu(f32 h, f32 g) {
  // P's coefficients times -log2(e), the constant one first.
  constexpr f32 kP[] = {-2.301238536834717f,    -0.10609734803438187f,   0.0005874450434930623f,
                        7.556725904578343e-05f, -4.465962319954997e-06f, 1.0571717012908266e-07f,
                        -9.396371458691988e-10f};
  const f32 square = lesser(g * g, 36.0f);
  f32 p = kP[6];
  QK_UNROLL for (int i = 5; i >= 0; --i)
    p = multiply_add(p, square, kP[i]);
  return h * g * approx_reciprocal(1.0f + approx_exp2(g * p));
}

}  // namespace qk
