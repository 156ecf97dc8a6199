// Some consecutive values at a time: io -> f32 -> codes, the unit in which the quantize kernels
// work.
#pragma once

#include "codec.h"

namespace qk {

/// The value as it is once it has been written in the io type.
template <Io kIo>
QK_DEVICE f32 rounded(f32 value) {
  return IoType<kIo>::widen(IoType<kIo>::round(value));
}

/// kCount values of a row, kCount a multiple of 8: whole 16-byte loads.
template <Io kIo, int kCount>
struct RunOf {
  using Type = IoType<kIo>;
  using Memory = typename Type::Memory;
  static constexpr int kPerLoad = sizeof(Vec16) / sizeof(Memory);

  /// The values as they lie in memory.
  struct Raw {
    struct alignas(16) Vector {
      Memory v[kPerLoad];
    } vectors[kCount / kPerLoad];
  };

  /// The same as words: values of 16 bit that branches or loops hand on take a register each.
  struct Held {
    Vec16 vectors[kCount / kPerLoad];
  };
  static QK_DEVICE Held hold(const Memory* x) {
    Held held;
    QK_UNROLL for (int p = 0; p < kCount / kPerLoad; ++p)
      held.vectors[p] = load<Vec16>(x + p * kPerLoad);
    return held;
  }
  static QK_DEVICE Raw raw_of(const Held& held) { return load<Raw>(&held); }

  /// `aligned`: x is a multiple of 16 bytes and all values exist; else `count` of them are read one
  /// by one.
  static QK_DEVICE Raw load_raw(const Memory* x, bool aligned, int count) {
    Raw raw;
    QK_UNROLL for (int p = 0; p < kCount / kPerLoad; ++p) {
      if (aligned) {
        raw.vectors[p] = load<typename Raw::Vector>(x + p * kPerLoad);
      } else {
        QK_UNROLL for (int e = 0; e < kPerLoad; ++e) {
          const int at = p * kPerLoad + e;
          raw.vectors[p].v[e] = at < count ? x[at] : Type::round(0.0f);
        }
      }
    }
    return raw;
  }

  static QK_DEVICE void widen(f32 (&values)[kCount], const Raw& raw) {
    QK_UNROLL for (int e = 0; e < kCount; ++e)
      values[e] = Type::widen(raw.vectors[e / kPerLoad].v[e % kPerLoad]);
  }

  static QK_DEVICE Raw narrow(const f32 (&values)[kCount]) {
    Raw raw;
    QK_UNROLL for (int p = 0; p < kCount / kPerLoad; ++p) {
      if constexpr (sizeof(Memory) == 2) {
        Words words;
        QK_UNROLL for (int i = 0; i < 4; ++i) {
          const int e = p * kPerLoad + 2 * i;
          words.v[i] = Type::round_pair(values[e], values[e + 1]);
        }
        store(&raw.vectors[p], words);
      } else {
        QK_UNROLL for (int e = 0; e < kPerLoad; ++e)
          raw.vectors[p].v[e] = values[p * kPerLoad + e];
      }
    }
    return raw;
  }

  /// Sums, rounded as torch's are.
  static QK_DEVICE Raw add(const Raw& a, const Raw& b) {
    Raw raw;
    QK_UNROLL for (int p = 0; p < kCount / kPerLoad; ++p) {
      const Words x = load<Words>(&a.vectors[p]), y = load<Words>(&b.vectors[p]);
      Words z;
      QK_UNROLL for (int i = 0; i < 4; ++i)
        z.v[i] = Type::add(x.v[i], y.v[i]);
      store(&raw.vectors[p], z);
    }
    return raw;
  }

  /// x is a multiple of 16 bytes.
  static QK_DEVICE void store_raw(Memory* x, const Raw& raw) {
    QK_UNROLL for (int p = 0; p < kCount / kPerLoad; ++p)
      store(x + p * kPerLoad, raw.vectors[p]);
  }

  /// Largest magnitude, as f32 bits: they compare as the values do, with NaN above everything.
  static QK_DEVICE u32 amax_bits(const Raw& raw) {
    u32 best = 0;
    QK_UNROLL for (int p = 0; p < kCount / kPerLoad; ++p) {
      const Words words = load<Words>(&raw.vectors[p]);
      QK_UNROLL for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(Memory) == 2) {
          best = max_halves(best, words.v[i] & 0x7fff7fffu);
        } else {
          const u32 magnitude = words.v[i] & 0x7fffffffu;
          best = magnitude > best ? magnitude : best;
        }
      }
    }
    if constexpr (sizeof(Memory) == 4) return best;
    const u32 high = best >> 16, low = best & 0xffffu;
    return float_bits(Type::widen(static_cast<Memory>(high > low ? high : low)));
  }

 private:
  struct Words {
    u32 v[4];
  };
};

template <int kCount>
QK_DEVICE u32 amax_bits_of(const f32 (&values)[kCount]) {
  u32 best = 0;
  QK_UNROLL for (int e = 0; e < kCount; ++e) {
    const u32 magnitude = float_bits(values[e]) & 0x7fffffffu;
    best = magnitude > best ? magnitude : best;
  }
  return best;
}

/// Codes in order.
template <int kCount>
struct alignas(kCount) Codes {
  union {
    u8 v[kCount];
    u32 words[kCount / 4];
  };
};

template <Format kFormat, int kCount>
QK_DEVICE Codes<kCount> encode_run(const f32 (&values)[kCount]) {
  Codes<kCount> codes;
#ifdef QK_ENCODES_FOUR
  if constexpr (kFormat == Format::kE4M3FN) {
    QK_UNROLL for (int e = 0; e < kCount; e += 4)
      codes.words[e / 4] =
          encode_four_e4m3fn(values[e], values[e + 1], values[e + 2], values[e + 3]);
    return codes;
  }
#endif
#ifdef QK_ENCODES_PAIRS
  if constexpr (kFormat != Format::kInt8) {
    const auto pair = [](f32 low, f32 high) {
      return kFormat == Format::kE4M3FN ? encode_pair_e4m3fn(low, high)
                                        : encode_pair_e5m2(low, high);
    };
    QK_UNROLL for (int e = 0; e < kCount; e += 4) {
      codes.words[e / 4] = pair(values[e], values[e + 1]) | pair(values[e + 2], values[e + 3])
                                                                << 16;
    }
    return codes;
  }
#endif
  QK_UNROLL for (int e = 0; e < kCount; ++e)
    codes.v[e] = Codec<kFormat>::encode(values[e]);
  return codes;
}

/// Divides many values by one scale and rounds as a true division does, because a mere reciprocal
/// would move ties.
///
/// q = x r with r = 1 / scale rounded, then twice q += (x - q scale) r, each in one rounding: the
/// steps of the hardware's own division, without its search for special cases at every value. They
/// are exact where nothing overflows or becomes subnormal on the way, which a scale of 2^-60 to
/// 2^60 grants between kNear and kFar: what is larger is clamped and what is smaller becomes a zero
/// of its sign, whatever the low bits are. Other scales are brought there by 2^100 or 2^-100, and x
/// with them: exactly, but for an x whose quotient is clamped or becomes zero anyway.
template <Format kFormat>
struct Divisor {
  static constexpr f32 kFar = 4.0f * Codec<kFormat>::kMax, kNear = 1.0f / (1 << 20);
  static constexpr u32 kUp = (127u + 100u) << 23, kOne = 127u << 23,
                       kDown = (127u - 100u) << 23;  // as f32 bits
  f32 scale, factor, near_one, reciprocal;
  bool usual;

  QK_DEVICE explicit Divisor(f32 value) : Divisor(value, 0.0f) { reciprocal = 1.0f / near_one; }
  /// With a reciprocal that an earlier one has computed.
  QK_DEVICE Divisor(f32 value, f32 known) : scale(value), reciprocal(known) {
    const u32 exponent = float_bits(value) >> 23 & 0xffu;
    const bool small = exponent <= 127u - 60u, large = exponent >= 127u + 60u;
    usual = !small && !large;
    factor = bits_float(small ? kUp : large ? kDown : kOne);
    near_one = value * factor;
  }

  QK_DEVICE f32 divide(f32 value) const {
    const f32 x = value * factor, first = x * reciprocal;
    f32 q = multiply_add(multiply_add(-first, near_one, x), reciprocal, first);
    q = multiply_add(multiply_add(-q, near_one, x), reciprocal, q);
    const f32 size = bits_float(float_bits(first) & 0x7fffffffu);
    return size > kFar || size < kNear ? first : q;
  }

  /// The codes of values / scale.
  template <int kCount>
  QK_DEVICE Codes<kCount> encode(const f32 (&values)[kCount]) const {
    f32 quotients[kCount];
    QK_UNROLL for (int e = 0; e < kCount; ++e)
      quotients[e] = divide(values[e]);
    return encode_run<kFormat>(quotients);
  }
};

/// Codes of values times 1 / scale: one rounding more than a division's, so that a quotient next to
/// a tie may have the code of its other side.
template <Format kFormat>
struct Reciprocal {
  f32 factor;

  QK_DEVICE explicit Reciprocal(f32 scale) {
    const f32 inverse = 1.0f / scale;
    // Zeros are zeros with the smallest scales, too.
    factor = inverse > 0x1.fffffep127f ? 0x1.fffffep127f : inverse;
  }

  template <int kCount>
  QK_DEVICE Codes<kCount> encode(const f32 (&values)[kCount]) const {
    f32 quotients[kCount];
    QK_UNROLL for (int e = 0; e < kCount; ++e)
      quotients[e] = values[e] * factor;
    return encode_run<kFormat>(quotients);
  }
};

/// Codes of values times `less`; false where those times `more` have others.
template <Format kFormat, int kCount>
QK_DEVICE bool encode_between(Codes<kCount>& codes, const f32 (&values)[kCount], f32 less,
                              f32 more) {
  f32 low[kCount], high[kCount];
  QK_UNROLL for (int e = 0; e < kCount; ++e) {
    low[e] = values[e] * less;
    high[e] = values[e] * more;
  }
  codes = encode_run<kFormat>(low);
  const Codes<kCount> other = encode_run<kFormat>(high);
  u32 differ = 0;
  QK_UNROLL for (int i = 0; i < kCount / 4; ++i)
    differ |= codes.words[i] ^ other.words[i];
  return differ == 0;
}

/// The same as Divisor in a third of the instructions, where the hardware encodes and no value is
/// next to a tie.
///
/// The quotient lies between x times a little less and x times a little more than 1 / scale.
/// Rounding keeps order: where both have one code, the quotient has it.
template <Format kFormat>
struct FastDivisor {
#ifdef QK_ENCODES_PAIRS
  f32 less, more;

  QK_DEVICE explicit FastDivisor(f32 scale) {
    constexpr f32 kLittle = 1.0f / (1 << 21);  // eight roundings; three take part
    const Divisor<kFormat> divisor(scale);
    // Other scales: the codes of NaN and of zero differ, but where the row has a NaN or an
    // infinity.
    less =
        divisor.usual ? divisor.reciprocal - divisor.reciprocal * kLittle : bits_float(0x7fc00000u);
    more = divisor.usual ? divisor.reciprocal + divisor.reciprocal * kLittle : 0.0f;
  }

  /// False: the codes are not certain, Divisor has to encode.
  template <int kCount>
  QK_DEVICE bool encode(Codes<kCount>& codes, const f32 (&values)[kCount]) const {
    return encode_between<kFormat>(codes, values, less, more);
  }
#else
  Divisor<kFormat> divisor;

  QK_DEVICE explicit FastDivisor(f32 scale) : divisor(scale) {}

  template <int kCount>
  QK_DEVICE bool encode(Codes<kCount>& codes, const f32 (&values)[kCount]) const {
    codes = divisor.encode(values);
    return true;
  }
#endif
};

/// int8: everywhere, and certain unless the quotient is next to the middle of two codes.
template <>
struct FastDivisor<Format::kInt8> {
  using Int8 = Codec<Format::kInt8>;
  f32 reciprocal, farthest;

  QK_DEVICE explicit FastDivisor(f32 scale) {
    const Divisor<Format::kInt8> divisor(scale);
    reciprocal = divisor.reciprocal;
    // Two roundings of at most 127 * 2^-24 are below 2^-14. Other scales are left to Divisor.
    farthest = divisor.usual ? 0.5f - 1.0f / (1 << 14) : -1.0f;
  }

  template <int kCount>
  QK_DEVICE bool encode(Codes<kCount>& codes, const f32 (&values)[kCount]) const {
    f32 distance = 0.0f;
    QK_UNROLL for (int e = 0; e < kCount; ++e) {
      const f32 q = clamp(values[e] * reciprocal, Int8::kMax), sum = q + Int8::kMagic;
      const f32 off = q - (sum - Int8::kMagic);
      distance = maximum(distance, bits_float(float_bits(off) & 0x7fffffffu));
      codes.v[e] = static_cast<u8>(float_bits(sum));
    }
    return distance <= farthest;
  }
};

/// Divisor's codes in fewer instructions, where no lane of a wave has a value next to a tie. All
/// lanes take part.
template <Format kFormat>
struct WaveDivisor {
#ifdef QK_ENCODES_FOUR
  static constexpr bool kGuesses = kFormat == Format::kInt8 || kFormat == Format::kE4M3FN;
#else
  static constexpr bool kGuesses = QK_SPLITS_EDGES && kFormat == Format::kInt8;
#endif
  Divisor<kFormat> exact;
  f32 less, more;  // e4m3fn: as FastDivisor's; int8: reciprocal, farthest from a code

  QK_DEVICE explicit WaveDivisor(f32 scale) : exact(scale) {
    if constexpr (kFormat == Format::kInt8) {
      less = exact.reciprocal;
      more = exact.usual ? 0.5f - 1.0f / (1 << 14) : -1.0f;
    } else {
      constexpr f32 kLittle = 1.0f / (1 << 21);
      const f32 little = exact.reciprocal * kLittle;
      less = exact.usual ? exact.reciprocal - little : bits_float(0x7fc00000u);
      more = exact.usual ? exact.reciprocal + little : 0.0f;
    }
  }

  template <int kCount>
  QK_DEVICE Codes<kCount> encode(const f32 (&values)[kCount]) const {
    if constexpr (kGuesses) {
      Codes<kCount> codes;
      if (__builtin_expect(!any_lane(!guess(codes, values)), 1)) return codes;
    }
    return exact.encode(values);
  }

 private:
  /// Whether the codes are certain.
  template <int kCount>
  QK_DEVICE bool guess(Codes<kCount>& codes, const f32 (&values)[kCount]) const {
    if constexpr (kFormat == Format::kInt8) {
      using Int8 = Codec<Format::kInt8>;
      f32 distance = 0.0f, sums[kCount];
      QK_UNROLL for (int e = 0; e < kCount; ++e) {
        const f32 q = clamp_number(values[e] * less, Int8::kMax);
        sums[e] = q + Int8::kMagic;
        distance = larger_magnitude(distance, q - (sums[e] - Int8::kMagic));
      }
      QK_UNROLL for (int e = 0; e < kCount; e += 4) {
        codes.words[e / 4] = low_bytes(float_bits(sums[e]), float_bits(sums[e + 1]),
                                       float_bits(sums[e + 2]), float_bits(sums[e + 3]));
      }
      return distance <= more;
    } else {
      return encode_between<kFormat>(codes, values, less, more);
    }
  }
};

template <int kCount>
QK_DEVICE void write_codes(u8* q, const Codes<kCount>& codes, bool aligned, int count) {
  if (aligned) {
    store(q, codes);
  } else {
    QK_UNROLL for (int e = 0; e < kCount; ++e) {
      if (e < count) q[e] = codes.v[e];
    }
  }
}

/// What is done to a row of x before it is quantized: x * smooth, one number per column.
template <bool kSmooth>
struct Input {
  static constexpr bool kPlain = !kSmooth;
  const f32* smooth;

  /// kCount columns from `column`, which is a multiple of kCount where `whole`; `count` of them
  /// exist.
  template <int kCount>
  QK_DEVICE void apply(f32 (&values)[kCount], int column, bool whole, int count) const {
    if constexpr (kSmooth) {
      using Run = RunOf<Io::kF32, kCount>;
      f32 numbers[kCount];
      Run::widen(numbers, Run::load_raw(smooth + column, whole, count));
      QK_UNROLL for (int e = 0; e < kCount; ++e)
        values[e] *= numbers[e];
    }
  }

  /// The same where rows of k columns follow one another: the run may go on in the next one.
  template <int kCount>
  QK_DEVICE void apply_across_rows(f32 (&values)[kCount], int column, int k) const {
    QK_UNROLL for (int e = 0; e < kCount; ++e) {
      if constexpr (kSmooth) values[e] *= smooth[column];
      column = column + 1 < k ? column + 1 : 0;
    }
  }
};

}  // namespace qk
