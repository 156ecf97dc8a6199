// The tile loop of every GEMM: global memory -> registers -> double-buffered LDS -> fragments -> matrix unit.
//
// One block computes kM tokens x kN outputs. While a K step is multiplied from one LDS buffer, the next one
// is already on its way into registers; it is stored into the other buffer afterwards, so one barrier per
// step is enough. Rows beyond M or N and bytes beyond K are loaded as zeros: the matrix unit always runs with
// all lanes.
#pragma once

#include "config.h"

namespace qk {

/// kK bytes of every x row per step; the wave grid cuts the tile into kWaveM x kWaveN per wave.
template <int M, int N, int K, int WavesM, int WavesN>
struct TileShape {
  static constexpr int kM = M, kN = N, kK = K;
  static constexpr int kWavesN = WavesN;
  static constexpr int kThreads = WavesM * WavesN * kWave;
  static constexpr int kWaveM = M / WavesM, kWaveN = N / WavesN;
  static constexpr int kBlocksM = kWaveM / 16, kBlocksN = kWaveN / 16;  // 16x16 accumulators of a wave
  static_assert(M % (16 * WavesM) == 0 && N % (16 * WavesN) == 0,
                "the wave grid must cut the tile into 16x16 blocks");
};

// The menu; launch.json repeats these numbers for the launcher and the .hip files assert them.
template <int kIndex>
struct TileMenu;
// Four waves of 64x64: 128 accumulators a lane, and each fragment read from LDS feeds four matrix operations.
template <>
struct TileMenu<0> : TileShape<128, 128, 64, 2, 2> {};
// Four times the blocks for layers whose 128x128 grid would leave compute units idle; weight fragments still
// in fours.
template <>
struct TileMenu<1> : TileShape<64, 64, 64, 2, 1> {};
// M <= 16 (time embeddings): bound by the weight stream, so narrow, with twice the bytes in flight.
template <>
struct TileMenu<2> : TileShape<16, 64, 128, 1, 2> {};

/// Whether menu entry kIndex is what launch.json says.
template <int kIndex>
constexpr bool tile_is(int m, int n, int block) {
  return TileMenu<kIndex>::kM == m && TileMenu<kIndex>::kN == n && TileMenu<kIndex>::kThreads == block;
}
static_assert(tile_is<0>(128, 128, 128) && tile_is<1>(64, 64, 64) && tile_is<2>(16, 64, 64),
              "launch.json repeats the menu: change both");

/// The part of a tile that one thread carries from global memory to LDS: kRows x kPerRow pieces of type T.
template <class T, int kRows, int kPerRow, int kThreads>
struct Carrier {
  static constexpr int kCount = kRows * kPerRow / kThreads;
  static_assert(kRows * kPerRow % kThreads == 0, "the threads must share the tile evenly");
  T pieces[kCount];

  /// base: first row's bytes of this step. Rows >= rows and bytes >= bytes of a row become `fill`.
  QK_DEVICE void fetch(const u8* base, u32 pitch, int rows, int bytes, int thread, const T& fill) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      const int piece = i * kThreads + thread, row = piece / kPerRow;
      const int column = piece % kPerRow * static_cast<int>(sizeof(T));
      pieces[i] = fill;
      if (row < rows && column < bytes) pieces[i] = load<T>(base + (static_cast<u32>(row) * pitch + column));
    }
  }

  QK_DEVICE void deposit(u8* lds, int lds_pitch, int thread) const {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      const int piece = i * kThreads + thread;
      store(lds + piece / kPerRow * lds_pitch + piece % kPerRow * static_cast<int>(sizeof(T)), pieces[i]);
    }
  }
};

/// Operands of one GEMM; w_meta is null unless the weights are sparse.
struct Operands {
  const u8* x;
  const u8* w;
  const u8* w_meta;
  int m, n, k;
};

template <class Tile, class Mma>
struct TileLoop {
  static constexpr bool kSparse = Mma::kSparse;
  static constexpr int kCodes = kSparse ? Tile::kK / 2 : Tile::kK;  // weight bytes of a row and step
  // 16 bytes of padding: rows start 4 banks apart modulo 16, so 8 lanes reading 16 bytes each meet no bank
  // twice. Sparse rows keep their metadata (kK / 8 <= 16 bytes) in it.
  static constexpr int kPad = 16;
  static constexpr int kPitchX = Tile::kK + kPad, kPitchW = kCodes + kPad;
  static constexpr int kBytesX = Tile::kM * kPitchX;
  static constexpr int kBufferBytes = kBytesX + Tile::kN * kPitchW;
  static constexpr int kLdsBytes = 2 * kBufferBytes;
  static_assert(kLdsBytes <= 64 * 1024, "a workgroup has 64 KB of LDS");
  static_assert(Tile::kK % Mma::kChunk == 0, "a step must be a whole number of fragments");
  static_assert(!kSparse || Tile::kK / 8 <= kPad, "the metadata of a step must fit into the row padding");

  using Accumulators = typename Mma::Acc[Tile::kBlocksN][Tile::kBlocksM];

  Carrier<Vec16, Tile::kM, Tile::kK / 16, Tile::kThreads> x;
  Carrier<Vec16, Tile::kN, kCodes / 16, Tile::kThreads> w;
  Carrier<u32, Tile::kN, Tile::kK / 32, Tile::kThreads> meta;

  QK_DEVICE void fetch(const Operands& op, int m0, int n0, int k0, int thread) {
    const int left = op.k - k0;
    x.fetch(op.x + static_cast<i64>(m0) * op.k + k0, op.k, op.m - m0, left, thread, Vec16{});
    if constexpr (kSparse) {
      constexpr u32 kNeutral = 0x44444444u;  // positions 0 and 1 everywhere: legal, and the codes are zero
      w.fetch(op.w + static_cast<i64>(n0) * (op.k / 2) + k0 / 2, op.k / 2, op.n - n0, left / 2, thread, Vec16{});
      meta.fetch(op.w_meta + static_cast<i64>(n0) * (op.k / 8) + k0 / 8, op.k / 8, op.n - n0, left / 8, thread,
                 kNeutral);
    } else {
      w.fetch(op.w + static_cast<i64>(n0) * op.k + k0, op.k, op.n - n0, left, thread, Vec16{});
    }
  }

  QK_DEVICE void deposit(u8* buffer, int thread) const {
    x.deposit(buffer, kPitchX, thread);
    w.deposit(buffer + kBytesX, kPitchW, thread);
    if constexpr (kSparse) meta.deposit(buffer + kBytesX + kCodes, kPitchW, thread);
  }

  static QK_DEVICE void multiply(Accumulators& acc, const u8* buffer, int wave_m, int wave_n, int lane) {
    const u8* const x_rows = buffer + wave_m * kPitchX;
    const u8* const w_rows = buffer + kBytesX + wave_n * kPitchW;
    // Unrolled, the fragments of all chunks live at once: gfx1100 spilled 245 registers, gfx1201 had none left.
    QK_NO_UNROLL
    for (int chunk = 0; chunk < Tile::kK / Mma::kChunk; ++chunk) {
      typename Mma::A a[Tile::kBlocksN];
      typename Mma::B b[Tile::kBlocksM];
      QK_UNROLL for (int i = 0; i < Tile::kBlocksN; ++i) {
        a[i] = Mma::template load_a<kPitchW, kCodes, Tile::kBlocksN>(w_rows, i, chunk, lane);
      }
      QK_UNROLL for (int j = 0; j < Tile::kBlocksM; ++j)
        b[j] = Mma::template load_b<kPitchX>(x_rows, j, chunk, lane);
      Mma::multiply(acc, a, b);
    }
  }

  /// Runs the whole K loop of the tile at (m0, n0) for the calling wave.
  QK_DEVICE void run(Accumulators& acc, const Operands& op, u8* lds, int m0, int n0) {
    const int thread = thread_index(), wave = wave_index(), lane = thread % kWave;
    const int wave_m = wave / Tile::kWavesN * Tile::kWaveM, wave_n = wave % Tile::kWavesN * Tile::kWaveN;
    u8* current = lds;
    u8* next = lds + kBufferBytes;
    fetch(op, m0, n0, 0, thread);
    deposit(current, thread);
    block_sync();
    for (int k0 = 0; k0 < op.k; k0 += Tile::kK) {
      const bool more = k0 + Tile::kK < op.k;
      if (more) fetch(op, m0, n0, k0 + Tile::kK, thread);
      multiply(acc, current, wave_m, wave_n, lane);
      if (more) {
        deposit(next, thread);
        block_sync();
      }
      u8* const swap = current;
      current = next;
      next = swap;
    }
  }
};

}  // namespace qk
