// Where a wave of RDNA2 keeps a product of int8 codes. There is no matrix instruction: dot4
// multiplies four codes of K, lane by lane, and each lane has whole rows of both operands.
//
// Lane 8g + h has tokens h and h + 8 of a 16x16 block, and outputs 8g..8g + 7 of two blocks side by
// side, four of each: a run of 8 outputs, as the epilogues store. Eight neighbours read one row of
// weights, which LDS broadcasts, and eight rows of tokens, whose starts take all banks. Of 64x64 a
// lane has 16 outputs of 8 tokens: 24 loads of 16 bytes for 512 dot4.
#pragma once

#include "spread.h"

namespace qk {

struct LayoutGfx10 {
  static constexpr bool kSparse = false;
  static constexpr int kChunk = 16;
  static constexpr int kUnroll = 1;
  static constexpr int kColumns = 2;                // tokens of a block that a lane has
  static constexpr int kRows = 4, kNeighbours = 8;  // outputs; lanes with the same ones
  struct A {
    Vec16 rows[kRows];
  };
  struct B {
    Vec16 tokens[kColumns];
  };

  template <int kBlocksN>
  struct Runs {
    static constexpr int kCount = kBlocksN / 2;
    static constexpr int kLength = 2 * kRows;
    static_assert(kBlocksN % 2 == 0, "a run is of two blocks");
  };
  static QK_DEVICE int token(int column, int lane) {
    return kNeighbours * column + lane % kNeighbours;
  }
  template <int kBlocksN>
  static QK_DEVICE int output(int run, int lane) {
    return 32 * run + 2 * kRows * (lane / kNeighbours);
  }
  template <int kBlocksN>
  static QK_DEVICE int block(int run, int e) {
    return 2 * run + e / kRows;
  }
  static QK_DEVICE int element(int e, int column) { return kColumns * (e % kRows) + column; }

  /// First of the neighbouring weight rows of a lane in `block`.
  template <int kBlocksN>
  static QK_DEVICE int weight_row(int block, int lane) {
    return output<kBlocksN>(block / 2, lane) + block % 2 * kRows;
  }

  template <int kPitch, int kCodes, int kBlocksN>
  static QK_DEVICE A load_a(const u8* rows, int block, int chunk, int lane) {
    const u8* const first = rows + weight_row<kBlocksN>(block, lane) * kPitch + kChunk * chunk;
    A a;
    QK_UNROLL for (int row = 0; row < kRows; ++row)
      a.rows[row] = load<Vec16>(first + row * kPitch);
    return a;
  }
  template <int kPitch>
  static QK_DEVICE B load_b(const u8* rows, int block, int chunk, int lane) {
    const u8* const first = rows + 16 * block * kPitch + kChunk * chunk;
    B b;
    QK_UNROLL for (int column = 0; column < kColumns; ++column)
      b.tokens[column] = load<Vec16>(first + token(column, lane) * kPitch);
    return b;
  }
};

struct SparseLayoutGfx10 : LayoutGfx10 {
  static constexpr bool kSparse = true;

  template <int kPitch, int kCodes, int kBlocksN>
  static QK_DEVICE A load_a(const u8* rows, int block, int chunk, int lane) {
    const u8* const first = rows + weight_row<kBlocksN>(block, lane) * kPitch;
    A a;
    QK_UNROLL for (int row = 0; row < kRows; ++row) {
      const u8* const kept = first + row * kPitch;
      a.rows[row] = expand_run(kept + kChunk / 2 * chunk, kept + kCodes + kChunk / 8 * chunk);
    }
    return a;
  }
};

}  // namespace qk
