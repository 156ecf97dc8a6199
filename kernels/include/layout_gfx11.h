// Where gfx11's WMMA keeps its operands, int8 codes as they are, and the exact widening of fp8
// codes to f16: wave32, h = lane / 16, r = lane % 16.
//
// clang-format off
//   WMMA 16x16x16          lanes 0..15 (h = 0)             lanes 16..31 (h = 1)
//     A v[i], f16, i < 8   A[r][k = 2i, 2i + 1]            the same
//     B v[i], f16, i < 8   B[k = 2i, 2i + 1][r]            the same
//     A v[i], iu8, i < 4   A[r][k = 4i..4i + 3]            the same
//     B v[i], iu8, i < 4   B[k = 4i..4i + 3][r]            the same
//     D acc[e], e = 0..7   D[2e][r]                        D[2e + 1][r]
// clang-format on
//
// Rows of A are free to permute: A row i is weight row 8 (i % 2) + i / 2, so that D element e of
// half h is output 8h + e and a lane again owns one token and 8 consecutive outputs per block.
// There is no sparse instruction: the kept codes are spread over a dense row in registers.
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

/// Four codes, one byte each, to four f16.
template <Format kFormat>
QK_DEVICE void widen_word(u32 codes, u32& low, u32& high) {
  low = widen_high_bytes<kFormat>((codes & 0xffu) << 8 | (codes & 0xff00u) << 16);
  high = widen_high_bytes<kFormat>((codes >> 8 & 0xff00u) | (codes & 0xff000000u));
}

/// A group of four from its two kept codes (low byte first) and its nibble of positions.
QK_DEVICE u32 expand_group(u32 kept, u32 nibble) {
  return (kept & 0xffu) << (nibble << 3 & 24u) | (kept >> 8 & 0xffu) << (nibble << 1 & 24u);
}

/// A lane's 16 codes of a row, as the matrix instruction takes them: widened.
template <Format kFormat>
struct FragmentGfx11 {
  u32 v[8];

  static QK_DEVICE FragmentGfx11 of(const Vec16& codes) {
    FragmentGfx11 wide;
    QK_UNROLL for (int i = 0; i < 4; ++i)
      widen_word<kFormat>(codes.v[i], wide.v[2 * i], wide.v[2 * i + 1]);
    return wide;
  }
};

/// int8: as they are.
template <>
struct FragmentGfx11<Format::kInt8> : Vec16 {
  static QK_DEVICE FragmentGfx11 of(const Vec16& codes) { return {codes}; }
};

template <Format kW, Format kX>
struct LayoutGfx11 {
  static constexpr bool kSparse = false;
  static constexpr int kChunk = 16;
  static constexpr int kSteps = 1;
  static constexpr int kUnroll = kX == Format::kInt8 ? 2 : 1;  // more spills registers
  static constexpr int kColumns = 1;
  using A = FragmentGfx11<kW>;
  using B = FragmentGfx11<kX>;

  template <int kBlocksN>
  struct Runs {
    static constexpr int kCount = kBlocksN;
    static constexpr int kLength = 8;
  };
  static QK_DEVICE int token(int, int lane) { return lane % 16; }
  template <int kBlocksN>
  static QK_DEVICE int output(int run, int lane) {
    return 16 * run + 8 * (lane / 16);
  }
  template <int kBlocksN>
  static QK_DEVICE int block(int run, int) {
    return run;
  }
  static QK_DEVICE int element(int e, int) { return e; }

  static QK_DEVICE int weight_row(int block, int lane) {
    return 16 * block + 8 * (lane % 2) + lane % 16 / 2;
  }

  template <int kPitch, int kCodes, int kBlocksN>
  static QK_DEVICE A load_a(const u8* rows, int block, int chunk, int lane) {
    return A::of(load<Vec16>(rows + weight_row(block, lane) * kPitch + kChunk * chunk));
  }
  template <int kPitch>
  static QK_DEVICE B load_b(const u8* rows, int block, int chunk, int lane) {
    return B::of(load<Vec16>(rows + (16 * block + lane % 16) * kPitch + kChunk * chunk));
  }
};

template <Format kW, Format kX>
struct SparseLayoutGfx11 : LayoutGfx11<kW, kX> {
  using Dense = LayoutGfx11<kW, kX>;
  static constexpr bool kSparse = true;
  struct alignas(8) Kept {
    u32 v[2];
  };

  template <int kPitch, int kCodes, int kBlocksN>
  static QK_DEVICE typename Dense::A load_a(const u8* rows, int block, int chunk, int lane) {
    const u8* const row = rows + Dense::weight_row(block, lane) * kPitch;
    const Kept kept = load<Kept>(row + Dense::kChunk / 2 * chunk);
    const u32 nibbles = load<u16>(row + kCodes + Dense::kChunk / 8 * chunk);
    Vec16 codes;
    QK_UNROLL for (int group = 0; group < 4; ++group) {
      codes.v[group] =
          expand_group(kept.v[group / 2] >> (16 * (group % 2)), nibbles >> (4 * group));
    }
    return Dense::A::of(codes);
  }
};

}  // namespace qk
