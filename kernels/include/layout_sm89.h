// Where the warp-level mma of sm_89 keeps its 8-bit operands: g = lane / 4, t = lane % 4. Tokens
// come in two parts of 8: part p of a 16x16 block is acc[4p..4p + 3].
//
// clang-format off
//   mma m16n8k32           lane 4g + t
//     A v[0]               A[g][k = 4t..4t + 3]
//     A v[1]               A[g + 8][k = 4t..4t + 3]
//     A v[2]               A[g][k = 16 + 4t..16 + 4t + 3]
//     A v[3]               A[g + 8][k = 16 + 4t..16 + 4t + 3]
//     B v[0]               B[k = 4t..4t + 3][g]
//     B v[1]               B[k = 16 + 4t..16 + 4t + 3][g]
//     D acc[0], acc[1]     D[g][2t], D[g][2t + 1]
//     D acc[2], acc[3]     D[g + 8][2t], D[g + 8][2t + 1]
//
//   mma.sp m16n8k64        lane 4g + t
//     A v[0..3]            as m16n8k32, k counts kept codes
//     metadata             row g + 8 (t % 2), groups 8 (t / 2)..8 (t / 2) + 7: a word as on disk
//     B v[i], i = 0..3     B[k = 16i + 4t..16i + 4t + 3][g]
//     D acc[0..3]          as m16n8k32
// clang-format on
//
// Rows of A are free to permute: A rows g and g + 8 of block i are weight rows R g + 2i and R g +
// 2i + 1 with R = 2 * blocks, so that a lane's rows over all blocks are one run of R consecutive
// outputs per token.
#pragma once

#include "config.h"

namespace qk {

struct OutputsSm89 {
  static constexpr int kColumns = 4;

  template <int kBlocksN>
  struct Runs {
    static constexpr int kCount = 1;
    static constexpr int kLength = 2 * kBlocksN;
  };
  static QK_DEVICE int token(int column, int lane) {
    return 8 * (column / 2) + 2 * (lane % 4) + column % 2;
  }
  template <int kBlocksN>
  static QK_DEVICE int output(int, int lane) {
    return 2 * kBlocksN * (lane / 4);
  }
  template <int kBlocksN>
  static QK_DEVICE int block(int, int e) {
    return e / 2;
  }
  static QK_DEVICE int element(int e, int column) {
    return 4 * (column / 2) + 2 * (e % 2) + column % 2;
  }

  /// First of the two neighbouring weight rows of a lane in `block`.
  template <int kBlocksN>
  static QK_DEVICE int weight_row(int block, int lane) {
    return 2 * kBlocksN * (lane / 4) + 2 * block;
  }
};

struct LayoutSm89 : OutputsSm89 {
  static constexpr bool kSparse = false;
  static constexpr int kChunk = 64;
  static constexpr int kSteps = 2;
  static constexpr int kUnroll = 1;
  struct A {
    u32 v[8];  // [step][register]
  };
  struct B {
    u32 v[8];  // [part][step][register]
  };

  // K slots are free to permute, the same way in A and B: a lane's four words of a chunk are its 16
  // bytes at 16t.
  template <int kPitch, int kCodes, int kBlocksN>
  static QK_DEVICE A load_a(const u8* rows, int block, int chunk, int lane) {
    const u8* const row =
        rows + weight_row<kBlocksN>(block, lane) * kPitch + kChunk * chunk + 16 * (lane % 4);
    const Vec16 low = load<Vec16>(row), high = load<Vec16>(row + kPitch);
    return {{low.v[0], high.v[0], low.v[1], high.v[1], low.v[2], high.v[2], low.v[3], high.v[3]}};
  }
  template <int kPitch>
  static QK_DEVICE B load_b(const u8* rows, int block, int chunk, int lane) {
    const u8* const row =
        rows + (16 * block + lane / 4) * kPitch + kChunk * chunk + 16 * (lane % 4);
    const Vec16 first = load<Vec16>(row), second = load<Vec16>(row + 8 * kPitch);
    return {{first.v[0], first.v[1], first.v[2], first.v[3], second.v[0], second.v[1], second.v[2],
             second.v[3]}};
  }
};

struct SparseLayoutSm89 : OutputsSm89 {
  static constexpr bool kSparse = true;
  static constexpr int kChunk = 64;
  static constexpr int kSteps = 1;
  static constexpr int kUnroll = 1;
  struct A {
    u32 v[5];  // four registers, then the metadata
  };
  struct B {
    u32 v[8];  // [part][register]
  };

  template <int kPitch, int kCodes, int kBlocksN>
  static QK_DEVICE A load_a(const u8* rows, int block, int chunk, int lane) {
    const int t = lane % 4;
    const u8* const row = rows + weight_row<kBlocksN>(block, lane) * kPitch;
    const u8* const low = row + kChunk / 2 * chunk + 4 * t;
    const u8* const high = low + kPitch;
    const u32 nibbles = load<u32>(row + t % 2 * kPitch + kCodes + kChunk / 8 * chunk + 4 * (t / 2));
    return {{load<u32>(low), load<u32>(high), load<u32>(low + 16), load<u32>(high + 16), nibbles}};
  }
  template <int kPitch>
  static QK_DEVICE B load_b(const u8* rows, int block, int chunk, int lane) {
    const u8* const row = rows + (16 * block + lane / 4) * kPitch + kChunk * chunk + 4 * (lane % 4);
    B tokens;
    QK_UNROLL for (int i = 0; i < 8; ++i)
      tokens.v[i] = load<u32>(row + i / 4 * 8 * kPitch + i % 4 * 16);
    return tokens;
  }
};

/// 16-bit operands of m16n8k16: a lane's registers of a row hold 4 consecutive k, in both operands.
/// Weights are A, so that a lane's sums belong to the two weight rows that it loaded.
struct HalfLayoutSm89 {
  static constexpr bool kSparse = false;
  static constexpr int kSteps = 1;
  static constexpr int kRun = 4;                // K of a row that a lane holds, of an instruction
  static constexpr int kRows = 2, kTokens = 2;  // rows of a block that a lane holds
  struct A {
    u32 v[4];  // [word][row]
  };
  struct B {
    u32 v[4];  // [part][word]
  };
  using Weights = A;
  using Tokens = B;

  static QK_DEVICE int run(int lane) { return lane % 4; }  // which of a step's runs the lane holds
  static QK_DEVICE int row(int which, int lane) { return 8 * which + lane / 4; }
  static QK_DEVICE int token_row(int which, int lane) { return 8 * which + lane / 4; }
  static constexpr QK_DEVICE int weight_word(int which, int word) { return 2 * word + which; }
  static constexpr QK_DEVICE int token_word(int which, int word) { return 2 * which + word; }
  static constexpr QK_DEVICE int row_of(int e) { return e / 2 % 2; }  // of an accumulator
  static QK_DEVICE int token_of(int e, int lane) { return 8 * (e / 4) + 2 * (lane % 4) + e % 2; }
};

}  // namespace qk
