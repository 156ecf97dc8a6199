// Online softmax over scores that arrive in powers of two: a maximum that may lag, probabilities as
// e4m3fn codes or in float16, and their sum.
//
//   bias = 8 - m; scores come as S + bias, so exp2 of them is what is encoded: 2^(S - m + 8)
//   m grows only when a score exceeds it by more than 0.75: e4m3fn ends at 448 = 2^8.81. It grows
//   by whole numbers, so that a probability's code has the same mantissa whatever m is: tiles of
//   another size give the same result, but for what is below 2^-14 of the largest
//
// The sum is taken of the codes, not of what they were rounded from: the error of a row's
// probabilities then cancels, where all values are alike. So float16 is cut, which takes one
// instruction for two: of what cutting takes away, the mean cancels, and the rest spreads as that
// of rounding to nearest.
#pragma once

#include "fp8.h"
#if defined(QK_HOST) && QK_HOST
#  include "number.h"
#endif

namespace qk {

/// Where probabilities start below, in powers of two.
constexpr f32 kTop = 8.0f;
/// The largest S + bias that is encoded as it is.
constexpr f32 kOutgrown = 8.75f;
/// What m grows by when the largest S + bias is `top`.
QK_DEVICE f32 growth_to(f32 top) { return round_up(top - kTop); }

#if defined(QK_AMD)
/// e4m3fn codes of four values below 464, the first one lowest; NaN becomes NaN.
QK_DEVICE u32 encode_four(f32 a, f32 b, f32 c, f32 d) {
  // Into a's own register, of which both halves are overwritten: no other has to be cleared.
  const int low = __builtin_amdgcn_cvt_pk_fp8_f32(a, b, static_cast<int>(float_bits(a)), false);
  return static_cast<u32>(__builtin_amdgcn_cvt_pk_fp8_f32(c, d, low, true));
}
/// sum plus the values of four e4m3fn codes.
QK_DEVICE f32 add_codes(u32 codes, f32 sum) {
  constexpr u32 kOnes = 0x38383838u;
  return __builtin_amdgcn_dot4_f32_fp8_fp8(codes, kOnes, sum);
}
/// float16 of two values from 0 on, cut, the first one lowest; NaN becomes NaN.
QK_DEVICE u32 cut_pair(f32 a, f32 b) {
  return __builtin_bit_cast(u32, __builtin_amdgcn_cvt_pkrtz(a, b));
}
/// sum plus two float16.
QK_DEVICE f32 add_pair(u32 pair, f32 sum) {
  using Half2 = _Float16 __attribute__((ext_vector_type(2)));
  const Half2 ones = {static_cast<_Float16>(1.0f), static_cast<_Float16>(1.0f)};
  return __builtin_amdgcn_fdot2(__builtin_bit_cast(Half2, pair), ones, sum, false);
}
#elif defined(QK_HOST) && QK_HOST
QK_DEVICE u32 encode_four(f32 a, f32 b, f32 c, f32 d) {
  constexpr Format kFormat = Format::kE4M3FN;
  return encode_fp8<kFormat>(a) | encode_fp8<kFormat>(b) << 8 | encode_fp8<kFormat>(c) << 16 |
         static_cast<u32>(encode_fp8<kFormat>(d)) << 24;
}
QK_DEVICE f32 add_codes(u32 codes, f32 sum) {
  f32 values[4];
  host::decode_run<host::Number::kE4M3FN, 4>(reinterpret_cast<const u8*>(&codes), values);
  return sum + ((values[0] + values[1]) + (values[2] + values[3]));
}
QK_DEVICE u32 cut_half(f32 value) {
  const u16 nearest = float_to_half(value);
  return static_cast<u32>(nearest) - (half_to_float(nearest) > value ? 1u : 0u);
}
QK_DEVICE u32 cut_pair(f32 a, f32 b) { return cut_half(a) | cut_half(b) << 16; }
QK_DEVICE f32 add_pair(u32 pair, f32 sum) {
  return sum +
         (half_to_float(static_cast<u16>(pair)) + half_to_float(static_cast<u16>(pair >> 16)));
}
#elif defined(QK_NVIDIA)
QK_DEVICE u32 encode_four(f32 a, f32 b, f32 c, f32 d) {
  return encode_pair_e4m3fn(a, b) | encode_pair_e4m3fn(c, d) << 16;
}
#endif

#if defined(QK_AMD) || (defined(QK_HOST) && QK_HOST)
/// The row of a lane: its two halves in the wave hold different keys of one query.
struct SoftmaxRow {
  f32 bias = kTop;
  f32 sum = 0.0f;

  QK_DEVICE f32 total() const { return sum + swap_halves(sum); }
};
#endif

}  // namespace qk
