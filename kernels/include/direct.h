// The loop of few tokens: fragments go from global memory straight to registers, and the waves of a
// block share K. No weight is used twice there, so LDS would only add a trip and a barrier; and
// narrow blocks of many waves keep the memory busy where N is small.
//
// A wave takes every kWaves-th chunk: a row's bytes that the block reads at one time are
// consecutive. While one pass is multiplied, the next one is on its way. The sums of the waves are
// added through LDS in order of wave, and wave 0 has the result.
#pragma once

#include "loop.h"

namespace qk {

template <class Tile, class Mma, class WeightRows>
struct DirectLoop {
  using Sum = typename Mma::Sum;
  using StepRows = RowsAt<CodeStorage<Mma::kSparse>>;
  static constexpr bool kSparse = Mma::kSparse;
  static constexpr int kWaves = Tile::kThreads / kWave;
  static constexpr int kRun = Mma::kChunk / 2;  // K of a chunk that one half of the wave holds
  static constexpr int kDeep = Tile::kK / (kWaves * Mma::kChunk);  // chunks of a wave in one pass
  static constexpr int kSums = Tile::kBlocksN * 8;
  static constexpr int kLdsBytes = (kWaves - 1) * kSums * kWave * static_cast<int>(sizeof(Sum));
  static_assert(Tile::kBlocksM == 1, "one row of blocks: more would want LDS");
  static_assert(Tile::kK % (kWaves * Mma::kChunk) == 0, "the waves must share a pass evenly");

  using Accumulators = typename Mma::Acc[Tile::kBlocksN][1];

  struct Fragments {
    typename Mma::A a[kDeep][Tile::kBlocksN];
    typename Mma::B b[kDeep][1];
  };

  u32 x_offset, w_offsets[Tile::kBlocksN],
      meta_offsets[Tile::kBlocksN];  // bytes from the tile's first row
  int lane_k;                        // K of the lane's first run in a pass

  QK_DEVICE void set_offsets(const Operands& op, int m0, int n0) {
    const int lane = thread_index() % kWave, row = lane % 16;
    lane_k = wave_index() * Mma::kChunk + lane / 16 * kRun;
    const ClampedRows tokens{op.m - m0};
    const WeightRows weights = WeightRows::of_weights(op, n0);
    x_offset = static_cast<u32>(tokens(row)) * op.k + lane_k;
    QK_UNROLL for (int i = 0; i < Tile::kBlocksN; ++i) {
      const u32 weight = weights(16 * i + row);
      w_offsets[i] = kSparse ? weight * (op.k / 2) + lane_k / 2 : weight * op.k + lane_k;
      meta_offsets[i] = kSparse ? weight * (op.k / 8) + lane_k / 8 : 0;
    }
  }

  /// kWhole: all of the pass exists; else `count` of its kK values do, and the rest become zeros.
  template <bool kWhole>
  QK_DEVICE void load_pass(Fragments& fragments, const StepRows& from, int count) {
    x_offset = optimization_barrier(x_offset);
    QK_UNROLL for (int i = 0; i < Tile::kBlocksN; ++i) {
      w_offsets[i] = optimization_barrier(w_offsets[i]);
      meta_offsets[i] = optimization_barrier(meta_offsets[i]);
    }
    QK_UNROLL for (int d = 0; d < kDeep; ++d) {
      const int skip = d * kWaves * Mma::kChunk;
      const bool there = kWhole || lane_k + skip < count;
      fragments.b[d][0] = Mma::zero_b();
      if (there) fragments.b[d][0] = Mma::load_run_b(from.x + x_offset + skip);
      QK_UNROLL for (int i = 0; i < Tile::kBlocksN; ++i) {
        const u8* const codes = from.w + w_offsets[i] + (kSparse ? skip / 2 : skip);
        fragments.a[d][i] = Mma::zero_a();
        if (there)
          fragments.a[d][i] = Mma::load_run_a(codes, from.meta + meta_offsets[i] + skip / 8);
      }
    }
  }

  static QK_DEVICE void multiply(Accumulators& acc, const Fragments& fragments) {
    QK_UNROLL for (int d = 0; d < kDeep; ++d)
      Mma::multiply(acc, fragments.a[d], fragments.b[d]);
  }

  /// Returns whether the calling wave has the result.
  QK_DEVICE bool run(Accumulators& acc, const Operands& op, u8* lds, int m0, int n0) {
    // The pass that K does not fill comes first, as in TileLoop.
    const int first = (op.k - 1) % Tile::kK + 1;
    StepRows rows(op, m0, n0);
    set_offsets(op, m0, n0);
    Fragments now;
    load_pass<false>(now, rows, first);
    rows.advance(first);
    QK_NO_UNROLL for (int left = op.k - first; left > 0; left -= Tile::kK) {
      Fragments next;
      load_pass<true>(next, rows, Tile::kK);
      rows.advance(Tile::kK);
      multiply(acc, now);
      now = next;
    }
    multiply(acc, now);
    finish_all(acc);
    return reduce_waves(acc, reinterpret_cast<Sum*>(lds));
  }

 private:
  static QK_DEVICE bool reduce_waves(Accumulators& acc, Sum* sums) {
    const int wave = wave_index(), lane = thread_index() % kWave;
    if (wave > 0) {
      QK_UNROLL for (int i = 0; i < kSums; ++i)
        sums[((wave - 1) * kSums + i) * kWave + lane] = acc[i / 8][0][i % 8];
    }
    block_sync();
    if (wave > 0) return false;
    for (int other = 0; other < kWaves - 1; ++other) {
      QK_UNROLL for (int i = 0; i < kSums; ++i)
        acc[i / 8][0][i % 8] += sums[(other * kSums + i) * kWave + lane];
    }
    return true;
  }
};

template <bool kDirect>
struct LoopKind {
  template <class Tile, class Mma, class WeightRows, class Tokens, class Weights>
  using Loop = TileLoop<Tile, Mma, WeightRows, Tokens, Weights>;
};
template <>
struct LoopKind<true> {
  template <class Tile, class Mma, class WeightRows, class Tokens, class Weights>
  using Loop = DirectLoop<Tile, Mma, WeightRows>;
};

/// The loop of a tile of the menu. One of few tokens reads codes from matrices alone.
template <class Tile, class Mma, class WeightRows = ClampedRows, class Tokens = MatrixTokens<Tile>,
          class Weights = CodeWeights<Tile, Mma::kSparse>>
using LoopOf =
    typename LoopKind<Tile::kDirect>::template Loop<Tile, Mma, WeightRows, Tokens, Weights>;

}  // namespace qk
