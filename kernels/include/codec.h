// What every format of codes has: its largest number, and how a number becomes a code.
#pragma once

#include "fp8.h"

namespace qk {

template <Format kFormat>
struct Codec {
  static constexpr f32 kMax = Fp8<kFormat>::kMax;
  static QK_DEVICE u8 encode(f32 value) { return encode_fp8<kFormat>(value); }
};

/// Two's complement, -127 to 127. -128 stands for NaN, which int8 lacks: nothing else is encoded
/// so, and nothing that reads codes knows it.
template <>
struct Codec<Format::kInt8> {
  static constexpr f32 kMax = 127.0f;
  static constexpr u32 kNan = 0x80;
  // Added to a value below 2^22, the sum's low bits are the value, rounded to nearest even.
  static constexpr f32 kMagic = 1.5f * (1 << 23);

  static QK_DEVICE u8 encode(f32 value) {
    const u32 code = float_bits(clamp(value, kMax) + kMagic);
    return static_cast<u8>(select(value != value, kNan, code));
  }
};

}  // namespace qk
