// clang-format off
// Where gfx12's matrix instructions keep their operands: wave32, h = lane / 16, r = lane % 16.
//
//   WMMA 16x16x16          lanes 0..15 (h = 0)             lanes 16..31 (h = 1)
//     A v[0]               A[r][k = 0..3]                  A[r][k = 8..11]
//     A v[1]               A[r][k = 4..7]                  A[r][k = 12..15]
//     B v[0]               B[k = 0..3][r]                  B[k = 8..11][r]
//     B v[1]               B[k = 4..7][r]                  B[k = 12..15][r]
//     D acc[e], e = 0..7   D[e][r]                         D[8 + e][r]
//
//   SWMMAC 16x16x32        lanes 0..15 (h = 0)             lanes 16..31 (h = 1)
//     A v[0]               the kept of A[r][k = 0..7]      the kept of A[r][k = 16..23]
//     A v[1]               the kept of A[r][k = 8..15]     the kept of A[r][k = 24..31]
//     index, nibble p < 4  positions in k = 4p..4p + 3     positions in k = 16 + 4p..16 + 4p + 3
//     B v[i], i = 0..3     B[k = 4i..4i + 3][r]            B[k = 16 + 4i..16 + 4i + 3][r]
//     D acc[e], e = 0..7   D[e][r]                         D[8 + e][r]
// clang-format on
//
// The hardware multiplies slot by slot, so which k a slot holds is free as long as A and B agree: a
// lane reads one run of 16 (sparse: 32) consecutive bytes and feeds it to two instructions. A =
// weights (rows are outputs n), B = tokens: a lane owns one token and 8 consecutive outputs per
// block.
#pragma once

#include "config.h"

namespace qk {

/// What both forms share: one token per lane, runs of 8 outputs.
struct OutputsGfx12 {
  static constexpr int kColumns = 1;  // tokens of a 16x16 block that a lane holds

  template <int kBlocksN>
  struct Runs {
    static constexpr int kCount = kBlocksN;  // runs of consecutive outputs per token
    static constexpr int kLength = 8;
  };

  static QK_DEVICE int token(int, int lane) { return lane % 16; }
  template <int kBlocksN>
  static QK_DEVICE int output(int run, int lane) {
    return 16 * run + 8 * (lane / 16);
  }
  /// Element e of a run: accumulator block along n and index in it.
  template <int kBlocksN>
  static QK_DEVICE int block(int run, int) {
    return run;
  }
  static QK_DEVICE int element(int e, int) { return e; }
};

struct LayoutGfx12 : OutputsGfx12 {
  static constexpr bool kSparse = false;
  static constexpr int kChunk = 32;  // K bytes of one fragment
  static constexpr int kSteps = 2;   // instructions that consume it
  static constexpr int kUnroll = 4;  // fragments of a K step in one stretch of code
  using A = Vec16;
  using B = Vec16;

  static QK_DEVICE Vec16 load_row(const u8* row, int chunk, int lane) {
    return load<Vec16>(row + kChunk * chunk + 16 * (lane / 16));
  }
  /// The lane's run of a chunk, wherever it lies.
  static QK_DEVICE A load_run_a(const u8* codes, const u8*) { return load<Vec16>(codes); }
  static QK_DEVICE B load_run_b(const u8* codes) { return load<Vec16>(codes); }
  /// The lane's 8 bytes of the 16 that one instruction takes; the rest of the fragment is zero.
  static QK_DEVICE Vec16 load_half_row(const u8* row, int chunk, int lane) {
    struct Pair {
      u32 v[2];
    };
    const auto half = load<Pair>(row + kChunk * chunk + 8 * (lane / 16));
    return {{half.v[0], half.v[1], 0, 0}};
  }
  static QK_DEVICE A zero_a() { return {}; }
  static QK_DEVICE B zero_b() { return {}; }

  template <int kPitch, int kCodes, int kBlocksN>
  static QK_DEVICE A load_a(const u8* rows, int block, int chunk, int lane) {
    return load_row(rows + (16 * block + lane % 16) * kPitch, chunk, lane);
  }
  template <int kPitch>
  static QK_DEVICE B load_b(const u8* rows, int block, int chunk, int lane) {
    return load_row(rows + (16 * block + lane % 16) * kPitch, chunk, lane);
  }
};

struct SparseLayoutGfx12 : OutputsGfx12 {
  static constexpr bool kSparse = true;
  static constexpr int kChunk = 64;
  static constexpr int kSteps = 2;
  static constexpr int kUnroll = 4;
  struct A {
    Vec16 codes;  // the kept ones of k 32h..32h+31
    u32 nibbles;  // their 8 groups, as on disk; each step uses 16 bits
  };
  struct B {
    Vec16 steps[2];
  };

  static QK_DEVICE A load_run_a(const u8* codes, const u8* nibbles) {
    return {load<Vec16>(codes), load<u32>(nibbles)};
  }
  static QK_DEVICE B load_run_b(const u8* codes) {
    return {{load<Vec16>(codes), load<Vec16>(codes + 16)}};
  }
  static QK_DEVICE A zero_a() { return {{}, kNeutral}; }
  static QK_DEVICE B zero_b() { return {}; }

  template <int kPitch, int kCodes, int kBlocksN>
  static QK_DEVICE A load_a(const u8* rows, int block, int chunk, int lane) {
    // One address for the codes of all blocks, one for the nibbles: the rest goes into the
    // instruction's offset.
    const u8* const row = rows + lane % 16 * kPitch;
    const u8 *const codes = row + 16 * (lane / 16), *const nibbles = row + 4 * (lane / 16);
    const int skip = 16 * block * kPitch;
    return {load<Vec16>(codes + skip + kChunk / 2 * chunk),
            load<u32>(nibbles + skip + kCodes + kChunk / 8 * chunk)};
  }
  template <int kPitch>
  static QK_DEVICE B load_b(const u8* rows, int block, int chunk, int lane) {
    const u8* const run =
        rows + (16 * block + lane % 16) * kPitch + kChunk * chunk + 32 * (lane / 16);
    return {{load<Vec16>(run), load<Vec16>(run + 16)}};
  }
};

/// 16-bit operands of WMMA 16x16x16, a run of 8 consecutive k in each half: tokens are A and
/// weights B, so that a lane's sums all belong to the weight row that it loaded, and a scale of
/// that row is one register.
struct HalfLayoutGfx12 {
  static constexpr bool kSparse = false;
  static constexpr int kSteps = 1;
  static constexpr int kRun = 8;                // K of a row that a lane holds, of an instruction
  static constexpr int kRows = 1, kTokens = 1;  // rows of a block that a lane holds
  struct A {
    u32 v[4];
  };
  using B = A;
  using Weights = A;
  using Tokens = A;

  static QK_DEVICE int run(int lane) { return lane / 16; }  // which of a step's runs the lane holds
  static QK_DEVICE int row(int, int lane) { return lane % 16; }
  static QK_DEVICE int token_row(int, int lane) { return lane % 16; }
  static constexpr QK_DEVICE int weight_word(int, int word) { return word; }
  static constexpr QK_DEVICE int token_word(int, int word) { return word; }
  static constexpr QK_DEVICE int row_of(int) { return 0; }  // of an accumulator
  static QK_DEVICE int token_of(int e, int lane) { return 8 * (lane / 16) + e; }
};

}  // namespace qk
