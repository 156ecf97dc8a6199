// clang-format off
// The loop of attention with NVIDIA's mma.sync: S = Q K^T, P = exp2 of it, O = P V, over tiles of
// keys.
//
// Queries are the rows of both products, so what a lane gets of S is what the second product wants
// of P when K's rows lie in another order: probabilities stay in their registers.
//
//   g = lane / 4, t = lane % 4; block b of a warp has queries 16b .. 16b + 15
//   S    s[b][4j + e]       query 16b + g + 8 (e / 2), row 8j + 2t + e % 2 of the tile of K
//   row 8j + c of K         key 32 (j / 4) + 16 (j / 2 % 2) + 4 (c / 2) + 2 (j % 2) + c % 2
//   P    p[b][step][i]      query 16b + g + 8 (i % 2), keys 32 step + 16 (i / 2) + 4t .. + 3
//   O    out[b][j][e]       query as S, column 8j + 2t + e % 2
// clang-format on
//
// The FP8 unit of these cards keeps fewer bits than float32 of what it adds, so a tile's sums leave
// it before the next one's, as on Hopper (attend_sm90.h has the errors). 8 - m is added behind the
// products for the same reason. The sums of codes are a product with ones.
//
// Tiles come by cp.async, which takes no registers; K's rows change places on the way, because
// eight neighbouring rows, an odd number of 16 bytes apart, are read without bank conflicts.
#pragma once

#include "attend_head.h"
#include "mma.h"
#include "pieces_sm89.h"
#include "softmax.h"

namespace qk {

template <int kD, int kQueryBlocks, int kKeys, int kThreads, Format kQk, Pv kPv>
struct Attention {
  static_assert(kPv == Pv::kE4M3FN, "there are no others here");
  using Scores = DenseMma<kQk, kQk>;
  using Values = DenseMma<Format::kE4M3FN, Format::kE4M3FN>;
  static constexpr bool kInt8 = kQk == Format::kInt8;
  static constexpr int kWaveQueries = 16 * kQueryBlocks;
  static constexpr int kPieces = kD / 16, kHeadSteps = (kPieces + 1) / 2;
  static constexpr int kKeySteps = kKeys / 32, kScores = kKeys / 2;
  static constexpr int kValuePieces = kKeys / 16, kValueBlocks = kD / 8;
  static constexpr int kPitchK = kD + (kPieces % 2 != 0 ? 0 : 16), kPitchV = kKeys + 16;
  static constexpr int kBytesK = kKeys * kPitchK, kBufferBytes = kBytesK + kD * kPitchV;
  static constexpr int kLdsBytes = 2 * kBufferBytes;
  static_assert(kKeys == 32 || kKeys == 64, "four pieces of V^T are one or two blocks of columns");
  static_assert(kD % 16 == 0, "a head must be a whole number of pieces");

  // What a lane has of the result: its queries, and runs of neighbouring columns of each.
  static constexpr int kLaneQueries = 2 * kQueryBlocks, kRuns = kValueBlocks, kRun = 2;
  static QK_DEVICE int lane() { return fresh_thread_index() % kWave; }
  static QK_DEVICE int query(int which, int lane) { return 8 * which + lane / 4; }
  static QK_DEVICE int column(int run, int lane) { return 8 * run + 2 * (lane % 4); }
  QK_DEVICE f32 total(int which) const { return sum[which / 2][which % 2]; }
  QK_DEVICE f32 value(int which, int run, int e) const {
    return out[which / 2][run][2 * (which % 2) + e];
  }

  /// Blocks of queries whose scores live at a time. With both, those of larger heads do not fit the
  /// registers; one at a time, K's rows are read twice.
  static constexpr int kTogether = kD > 80 ? 1 : kQueryBlocks;
  using Tile = f32[kTogether][kScores];
  using Probabilities = u32[kQueryBlocks][kKeySteps][4];
  /// Of int8 codes: 16 keys have one.
  using KeyScales = f32[kKeys / 16];

  f32 out[kQueryBlocks][kValueBlocks][4];
  f32 bias[kQueryBlocks][2], sum[kQueryBlocks][2], q_scale[kQueryBlocks][2];
  u32 q[kQueryBlocks][kHeadSteps][4];
  QK_DEVICE void load_queries(const Head& head, int first, int lane) {
    QK_UNROLL for (int b = 0; b < kQueryBlocks; ++b) {
      QK_UNROLL for (int r = 0; r < 2; ++r) {
        int query = first + 16 * b + 8 * r + lane / 4;
        query = query < head.queries ? query : head.queries - 1;
        const u8* const row = head.q + static_cast<i64>(query) * kD + 4 * (lane % 4);
        QK_UNROLL for (int i = 0; i < 2 * kHeadSteps; ++i)
          q[b][i / 2][i % 2 * 2 + r] = i < kPieces ? load<u32>(row + 16 * i) : 0;
        if constexpr (kInt8) q_scale[b][r] = head.q_scale[query];
      }
    }
  }

  /// Which key of a tile lies in a row of it.
  static constexpr QK_DEVICE int key_of(int row) {
    const int j = row / 8, c = row % 8;
    return 32 * (j / 4) + 16 * (j / 2 % 2) + 4 * (c / 2) + 2 * (j % 2) + c % 2;
  }

  /// Calls copy(row, byte) for the 16-byte pieces of kRows rows that the thread copies.
  template <int kRows, int kBytes, class Copy>
  static QK_DEVICE void share(const Copy& copy) {
    constexpr int kPerRow = kBytes / 16, kTotal = kRows * kPerRow;
    const u32 thread = fresh_thread_index();  // unsigned: divisions take fewer registers
    QK_UNROLL for (int i = 0; i < (kTotal + kThreads - 1) / kThreads; ++i) {
      const u32 index = thread + i * kThreads;
      if ((i + 1) * kThreads <= kTotal || index < kTotal)
        copy(index / kPerRow, index % kPerRow * 16);
    }
  }

  /// The tile of the keys from `key` on, all of them there.
  static QK_DEVICE void fetch(const Head& head, Shared buffer, int key) {
    const u8* const k = head.k + static_cast<i64>(key) * kD;
    const u8* const v = head.v + key;
    share<kKeys, kD>([&](int row, int byte) {
      copy_piece(buffer + row * kPitchK + byte, k + static_cast<u32>(key_of(row) * kD + byte));
    });
    share<kD, kKeys>([&](int row, int byte) {
      copy_piece(buffer + kBytesK + row * kPitchV + byte,
                 v + static_cast<u32>(row * head.pitch + byte));
    });
  }

  /// The tile that the keys need not fill: keys beyond the last repeat it, values are zeros.
  static QK_DEVICE void fetch_last(const Head& head, Shared buffer, int key) {
    const u8* const k = head.k + static_cast<i64>(key) * kD;
    const int last = head.keys - key - 1, columns = head.pitch - key;
    share<kKeys, kD>([&](int row, int byte) {
      const int from = key_of(row) < last ? key_of(row) : last;
      copy_piece(buffer + row * kPitchK + byte, k + from * kD + byte);
    });
    share<kD, kKeys>([&](int row, int byte) {
      const u8* const from = head.v + key + static_cast<u32>(row * head.pitch);
      const bool there = byte < columns;
      copy_piece_or_zeros(buffer + kBytesK + row * kPitchV + byte, from + (there ? byte : 0),
                          there);
    });
  }

  /// The j-th eight rows of K as the matrix instruction's columns; columns from kD on are zero.
  static QK_DEVICE void load_keys(u32 (&words)[2 * kHeadSteps], Shared rows, int j) {
    const Shared address = rows + 8 * j * kPitchK;
    constexpr int kWhole = kPieces / 4 * 4;
    QK_UNROLL for (int i = 0; i < kWhole; i += 4)
      load_pieces<4>(words + i, address + 16 * i);
    if constexpr (kPieces % 4 >= 2) load_pieces<2>(words + kWhole, address + 16 * kWhole);
    if constexpr (kPieces % 2 != 0) {
      load_pieces<1>(words + kPieces - 1, address + 16 * (kPieces - 1));
      words[kPieces] = 0;
    }
  }

  /// Scores of the blocks of queries from `first` on, plus 8 - m, in powers of two.
  QK_DEVICE void score(Tile& s, int first, Shared rows, const KeyScales& k_scale) const {
    QK_UNROLL for (int j = 0; j < kKeys / 8; ++j) {
      u32 keys[2 * kHeadSteps];
      load_keys(keys, rows, j);
      typename Scores::Sum sums[kTogether][4] = {};
      QK_UNROLL for (int step = 0; step < kHeadSteps; ++step) {
        QK_UNROLL for (int b = 0; b < kTogether; ++b)
          Scores::multiply_step(sums[b], q[first + b][step], keys + 2 * step);
      }
      QK_UNROLL for (int b = 0; b < kTogether; ++b) {
        QK_UNROLL for (int e = 0; e < 4; ++e) {
          const auto product = static_cast<f32>(sums[b][e]);
          const int block = first + b, r = e / 2;
          if constexpr (kInt8)
            s[b][4 * j + e] =
                multiply_add(product, k_scale[j / 2] * q_scale[block][r], bias[block][r]);
          else s[b][4 * j + e] = product + bias[block][r];
        }
      }
    }
  }

  /// Keys from `count` on get no probability.
  static QK_DEVICE void mask(Tile& s, int count, int lane) {
    const f32 never = bits_float(0xff800000u);  // -infinity
    QK_UNROLL for (int i = 0; i < kScores; ++i) {
      const bool counts = key_of(2 * (i / 4 * 4)) + 4 * (lane % 4) + i % 2 < count;
      QK_UNROLL for (int b = 0; b < kTogether; ++b)
        s[b][i] = counts ? s[b][i] : never;
    }
  }

  /// Lets maxima grow where a score has outgrown them: rare, and laid out beside the loop.
  template <bool kFirst>
  QK_DEVICE void rescale(Tile& s, int first) {
    f32 tops[kTogether][2], top = s[0][0];
    QK_UNROLL for (int b = 0; b < kTogether; ++b) {
      tops[b][0] = s[b][0];
      tops[b][1] = s[b][2];
      QK_UNROLL for (int i = 0; i < kScores; ++i)
        tops[b][i / 2 % 2] = maximum(tops[b][i / 2 % 2], s[b][i]);
      top = maximum(top, maximum(tops[b][0], tops[b][1]));
    }
    if (!kFirst && __builtin_expect(!any_lane(top > kOutgrown), 1)) return;
    QK_UNROLL for (int b = 0; b < kTogether; ++b) {
      QK_UNROLL for (int r = 0; r < 2; ++r)
        grow<kFirst>(s[b], first + b, r, tops[b][r]);
    }
  }

  /// s: of block b. top: the largest score of a query, of those that the calling lane has.
  template <bool kFirst>
  QK_DEVICE void grow(f32 (&s)[kScores], int b, int r, f32 top) {
    QK_UNROLL for (int apart = 1; apart < 4; apart *= 2)
      top = maximum(top, bits_float(lane_xor(float_bits(top), apart)));
    const f32 growth = kFirst || top > kOutgrown ? growth_to(top) : 0.0f;
    bias[b][r] -= growth;
    // Nothing was summed before the first tile, and 2^-growth may be infinite there.
    if constexpr (!kFirst) {
      const f32 factor = approx_exp2(-growth);
      sum[b][r] *= factor;
      QK_UNROLL for (int j = 0; j < kValueBlocks; ++j) {
        out[b][j][2 * r] *= factor;
        out[b][j][2 * r + 1] *= factor;
      }
    }
    QK_UNROLL for (int i = 0; i < kScores; ++i) {
      if (i / 2 % 2 == r) s[i] -= growth;
    }
  }

  /// Probabilities in e4m3fn.
  static QK_DEVICE void encode(Probabilities& p, const Tile& s, int first) {
    QK_UNROLL for (int b = 0; b < kTogether; ++b) {
      QK_UNROLL for (int w = 0; w < 4 * kKeySteps; ++w) {
        const f32* const v = s[b] + 16 * (w / 4) + 8 * (w % 4 / 2) + 2 * (w % 2);
        p[first + b][w / 4][w % 4] =
            encode_four(approx_exp2(v[0]), approx_exp2(v[1]), approx_exp2(v[4]), approx_exp2(v[5]));
      }
    }
  }

  QK_DEVICE void add_sums(const Probabilities& p) {
    constexpr u32 kOnes[2] = {0x38383838u, 0x38383838u};
    QK_UNROLL for (int b = 0; b < kQueryBlocks; ++b) {
      f32 part[4] = {};
      QK_UNROLL for (int step = 0; step < kKeySteps; ++step)
        Values::multiply_step(part, p[b][step], kOnes);
      sum[b][0] += part[0];
      sum[b][1] += part[2];
    }
  }

  QK_DEVICE void multiply_values(const Probabilities& p, Shared tile) {
    constexpr int kAtOnce = 4 / kValuePieces;  // blocks of eight columns
    const int thread = lane(), piece = thread / 8;
    const Shared rows = tile + kBytesK + (piece / kValuePieces * 8 + thread % 8) * kPitchV +
                        piece % kValuePieces * 16;
    QK_UNROLL for (int j = 0; j < kValueBlocks; j += kAtOnce) {
      u32 values[4];
      load_pieces<4>(values, rows + 8 * j * kPitchV);
      QK_UNROLL for (int i = 0; i < kAtOnce; ++i) {
        QK_UNROLL for (int b = 0; b < kQueryBlocks; ++b) {
          f32 part[4] = {};
          QK_UNROLL for (int step = 0; step < kKeySteps; ++step)
            Values::multiply_step(part, p[b][step], values + i * kValuePieces + 2 * step);
          QK_UNROLL for (int e = 0; e < 4; ++e)
            out[b][j + i][e] += part[e];
        }
      }
    }
  }

  /// The tile of the keys from `key` on. The first one may have fewer than kKeys.
  template <bool kFirst>
  QK_DEVICE void step(const Head& head, Shared tile, int key, int lane) {
    KeyScales k_scale = {};
    if constexpr (kInt8) {
      QK_UNROLL for (int c = 0; c < kKeys / 16; ++c) {
        const int group = key / 16 + c, last = (head.keys - 1) / 16;
        k_scale[c] = head.k_scale[group < last ? group : last];
      }
    }
    Probabilities p;
    QK_UNROLL for (int b = 0; b < kQueryBlocks; b += kTogether) {
      Tile s;
      score(s, b, tile + lane % 8 * kPitchK + 16 * (lane / 8), k_scale);
      if constexpr (kFirst) mask(s, head.keys - key, lane);
      rescale<kFirst>(s, b);
      encode(p, s, b);
    }
    add_sums(p);
    multiply_values(p, tile);
  }

  QK_DEVICE void clear() {
    QK_UNROLL for (int b = 0; b < kQueryBlocks; ++b) {
      bias[b][0] = bias[b][1] = kTop;
      sum[b][0] = sum[b][1] = 0.0f;
      QK_UNROLL for (int i = 0; i < 4 * kValueBlocks; ++i)
        out[b][i / 4][i % 4] = 0.0f;
    }
  }

  /// All keys for the queries of the calling warp; `first` is its first one. The tile that the keys
  /// do not fill comes first: no later one asks for anything.
  QK_DEVICE void run(const Head& head, u8* lds, int first) {
    const int lane = Attention::lane();
    const int whole = (head.keys - 1) / kKeys * kKeys;
    Shared current = in_shared(lds), next = current + kBufferBytes;
    fetch_last(head, current, whole);
    load_queries(head, first, lane);
    clear();
    wait_for_copies();
    block_sync();
    if (whole > 0) fetch(head, next, 0);
    step<true>(head, current, whole, lane);
    QK_NO_UNROLL for (int key = 0; key < whole; key += kKeys) {
      const Shared read = current;
      current = next;
      next = read;
      wait_for_copies();
      // The tile is there, and the one before is read.
      block_sync();
      if (key + kKeys < whole) fetch(head, next, key + kKeys);
      step<false>(head, current, key, lane);
    }
  }
};

}  // namespace qk
