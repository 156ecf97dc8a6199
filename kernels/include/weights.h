// How weights are stored, and how a tile's rows of them come to LDS: dense codes, 2:4 codes with
// their positions, and int4 codes, which become int8 on the way.
#pragma once

#include "tile.h"

namespace qk {

// 16 bytes of padding: rows start 4 banks apart modulo 16, so 8 lanes reading 16 bytes each meet no
// bank twice. Sparse rows keep their metadata (kK / 8 <= 16 bytes) in it.
constexpr int kPad = 16;

/// Weights in a byte of w, and in a byte of w_meta; 0: there is none.
template <int PerByte, int PerMeta>
struct Storage {
  static constexpr int kPerByte = PerByte, kPerMeta = PerMeta;
};
template <bool kSparse>
using CodeStorage = Storage<kSparse ? 2 : 1, kSparse ? 8 : 0>;
using Int4Storage = Storage<2, 32>;

/// Where the next step begins in the first rows of a tile.
template <class Stored>
struct RowsAt {
  const u8* x;
  const u8* w;
  const u8* meta;

  QK_DEVICE RowsAt(const Operands& op, int m0, int n0) {
    x = op.x + static_cast<i64>(m0) * op.k;
    w = op.w + static_cast<i64>(n0) * (op.k / Stored::kPerByte);
    meta = nullptr;
    if constexpr (Stored::kPerMeta > 0) {
      meta = op.w_meta + static_cast<i64>(n0) * (op.k / Stored::kPerMeta);
    }
  }

  QK_DEVICE void advance(int count) {
    x += count;
    w += count / Stored::kPerByte;
    if constexpr (Stored::kPerMeta > 0) meta += count / Stored::kPerMeta;
  }
};

/// Pointers to int4 weights stay, and the offsets of their vectors move (Int4Weights::advance): a
/// vector or two, where a pointer takes two registers and four instructions of a step.
template <>
struct RowsAt<Int4Storage> {
  const u8* x;
  const u8* w;
  const u8* meta;

  QK_DEVICE RowsAt(const Operands& op, int m0, int n0) {
    x = op.x + static_cast<i64>(m0) * op.k;
    w = op.w + static_cast<i64>(n0) * (op.k / 2);
    meta = op.w_meta + static_cast<i64>(n0) * (op.k / 32);
  }

  QK_DEVICE void advance(int count) { x += count; }
};

/// Codes as they are, dense or 2:4.
template <class Tile, bool kSparse>
struct CodeWeights {
  using Stored = CodeStorage<kSparse>;
  static constexpr int kCodes = Tile::kK / Stored::kPerByte;  // bytes in LDS of a row and step
  static constexpr int kPitch = kCodes + kPad;
  static_assert(!kSparse || Tile::kK / 8 <= kPad,
                "the metadata of a step must fit into the row padding");

  TileCopy<Vec16, Tile::kN, kCodes / 16, Tile::kThreads, kCodes> w;
  TileCopy<u32, Tile::kN, Tile::kK / 32, Tile::kThreads, kCodes> meta;

  template <class Map>
  QK_DEVICE void set_offsets(int k, const Map& rows, int thread) {
    w.set_offsets(k / Stored::kPerByte, rows, thread);
    if constexpr (kSparse) meta.set_offsets(k / 8, rows, thread);
  }

  QK_DEVICE void load_partial_step(const RowsAt<Stored>& from, int count, int thread) {
    w.load_partial_step(from.w, count / Stored::kPerByte, thread, Vec16{});
    if constexpr (kSparse) meta.load_partial_step(from.meta, count / 8, thread, kNeutral);
  }

  QK_DEVICE void load_step(const RowsAt<Stored>& from) {
    w.load_step(from.w);
    if constexpr (kSparse) meta.load_step(from.meta);
  }

  QK_DEVICE void advance(int) {}

  QK_DEVICE void store_step(u8* lds, int thread) const {
    w.store_step(lds, kPitch, thread);
    if constexpr (kSparse) meta.store_step(lds + kCodes, kPitch, thread);
  }
};

/// Weights (code - 8) * s as int8, |s| <= 15: 16 bytes hold 32 codes, byte i those of k = i (low)
/// and i +
/// 16. They are decoded once per tile, on the way to LDS: in fragments it would be once per wave.
template <class Tile>
struct Int4Weights {
  using Stored = Int4Storage;
  static constexpr int kCodes = Tile::kK;
  static constexpr int kPitch = kCodes + kPad;

  TileCopy<Vec16, Tile::kN, Tile::kK / 32, Tile::kThreads, kCodes> w;
  TileCopy<i8, Tile::kN, Tile::kK / 32, Tile::kThreads, kCodes> scales;

  template <class Map>
  QK_DEVICE void set_offsets(int k, const Map& rows, int thread) {
    w.set_offsets(k / 2, rows, thread);
    scales.set_offsets(k / 32, rows, thread);
  }

  /// A scale of 0 makes zeros of what is not there.
  QK_DEVICE void load_partial_step(const RowsAt<Stored>& from, int count, int thread) {
    w.load_partial_step(from.w, count / 2, thread, Vec16{});
    scales.load_partial_step(from.meta, count / 32, thread, i8{0});
  }

  QK_DEVICE void load_step(const RowsAt<Stored>& from) {
    w.load_step(from.w);
    scales.load_step(from.meta);
  }

  QK_DEVICE void advance(int count) {
    QK_UNROLL for (int i = 0; i < w.kCount; ++i) {
      w.offsets[i] += static_cast<u32>(count / 2);
      scales.offsets[i] += static_cast<u32>(count / 32);
    }
  }

  QK_DEVICE void store_step(u8* lds, int thread) const {
    constexpr int kPerRow = Tile::kK / 32;
    u8* const first = lds + w.row(thread) * kPitch + thread % kPerRow * 32;
    QK_UNROLL for (int i = 0; i < w.kCount; ++i) {
      Vec16 low, high;
      decode(w.vectors[i], scales.vectors[i], low, high);
      u8* const target = first + i * w.kRowStep * kPitch;
      store(target, low);
      store(target + 16, high);
    }
  }

 private:
  static QK_DEVICE void decode(const Vec16& codes, int s, Vec16& low, Vec16& high) {
    QK_UNROLL for (int i = 0; i < 4; ++i) {
      low.v[i] = scale_codes(codes.v[i] & 0x0f0f0f0fu, s) ^ 0x80808080u;
      high.v[i] = scale_codes(codes.v[i] >> 4 & 0x0f0f0f0fu, s) ^ 0x80808080u;
    }
  }
};

}  // namespace qk
