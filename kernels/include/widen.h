// 8-bit codes as 16-bit floats, exactly.
#pragma once

#include "fp8.h"

namespace qk {

/// Two codes of one 32-bit word (bytes 0, 1 or 2, 3, already moved into the high byte of each half)
/// to two f16, exactly. NaN and Inf stay NaN and Inf.
template <Format kFormat>
QK_DEVICE u32 widen_high_bytes(u32 pair);

/// e5m2 is the high byte of f16.
template <>
QK_DEVICE u32 widen_high_bytes<Format::kE5M2>(u32 pair) {
  return pair;
}

#ifndef QK_WIDENS_PAIRS
/// e4m3fn: the magnitude moves down by one bit and the value becomes 2^-8 of the true one.
/// Multiplying by 2^8 is exact and turns subnormal codes into normal f16, so that no matrix unit
/// can flush them. Adding 0x80 carries into bit 14 for the NaN code alone, and with that bit the
/// pattern is an f16 NaN before and after the product.
template <>
QK_DEVICE u32 widen_high_bytes<Format::kE4M3FN>(u32 pair) {
  const u32 magnitude = pair >> 1 & 0x3f803f80u;
  const u32 nan = (magnitude + 0x00800080u) & 0x40004000u;
  return scale_half_pair(magnitude | nan | (pair & 0x80008000u));
}
#endif

/// Four codes, one byte each, to four f16.
template <Format kFormat>
QK_DEVICE void widen_word(u32 codes, u32& low, u32& high) {
  low = widen_high_bytes<kFormat>((codes & 0xffu) << 8 | (codes & 0xff00u) << 16);
  high = widen_high_bytes<kFormat>((codes >> 8 & 0xff00u) | (codes & 0xff000000u));
}

#ifdef QK_WIDENS_PAIRS
template <>
QK_DEVICE void widen_word<Format::kE4M3FN>(u32 codes, u32& low, u32& high) {
  low = halves_of_e4m3fn(codes);
  high = halves_of_e4m3fn(codes >> 16);
}
#endif

/// Four bytes less `bias` each, 0x64xx for the number xx: f16 from 1024 on counts in ones.
QK_DEVICE void halves_of_bytes(u32 bytes, u32 bias, u32& low, u32& high) {
  const u32 twice = 0x64006400u | bias << 16 | bias;
  low = subtract_halves(spread_low_bytes(bytes), twice);
  high = subtract_halves(spread_high_bytes(bytes), twice);
}

/// Two f16 of at most eight significant bits as bf16.
QK_DEVICE u32 bfloats_of_halves(u32 pair) {
  const u32 low = float_bits(half_to_float(static_cast<u16>(pair)));
  const u32 high = float_bits(half_to_float(static_cast<u16>(pair >> 16)));
  return low >> 16 | (high & 0xffff0000u);
}

}  // namespace qk
