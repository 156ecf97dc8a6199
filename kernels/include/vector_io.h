// Sixteen consecutive values at a time: io -> f32 -> fp8, the unit in which the quantize kernels work.
#pragma once

#include "fp8.h"

namespace qk {

constexpr int kRun = 16;  // values: one 16-byte store of codes

template <Io kIo>
struct RunOf {
  using Type = IoType<kIo>;
  using Memory = typename Type::Memory;
  static constexpr int kPerLoad = sizeof(Vec16) / sizeof(Memory);

  /// The values as they lie in memory.
  struct Raw {
    struct alignas(16) Piece {
      Memory v[kPerLoad];
    } pieces[kRun / kPerLoad];
  };

  /// `aligned`: x is a multiple of 16 bytes and all values exist; else `count` of them are read one by one.
  static QK_DEVICE Raw fetch(const Memory* x, bool aligned, int count) {
    Raw raw;
    QK_UNROLL for (int p = 0; p < kRun / kPerLoad; ++p) {
      if (aligned) {
        raw.pieces[p] = load<typename Raw::Piece>(x + p * kPerLoad);
      } else {
        QK_UNROLL for (int e = 0; e < kPerLoad; ++e) {
          const int at = p * kPerLoad + e;
          raw.pieces[p].v[e] = at < count ? x[at] : Type::round(0.0f);
        }
      }
    }
    return raw;
  }

  static QK_DEVICE void widen(f32 (&values)[kRun], const Raw& raw) {
    QK_UNROLL for (int e = 0; e < kRun; ++e)
      values[e] = Type::widen(raw.pieces[e / kPerLoad].v[e % kPerLoad]);
  }

  static QK_DEVICE void read(f32 (&values)[kRun], const Memory* x, bool aligned, int count) {
    widen(values, fetch(x, aligned, count));
  }
};

/// Sixteen codes in order.
struct alignas(16) Codes {
  u8 v[kRun];
};

template <Format kFormat>
QK_DEVICE Codes encode_run(const f32 (&values)[kRun]) {
  Codes codes;
#ifdef QK_ENCODES_PAIRS
  QK_UNROLL for (int e = 0; e < kRun; e += 2) {
    const u32 pair = kFormat == Format::kE4M3FN ? encode_pair_e4m3fn(values[e], values[e + 1])
                                                : encode_pair_e5m2(values[e], values[e + 1]);
    codes.v[e] = static_cast<u8>(pair);
    codes.v[e + 1] = static_cast<u8>(pair >> 8);
  }
#else
  QK_UNROLL for (int e = 0; e < kRun; ++e)
    codes.v[e] = encode_fp8<kFormat>(values[e]);
#endif
  return codes;
}

/// Divides many values by one scale and rounds as a true division does, because a mere reciprocal would move ties.
///
/// q = x r with r = 1 / scale rounded, then twice q += (x - q scale) r, each in one rounding: the steps of the
/// hardware's own division, without its search for special cases at every value. They are exact where nothing
/// overflows or becomes subnormal on the way, which a scale of 2^-60 to 2^60 grants between kNear and kFar: what is
/// larger is clamped and what is smaller becomes a zero of its sign, whatever the low bits are.
template <Format kFormat>
struct Divisor {
  static constexpr f32 kFar = 4.0f * Fp8<kFormat>::kMax, kNear = 1.0f / (1 << 20);
  f32 scale, reciprocal;
  bool usual;

  QK_DEVICE explicit Divisor(f32 value) : scale(value), reciprocal(1.0f / value) {
    const u32 exponent = float_bits(value) >> 23;
    usual = exponent > 127u - 60u && exponent < 127u + 60u;  // a negative scale is not
  }

  QK_DEVICE f32 divide(f32 x) const {
    const f32 first = x * reciprocal;
    f32 q = multiply_add(multiply_add(-first, scale, x), reciprocal, first);
    q = multiply_add(multiply_add(-q, scale, x), reciprocal, q);
    const f32 size = bits_float(float_bits(first) & 0x7fffffffu);
    return size > kFar || size < kNear ? first : q;
  }

  QK_DEVICE void divide_all(f32 (&values)[kRun]) const {
    if (usual) {
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        values[e] = divide(values[e]);
    } else {
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        values[e] = values[e] / scale;
    }
  }
};

/// Writes the codes of values / scale.
template <Format kFormat>
QK_DEVICE void write_codes(u8* q, f32 (&values)[kRun], const Divisor<kFormat>& divisor, bool aligned, int count) {
  divisor.divide_all(values);
  const Codes codes = encode_run<kFormat>(values);
  if (aligned) {
    store(q, codes);
  } else {
    QK_UNROLL for (int e = 0; e < kRun; ++e) {
      if (e < count) q[e] = codes.v[e];
    }
  }
}

}  // namespace qk
