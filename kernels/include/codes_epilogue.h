// From accumulators to e4m3fn codes of attention's heads: acc * x_scale * w_scale + bias in f32,
// left to right, rounded once, saturated; NaN becomes the NaN code. An int32 sum is rounded to f32
// first. Token i is token i % tokens of picture i / tokens, output j column j % d of head j / d.
//
//   CodeRows     [picture * heads + head, token, D]      lanes with runs of outputs
//   CodeColumns  [picture * heads + head, D, pitch]      lanes with runs of tokens: weights are the
//                                                        B operand, and tokens A
//
// D is d up to a multiple of 16, pitch the tokens of a picture likewise. What no output or token
// has is zero: the lane of the last one before it writes that.
#pragma once

#include "vector_io.h"

namespace qk {

struct CodesArgs {
  const f32* x_scale;  // [1] or [m]
  const f32* w_scale;  // [n]
  const f32* bias;     // [n] or null
  u8* codes;
  int m, n;       // n is a multiple of d
  int tokens, d;  // of a picture; columns of a head, a multiple of 8
  int per_token;  // 1 where x_scale has m numbers, else 0

  QK_DEVICE int heads() const { return n / d; }
  QK_DEVICE int padded() const { return (d + 15) / 16 * 16; }
  QK_DEVICE int pitch() const { return (tokens + 15) / 16 * 16; }
};

/// kCount numbers from `first` on; past `end`, and of null, zeros.
template <int kCount>
QK_DEVICE void load_numbers(f32 (&numbers)[kCount], const f32* from, int first, int end) {
  QK_UNROLL for (int e = 0; e < kCount; ++e)
    numbers[e] = from != nullptr && first + e < end ? from[first + e] : 0.0f;
}

/// What the sums of a lane become, all of it before anything is stored: codes are bytes, which may
/// be what scales lie in as far as the compiler knows, and every load would wait for a store.
template <class Mma, int kBlocksN, int kBlocksM>
struct LaneCodes {
  using Runs = typename Mma::template Runs<kBlocksN>;
  using Accumulators = typename Mma::Acc[kBlocksN][kBlocksM];
  static constexpr int kLength = Runs::kLength, kRuns = Runs::kCount,
                       kParts = kBlocksM * Mma::kColumns;
  static_assert(8 % kLength == 0 && kLength % 4 == 0, "a run is of one head, and whole words");
  using Run = Codes<kLength>;
  Run codes[kRuns][kParts];

  /// First row of A of a run, and the row of B of a part, from the wave's first ones.
  static QK_DEVICE int across(int run, int lane) {
    return Mma::template output<kBlocksN>(run, lane);
  }
  static QK_DEVICE int down(int part, int lane) {
    return 16 * (part / Mma::kColumns) + Mma::token(part % Mma::kColumns, lane);
  }
  static QK_DEVICE f32 sum(const Accumulators& acc, int run, int part, int e) {
    return static_cast<f32>(acc[Mma::template block<kBlocksN>(run, e)][part / Mma::kColumns]
                               [Mma::element(e, part % Mma::kColumns)]);
  }
};

struct CodeRows {
  /// m0, n0: first token and output of the calling wave's accumulators.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run(const CodesArgs& args,
                            const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0) {
    LaneCodes<Mma, kBlocksN, kBlocksM> mine;
    const int lane = thread_index() % kWave;
    encode<Mma>(mine, args, acc, m0, n0, lane);
    store_all(args, mine, m0, n0, lane);
  }

  /// What the calling lane's sums become.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void encode(LaneCodes<Mma, kBlocksN, kBlocksM>& mine, const CodesArgs& args,
                               const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0,
                               int lane) {
    using Lane = LaneCodes<Mma, kBlocksN, kBlocksM>;
    constexpr int kLength = Lane::kLength;
    f32 x_scale[Lane::kParts];
    QK_UNROLL for (int part = 0; part < Lane::kParts; ++part) {
      const int token = m0 + Lane::down(part, lane), last = args.m - 1;
      x_scale[part] = args.x_scale[(token < last ? token : last) * args.per_token];
    }
    QK_UNROLL for (int run = 0; run < Lane::kRuns; ++run) {
      f32 scale[kLength], bias[kLength];
      load_numbers(scale, args.w_scale, n0 + Lane::across(run, lane), args.n);
      load_numbers(bias, args.bias, n0 + Lane::across(run, lane), args.n);
      QK_UNROLL for (int part = 0; part < Lane::kParts; ++part) {
        f32 values[kLength];
        QK_UNROLL for (int e = 0; e < kLength; ++e) {
          const f32 sum = Lane::sum(acc, run, part, e);
          values[e] = add_rounded(sum * x_scale[part] * scale[e], bias[e]);
        }
        mine.codes[run][part] = encode_run<Format::kE4M3FN>(values);
      }
    }
  }

 private:
  template <class Lane>
  static QK_DEVICE void store_all(const CodesArgs& args, const Lane& mine, int m0, int n0,
                                  int lane) {
    constexpr int kLength = Lane::kLength;
    const int heads = args.heads(), padded = args.padded();
    QK_UNROLL for (int part = 0; part < Lane::kParts; ++part) {
      const int token = m0 + Lane::down(part, lane);
      if (token >= args.m) continue;
      const int picture = token / args.tokens, at = token % args.tokens;
      QK_UNROLL for (int run = 0; run < Lane::kRuns; ++run) {
        const int output = n0 + Lane::across(run, lane);
        if (output >= args.n) continue;
        const int head = output / args.d, column = output % args.d;
        const i64 row = static_cast<i64>(picture * heads + head) * args.tokens + at;
        u8* const target = args.codes + row * padded + column;
        store(target, mine.codes[run][part]);
        // A head is short of a multiple of 16 by 8 columns or none.
        if (args.d == padded || column + kLength != args.d) continue;
        const typename Lane::Run zeros = {};
        QK_UNROLL for (int behind = 0; behind < 8; behind += kLength)
          store(target + kLength + behind, zeros);
      }
    }
  }
};

struct CodeColumns {
  /// m0, n0: first output and token of the calling wave's accumulators.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run(const CodesArgs& args,
                            const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0) {
    using Lane = LaneCodes<Mma, kBlocksN, kBlocksM>;
    constexpr int kLength = Lane::kLength;
    const int lane = thread_index() % kWave;
    Lane mine;
    f32 scale[Lane::kParts], bias[Lane::kParts];
    QK_UNROLL for (int part = 0; part < Lane::kParts; ++part) {
      const int output = m0 + Lane::down(part, lane), last = args.n - 1;
      const int at = output < last ? output : last;
      scale[part] = args.w_scale[at];
      bias[part] = args.bias != nullptr ? args.bias[at] : 0.0f;
    }
    QK_UNROLL for (int run = 0; run < Lane::kRuns; ++run) {
      f32 x_scale[kLength];
      QK_UNROLL for (int e = 0; e < kLength; ++e) {
        const int token = n0 + Lane::across(run, lane) + e, last = args.m - 1;
        x_scale[e] = args.x_scale[(token < last ? token : last) * args.per_token];
      }
      QK_UNROLL for (int part = 0; part < Lane::kParts; ++part) {
        f32 values[kLength];
        QK_UNROLL for (int e = 0; e < kLength; ++e) {
          const f32 sum = Lane::sum(acc, run, part, e);
          values[e] = add_rounded(sum * x_scale[e] * scale[part], bias[part]);
        }
        mine.codes[run][part] = encode_run<Format::kE4M3FN>(values);
      }
    }
    store_all(args, mine, m0, n0, lane);
  }

 protected:
  template <class Lane>
  static QK_DEVICE void store_all(const CodesArgs& args, const Lane& mine, int m0, int n0,
                                  int lane) {
    const bool whole = args.tokens % Lane::kLength == 0;
    QK_UNROLL for (int part = 0; part < Lane::kParts; ++part) {
      const int output = m0 + Lane::down(part, lane);
      if (output >= args.n) continue;
      const Channel channel(args, output);
      QK_UNROLL for (int run = 0; run < Lane::kRuns; ++run) {
        const int token = n0 + Lane::across(run, lane);
        if (token >= args.m) continue;
        channel.write_run(args, token, mine.codes[run][part], whole);
      }
    }
  }

  /// A column of a head.
  struct Channel {
    int head, column;

    QK_DEVICE Channel(const CodesArgs& args, int output)
        : head(output / args.d), column(output % args.d) {}

    /// A run of tokens, which begins on a multiple of its length; whole: runs are of one picture
    /// each.
    template <int kLength>
    QK_DEVICE void write_run(const CodesArgs& args, int token, const Codes<kLength>& codes,
                             bool whole) const {
      if (whole) {
        write<kLength>(args, token, codes);
      } else {
        write_each(args, token, codes);
      }
    }

   private:
    /// The codes of kCount tokens of a picture, and zeros where the picture or the head ends behind
    /// them.
    template <int kCount, class Run>
    QK_DEVICE void write(const CodesArgs& args, int token, const Run& codes) const {
      const int picture = token / args.tokens, at = token % args.tokens, pitch = args.pitch();
      const i64 row = static_cast<i64>(picture * args.heads() + head) * args.padded() + column;
      u8* const target = args.codes + row * pitch + at;
      const int count = at + kCount == args.tokens ? pitch - at : kCount;
      store(target, codes);
      zero<kCount, Run>(target, kCount, count);
      if (args.d == args.padded() || column + 1 != args.d) return;
      QK_NO_UNROLL for (int below = 1; below <= 8; ++below)
        zero<kCount, Run>(target + static_cast<i64>(below) * pitch, 0, count);
    }

    /// Codes one by one, each of a picture of its own perhaps. By shifts: an array indexed in a
    /// rolled loop is one in memory.
    template <int kLength>
    QK_DEVICE void write_each(const CodesArgs& args, int token, const Codes<kLength>& codes) const {
      unsigned long long bits = 0;
      QK_UNROLL for (int w = 0; w < kLength / 4; ++w)
        bits |= static_cast<unsigned long long>(codes.words[w]) << (32 * w);
      QK_NO_UNROLL for (int i = token; i < token + kLength && i < args.m; ++i) {
        write<1>(args, i, static_cast<u8>(bits));
        bits >>= 8;
      }
    }

    /// The compiler would make unaligned words of single bytes, if it knew the offsets.
    template <int kCount, class Run>
    static QK_DEVICE void zero(u8* target, int from, int to) {
      const Run zeros = {};
      QK_NO_UNROLL for (int t = from; t < to; t += kCount)
        store(target + optimization_barrier(static_cast<u32>(t)), zeros);
    }
  };
};

/// CodeColumns of lanes with runs of outputs: codes turn in LDS, byte by byte.
template <class Tile, class Mma>
struct TurnedColumns : private CodeColumns {
  static constexpr int kPitch = Tile::kM + 16, kBytes = Tile::kN * kPitch, kRun = 8;
  using Lane = LaneCodes<Mma, Tile::kBlocksN, Tile::kBlocksM>;

  /// All threads of the block; m0, n0: first token and output of the tile.
  static QK_DEVICE void run(const CodesArgs& args, const typename Lane::Accumulators& acc, u8* lds,
                            int m0, int n0) {
    const int wave = wave_index(), lane = thread_index() % kWave;
    const int wave_m = wave / Tile::kWavesN * Tile::kWaveM,
              wave_n = wave % Tile::kWavesN * Tile::kWaveN;
    Lane mine;
    CodeRows::encode<Mma>(mine, args, acc, m0 + wave_m, n0 + wave_n, lane);
    block_sync();  // operands have been read
    QK_UNROLL for (int part = 0; part < Lane::kParts; ++part) {
      QK_UNROLL for (int run = 0; run < Lane::kRuns; ++run) {
        u8* const target =
            lds + (wave_n + Lane::across(run, lane)) * kPitch + wave_m + Lane::down(part, lane);
        QK_UNROLL for (int e = 0; e < Lane::kLength; ++e)
          target[e * kPitch] = static_cast<u8>(mine.codes[run][part].words[e / 4] >> 8 * (e % 4));
      }
    }
    block_sync();
    write(args, lds, m0, n0);
  }

 private:
  static QK_DEVICE void write(const CodesArgs& args, const u8* lds, int m0, int n0) {
    constexpr int kRuns = Tile::kM / kRun;
    const bool whole = args.tokens % kRun == 0;
    QK_NO_UNROLL for (int i = thread_index(); i < Tile::kN * kRuns; i += Tile::kThreads) {
      const int row = i / kRuns, at = i % kRuns * kRun;
      if (n0 + row >= args.n) return;
      if (m0 + at >= args.m) continue;
      const Channel channel(args, n0 + row);
      channel.write_run(args, m0 + at, load<Codes<kRun>>(lds + row * kPitch + at), whole);
    }
  }
};

}  // namespace qk
