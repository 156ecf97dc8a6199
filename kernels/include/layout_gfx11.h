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

#include "spread.h"
#include "widen.h"

namespace qk {

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
  template <int kPitch, int kCodes, int kBlocksN>
  static QK_DEVICE typename Dense::A load_a(const u8* rows, int block, int chunk, int lane) {
    const u8* const row = rows + Dense::weight_row(block, lane) * kPitch;
    return Dense::A::of(
        expand_run(row + Dense::kChunk / 2 * chunk, row + kCodes + Dense::kChunk / 8 * chunk));
  }
};

/// 16-bit operands: tokens are A and weights B, so that a lane's sums all belong to the weight row
/// that it loaded, and a scale of that row is one register.
struct HalfLayoutGfx11 {
  static constexpr bool kSparse = false;
  static constexpr int kSteps = 1;
  static constexpr int kRun = 16;               // K of a row that a lane holds, of an instruction
  static constexpr int kRows = 1, kTokens = 1;  // rows of a block that a lane holds
  struct A {
    u32 v[8];
  };
  using B = A;
  using Weights = A;
  using Tokens = A;

  static QK_DEVICE int run(int) { return 0; }  // which of a step's runs the lane holds
  static QK_DEVICE int row(int, int lane) { return lane % 16; }
  static QK_DEVICE int token_row(int, int lane) { return lane % 16; }
  static constexpr QK_DEVICE int weight_word(int, int word) { return word; }
  static constexpr QK_DEVICE int token_word(int, int word) { return word; }
  static constexpr QK_DEVICE int row_of(int) { return 0; }  // of an accumulator
  static QK_DEVICE int token_of(int e, int lane) { return 2 * e + lane / 16; }
};

}  // namespace qk
