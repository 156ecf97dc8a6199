// Decoding operand elements of the emulated matrix instructions to f32, exactly.
#pragma once

#include "config.h"

namespace qk {
namespace host {

enum class Number { kE4M3FN, kE5M2, kF16 };

constexpr f32 power_of_two(int exponent) {
  f32 value = 1.0f;
  for (int i = 0; i < exponent; ++i) value *= 2.0f;
  for (int i = 0; i > exponent; --i) value *= 0.5f;
  return value;
}

/// The value of every code of an 8-bit float.
struct CodeTable {
  f32 value[256];

  constexpr CodeTable(int mantissa, int bias, bool has_infinity) : value() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
      const f32 steps = static_cast<f32>(exponent == 0 ? fraction : fraction + (1 << mantissa));
      f32 magnitude = steps * power_of_two((exponent == 0 ? 1 : exponent) - bias - mantissa);
      const bool top = exponent == (0x7f >> mantissa);
      if (has_infinity && top) magnitude = fraction == 0 ? __builtin_inff() : __builtin_nanf("");
      if (!has_infinity && (code & 0x7f) == 0x7f) magnitude = __builtin_nanf("");
      value[code] = (code & 0x80) != 0 ? -magnitude : magnitude;
    }
  }
};

inline constexpr CodeTable kValuesE4M3FN{3, 7, false};
inline constexpr CodeTable kValuesE5M2{2, 15, true};

template <Number kNumber>
inline f32 decode(const u8* element) {
  if constexpr (kNumber == Number::kE4M3FN) {
    return kValuesE4M3FN.value[*element];
  } else if constexpr (kNumber == Number::kE5M2) {
    return kValuesE5M2.value[*element];
  } else {
    return half_to_float(load<u16>(element));
  }
}

}  // namespace host
}  // namespace qk
