// The tile loop of every GEMM: global memory -> registers -> double-buffered LDS -> fragments ->
// matrix unit.
//
// One block computes kM tokens x kN outputs. While a K step is multiplied from one LDS buffer, the
// next one is already on its way into registers; it is stored into the other buffer afterwards, so
// one barrier per step is enough. Rows beyond M or N repeat the last one and bytes beyond K are
// zeros: the matrix unit always runs with all lanes.
#pragma once

#include "weights.h"

namespace qk {

/// Ends the multiplications: what follows may mask lanes.
template <class Acc, int kBlocksN, int kBlocksM>
QK_DEVICE void finish_all(Acc (&acc)[kBlocksN][kBlocksM]) {
  QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
    QK_UNROLL for (int j = 0; j < kBlocksM; ++j)
      finish(acc[i][j]);
  }
}

/// WeightRows: which rows of w a tile has. Tokens: where x is read. Weights: how w is stored.
template <class Tile, class Mma, class WeightRows, class Tokens = MatrixTokens<Tile>,
          class Weights = CodeWeights<Tile, Mma::kSparse>>
struct TileLoop {
  static constexpr int kPitchX = Tile::kK + kPad, kPitchW = Weights::kPitch;
  static constexpr int kBytesX = Tile::kM * kPitchX;
  static constexpr int kBufferBytes = kBytesX + Tile::kN * kPitchW;
  static constexpr int kLdsBytes = 2 * kBufferBytes;
  static_assert(kLdsBytes <= 64 * 1024, "a workgroup has 64 KB of LDS");
  static_assert(Tile::kK % Mma::kChunk == 0, "a step must be a whole number of fragments");

  using StepRows = RowsAt<typename Weights::Stored>;
  using Accumulators = typename Mma::Acc[Tile::kBlocksN][Tile::kBlocksM];

  Tokens x;
  Weights w;

  QK_DEVICE void set_offsets(const Operands& op, int m0, int n0, int thread) {
    x.set_offsets(op, m0, thread);
    w.set_offsets(op.k, WeightRows::of_weights(op, n0), thread);
  }

  /// The first step: `count` of its kK values of every row exist.
  QK_DEVICE void load_partial_step(const StepRows& from, int count, int thread) {
    x.load_partial_step(from.x, count, thread);
    w.load_partial_step(from, count, thread);
  }

  QK_DEVICE void load_step(const StepRows& from) {
    x.load_step(from.x);
    w.load_step(from);
  }

  QK_DEVICE void store_step(u8* buffer, int thread) const {
    x.store_step(buffer, kPitchX, thread);
    w.store_step(buffer + kBytesX, thread);
  }

  static QK_DEVICE void multiply(Accumulators& acc, const u8* buffer, int wave_m, int wave_n,
                                 int lane) {
    const u8* const x_rows = buffer + wave_m * kPitchX;
    const u8* const w_rows = buffer + kBytesX + wave_n * kPitchW;
    constexpr int kUnroll = Mma::kUnroll;
    QK_UNROLL_CHUNKS for (int chunk = 0; chunk < Tile::kK / Mma::kChunk; ++chunk) {
      typename Mma::A a[Tile::kBlocksN];
      typename Mma::B b[Tile::kBlocksM];
      QK_UNROLL for (int i = 0; i < Tile::kBlocksN; ++i) {
        a[i] =
            Mma::template load_a<kPitchW, Weights::kCodes, Tile::kBlocksN>(w_rows, i, chunk, lane);
      }
      QK_UNROLL for (int j = 0; j < Tile::kBlocksM; ++j)
        b[j] = Mma::template load_b<kPitchX>(x_rows, j, chunk, lane);
      Mma::multiply(acc, a, b);
      // Else the fragments of all unrolled chunks live at once, and registers spill.
      schedule_barrier();
    }
  }

  /// Runs the whole K loop of the tile at (m0, n0). Returns whether the calling wave has results:
  /// all have.
  QK_DEVICE bool run(Accumulators& acc, const Operands& op, u8* lds, int m0, int n0) {
    const int thread = thread_index(), wave = wave_index(), lane = thread % kWave;
    const int wave_m = wave / Tile::kWavesN * Tile::kWaveM,
              wave_n = wave % Tile::kWavesN * Tile::kWaveN;
    u8* current = lds;
    u8* next = lds + kBufferBytes;
    // The step that K does not fill comes first: all those of the loop are whole, and ask for
    // nothing.
    const int first = static_cast<int>(static_cast<u32>(op.k - 1) % Tile::kK) + 1;
    StepRows rows(op, m0, n0);
    set_offsets(op, m0, n0, thread);
    // Else the zeros of `acc` are made twice: for the loop, and for what follows without it.
    finish_all(acc);
    if (QK_SPLITS_EDGES && first == Tile::kK) {
      load_step(rows);
    } else {
      load_partial_step(rows, first, thread);
    }
    rows.advance(first);
    x.advance(first);
    w.advance(first);
    store_step(current, thread);
    block_sync();
    QK_NO_UNROLL for (int left = op.k - first; left > 0; left -= Tile::kK) {
      load_step(rows);
      rows.advance(Tile::kK);
      x.advance(Tile::kK);
      w.advance(Tile::kK);
      multiply(acc, current, wave_m, wave_n, lane);
      store_step(next, thread);
      block_sync();
      u8* const swap = current;
      current = next;
      next = swap;
    }
    multiply(acc, current, wave_m, wave_n, lane);
    finish_all(acc);
    return true;
  }
};

}  // namespace qk
