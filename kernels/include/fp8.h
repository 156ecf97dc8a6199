// The FP8 codec, by bits: OCP e4m3fn (max 448, NaN 0x7f, no Inf) and e5m2 (max 57344, Inf, NaN).
#pragma once

#include "config.h"

namespace qk {

template <Format>
struct Fp8;

template <>
struct Fp8<Format::kE4M3FN> {
  static constexpr int kMantissa = 3;
  static constexpr int kBias = 7;
  static constexpr f32 kMax = 448.0f;  // 2^8 * 1.75
  static constexpr int kMaxExponent = 8;
  static constexpr u32 kMaxFraction = 6u << 20;
};

template <>
struct Fp8<Format::kE5M2> {
  static constexpr int kMantissa = 2;
  static constexpr int kBias = 15;
  static constexpr f32 kMax = 57344.0f;  // 2^15 * 1.75
  static constexpr int kMaxExponent = 15;
  static constexpr u32 kMaxFraction = 3u << 21;
};

/// Clamps to the format's range and rounds to nearest even; NaN becomes sign | 0x7f. Same bytes as
/// torch's `value.clamp(-max, max).to(fp8)`. Free of branches, so that the host compiler vectorises
/// loops over it.
template <Format kFormat>
QK_DEVICE u8 encode_fp8(f32 value) {
  using F = Fp8<kFormat>;
  constexpr int kDrop = 23 - F::kMantissa;  // f32 mantissa bits that are rounded away
  // 2^(1 - bias) as f32 bits.
  constexpr u32 kMinNormal = static_cast<u32>(127 + 1 - F::kBias) << 23;
  constexpr u32 kRebias = static_cast<u32>(127 - F::kBias) << F::kMantissa;
  // Adding 2^(1 - bias - mantissa + 23) leaves the rounded subnormal code in the low bits of the
  // sum.
  constexpr u32 kMagic = static_cast<u32>(127 + 1 - F::kBias - F::kMantissa + 23) << 23;
  const u32 bits = float_bits(value), magnitude = bits & 0x7fffffffu;
  constexpr u32 kMaxBits = static_cast<u32>(127 + F::kMaxExponent) << 23 | F::kMaxFraction;
  const u32 finite =
      select(magnitude > kMaxBits, kMaxBits, magnitude);  // magnitudes compare as their bits
  const u32 normal =
      ((finite + (1u << (kDrop - 1)) - 1 + (finite >> kDrop & 1u)) >> kDrop) - kRebias;
  const u32 subnormal = float_bits(bits_float(finite) + bits_float(kMagic)) - kMagic;
  const u32 rounded = select(finite < kMinNormal, subnormal, normal);
  return static_cast<u8>(select(magnitude > 0x7f800000u, 0x7fu, rounded) | (bits >> 24 & 0x80u));
}

#if defined(QK_HOST) && QK_HOST && QK_HOST_LAYOUT == QK_SM89
/// As NVIDIA's hardware does, so that what is built on it runs on the host.
#  define QK_ENCODES_PAIRS 1
QK_DEVICE u32 encode_pair_e4m3fn(f32 low, f32 high) {
  return encode_fp8<Format::kE4M3FN>(low) | static_cast<u32>(encode_fp8<Format::kE4M3FN>(high))
                                                << 8;
}
QK_DEVICE u32 encode_pair_e5m2(f32 low, f32 high) {
  return encode_fp8<Format::kE5M2>(low) | static_cast<u32>(encode_fp8<Format::kE5M2>(high)) << 8;
}
#endif

#ifndef QK_ENCODES_FOUR
/// Codes of four values, the first one lowest.
QK_DEVICE u32 encode_four_e4m3fn(f32 a, f32 b, f32 c, f32 d) {
#  ifdef QK_ENCODES_PAIRS
  return encode_pair_e4m3fn(a, b) | encode_pair_e4m3fn(c, d) << 16;
#  else
  constexpr Format kFormat = Format::kE4M3FN;
  return encode_fp8<kFormat>(a) | static_cast<u32>(encode_fp8<kFormat>(b)) << 8 |
         static_cast<u32>(encode_fp8<kFormat>(c)) << 16 |
         static_cast<u32>(encode_fp8<kFormat>(d)) << 24;
#  endif
}
#endif

}  // namespace qk
