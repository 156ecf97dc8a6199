// The K loop of a warpgroup of the Hopper kernels: waits for stages, multiplies, hands them back.
//
// Sums of int8 are exact. Hopper's FP8 matrix unit adds with fewer bits than f32 has. kPromote
// (accurate) adds its sums of 128 stored products to f32 registers; else everything is summed in
// the unit (fast). Measured against float64 at K = 2048, f32 output: relative errors of 1.3e-4
// and 8.7e-4.
#pragma once

#include "view_sm90.h"

namespace qk {

template <class Tile, Format kW, Format kX, bool kPromote, class View>
struct HopperLoop {
  static constexpr int kSums = Tile::kM / 2;
  static constexpr int kSteps = Tile::kSparse ? 2 : 4;  // matrix instructions per stage and block
  // 128 stored products per promotion: one stage of dense weights, two of sparse ones.
  static constexpr int kRound = Tile::kSparse ? 2 : 1;
  using Sum = qk::Sum<kW, kX>;
  using Sums = Sum[Tile::kBlocks][kSums];
  using Operation = Wgmma<Tile::kM>;

  /// Metadata of kPeriod K steps, a word per matrix instruction and block once exchanged.
  static constexpr int kPeriod = Tile::kSparse ? 4 : 1, kLap = Tile::kSparse ? 2 * kPeriod : 1;
  struct Metadata {
    u32 words[Tile::kBlocks][Tile::kSparse ? kPeriod * kSteps : 1];
  };

  Ring<Tile> ring;
  int set;        // of full barriers
  int first_row;  // of the warpgroup's weights in the tile
  int lane;
  const u8* nibbles;        // metadata of the matrix
  int output, next_output;  // whose metadata the lane loads first, in this tile and in the next one
  int n, k;
  int begin, count;  // K steps
  View view;

  /// Loads the metadata of the tile's K steps `step` .. step + 3, past its end of the next tile's
  /// first ones: a lane takes one step of two rows, its quad 64 bytes of each. The fewer rows a
  /// load touches the better: each costs a cycle of shared memory's data path, of which the matrix
  /// instructions leave little. Outside the matrix, where codes are zeros, any legal pattern will
  /// do: the nearest one inside.
  QK_DEVICE void load_metadata(Metadata& meta, int step) const {
    const bool here = step < count;
    int first = here ? output : next_output;
    asm volatile("" : "+r"(first));  // or the addresses of all rows wait in registers
    // Where two blocks leave few registers, the thread's number is read anew.
    const int quarter = Tile::kBlocks > 1 ? thread_index() & 3 : lane % 4;
    const ByteRange range = view.metadata(begin + (here ? step : 0) + quarter, k);
    if (range.whole) {
      const int at = range.begin < range.end ? range.begin : range.end - 16;
      QK_UNROLL for (int i = 0; i < 2 * Tile::kBlocks; ++i) {
        const Vec16 words = load<Vec16>(row(first, i) + at);
        QK_UNROLL for (int j = 0; j < 4; ++j)
          meta.words[i / 2][4 * (i % 2) + j] = words.v[j];
      }
    } else {
      QK_UNROLL for (int j = 0; j < 4; ++j) {
        const int at = range.begin + 4 * j < range.end ? range.begin + 4 * j : range.end - 4;
        QK_UNROLL for (int i = 0; i < 2 * Tile::kBlocks; ++i) {
          meta.words[i / 2][4 * (i % 2) + j] = load<u32>(row(first, i) + at);
        }
      }
    }
  }

  /// Metadata of the lane's row `i`, two of every block.
  QK_DEVICE const u8* row(int first, int i) const {
    const int wanted = first + (Tile::kGated ? 0 : 64 * (i / 2)) + 8 * (i % 2);
    if constexpr (Tile::kGated) {
      const int inside = wanted < n ? wanted : n - 1;
      return metadata_row(nibbles, inside + i / 2 * n, k / Tile::kPerMeta);
    } else {
      return view.metadata_of(nibbles, wanted, n, k);
    }
  }

  /// Turns what a quad has loaded: lane t needs words t / 2 and t / 2 + 2 of row t % 2 in every
  /// step, and lane j has both rows of step j.
  QK_DEVICE void exchange(Metadata& meta) const {
    const bool odd = lane % 2 == 1, high = lane / 2 % 2 == 1;
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      u32(&w)[kPeriod * kSteps] = meta.words[block];
      u32 turned[kPeriod * kSteps];
      QK_UNROLL for (int i = 0; i < 4; ++i)
        swap_lanes(w[i], w[4 + i], odd, 1);
      // Now w[4j + i] is word i of the lane's row in the step of the even or odd neighbour.
      QK_UNROLL for (int j = 0; j < 2; ++j) {
        QK_UNROLL for (int s = 0; s < 2; ++s) {
          u32 low = w[4 * j + 2 * s], up = w[4 * j + 2 * s + 1];
          swap_lanes(low, up, high, 2);
          turned[2 * j + s] = low;
          turned[2 * (j + 2) + s] = up;
        }
      }
      QK_UNROLL for (int i = 0; i < kPeriod * kSteps; ++i) {
        w[i] = turned[i];
        // Ready before the fence of the instructions that read it, or the assembler runs those one
        // by one.
        asm volatile("" : "+r"(w[i])::"memory");
      }
    }
  }

  /// Of two lanes that differ in bit `mask` (`upper`: the one that has it), the lower one gets both
  /// `first`, the upper one both `second`; the lower lane's stands first.
  static QK_DEVICE void swap_lanes(u32& first, u32& second, bool upper, int mask) {
    const u32 got = lane_xor(upper ? first : second, mask);
    first = upper ? got : first;
    second = upper ? second : got;
  }

  QK_DEVICE void multiply(Sum (&sums)[kSums], int stage, int block, const u32* meta,
                          bool keep) const {
    const int weight = first_row + Tile::kBlockStep * block;
    const u64 w = operand_at<Tile::kWeightRow>(ring.weights(stage) + weight * Tile::kWeightRow);
    const u64 x = operand_at<Tile::kStepK>(ring.tokens(stage));
    QK_UNROLL for (int s = 0; s < kSteps; ++s) {
      if constexpr (Tile::kSparse) {
        Operation::template sparse<kW, kX>(sums, w + 2 * s, x + 4 * s, meta[s], keep || s > 0);
      } else {
        Operation::template dense<kW, kX>(sums, w + 2 * s, x + 2 * s, keep || s > 0);
      }
    }
  }

  /// Adds up the tile's K steps, the next ones of `reader`. `first` is the metadata of the first
  /// period, loaded, and then of the next tile's. `overlapped` is called once, with the first
  /// operands under way.
  template <class Overlapped>
  QK_DEVICE void run(Sums& sums, Reader<Tile>& reader, Metadata& first,
                     Overlapped overlapped) const {
    Metadata second;
    if constexpr (kPromote) {
      run_in_rounds(sums, reader, first, second, overlapped);
    } else {
      run_ahead(sums, reader, first, second, overlapped);
    }
    if (Tile::kSparse && (count - 1) / kPeriod % 2 == 0) first = second;
  }

  /// Waits for every round. With several warpgroups the others' instructions fill the gap.
  template <class Overlapped>
  QK_DEVICE void run_in_rounds(Sums& sums, Reader<Tile>& reader, Metadata& first, Metadata& second,
                               Overlapped overlapped) const {
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      QK_UNROLL for (int i = 0; i < kSums; ++i)
        sums[block][i] = 0.0f;
    }
    if constexpr (Tile::kSparse) exchange(first);
    QK_NO_UNROLL for (int lap = 0; lap < count; lap += kLap) {
      QK_UNROLL for (int i = 0; i < kLap; i += kRound) {
        const int step = lap + i;
        if (i > 0 && step >= count) break;
        Metadata &now = i < kPeriod ? first : second, &other = i < kPeriod ? second : first;
        round(sums, reader, now, i % kPeriod, step + 1 < count, [&] {
          if constexpr (Tile::kSparse) {
            if (i % kPeriod == 0) load_metadata(other, step + kPeriod);
            if (i % kPeriod == kPeriod - kRound && step + kRound < count) exchange(other);
          }
          if constexpr (Tile::kAdds) {
            if (step == overlapped_step(count)) overlapped();
          }
        });
      }
    }
  }

  /// Steps i and, of a round of two, i + 1 of a period; `meanwhile` runs under the first block's
  /// instructions.
  template <class Work>
  QK_DEVICE void round(Sums& sums, Reader<Tile>& reader, const Metadata& meta, int i, bool both,
                       Work meanwhile) const {
    f32 parts[kSums];
    const int first = reader.stage;
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      int stage = first;
      wgmma_fence();
      QK_UNROLL for (int r = 0; r < kRound; ++r) {
        if (r > 0 && !both) break;
        if (block == 0) reader.take(ring, set);
        multiply(parts, stage, block, words_of(meta, block, i + r), r > 0);
        stage = Reader<Tile>::after(stage);
      }
      wgmma_commit();
      if (block == 0) meanwhile();
      wgmma_wait<0>();
      if (block + 1 == Tile::kBlocks) {
        ring.release(first, lane);
        if (kRound == 2 && both) ring.release(Reader<Tile>::after(first), lane);
      }
      settle(parts);
      QK_UNROLL for (int j = 0; j < kSums; ++j)
        sums[block][j] += parts[j];
    }
  }

  static QK_DEVICE const u32* words_of(const Metadata& meta, int block, int step) {
    return meta.words[block] + (Tile::kSparse ? kSteps * step : 0);
  }

  /// Keeps one stage's instructions in flight while the next one's are issued. They read their
  /// metadata until they end: two periods of it take turns.
  template <class Overlapped>
  QK_DEVICE void run_ahead(Sums& sums, Reader<Tile>& reader, Metadata& first, Metadata& second,
                           Overlapped overlapped) const {
    int previous = 0;
    QK_NO_UNROLL for (int lap = 0; lap < count; lap += kLap) {
      QK_UNROLL for (int i = 0; i < kLap; ++i) {
        const int step = lap + i;
        if (i > 0 && step >= count) break;
        Metadata &now = i < kPeriod ? first : second, &other = i < kPeriod ? second : first;
        if constexpr (Tile::kSparse) {
          if (i % kPeriod == 0) exchange(now);
        }
        const int stage = reader.take(ring, set);
        wgmma_fence();
        QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
          multiply(sums[block], stage, block, words_of(now, block, i % kPeriod), step > 0);
        }
        wgmma_commit();
        if constexpr (Tile::kAdds) {
          if (step == overlapped_step(count)) overlapped();
        }
        wgmma_wait<1>();
        if (step > 0) ring.release(previous, lane);
        if constexpr (Tile::kSparse) {
          if (i % kPeriod == 0) load_metadata(other, step + kPeriod);
        }
        previous = stage;
      }
    }
    wgmma_wait<0>();
    ring.release(previous, lane);
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block)
      settle(sums[block]);
  }
};

}  // namespace qk
