// Decoding operand elements of the emulated matrix instructions to f32, exactly.
#pragma once

#include "fp8.h"

namespace qk {
namespace host {

enum class Number { kE4M3FN, kE5M2, kF16, kBF16, kInt8 };

/// Of codes.
constexpr Number number_of(Format format) {
  return format == Format::kE4M3FN ? Number::kE4M3FN
         : format == Format::kE5M2 ? Number::kE5M2
                                   : Number::kInt8;
}

/// Bytes of an element.
constexpr int bytes_of(Number number) {
  return number == Number::kF16 || number == Number::kBF16 ? 2 : 1;
}

/// One code. No subnormal f32 takes part: some CPUs multiply those slowly.
template <Format kFormat>
inline f32 decode_code(u8 code) {
  using F = Fp8<kFormat>;
  constexpr u32 kShift = 23 - F::kMantissa;
  constexpr u32 kLeastNormal = 1u << F::kMantissa;
  constexpr u32 kFirstSpecial = kFormat == Format::kE4M3FN ? 0x7fu : 0x7cu;  // NaN; Inf, then NaN
  // With bits of the code.
  constexpr u32 kSpecial = kFormat == Format::kE4M3FN ? 0x7fc00000u : 0x7f800000u;
  // Of subnormals, as f32.
  constexpr u32 kStep = static_cast<u32>(127 + 1 - F::kBias - F::kMantissa) << 23;
  const u32 magnitude = code & 0x7fu;
  const u32 normal = (magnitude << kShift) + (static_cast<u32>(127 - F::kBias) << 23);
  const u32 subnormal =
      float_bits(static_cast<f32>(static_cast<int>(magnitude)) * bits_float(kStep));
  const u32 finite = select(magnitude < kLeastNormal, subnormal, normal);
  const u32 bits = select(magnitude < kFirstSpecial, finite, kSpecial | magnitude << kShift);
  return bits_float(bits | static_cast<u32>(code & 0x80u) << 24);
}

/// kCount consecutive elements.
template <Number kNumber, int kCount>
inline void decode_run(const u8* elements, f32* values) {
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kNumber == Number::kF16) {
      values[i] = half_to_float(load<u16>(elements + 2 * i));
    } else if constexpr (kNumber == Number::kBF16) {
      values[i] = bfloat_to_float(load<u16>(elements + 2 * i));
    } else if constexpr (kNumber == Number::kInt8) {
      values[i] = static_cast<f32>(static_cast<signed char>(elements[i]));
    } else {
      values[i] =
          decode_code<kNumber == Number::kE4M3FN ? Format::kE4M3FN : Format::kE5M2>(elements[i]);
    }
  }
}

}  // namespace host
}  // namespace qk
