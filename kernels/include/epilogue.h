// From accumulators to y: y = acc * x_scale * w_scale + bias in f32, left to right, rounded once to
// io. An int32 sum is rounded to f32 first.
#pragma once

#include "config.h"

namespace qk {

struct EpilogueArgs {
  const f32* x_scale;  // [1] or [M]
  const f32* w_scale;  // [1] or [N]
  const void* bias;    // io [N] or null
  void* y;             // io [M, N]
  int m, n;
};

template <Io kIo, bool kPerToken, bool kPerChannel>
struct Epilogue {
  using Type = IoType<kIo>;
  using Memory = typename Type::Memory;

  /// Writes kCount values at y[token, output...]; by 16 bytes where the row pitch keeps them
  /// aligned.
  template <int kCount>
  static QK_DEVICE void write(const EpilogueArgs& args, int token, int output,
                              const f32 (&values)[kCount]) {
    constexpr int kPerStore = sizeof(Vec16) / sizeof(Memory);
    constexpr bool kVectors = kCount % kPerStore == 0;
    Memory* const target =
        static_cast<Memory*>(args.y) + (static_cast<i64>(token) * args.n + output);
    if (kVectors && args.n % kPerStore == 0 && output + kCount <= args.n) {
      QK_UNROLL for (int first = 0; first + kPerStore <= kCount; first += kPerStore) {
        store(target + first, Type::round_vector(values + first));
      }
    } else {
      QK_UNROLL for (int e = 0; e < kCount; ++e) {
        if (output + e < args.n) target[e] = Type::round(values[e]);
      }
    }
  }

  /// What kCount consecutive rows of w are multiplied with, and what is added to them.
  template <int kCount>
  struct Factors {
    f32 scale[kCount], bias[kCount];
    QK_DEVICE f32 apply(f32 sum, int e) const { return add_rounded(sum * scale[e], bias[e]); }
  };

  /// Those of rows `first` and on; past `end` zeros.
  template <int kCount>
  static QK_DEVICE Factors<kCount> factors(const EpilogueArgs& args, int first, int end) {
    Factors<kCount> found;
    QK_UNROLL for (int e = 0; e < kCount; ++e) {
      const bool inside = first + e < end;
      found.scale[e] = kPerChannel ? (inside ? args.w_scale[first + e] : 0.0f) : args.w_scale[0];
      found.bias[e] = 0.0f;
      if (args.bias != nullptr && inside)
        found.bias[e] = Type::widen(static_cast<const Memory*>(args.bias)[first + e]);
    }
    return found;
  }

  static QK_DEVICE f32 token_scale(const EpilogueArgs& args, int token) {
    return args.x_scale[kPerToken ? token : 0];
  }

  /// m0, n0: first token and output of the calling wave's accumulators.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run(const EpilogueArgs& args,
                            const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0) {
    using Runs = typename Mma::template Runs<kBlocksN>;
    constexpr int kLength = Runs::kLength;
    const int lane = thread_index() % kWave;
    QK_UNROLL for (int run = 0; run < Runs::kCount; ++run) {
      const int output = n0 + Mma::template output<kBlocksN>(run, lane);
      const Factors<kLength> mine = factors<kLength>(args, output, args.n);
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
        QK_UNROLL for (int column = 0; column < Mma::kColumns; ++column) {
          const int token = m0 + 16 * j + Mma::token(column, lane);
          if (token >= args.m || output >= args.n) continue;
          const f32 x_scale = token_scale(args, token);
          f32 values[kLength];
          QK_UNROLL for (int e = 0; e < kLength; ++e) {
            const auto sum = acc[Mma::template block<kBlocksN>(run, e)][j][Mma::element(e, column)];
            values[e] = mine.apply(static_cast<f32>(sum) * x_scale, e);
          }
          write(args, token, output, values);
        }
      }
    }
  }
};

}  // namespace qk
