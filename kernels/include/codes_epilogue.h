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

struct CodeRows {
  /// m0, n0: first token and output of the calling wave's accumulators.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run(const CodesArgs& args,
                            const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0) {
    using Runs = typename Mma::template Runs<kBlocksN>;
    constexpr int kLength = Runs::kLength;
    static_assert(8 % kLength == 0, "a run of outputs is of one head");
    const int lane = thread_index() % kWave, heads = args.heads(), padded = args.padded();
    QK_UNROLL for (int run = 0; run < Runs::kCount; ++run) {
      const int output = n0 + Mma::template output<kBlocksN>(run, lane);
      const int head = output / args.d, column = output % args.d;
      f32 scale[kLength], bias[kLength];
      load_numbers(scale, args.w_scale, output, args.n);
      load_numbers(bias, args.bias, output, args.n);
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
        QK_UNROLL for (int part = 0; part < Mma::kColumns; ++part) {
          const int token = m0 + 16 * j + Mma::token(part, lane);
          if (token >= args.m || output >= args.n) continue;
          const f32 x_scale = args.x_scale[token * args.per_token];
          f32 values[kLength];
          QK_UNROLL for (int e = 0; e < kLength; ++e) {
            const auto sum = acc[Mma::template block<kBlocksN>(run, e)][j][Mma::element(e, part)];
            values[e] = add_rounded(static_cast<f32>(sum) * x_scale * scale[e], bias[e]);
          }
          const i64 row = static_cast<i64>(token / args.tokens * heads + head) * args.tokens +
                          token % args.tokens;
          u8* const target = args.codes + row * padded + column;
          store(target, encode_run<Format::kE4M3FN>(values));
          if (column + kLength == args.d && args.d != padded)
            write_zeros<kLength>(target + kLength);
        }
      }
    }
  }

 private:
  /// The 8 columns that a head is short of a multiple of 16.
  template <int kLength>
  static QK_DEVICE void write_zeros(u8* target) {
    const Codes<kLength> zeros = {};
    QK_UNROLL for (int at = 0; at < 8; at += kLength)
      store(target + at, zeros);
  }
};

struct CodeColumns {
  /// m0, n0: first output and token of the calling wave's accumulators.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run(const CodesArgs& args,
                            const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0) {
    using Runs = typename Mma::template Runs<kBlocksN>;
    constexpr int kLength = Runs::kLength;
    const int lane = thread_index() % kWave;
    QK_UNROLL for (int run = 0; run < Runs::kCount; ++run) {
      const int token = n0 + Mma::template output<kBlocksN>(run, lane);
      f32 x_scale[kLength];
      QK_UNROLL for (int e = 0; e < kLength; ++e) {
        const int at = token + e < args.m ? token + e : args.m - 1;
        x_scale[e] = args.x_scale[at * args.per_token];
      }
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
        QK_UNROLL for (int part = 0; part < Mma::kColumns; ++part) {
          const int output = m0 + 16 * j + Mma::token(part, lane);
          if (token >= args.m || output >= args.n) continue;
          const f32 scale = args.w_scale[output];
          const f32 bias = args.bias != nullptr ? args.bias[output] : 0.0f;
          f32 values[kLength];
          QK_UNROLL for (int e = 0; e < kLength; ++e) {
            const auto sum = acc[Mma::template block<kBlocksN>(run, e)][j][Mma::element(e, part)];
            values[e] = add_rounded(static_cast<f32>(sum) * x_scale[e] * scale, bias);
          }
          write(args, token, output, encode_run<Format::kE4M3FN>(values));
        }
      }
    }
  }

 private:
  /// Codes of tokens from `token` on, of one output.
  template <int kLength>
  static QK_DEVICE void write(const CodesArgs& args, int token, int output,
                              const Codes<kLength>& codes) {
    const int picture = token / args.tokens, at = token % args.tokens;
    if (args.tokens % kLength == 0) {
      // All are of one picture, and begin on a multiple of their number.
      write_run<kLength>(args, picture, at, output, codes);
    } else {
      // By shifts: an array indexed in a rolled loop is one in memory.
      unsigned long long bits = 0;
      QK_UNROLL for (int w = 0; w < kLength / 4; ++w)
        bits |= static_cast<unsigned long long>(codes.words[w]) << (32 * w);
      QK_NO_UNROLL for (int i = token; i < token + kLength && i < args.m; ++i) {
        write_run<1>(args, i / args.tokens, i % args.tokens, output, static_cast<u8>(bits));
        bits >>= 8;
      }
    }
  }

  /// kCount codes, and zeros where the picture or the head ends behind them.
  template <int kCount, class Run>
  static QK_DEVICE void write_run(const CodesArgs& args, int picture, int at, int output,
                                  const Run& codes) {
    const int head = output / args.d, column = output % args.d, pitch = args.pitch();
    const i64 row = static_cast<i64>(picture * args.heads() + head) * args.padded() + column;
    u8* const target = args.codes + row * pitch + at;
    store(target, codes);
    const int end = at + kCount;
    const Run zeros = {};
    if (end == args.tokens) {
      for (int t = end; t < pitch; t += kCount) store(target + (t - at), zeros);
    }
    if (column + 1 != args.d || args.d == args.padded()) return;
    const int last = end == args.tokens ? pitch : end;
    for (int below = 1; below <= 8; ++below) {
      for (int t = at; t < last; t += kCount)
        store(target + static_cast<i64>(below) * pitch + (t - at), zeros);
    }
  }
};

}  // namespace qk
