// What a block computes at a time, and how its threads copy rows of a matrix to LDS.
#pragma once

#include "config.h"

namespace qk {

/// kK bytes of every x row per step; the wave grid cuts the tile into kWaveM x kWaveN per wave.
/// Waves that share K (WavesK) take their operands from memory to registers, not through LDS:
/// direct.h.
template <int M, int N, int K, int WavesM, int WavesN, int WavesK>
struct TileShape {
  static constexpr int kM = M, kN = N, kK = K;
  static constexpr bool kDirect = WavesK > 1;
  static constexpr int kWavesN = WavesN;
  static constexpr int kThreads = WavesM * WavesN * WavesK * kWave;
  static constexpr int kWaveM = M / WavesM, kWaveN = N / WavesN;
  static constexpr int kBlocksM = kWaveM / 16,
                       kBlocksN = kWaveN / 16;  // 16x16 accumulators of a wave
  static_assert(M % (16 * WavesM) == 0 && N % (16 * WavesN) == 0,
                "the wave grid must cut the tile into 16x16 blocks");
  static_assert(!kDirect || (M == 16 && WavesN == 1),
                "waves that share K all have the same 16 tokens and N outputs");
};

/// The tile of the variant that is compiled: its entry in launch.json.
using VariantTile = TileShape<QK_TILE_M, QK_TILE_N, QK_TILE_K, QK_WAVES_M, QK_WAVES_N, QK_WAVES_K>;
static_assert(VariantTile::kThreads == QK_THREADS,
              "launch.json says how many threads are launched");

/// The row of LDS that a thread's turn gives it, kBytes of a row being stored by neighbours: of
/// each 8 rows 0 4 1 5 2 6 3 7 with 64 bytes, 0 2 4 6 1 3 5 7 with 32. Eight lanes store 16 bytes
/// each in one cycle if all 32 banks take part. Rows start an odd number of 16 bytes apart (kPad):
/// row V = kBytes / 16 goes on in the banks where row 0 ends, and row 1 meets row 0. What lanes
/// read of a row of memory stays one run.
template <int kBytes>
QK_DEVICE int row_in_turn(int turn) {
  constexpr int kVectors = kBytes / 16, kApart = kVectors < 8 ? kVectors : 8;
  constexpr int kAtOnce = 8 / kApart;
  static_assert(kBytes % 16 == 0 && 8 % kApart == 0, "the rows of a cycle must fill the banks");
  const int first = turn % 8;
  return turn - first + first % kAtOnce * kApart + first / kAtOnce;
}

/// The part of a tile that one thread copies from global memory to LDS: kRows x kPerRow vectors of
/// type T, for rows of kLdsBytes.
template <class T, int kRows, int kPerRow, int kThreads, int kLdsBytes>
struct TileCopy {
  static constexpr int kCount = kRows * kPerRow / kThreads;
  static constexpr int kRowStep = kThreads / kPerRow;  // vectors of a thread lie below each other
  static_assert(kRows * kPerRow % kThreads == 0, "the threads must share the tile evenly");
  static_assert(kThreads % kPerRow == 0, "a thread must keep its column");
  static_assert(kRowStep % 8 == 0, "a thread must keep its place among 8 rows");
  T vectors[kCount];
  u32 offsets[kCount];  // bytes from the tile's first row

  /// Of its first vector, from the tile's first one.
  static QK_DEVICE int row(int thread) { return row_in_turn<kLdsBytes>(thread / kPerRow); }
  static QK_DEVICE int column(int thread) { return thread % kPerRow * static_cast<int>(sizeof(T)); }

  /// rows: which row of the matrix, from the tile's first one, each row of the tile is.
  template <class Map>
  QK_DEVICE void set_offsets(u32 pitch, const Map& rows, int thread) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      offsets[i] = static_cast<u32>(rows(row(thread) + i * kRowStep)) * pitch + column(thread);
    }
  }

  /// base: the first row's bytes of a step that has less than a whole one. Bytes >= bytes become
  /// `fill`.
  QK_DEVICE void load_partial_step(const u8* base, int bytes, int thread, const T& fill) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      vectors[i] = fill;
      if (column(thread) < bytes) vectors[i] = load<T>(base + offsets[i]);
    }
  }

  QK_DEVICE void load_step(const u8* base) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      offsets[i] = optimization_barrier(offsets[i]);
      vectors[i] = load<T>(base + offsets[i]);
    }
  }

  QK_DEVICE void store_step(u8* lds, int lds_pitch, int thread) const {
    u8* const first = lds + row(thread) * lds_pitch + column(thread);
    QK_UNROLL for (int i = 0; i < kCount; ++i)
      store(first + i * kRowStep * lds_pitch, vectors[i]);
  }
};

/// Operands of one GEMM. w_meta: what the codes of w need beside them (weights.h), null where they
/// need nothing.
struct Operands {
  const u8* x;
  const u8* w;
  const u8* w_meta;
  int m, n, k;
};

/// A tile's rows as the matrix has them. Those beyond the last repeat it: what they give is never
/// written, and no step has to ask.
struct ClampedRows {
  int count;  // from the tile's first one on

  static QK_DEVICE ClampedRows of_weights(const Operands& op, int n0) { return {op.n - n0}; }
  QK_DEVICE int operator()(int row) const { return row < count ? row : count - 1; }
};

template <class Tile>
using TokenCopy = TileCopy<Vec16, Tile::kM, Tile::kK / 16, Tile::kThreads, Tile::kK>;

/// Tokens as they lie in a matrix.
template <class Tile>
struct MatrixTokens : TokenCopy<Tile> {
  using Base = TokenCopy<Tile>;

  QK_DEVICE void set_offsets(const Operands& op, int m0, int thread) {
    Base::set_offsets(op.k, ClampedRows{op.m - m0}, thread);
  }
  QK_DEVICE void load_partial_step(const u8* base, int bytes, int thread) {
    Base::load_partial_step(base, bytes, thread, Vec16{});
  }
  QK_DEVICE void advance(int) {}
};

}  // namespace qk
