// The macros of the command line as constants: one compile is one variant of one kernel.
#pragma once

#include "platform.h"

#define QK_E4M3FN 0
#define QK_E5M2 1
#define QK_INT8 2
#define QK_INT4 3  // of weights in memory alone: they are int8 when they multiply
#define QK_Q4_0 4  // GGUF's blocks of 32 codes with a scale: of weights beside 16-bit inputs alone
#define QK_Q8_0 5
#define QK_TENSOR 0
#define QK_TOKEN 1
#define QK_CHANNEL 1
#define QK_F16 0
#define QK_BF16 1
#define QK_F32 2
// Tokens of a block beside weights alone.
#define QK_M16 0
#define QK_M64 1
#define QK_GFX12 0
#define QK_GFX11 1
#define QK_SM89 2
#define QK_GFX10 3
// Of QK_ACT: what stands between a norm or a product and its codes.
#define QK_IDENTITY 0
#define QK_SILU 1
#define QK_GELU 2
#define QK_TANH 3  // gelu with tanh

// Probabilities and values of attention: QK_PV.
#define QK_PV_E4M3FN 0
#define QK_PV_F16 1

// 1: a product is added to something, where the source says so.
#ifndef QK_RESIDUAL
#  define QK_RESIDUAL 0
#endif
// Parameters and arguments that only such products have.
#if QK_RESIDUAL
#  define QK_IF_RESIDUAL(...) __VA_ARGS__
#else
#  define QK_IF_RESIDUAL(...)
#endif

// How columns of a head pair up in a rotation.
#define QK_NONE 0
#define QK_PAIRS 1
#define QK_HALVES 2

#ifndef QK_SYMBOL
#  error "define QK_SYMBOL: the name of the kernel to emit"
#endif

namespace qk {

/// Nibbles of eight groups whose codes are zero: positions 0 and 1 everywhere, which is legal.
constexpr u32 kNeutral = 0x44444444u;

enum class Format { kE4M3FN = QK_E4M3FN, kE5M2 = QK_E5M2, kInt8 = QK_INT8 };
enum class Pv { kE4M3FN = QK_PV_E4M3FN, kF16 = QK_PV_F16 };
enum class Io { kF16 = QK_F16, kBF16 = QK_BF16, kF32 = QK_F32 };

/// What products of codes are summed in. int32 holds 133,000 products of int8 exactly.
template <Format>
struct SumOf {
  using Type = f32;
};
template <>
struct SumOf<Format::kInt8> {
  using Type = int;
};
template <Format kW, Format kX>
using Sum = typename SumOf<kX>::Type;

/// A value of the io type in memory, and its exact or correctly rounded conversions; sums of
/// what a word holds, two values of 16 bit or one of 32, rounded as torch's are.
template <Io>
struct IoType;

/// Eight 16-bit values in one 16-byte vector, element 0 lowest.
template <class Type>
QK_DEVICE Vec16 round_eight(const f32* values) {
  Vec16 vector;
  QK_UNROLL for (int i = 0; i < 4; ++i) {
    vector.v[i] = Type::pack(values[2 * i], values[2 * i + 1]);
  }
  return vector;
}

template <>
struct IoType<Io::kF16> {
  using Memory = u16;
  static QK_DEVICE f32 widen(Memory value) { return half_to_float(value); }
  static QK_DEVICE Memory round(f32 value) { return float_to_half(value); }
  static QK_DEVICE u32 round_pair(f32 low, f32 high) { return halves_of(low, high); }
  static QK_DEVICE u32 pack(f32 low, f32 high) { return pack_halves(low, high); }
  static QK_DEVICE u32 add(u32 a, u32 b) { return add_halves(a, b); }
  static QK_DEVICE Vec16 round_vector(const f32* values) { return round_eight<IoType>(values); }
  static QK_DEVICE Vec16 round_numbers(const f32* values) { return round_vector(values); }
};

template <>
struct IoType<Io::kBF16> {
  using Memory = u16;
  static QK_DEVICE f32 widen(Memory value) { return bfloat_to_float(value); }
  static QK_DEVICE Memory round(f32 value) { return float_to_bfloat(value); }
  static QK_DEVICE u32 round_pair(f32 low, f32 high) { return bfloats_of(low, high); }
  static QK_DEVICE u32 pack(f32 low, f32 high) { return pack_bfloats(low, high); }
  static QK_DEVICE u32 add(u32 a, u32 b) { return add_bfloats(a, b); }
  static QK_DEVICE Vec16 round_vector(const f32* values) { return round_eight<IoType>(values); }
  /// Of values none of which is NaN.
  static QK_DEVICE Vec16 round_numbers(const f32* values) {
    Vec16 vector;
    QK_UNROLL for (int i = 0; i < 4; ++i)
      vector.v[i] = pack_numbers_as_bfloats(values[2 * i], values[2 * i + 1]);
    return vector;
  }
};

template <>
struct IoType<Io::kF32> {
  using Memory = f32;
  static QK_DEVICE f32 widen(Memory value) { return value; }
  static QK_DEVICE Memory round(f32 value) { return value; }
  static QK_DEVICE u32 add(u32 a, u32 b) {
    return float_bits(add_rounded(bits_float(a), bits_float(b)));
  }
  static QK_DEVICE Vec16 round_vector(const f32* values) {
    return {{float_bits(values[0]), float_bits(values[1]), float_bits(values[2]),
             float_bits(values[3])}};
  }
  static QK_DEVICE Vec16 round_numbers(const f32* values) { return round_vector(values); }
};

}  // namespace qk
