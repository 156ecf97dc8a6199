// The loop of 16-bit inputs and weights that are packed: their codes become 16-bit numbers, all
// exactly, in the registers of the wave that multiplies them. As in direct.h, no weight is used
// twice, so nothing goes through LDS, and the waves of a block share K: a pass is some groups of 32
// for each. Scales of groups apply to the sums of a group, in f32: times them, 16-bit codes would
// be rounded, or overflow.
//
// Which K a lane multiplies is free. Where an instruction takes four codes of a row from it, those
// of several lie side by side, over all groups of a pass where these have no numbers of their own:
// one load of 16 bytes instead of four words, which kept NVIDIA's L1 cache busy.
#pragma once

#include "widen.h"

namespace qk {

constexpr int kGroup = 32;  // codes with one scale or factor, and the least K

/// kCount words, by the widest loads that their number allows.
template <int kCount>
QK_DEVICE void load_words(const u8* from, u32* words) {
  if constexpr (kCount % 4 == 0) {
    QK_UNROLL for (int first = 0; first < kCount; first += 4) {
      const Vec16 four = load<Vec16>(from + 4 * first);
      QK_UNROLL for (int i = 0; i < 4; ++i)
        words[first + i] = four.v[i];
    }
  } else if constexpr (kCount == 2) {
    struct alignas(8) Two {
      u32 v[2];
    };
    const Two two = load<Two>(from);
    words[0] = two.v[0];
    words[1] = two.v[1];
  } else {
    static_assert(kCount == 1, "one, two, or whole vectors");
    words[0] = load<u32>(from);
  }
}

/// How a format's codes lie in memory, and what they are as 16-bit numbers.
template <int kFormat>
struct PackedWeights {
  static constexpr bool kNibbles = kFormat == QK_INT4 || kFormat == QK_Q4_0;
  static constexpr bool kFactors = kFormat == QK_INT4;  // an int8 beside each group
  static constexpr bool kGroupScales = kFormat == QK_Q4_0 || kFormat == QK_Q8_0;  // f16
  static constexpr int kGroupBytes = kNibbles ? kGroup / 2 : kGroup;
  static constexpr int kMetaBytes = kFactors ? 1 : kGroupScales ? 2 : 0;  // of a group
  static constexpr int kHalves = kNibbles ? 1 : 2;  // runs of bytes for the halves of a group

  /// Four codes. meta: int4's factor.
  static QK_DEVICE void decode(u32 bytes, u32 meta, u32& low, u32& high) {
    if constexpr (kFormat == QK_E4M3FN) widen_word<Format::kE4M3FN>(bytes, low, high);
    if constexpr (kFormat == QK_E5M2) widen_word<Format::kE5M2>(bytes, low, high);
    if constexpr (kFormat == QK_INT8 || kFormat == QK_Q8_0)
      halves_of_bytes(bytes ^ 0x80808080u, 128, low, high);
    if constexpr (kFormat == QK_INT4)
      halves_of_bytes(scale_codes(bytes, static_cast<i8>(meta)), 128, low, high);
    if constexpr (kFormat == QK_Q4_0) halves_of_bytes(bytes, 8, low, high);
  }
};

/// What the kernel reads. meta: int4's factors, or the scales of groups.
struct WeightOnlyOperands {
  const u8* x;
  const u8* w;
  const u8* meta;
  int m, n, k;
};

template <int TokenBlocks, int kThreads, class Mma, int kFormat, Io kIo>
struct WeightOnlyLoop {
  using Codes = PackedWeights<kFormat>;
  using Acc = typename Mma::Acc;
  static constexpr int kBlocksN = 2, kBlocksM = TokenBlocks;
  static constexpr int kRun = Mma::kRun, kRows = Mma::kRows, kTokens = Mma::kTokens;
  static constexpr int kWaves = kThreads / kWave;
  static constexpr int kGroups = kBlocksM == 1 ? 2 : 1;  // of a wave in a pass
  static constexpr int kPass = kWaves * kGroups;
  static constexpr int kSteps = 2;  // instructions for a group
  // Of which a lane's codes lie side by side, and of how many groups in all passes but the first.
  static constexpr int kRuns = Codes::kNibbles || kRun > 4 ? 1 : kSteps;
  static constexpr int kJoined = kRuns > 1 && Codes::kMetaBytes == 0 ? kGroups : 1;
  static constexpr int kCodeWords = Codes::kHalves * kRun / 4, kTokenWords = kRun / 2;
  static constexpr int kSums = kBlocksN * 8;  // of 16 tokens
  static constexpr int kLdsBytes = (kWaves - 1) * kSums * kWave * static_cast<int>(sizeof(f32));

  using Accumulators = Acc[kBlocksN][kBlocksM];

  struct Fragments {
    u32 codes[kGroups][kBlocksN][kRows][kCodeWords];
    u32 meta[kGroups][kBlocksN][kRows];
  };
  using Tokens = typename Mma::Tokens[kGroups][kSteps][kBlocksM];

  const u8 *x, *w, *meta;  // of the pass, at the tile's first row
  u32 x_offsets[kBlocksM][kTokens], w_offsets[kBlocksN][kRows], meta_offsets[kBlocksN][kRows];

  QK_DEVICE void set_offsets(const WeightOnlyOperands& op, int m0, int n0) {
    const int lane = thread_index() % kWave, group = wave_index() * kGroups, groups = op.k / kGroup;
    x = op.x + static_cast<i64>(m0) * op.k * 2;
    w = op.w + static_cast<i64>(n0) * groups * Codes::kGroupBytes;
    meta = op.meta + static_cast<i64>(n0) * groups * Codes::kMetaBytes;
    QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
      QK_UNROLL for (int q = 0; q < kTokens; ++q) {
        const u32 token = existing(16 * j + Mma::token_row(q, lane), op.m - m0);
        x_offsets[j][q] = 2 * (token * op.k + group * kGroup + lane_codes());
      }
    }
    QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
      QK_UNROLL for (int q = 0; q < kRows; ++q) {
        const u32 first = existing(16 * i + Mma::row(q, lane), op.n - n0) * groups + group;
        w_offsets[i][q] = first * Codes::kGroupBytes + lane_codes();
        meta_offsets[i][q] = first * Codes::kMetaBytes;
      }
    }
  }

  /// Codes of a group, as bytes, before those of the lane.
  static QK_DEVICE int lane_codes() { return Mma::run(thread_index() % kWave) * kRun * kRuns; }

  /// From lanes that share each group to lanes that share `kJoined` of them.
  QK_DEVICE void join_groups() {
    const int more = (kJoined - 1) * lane_codes();
    QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
      QK_UNROLL for (int q = 0; q < kTokens; ++q)
        x_offsets[j][q] += 2 * more;
    }
    QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
      QK_UNROLL for (int q = 0; q < kRows; ++q)
        w_offsets[i][q] += more;
    }
  }

  QK_DEVICE void advance_tokens(int groups) { x += groups * kGroup * 2; }
  QK_DEVICE void advance_weights(int groups) {
    w += groups * Codes::kGroupBytes;
    meta += groups * Codes::kMetaBytes;
  }

  /// The first pass: `count` of its groups exist, and the others become zeros.
  QK_DEVICE void load_partial_pass(Fragments& to, Tokens& tokens, int count) {
    QK_UNROLL for (int d = 0; d < kGroups; ++d) {
      if (wave_index() * kGroups + d >= count) continue;
      load_weights<1>(to, d);
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j)
        load_tokens<1>(tokens, d, j);
    }
  }

  /// Of `kCount` groups from `first` on.
  template <int kCount>
  QK_DEVICE void load_weights(Fragments& to, int first) {
    QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
      QK_UNROLL for (int q = 0; q < kRows; ++q) {
        w_offsets[i][q] = optimization_barrier(w_offsets[i][q]);
        constexpr int kParts = Codes::kHalves / kRuns, kWords = kCount * kCodeWords / kParts;
        QK_UNROLL for (int part = 0; part < kParts; ++part) {
          u32 words[kWords];
          load_words<kWords>(w + w_offsets[i][q] + first * Codes::kGroupBytes + part * kGroup / 2,
                             words);
          QK_UNROLL for (int word = 0; word < kWords; ++word) {
            const int place = part * kWords + word;
            to.codes[first + place / kCodeWords][i][q][place % kCodeWords] = words[word];
          }
        }
        if constexpr (Codes::kMetaBytes > 0)
          meta_offsets[i][q] = optimization_barrier(meta_offsets[i][q]);
        const u8* const number = meta + meta_offsets[i][q] + first * Codes::kMetaBytes;
        if constexpr (Codes::kFactors) to.meta[first][i][q] = load<u8>(number);
        if constexpr (Codes::kGroupScales) to.meta[first][i][q] = load<u16>(number);
      }
    }
  }

  template <int kCount>
  QK_DEVICE void load_tokens(Tokens& to, int first, int j) {
    constexpr int kParts = kSteps / kRuns, kWords = kCount * kSteps * kTokenWords / kParts;
    QK_UNROLL for (int q = 0; q < kTokens; ++q) {
      x_offsets[j][q] = optimization_barrier(x_offsets[j][q]);
      QK_UNROLL for (int part = 0; part < kParts; ++part) {
        u32 words[kWords];
        load_words<kWords>(x + x_offsets[j][q] + 2 * (first * kGroup + part * kGroup / 2), words);
        QK_UNROLL for (int i = 0; i < kWords; ++i) {
          const int step = part + i / kTokenWords;
          to[first + step / kSteps][step % kSteps][j].v[Mma::token_word(q, i % kTokenWords)] =
              words[i];
        }
      }
    }
  }

  static QK_DEVICE typename Mma::Weights decoded(const Fragments& from, int d, int i, int step) {
    typename Mma::Weights weights;
    QK_UNROLL for (int q = 0; q < kRows; ++q) {
      QK_UNROLL for (int word = 0; word < kRun / 4; ++word) {
        const u32* const codes = from.codes[d][i][q];
        const u32 four =
            Codes::kNibbles ? codes[word] >> 4 * step & 0x0f0f0f0fu : codes[step * kRun / 4 + word];
        u32 low, high;
        Codes::decode(four, from.meta[d][i][q], low, high);
        weights.v[Mma::weight_word(q, 2 * word)] = as_io(low);
        weights.v[Mma::weight_word(q, 2 * word + 1)] = as_io(high);
      }
    }
    return weights;
  }

  static QK_DEVICE u32 as_io(u32 halves) {
    return kIo == Io::kF16 ? halves : bfloats_of_halves(halves);
  }

  /// Tokens of the next pass take the registers of those that are multiplied: two sets of 64 rows
  /// would spill on gfx1100.
  template <bool kLast>
  QK_DEVICE void multiply(Accumulators& acc, const Fragments& from, Tokens& tokens) {
    QK_UNROLL for (int d = 0; d < kGroups; ++d) {
      typename Mma::Weights weights[kBlocksN][2];
      QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
        QK_UNROLL for (int step = 0; step < kSteps; ++step)
          weights[i][step] = decoded(from, d, i, step);
      }
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
        QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
          Acc sums = {};
          if constexpr (!Codes::kGroupScales) sums = acc[i][j];
          QK_UNROLL for (int step = 0; step < kSteps; ++step)
            sums = Mma::multiply(weights[i][step], tokens[d][step][j], sums);
          acc[i][j] = Codes::kGroupScales ? scaled(sums, from.meta[d][i], acc[i][j]) : sums;
        }
        if (!kLast && (d + 1) % kJoined == 0) load_tokens<kJoined>(tokens, d + 1 - kJoined, j);
      }
    }
  }

  static QK_DEVICE Acc scaled(const Acc& sums, const u32 (&scales)[kRows], Acc acc) {
    QK_UNROLL for (int e = 0; e < 8; ++e) {
      const f32 scale = half_to_float(static_cast<u16>(scales[Mma::row_of(e)]));
      acc[e] = multiply_add(sums[e], scale, acc[e]);
    }
    return acc;
  }

  /// Returns whether the calling wave has the result.
  QK_DEVICE bool run(Accumulators& acc, const WeightOnlyOperands& op, u8* lds, int m0, int n0) {
    // The pass that K does not fill comes first, as in TileLoop.
    const int groups = op.k / kGroup, first = (groups - 1) % kPass + 1;
    set_offsets(op, m0, n0);
    Fragments now = {};
    Tokens tokens = {};
    load_partial_pass(now, tokens, first);
    join_groups();
    advance_weights(first);
    advance_tokens(first);
    QK_NO_UNROLL for (int left = groups - first; left > 0; left -= kPass) {
      Fragments next;
      QK_UNROLL for (int d = 0; d < kGroups; d += kJoined)
        load_weights<kJoined>(next, d);
      advance_weights(kPass);
      multiply<false>(acc, now, tokens);
      advance_tokens(kPass);
      now = next;
    }
    multiply<true>(acc, now, tokens);
    QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j)
        finish(acc[i][j]);
    }
    QK_UNROLL for (int j = 0; j < kBlocksM; ++j)
      reduce_waves(acc, j, reinterpret_cast<f32*>(lds));
    return wave_index() == 0;
  }

 private:
  /// Rows beyond the last repeat it: what they give is never written.
  static QK_DEVICE u32 existing(int row, int count) {
    return static_cast<u32>(row < count ? row : count - 1);
  }

  /// Wave 0 adds the sums of 16 tokens in order of wave.
  static QK_DEVICE void reduce_waves(Accumulators& acc, int j, f32* sums) {
    const int wave = wave_index(), lane = thread_index() % kWave;
    if (j > 0) block_sync();
    if (wave > 0) {
      QK_UNROLL for (int i = 0; i < kSums; ++i)
        sums[((wave - 1) * kSums + i) * kWave + lane] = acc[i / 8][j][i % 8];
    }
    block_sync();
    if (wave > 0) return;
    for (int other = 0; other < kWaves - 1; ++other) {
      QK_UNROLL for (int i = 0; i < kSums; ++i)
        acc[i / 8][j][i % 8] += sums[(other * kSums + i) * kWave + lane];
    }
  }
};

}  // namespace qk
