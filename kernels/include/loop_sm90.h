// The K loop of a warpgroup of the Hopper kernels: waits for stages, multiplies, hands them back.
//
// Hopper's FP8 matrix unit adds with fewer bits than f32 has. kPromote (accurate) adds its sums of 128 stored products to
// f32 registers; else everything is summed in the unit (fast). Measured against float64 at K = 2048, f32 output: relative
// errors of 1.3e-4 and 8.7e-4.
#pragma once

#include "tile_sm90.h"

namespace qk {

template <class Tile, Format kW, Format kX, bool kPromote>
struct HopperLoop {
  static constexpr int kSums = Tile::kM / 2;
  static constexpr int kSteps = Tile::kSparse ? 2 : 4;  // matrix instructions per stage and block
  // 128 stored products per promotion: one stage of dense weights, two of sparse ones.
  static constexpr int kRound = kPromote && Tile::kSparse ? 2 : 1;
  using Sums = f32[Tile::kBlocks][kSums];
  using Operation = Wgmma<Tile::kM>;

  struct Metadata {
    u32 words[Tile::kSparse ? kRound : 1][Tile::kBlocks][kSteps];
  };

  Ring<Tile> ring;
  int set;        // of full barriers
  int first_row;  // of the warpgroup's weights in the tile
  int lane;
  const u8* nibbles;  // of the lane's first row, its word of the first step
  int rows_left;      // weight rows from the lane's first one to the end of the matrix
  int k;

  /// Words of the round of stages from K step `step`; beyond the matrix a legal pattern, whose codes are zeros.
  QK_DEVICE void fetch(Metadata& meta, int step) const {
    if constexpr (Tile::kSparse) {
      QK_UNROLL for (int r = 0; r < kRound; ++r) {
        QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
          QK_UNROLL for (int s = 0; s < kSteps; ++s) {
            const int column = 16 * (step + r) + 8 * s;
            const bool inside = 64 * block < rows_left && 8 * column + 32 * (lane >> 1 & 1) < k;
            meta.words[r][block][s] =
                inside ? load<u32>(nibbles + static_cast<i64>(64 * block) * (k / 8) + column) : 0x44444444u;
          }
        }
      }
    }
  }

  QK_DEVICE void multiply(f32 (&sums)[kSums], int stage, int block, const u32* meta, bool keep) const {
    const u64 w = operand_at<Tile::kWeightRow>(ring.weights(stage) + (first_row + 64 * block) * Tile::kWeightRow);
    const u64 x = operand_at<Tile::kStepK>(ring.tokens(stage));
    QK_UNROLL for (int s = 0; s < kSteps; ++s) {
      if constexpr (Tile::kSparse) {
        Operation::template sparse<kW, kX>(sums, w + 2 * s, x + 4 * s, meta[s], keep || s > 0);
      } else {
        Operation::template dense<kW, kX>(sums, w + 2 * s, x + 2 * s, keep || s > 0);
      }
    }
  }

  /// Adds up K steps begin .. begin + count - 1, the next ones of `reader`.
  QK_DEVICE void run(Sums& sums, Reader<Tile>& reader, int begin, int count) const {
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      QK_UNROLL for (int i = 0; i < kSums; ++i) sums[block][i] = 0.0f;
    }
    if constexpr (kPromote || Tile::kSparse) {
      run_in_rounds(sums, reader, begin, count);
    } else {
      run_ahead(sums, reader, count);
    }
  }

  /// Waits for every round. With two warpgroups the other one's instructions fill the gap.
  QK_DEVICE void run_in_rounds(Sums& sums, Reader<Tile>& reader, int begin, int count) const {
    f32 parts[kPromote ? kSums : 1];
    Metadata meta;
    fetch(meta, begin);
    QK_NO_UNROLL
    for (int step = 0; step < count; step += kRound) {
      Metadata next;
      fetch(next, begin + step + kRound);
      const int first = reader.stage;
      QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
        int stage = first;
        wgmma_fence();
        QK_UNROLL for (int r = 0; r < kRound; ++r) {
          if (r > 0 && step + r >= count) break;
          if (block == 0) reader.take(ring, set);
          const u32* const words = meta.words[Tile::kSparse ? r : 0][block];
          if constexpr (kPromote) {
            multiply(parts, stage, block, words, r > 0);
          } else {
            multiply(sums[block], stage, block, words, true);
          }
          stage = Reader<Tile>::after(stage);
        }
        wgmma_commit();
        if constexpr (kPromote) {
          wgmma_wait<0>();
          if (block + 1 == Tile::kBlocks) release(first, step + 1 < count);
          settle(parts);
          QK_UNROLL for (int i = 0; i < kSums; ++i) sums[block][i] += parts[i];
        }
      }
      if constexpr (!kPromote) {
        wgmma_wait<0>();
        release(first, false);
        QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) settle(sums[block]);
      }
      meta = next;
    }
  }

  QK_DEVICE void release(int stage, bool both) const {
    ring.release(stage, lane);
    if (kRound == 2 && both) ring.release(Reader<Tile>::after(stage), lane);
  }

  /// Keeps one stage's instructions in flight while the next one's are issued.
  QK_DEVICE void run_ahead(Sums& sums, Reader<Tile>& reader, int count) const {
    int previous = 0;
    QK_NO_UNROLL
    for (int step = 0; step < count; ++step) {
      const int stage = reader.take(ring, set);
      wgmma_fence();
      QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
        multiply(sums[block], stage, block, nullptr, true);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) ring.release(previous, lane);
      previous = stage;
    }
    wgmma_wait<0>();
    if (count > 0) ring.release(previous, lane);
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) settle(sums[block]);
  }
};

}  // namespace qk
