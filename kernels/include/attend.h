// clang-format off
// The loop of attention: S^T = K Q^T, P = exp2 of it, O^T = V^T P^T, over tiles of keys.
//
// Keys are the rows of the first product and queries its columns, so a lane has one query, and what
// it gets of S is what the second product wants of P: probabilities never move between lanes.
//
//   block i = 2c + s of a tile, row r           key 32c + 16 (r / 8) + 8s + r % 8 of the tile
//   lane (h = lane / 16, r = lane % 16)         query r of each of its kQueryBlocks
//   score e of block i in half h                key 32c + 16h + 8s + e
//   chunk c of V^T, row d, half h               keys 32c + 16h .. 32c + 16h + 15: attend_values.h
// clang-format on
//
// The tile that the keys do not fill comes first, and is the last one in memory: no later tile asks
// for anything, and V^T is read from where 16 bytes start.
#pragma once

#include "attend_head.h"
#include "attend_values.h"

namespace qk {

/// What a thread copies of kRows rows of kPerRow 16-byte vectors, memory to LDS.
template <int kRows, int kPerRow, int kThreads>
struct RowsCopy {
  static constexpr int kTotal = kRows * kPerRow, kCount = (kTotal + kThreads - 1) / kThreads;
  Vec16 vectors[kCount];
  u32 offsets[kCount];

  static QK_DEVICE int row(int index) { return index / kPerRow; }
  static QK_DEVICE int column(int index) { return index % kPerRow * 16; }
  static_assert(kTotal % kWave == 0, "a wave copies with all lanes, or with none");
  /// Whether the thread has an i-th vector: the same for all of its wave.
  static QK_DEVICE bool has(int i) {
    return (i + 1) * kThreads <= kTotal || wave_index() * kWave + i * kThreads < kTotal;
  }

  QK_DEVICE void set_offsets(u32 pitch, int thread) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      const int index = thread + i * kThreads;
      offsets[i] = static_cast<u32>(row(index)) * pitch + column(index);
    }
  }
  /// Rows beyond the last repeat it; bytes beyond a row's end become zero.
  QK_DEVICE void load_part(const u8* base, u32 pitch, int rows, int bytes, int thread) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      const int index = thread + i * kThreads;
      vectors[i] = {};
      if (!has(i) || column(index) >= bytes) continue;
      const int from = row(index) < rows ? row(index) : rows - 1;
      vectors[i] = load<Vec16>(base + static_cast<u32>(from) * pitch + column(index));
    }
  }
  QK_DEVICE void load_whole(const u8* base, int thread) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      offsets[i] = optimization_barrier(offsets[i]);
      if (has(i)) vectors[i] = load<Vec16>(base + offsets[i]);
    }
  }
  QK_DEVICE void store_all(u8* lds, int pitch, int thread) const {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      const int index = thread + i * kThreads;
      if (has(i)) store(lds + row(index) * pitch + column(index), vectors[i]);
    }
  }
};

/// What two buffers of keys and values may take.
constexpr int kLdsLimit = 32 * 1024;

template <int kD, int kQueryBlocks, int kKeys, int kThreads, Format kQk, Pv kPv>
struct Attention {
  using Scores = DenseMma<kQk, kQk>;
  using Values = ValuesOf<kPv>;
  static constexpr bool kInt8 = kQk == Format::kInt8;
  static constexpr int kWaveQueries = 16 * kQueryBlocks;
  static constexpr int kKeyBlocks = kKeys / 16, kHeadBlocks = kD / 16;
  static constexpr int kChunks = kD / Scores::kChunk;      // whole ones of a row of K
  static constexpr bool kHalf = kD % Scores::kChunk != 0;  // and a half
  // Odd numbers of 16 bytes: rows then begin in different banks.
  static constexpr int kPitchK = kD + (kHalf ? 0 : 16), kRowV = kKeys * Values::kBytes;
  static constexpr int kBytesK = kKeys * kPitchK;
  // Where two padded buffers do not fit, two rows of V^T share banks.
  static constexpr bool kPadV = 2 * (kBytesK + kD * (kRowV + 16)) <= kLdsLimit;
  static constexpr int kPitchV = kRowV + (kPadV ? 16 : 0);
  static constexpr int kBufferBytes = kBytesK + kD * kPitchV;
  static constexpr int kLdsBytes = 2 * kBufferBytes;
  static_assert(kKeys % 32 == 0, "a tile must be a whole number of fragments of V^T");
  static_assert(kD % 16 == 0, "a head must be a whole number of instructions");

  // What a lane has of the result: its queries, and runs of neighbouring columns of each.
  static constexpr int kLaneQueries = kQueryBlocks, kRuns = kHeadBlocks, kRun = 8;
  static QK_DEVICE int lane() { return thread_index() % kWave; }
  static QK_DEVICE int query(int which, int lane) { return 16 * which + lane % 16; }
  static QK_DEVICE int column(int run, int lane) { return 16 * run + 8 * (lane / 16); }
  QK_DEVICE f32 total(int which) const { return rows[which].total(); }
  QK_DEVICE f32 value(int which, int run, int e) const { return out[run][0][which][e]; }

  struct Score {
    f32 v[8];
  };
  /// Of int8 codes: a lane's 16 keys of every chunk have one.
  using KeyScales = f32[kKeys / 32];
  using Tile = Score[kKeyBlocks][kQueryBlocks];

  typename Values::Acc out[kHeadBlocks][1][kQueryBlocks];
  SoftmaxRow rows[kQueryBlocks];
  // What scores are added to: of FP8 a row's bias in all eight registers, so that none has to be
  // copied; of int8 zeros.
  typename Scores::Acc start[kQueryBlocks];
  typename Scores::B q[kChunks + kHalf][kQueryBlocks];
  f32 q_scale[kQueryBlocks];

  template <class Acc, class Value>
  static QK_DEVICE void fill(Acc& acc, Value value) {
    QK_UNROLL for (int e = 0; e < 8; ++e)
      acc[e] = value;
  }

  QK_DEVICE void load_queries(const Head& head, int first, int lane) {
    QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j) {
      int query = first + 16 * j + lane % 16;
      query = query < head.queries ? query : head.queries - 1;
      const u8* const row = head.q + static_cast<i64>(query) * kD;
      QK_UNROLL for (int c = 0; c < kChunks; ++c)
        q[c][j] = Scores::load_row(row, c, lane);
      if constexpr (kHalf) q[kChunks][j] = Scores::load_half_row(row, kChunks, lane);
      if constexpr (kInt8) q_scale[j] = head.q_scale[query];
    }
  }

  /// Products of a block of 16 keys, in `acc`.
  QK_DEVICE void multiply_keys(typename Scores::Acc (&acc)[1][kQueryBlocks], const u8* k_rows,
                               int block, int lane) const {
    const int r = lane % 16;
    const u8* const row =
        k_rows + (32 * (block / 2) + 8 * (block % 2) + 16 * (r / 8) + r % 8) * kPitchK;
    QK_UNROLL for (int c = 0; c < kChunks; ++c) {
      const typename Scores::A keys[1] = {Scores::load_row(row, c, lane)};
      Scores::multiply(acc, keys, q[c]);
    }
    if constexpr (kHalf) {
      const typename Scores::A keys[1] = {Scores::load_half_row(row, kChunks, lane)};
      Scores::multiply_half(acc, keys, q[kChunks]);
    }
  }

  /// Scores plus 8 - m, in powers of two. FP8 codes have been made so that their products are
  /// scores: 8 - m is what the matrix unit adds them to.
  QK_DEVICE void score(Tile& s, const u8* k_rows, const KeyScales& k_scale, int lane) const {
    QK_UNROLL for (int i = 0; i < kKeyBlocks; ++i) {
      typename Scores::Acc acc[1][kQueryBlocks];
      QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j)
        acc[0][j] = start[j];
      multiply_keys(acc, k_rows, i, lane);
      QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j) {
        const f32 scale = kInt8 ? q_scale[j] * k_scale[i / 2] : 1.0f;
        QK_UNROLL for (int e = 0; e < 8; ++e) {
          const auto sum = static_cast<f32>(acc[0][j][e]);
          s[i][j].v[e] = kInt8 ? multiply_add(sum, scale, rows[j].bias) : sum;
        }
      }
    }
  }

  /// Keys from `count` on get no probability.
  static QK_DEVICE void mask(Tile& s, int count, int lane) {
    constexpr f32 kNever = -__builtin_huge_valf();
    QK_UNROLL for (int i = 0; i < kKeyBlocks; ++i) {
      QK_UNROLL for (int e = 0; e < 8; ++e) {
        const int key = 32 * (i / 2) + 16 * (lane / 16) + 8 * (i % 2) + e;
        QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j)
          s[i][j].v[e] = key < count ? s[i][j].v[e] : kNever;
      }
    }
  }

  /// The largest score of a block of queries, in both halves of the wave.
  static QK_DEVICE f32 largest(const Tile& s, int j) {
    f32 even = s[0][j].v[0], odd = s[0][j].v[1];
    QK_UNROLL for (int i = 0; i < kKeyBlocks; ++i) {
      QK_UNROLL for (int e = 0; e < 8; e += 2) {
        even = maximum(even, s[i][j].v[e]);
        odd = maximum(odd, s[i][j].v[e + 1]);
      }
    }
    const f32 mine = maximum(even, odd);
    return maximum(mine, swap_halves(mine));
  }

  /// Lets the maximum of a block of queries grow by a number of each lane.
  template <bool kFirst>
  QK_DEVICE void grow(Tile& s, int j, f32 growth) {
    rows[j].bias -= growth;
    if constexpr (!kInt8) fill(start[j], rows[j].bias);
    // Nothing was summed before the first tile, and 2^-growth may be infinite there.
    if constexpr (!kFirst) {
      const f32 factor = approx_exp2(-growth);
      rows[j].sum *= factor;
      QK_UNROLL for (int d = 0; d < kHeadBlocks; ++d) {
        QK_UNROLL for (int e = 0; e < 8; ++e)
          out[d][0][j][e] *= factor;
      }
    }
    QK_UNROLL for (int i = 0; i < kKeyBlocks; ++i) {
      QK_UNROLL for (int e = 0; e < 8; ++e)
        s[i][j].v[e] -= growth;
    }
  }

  /// Lets maxima grow where a score has outgrown them: rare, and laid out beside the loop.
  template <bool kFirst>
  QK_DEVICE void rescale(Tile& s) {
    f32 tops[kQueryBlocks], top = largest(s, 0);
    QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j) {
      tops[j] = j == 0 ? top : largest(s, j);
      top = maximum(top, tops[j]);
    }
    if (!kFirst && __builtin_expect(!any_lane(top > kOutgrown), 1)) return;
    QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j)
      grow<kFirst>(s, j, kFirst || tops[j] > kOutgrown ? growth_to(tops[j]) : 0.0f);
  }

  using Probabilities = typename Values::Probabilities[kKeyBlocks / 2][kQueryBlocks];

  /// Rounded probabilities, and their sums.
  QK_DEVICE void encode(Probabilities& p, const Tile& s) {
    QK_UNROLL for (int c = 0; c < kKeyBlocks / 2; ++c) {
      QK_UNROLL for (int w = 0; w < 4; ++w) {
        QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j)
          Values::encode(p[c][j], w, s[2 * c + w / 2][j].v + 4 * (w % 2));
      }
    }
    QK_UNROLL for (int c = 0; c < kKeyBlocks / 2; ++c) {
      QK_UNROLL for (int w = 0; w < 4; ++w) {
        QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j)
          rows[j].sum = Values::add(p[c][j], w, rows[j].sum);
      }
    }
  }

  QK_DEVICE void multiply_values(const Probabilities& p, const u8* v_rows, int lane) {
    QK_UNROLL for (int c = 0; c < kKeyBlocks / 2; ++c) {
      QK_UNROLL for (int d = 0; d < kHeadBlocks; ++d) {
        const u8* const row = v_rows + (16 * d + lane % 16) * kPitchV;
        Values::multiply(out[d], Values::load_row(row, c, lane), p[c]);
      }
    }
  }

  /// The tile of the keys from `key` on. The first one may have fewer than kKeys.
  template <bool kFirst>
  QK_DEVICE void step(const Head& head, const u8* buffer, int key, int lane) {
    KeyScales k_scale = {};
    if constexpr (kInt8) {
      QK_UNROLL for (int c = 0; c < kKeys / 32; ++c) {
        const int group = key / 16 + 2 * c + lane / 16, last = (head.keys - 1) / 16;
        k_scale[c] = head.k_scale[group < last ? group : last];
      }
    }
    Tile s;
    score(s, buffer, k_scale, lane);
    if constexpr (kFirst) mask(s, head.keys - key, lane);
    rescale<kFirst>(s);
    Probabilities p;
    encode(p, s);
    // Else fragments of V^T are loaded while scores still live, and registers spill.
    schedule_barrier();
    multiply_values(p, buffer + kBytesK, lane);
  }

  /// All keys for the queries of the calling wave; `first` is its first one.
  QK_DEVICE void run(const Head& head, u8* lds, int first) {
    const int thread = thread_index(), lane = thread % kWave;
    RowsCopy<kKeys, kD / 16, kThreads> k;
    RowsCopy<kD, kRowV / 16, kThreads> v;
    QK_UNROLL for (int d = 0; d < kHeadBlocks; ++d) {
      QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j)
        fill(out[d][0][j], 0.0f);
    }
    QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j) {
      if constexpr (kInt8) fill(start[j], 0);
      if constexpr (!kInt8) fill(start[j], kTop);
    }
    const int whole = (head.keys - 1) / kKeys * kKeys;
    const int pitch = head.pitch * Values::kBytes;
    load_queries(head, first, lane);
    k.load_part(head.k + static_cast<i64>(whole) * kD, kD, head.keys - whole, kD, thread);
    v.load_part(head.v + whole * Values::kBytes, pitch, kD, pitch - whole * Values::kBytes, thread);
    k.set_offsets(kD, thread);
    v.set_offsets(pitch, thread);
    u8 *current = lds, *next = lds + kBufferBytes;
    const auto store_tile = [&](u8* buffer) {
      k.store_all(buffer, kPitchK, thread);
      v.store_all(buffer + kBytesK, kPitchV, thread);
      block_sync();
    };
    store_tile(current);
    if (whole == 0) {
      step<true>(head, current, 0, lane);
    } else {
      k.load_whole(head.k, thread);
      v.load_whole(head.v, thread);
      step<true>(head, current, whole, lane);
      store_tile(next);
      // The last turn fetches a tile that nobody reads: cheaper than asking in every turn.
      QK_NO_UNROLL for (int key = 0; key < whole; key += kKeys) {
        const int following = key + kKeys < whole ? key + kKeys : 0;
        k.load_whole(head.k + static_cast<i64>(following) * kD, thread);
        v.load_whole(head.v + following * Values::kBytes, thread);
        u8* const swap = current;
        current = next;
        next = swap;
        step<false>(head, current, key, lane);
        store_tile(next);
      }
    }
    QK_UNROLL for (int d = 0; d < kHeadBlocks; ++d) {
      QK_UNROLL for (int j = 0; j < kQueryBlocks; ++j)
        finish(out[d][0][j]);
    }
  }
};

}  // namespace qk
