// The K loop of a warpgroup of the Hopper kernels: waits for stages, multiplies, hands them back.
//
// Hopper's FP8 matrix unit adds with fewer bits than f32 has. kPromote (accurate) adds its sums of 128 stored products to
// f32 registers; else everything is summed in the unit (fast). Measured against float64 at K = 2048, f32 output: relative
// errors of 1.3e-4 and 8.7e-4.
#pragma once

#include "view_sm90.h"

namespace qk {

template <class Tile, Format kW, Format kX, bool kPromote, class View = MatrixView<Tile>>
struct HopperLoop {
  static constexpr int kSums = Tile::kM / 2;
  static constexpr int kSteps = Tile::kSparse ? 2 : 4;  // matrix instructions per stage and block
  // 128 stored products per promotion: one stage of dense weights, two of sparse ones.
  static constexpr int kRound = Tile::kSparse ? 2 : 1;
  using Sums = f32[Tile::kBlocks][kSums];
  using Operation = Wgmma<Tile::kM>;

  /// The lane's words of a round; `raw` as 16 bytes were loaded.
  struct Metadata {
    u32 words[Tile::kBlocks][Tile::kSparse ? 4 : 1];
  };

  Ring<Tile> ring;
  int set;        // of full barriers
  int first_row;  // of the warpgroup's weights in the tile
  int lane;
  const u8* nibbles;  // the lane's first row
  int rows_left;      // weight rows from the lane's first one to the end of the matrix
  int k;
  View view;

  /// Loads the metadata of the round from K step `step`, 32 bytes of a row. A lane needs words p, p + 2, p + 4, p + 6 of
  /// them, p = 0 or 1, and takes words 4p .. 4p + 3 in one load: 4-byte loads from sixteen rows take sixteen cycles of
  /// shared memory's data path each, as many as the matrix instruction has. Outside the matrix: a legal pattern.
  QK_DEVICE void fetch(Metadata& meta, int step) const {
    const int row_bytes = k / 8;
    const Piece at_step = view.metadata(step + (lane >> 1 & 1), k);
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      const u8* const row = nibbles + static_cast<i64>(64 * block) * row_bytes;
      const int column = at_step.begin;
      const bool inside = 64 * block < rows_left;
      if (at_step.whole) {
        Vec16 piece{{0x44444444u, 0x44444444u, 0x44444444u, 0x44444444u}};
        if (inside && column < at_step.end) piece = load<Vec16>(row + column);
        QK_UNROLL for (int i = 0; i < 4; ++i) meta.words[block][i] = piece.v[i];
      } else {
        QK_UNROLL for (int i = 0; i < 4; ++i) {
          const int at = column + 4 * i;
          meta.words[block][i] = inside && at < at_step.end ? load<u32>(row + at) : 0x44444444u;
        }
      }
    }
  }

  /// Gives every lane its own four words, in order of K: the other half of them lies with the lane two further.
  QK_DEVICE void exchange(Metadata& meta) const {
    const bool high = (lane >> 1 & 1) == 1;
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      u32(&w)[Tile::kSparse ? 4 : 1] = meta.words[block];
      const u32 first = lane_xor(high ? w[0] : w[1], 2), second = lane_xor(high ? w[2] : w[3], 2);
      const u32 own_first = high ? w[1] : w[0], own_second = high ? w[3] : w[2];
      w[0] = high ? first : own_first;
      w[1] = high ? second : own_second;
      w[2] = high ? own_first : first;
      w[3] = high ? own_second : second;
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
    Metadata next;
    if constexpr (Tile::kSparse) fetch(next, begin);
    QK_NO_UNROLL
    for (int step = 0; step < count; step += kRound) {
      Metadata meta;
      if constexpr (Tile::kSparse) {
        meta = next;
        exchange(meta);
        fetch(next, begin + step + kRound);
      }
      const int first = reader.stage;
      QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
        int stage = first;
        wgmma_fence();
        QK_UNROLL for (int r = 0; r < kRound; ++r) {
          if (r > 0 && step + r >= count) break;
          if (block == 0) reader.take(ring, set);
          const u32* const words = meta.words[block] + (Tile::kSparse ? kSteps * r : 0);
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
        release(first, step + 1 < count);
        QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) settle(sums[block]);
      }
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
