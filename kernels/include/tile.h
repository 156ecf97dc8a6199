// The tile loop of every GEMM: global memory -> registers -> double-buffered LDS -> fragments ->
// matrix unit.
//
// One block computes kM tokens x kN outputs. While a K step is multiplied from one LDS buffer, the
// next one is already on its way into registers; it is stored into the other buffer afterwards, so
// one barrier per step is enough. Rows beyond M or N repeat the last one and bytes beyond K are
// zeros: the matrix unit always runs with all lanes.
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

/// The part of a tile that one thread copies from global memory to LDS: kRows x kPerRow vectors of
/// type T.
template <class T, int kRows, int kPerRow, int kThreads>
struct TileCopy {
  static constexpr int kCount = kRows * kPerRow / kThreads;
  static constexpr int kRowStep = kThreads / kPerRow;  // vectors of a thread lie below each other
  static_assert(kRows * kPerRow % kThreads == 0, "the threads must share the tile evenly");
  static_assert(kThreads % kPerRow == 0, "a thread must keep its column");
  T vectors[kCount];
  u32 offsets[kCount];  // bytes from the tile's first row

  static QK_DEVICE int column(int thread) { return thread % kPerRow * static_cast<int>(sizeof(T)); }

  /// rows: which row of the matrix, from the tile's first one, each row of the tile is.
  template <class Map>
  QK_DEVICE void set_offsets(u32 pitch, const Map& rows, int thread) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      offsets[i] = static_cast<u32>(rows(thread / kPerRow + i * kRowStep)) * pitch + column(thread);
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
      offsets[i] = opaque(offsets[i]);
      vectors[i] = load<T>(base + offsets[i]);
    }
  }

  QK_DEVICE void store_step(u8* lds, int lds_pitch, int thread) const {
    u8* const first = lds + thread / kPerRow * lds_pitch + column(thread);
    QK_UNROLL for (int i = 0; i < kCount; ++i)
      store(first + i * kRowStep * lds_pitch, vectors[i]);
  }
};

/// Ends the multiplications: what follows may mask lanes.
template <class Acc, int kBlocksN, int kBlocksM>
QK_DEVICE void finish_all(Acc (&acc)[kBlocksN][kBlocksM]) {
  QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
    QK_UNROLL for (int j = 0; j < kBlocksM; ++j)
      finish(acc[i][j]);
  }
}

/// Operands of one GEMM; w_meta is null unless the weights are sparse.
struct Operands {
  const u8* x;
  const u8* w;
  const u8* w_meta;
  int m, n, k;
};

/// A tile's rows as the matrix has them. Those beyond the last repeat it: what they give is never
/// written, and no step has to ask.
struct Rows {
  int count;  // from the tile's first one on

  static QK_DEVICE Rows of_weights(const Operands& op, int n0) { return {op.n - n0}; }
  QK_DEVICE int operator()(int row) const { return row < count ? row : count - 1; }
};

/// Where the next step begins in the first rows of a tile.
template <bool kSparse>
struct RowsAt {
  const u8* x;
  const u8* w;
  const u8* meta;

  QK_DEVICE RowsAt(const Operands& op, int m0, int n0) {
    x = op.x + static_cast<i64>(m0) * op.k;
    w = op.w + static_cast<i64>(n0) * (kSparse ? op.k / 2 : op.k);
    meta = kSparse ? op.w_meta + static_cast<i64>(n0) * (op.k / 8) : nullptr;
  }

  QK_DEVICE void advance(int count) {
    x += count;
    w += kSparse ? count / 2 : count;
    if constexpr (kSparse) meta += count / 8;
  }
};

/// Tokens as they lie in a matrix.
template <class Tile>
struct MatrixTokens : TileCopy<Vec16, Tile::kM, Tile::kK / 16, Tile::kThreads> {
  using Base = TileCopy<Vec16, Tile::kM, Tile::kK / 16, Tile::kThreads>;

  QK_DEVICE void set_offsets(const Operands& op, int m0, int thread) {
    Base::set_offsets(op.k, Rows{op.m - m0}, thread);
  }
  QK_DEVICE void load_partial_step(const u8* base, int bytes, int thread) {
    Base::load_partial_step(base, bytes, thread, Vec16{});
  }
  QK_DEVICE void advance(int) {}
};

/// WeightRows: which rows of w a tile has. Tokens: where x is read.
template <class Tile, class Mma, class WeightRows, class Tokens = MatrixTokens<Tile>>
struct TileLoop {
  static constexpr bool kSparse = Mma::kSparse;
  static constexpr int kCodes =
      kSparse ? Tile::kK / 2 : Tile::kK;  // weight bytes of a row and step
  // 16 bytes of padding: rows start 4 banks apart modulo 16, so 8 lanes reading 16 bytes each meet
  // no bank twice. Sparse rows keep their metadata (kK / 8 <= 16 bytes) in it.
  static constexpr int kPad = 16;
  static constexpr int kPitchX = Tile::kK + kPad, kPitchW = kCodes + kPad;
  static constexpr int kBytesX = Tile::kM * kPitchX;
  static constexpr int kBufferBytes = kBytesX + Tile::kN * kPitchW;
  static constexpr int kLdsBytes = 2 * kBufferBytes;
  static_assert(kLdsBytes <= 64 * 1024, "a workgroup has 64 KB of LDS");
  static_assert(Tile::kK % Mma::kChunk == 0, "a step must be a whole number of fragments");
  static_assert(!kSparse || Tile::kK / 8 <= kPad,
                "the metadata of a step must fit into the row padding");

  using Accumulators = typename Mma::Acc[Tile::kBlocksN][Tile::kBlocksM];

  Tokens x;
  TileCopy<Vec16, Tile::kN, kCodes / 16, Tile::kThreads> w;
  TileCopy<u32, Tile::kN, Tile::kK / 32, Tile::kThreads> meta;

  QK_DEVICE void set_offsets(const Operands& op, int m0, int n0, int thread) {
    const WeightRows rows = WeightRows::of_weights(op, n0);
    x.set_offsets(op, m0, thread);
    w.set_offsets(kSparse ? op.k / 2 : op.k, rows, thread);
    if constexpr (kSparse) meta.set_offsets(op.k / 8, rows, thread);
  }

  /// The first step: `count` of its kK values of every row exist.
  QK_DEVICE void load_partial_step(const RowsAt<kSparse>& from, int count, int thread) {
    x.load_partial_step(from.x, count, thread);
    w.load_partial_step(from.w, kSparse ? count / 2 : count, thread, Vec16{});
    if constexpr (kSparse) meta.load_partial_step(from.meta, count / 8, thread, kNeutral);
  }

  QK_DEVICE void load_step(const RowsAt<kSparse>& from) {
    x.load_step(from.x);
    w.load_step(from.w);
    if constexpr (kSparse) meta.load_step(from.meta);
  }

  QK_DEVICE void store_step(u8* buffer, int thread) const {
    x.store_step(buffer, kPitchX, thread);
    w.store_step(buffer + kBytesX, kPitchW, thread);
    if constexpr (kSparse) meta.store_step(buffer + kBytesX + kCodes, kPitchW, thread);
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
        a[i] = Mma::template load_a<kPitchW, kCodes, Tile::kBlocksN>(w_rows, i, chunk, lane);
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
    const int first = (op.k - 1) % Tile::kK + 1;
    RowsAt<kSparse> rows(op, m0, n0);
    set_offsets(op, m0, n0, thread);
    load_partial_step(rows, first, thread);
    rows.advance(first);
    x.advance(first);
    store_step(current, thread);
    block_sync();
    QK_NO_UNROLL for (int left = op.k - first; left > 0; left -= Tile::kK) {
      load_step(rows);
      rows.advance(Tile::kK);
      x.advance(Tile::kK);
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
