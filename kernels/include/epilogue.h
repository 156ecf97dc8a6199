// From accumulators to y: y = acc * x_scale * w_scale + bias in f32, left to right, rounded once to
// io. An int32 sum is rounded to f32 first. With a residual y = that + residual, before it is
// rounded.
#pragma once

#include "inside.h"

namespace qk {

struct EpilogueArgs {
  const f32* x_scale;  // [1] or [M]
  const f32* w_scale;  // [1] or [N]
  const void* bias;    // io [N] or null
  void* y;             // io [M, N]
  int m, n;
  const void* residual = nullptr;  // io [M, N]
};

template <Io kIo, bool kPerToken, bool kPerChannel, bool kAdds = QK_RESIDUAL == 1>
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

  /// kCount values of a row as they lie in memory, the first lowest.
  template <int kCount>
  struct Run {
    static constexpr int kPerWord = sizeof(u32) / sizeof(Memory), kWords = kCount / kPerWord;
    u32 words[kWords];

    /// All of them, `bytes` after an address that all lanes share.
    static QK_DEVICE Run load(const u8* base, u32 bytes) {
      Run run;
      QK_UNROLL for (int i = 0; i < kWords; i += 4) {
        const auto vector = load_beyond<Vec16>(base + i * sizeof(u32), bytes);
        QK_UNROLL for (int word = 0; word < 4; ++word)
          run.words[i + word] = vector.v[word];
      }
      return run;
    }

    QK_DEVICE f32 value(int e) const {
      if constexpr (sizeof(Memory) == 2) {
        return Type::widen(static_cast<Memory>(words[e / 2] >> 16 * (e % 2)));
      } else {
        return bits_float(words[e]);
      }
    }
  };

  /// Reads those of row `row` from `output` on, as `write` writes; zeros past the row's end.
  template <int kCount>
  static QK_DEVICE Run<kCount> read(const void* from, int row, int output, int n) {
    constexpr int kPerLoad = sizeof(Vec16) / sizeof(Memory);
    const Memory* const source =
        static_cast<const Memory*>(from) + (static_cast<i64>(row) * n + output);
    Run<kCount> run = {};
    if (kCount % kPerLoad == 0 && n % kPerLoad == 0 && output + kCount <= n) {
      QK_UNROLL for (int i = 0; i < Run<kCount>::kWords; i += 4) {
        const auto vector = load<Vec16>(source + i * Run<kCount>::kPerWord);
        QK_UNROLL for (int word = 0; word < 4; ++word)
          run.words[i + word] = vector.v[word];
      }
    } else {
      QK_UNROLL for (int e = 0; e < kCount; ++e) {
        if (output + e >= n) continue;
        if constexpr (sizeof(Memory) == 2) {
          run.words[e / 2] |= static_cast<u32>(source[e]) << 16 * (e % 2);
        } else {
          run.words[e] = float_bits(source[e]);
        }
      }
    }
    return run;
  }

  /// What some tokens' runs are added to. All of it is asked for before the first one is written:
  /// as far as the compiler knows, y may be what is read.
  template <int kCount, int kTokens>
  struct Addends {
    Run<kCount> residual[kTokens];

    QK_DEVICE void load(const EpilogueArgs& args, int i, int token, int output) {
      residual[i] = read<kCount>(args.residual, token, output, args.n);
    }
    QK_DEVICE f32 apply(f32 value, int i, int e) const {
      return add_rounded(value, residual[i].value(e));
    }
  };
  /// How many of a lane's tokens' runs it holds at once: what 16 registers take.
  template <int kCount>
  static constexpr QK_DEVICE int batch(int tokens) {
    const int fit = 64 / (kCount * static_cast<int>(sizeof(Memory)));
    return !kAdds || fit < 1 ? 1 : fit < tokens ? fit : tokens;
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

  /// Those of kRuns runs of a lane, all of which exist; n0 is the wave's first output and `across`
  /// the lane's first one from there on. `apart`: from the first run to another.
  template <int kCount, int kRuns, class Apart>
  static QK_DEVICE void load_factors(Factors<kCount> (&factors)[kRuns], const EpilogueArgs& args,
                                     int n0, u32 across, const Apart& apart) {
    const u32 scales = optimization_barrier(across * sizeof(f32));
    QK_UNROLL for (int run = 0; run < kRuns; ++run) {
      if constexpr (kPerChannel)
        load_beyond(factors[run].scale, args.w_scale + n0 + apart(run), scales);
      QK_UNROLL for (int e = 0; e < kCount; ++e) {
        if constexpr (!kPerChannel) factors[run].scale[e] = args.w_scale[0];
        factors[run].bias[e] = 0.0f;
      }
    }
    if (args.bias == nullptr) return;
    const u32 biases = optimization_barrier(across * sizeof(Memory));
    QK_UNROLL for (int run = 0; run < kRuns; ++run) {
      const Memory* const first = static_cast<const Memory*>(args.bias) + n0 + apart(run);
      QK_UNROLL for (int e = 0; e < kCount; ++e)
        factors[run].bias[e] = Type::widen(load_beyond<Memory>(first + e, biases));
    }
  }

  /// The scale of a lane's token number `i`, which exists.
  template <class Mma>
  static QK_DEVICE f32 token_scale_inside(const EpilogueArgs& args, int m0, int i, int lane) {
    const u32 token = Mma::token(i % Mma::kColumns, lane);
    return kPerToken
               ? load_beyond<f32>(args.x_scale + m0 + 16 * (i / Mma::kColumns), token * sizeof(f32))
               : args.x_scale[0];
  }

  /// m0, n0: first token and output of the calling wave's accumulators.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run(const EpilogueArgs& args,
                            const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0) {
    constexpr int kAligned = sizeof(Vec16) / sizeof(Memory);
    if constexpr (QK_SPLITS_EDGES && Mma::template Runs<kBlocksN>::kLength % kAligned == 0) {
      if (is_inside<16 * kBlocksM, 16 * kBlocksN, kAligned>(args.m, args.n, m0, n0) &&
          run_inside<Mma>(args, acc, m0, n0))
        return;
    }
    run_at_edge<Mma>(args, acc, m0, n0);
  }

 private:
  /// Whether NaN is looked for in what goes in, which is less than what comes out: three of eleven
  /// instructions of a bf16 are for NaN.
  static constexpr bool kHopes = kIo == Io::kBF16 && !kAdds;

  /// Returns false, with nothing written, where NaN may come out and is not expected.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE bool run_inside(const EpilogueArgs& args,
                                   const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0,
                                   int n0) {
    using Runs = typename Mma::template Runs<kBlocksN>;
    constexpr int kLength = Runs::kLength, kBytes = sizeof(Memory);
    constexpr int kTokens = kBlocksM * Mma::kColumns, kBatch = batch<kLength>(kTokens);
    const int lane = thread_index() % kWave;
    const i64 first = (static_cast<i64>(m0) * args.n + n0) * kBytes;
    u8* const y = static_cast<u8*>(args.y) + first;
    const u8* const residual = static_cast<const u8*>(args.residual) + (kAdds ? first : 0);
    const u32 pitch = static_cast<u32>(args.n) * kBytes;
    // Of a run, its first output beyond that of lane 0, which all lanes share.
    const u32 across = Mma::template output<kBlocksN>(0, lane);
    u32 offsets[kTokens];
    f32 x_scale[kTokens];
    QK_UNROLL for (int i = 0; i < kTokens; ++i) {
      const u32 token = Mma::token(i % Mma::kColumns, lane), block = 16 * (i / Mma::kColumns);
      offsets[i] = optimization_barrier(token * pitch + across * kBytes + block * pitch);
      x_scale[i] = token_scale_inside<Mma>(args, m0, i, lane);
    }
    Factors<kLength> factors[Runs::kCount];
    const auto apart = [](int run) {
      return Mma::template output<kBlocksN>(run, 0) - Mma::template output<kBlocksN>(0, 0);
    };
    load_factors(factors, args, n0, across, apart);
    if constexpr (kHopes) {
      if (any_lane(may_be_nan<Mma>(acc, x_scale, factors))) return false;
    }
    QK_UNROLL for (int run = 0; run < Runs::kCount; ++run) {
      const int beyond = apart(run) * kBytes;
      [[maybe_unused]] Addends<kLength, kBatch> addends;
      QK_UNROLL for (int i = 0; i < kTokens; ++i) {
        if constexpr (kAdds) {
          QK_UNROLL for (int j = i; i % kBatch == 0 && j < i + kBatch && j < kTokens; ++j)
            addends.residual[j - i] = Run<kLength>::load(residual + beyond, offsets[j]);
        }
        f32 values[kLength];
        QK_UNROLL for (int e = 0; e < kLength; ++e) {
          const auto sum = acc[Mma::template block<kBlocksN>(run, e)][i / Mma::kColumns]
                              [Mma::element(e, i % Mma::kColumns)];
          values[e] = factors[run].apply(static_cast<f32>(sum) * x_scale[i], e);
          if constexpr (kAdds) values[e] = addends.apply(values[e], i % kBatch, e);
        }
        QK_UNROLL for (int e = 0; e < kLength; e += 16 / kBytes) {
          store(y + beyond + e * kBytes + offsets[i],
                kHopes ? Type::round_numbers(values + e) : Type::round_vector(values + e));
        }
      }
    }
    return true;
  }

  /// Whether a value may be NaN: not where all that goes in is finite, and sums times scales of
  /// tokens are.
  template <class Mma, int kBlocksN, int kBlocksM, int kTokens, int kCount, int kRuns>
  static QK_DEVICE bool may_be_nan(const typename Mma::Acc (&acc)[kBlocksN][kBlocksM],
                                   const f32 (&x_scale)[kTokens],
                                   const Factors<kCount> (&factors)[kRuns]) {
    // int32 sums have less than 2^31.
    constexpr bool kFloats = static_cast<typename Mma::Sum>(0.5f) != 0;
    f32 sum = kFloats ? 0.0f : 0x1p31f, scale = 0.0f, other = 0.0f;
    QK_UNROLL for (int i = 0; kFloats && i < kBlocksN * kBlocksM * 8; ++i)
      sum = larger_magnitude(sum, static_cast<f32>(acc[i / 8 / kBlocksM][i / 8 % kBlocksM][i % 8]));
    QK_UNROLL for (int i = 0; i < kTokens; ++i)
      scale = larger_magnitude(scale, x_scale[i]);
    QK_UNROLL for (int i = 0; i < kRuns * kCount; ++i) {
      other = larger_magnitude(other, factors[i / kCount].scale[i % kCount]);
      other = larger_magnitude(other, factors[i / kCount].bias[i % kCount]);
    }
    const f32 largest = bits_float(0x7f7fffffu);
    return !(sum * scale <= largest && other <= largest);
  }

  template <class Mma, class Acc, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run_at_edge(const EpilogueArgs& args, const Acc (&acc)[kBlocksN][kBlocksM],
                                    int m0, int n0) {
    using Runs = typename Mma::template Runs<kBlocksN>;
    constexpr int kLength = Runs::kLength;
    const int lane = thread_index() % kWave;
    QK_UNROLL for (int run = 0; run < Runs::kCount; ++run) {
      const int output = n0 + Mma::template output<kBlocksN>(run, lane);
      const Factors<kLength> mine = factors<kLength>(args, output, args.n);
      constexpr int kTokens = kBlocksM * Mma::kColumns, kBatch = batch<kLength>(kTokens);
      [[maybe_unused]] Addends<kLength, kBatch> addends;
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
        QK_UNROLL for (int column = 0; column < Mma::kColumns; ++column) {
          if constexpr (kAdds) {
            const int i = j * Mma::kColumns + column;
            if (i % kBatch == 0) load_addends<Mma>(addends, args, i, kTokens, m0, output);
          }
          const int token = m0 + 16 * j + Mma::token(column, lane);
          if (token >= args.m || output >= args.n) continue;
          const f32 x_scale = token_scale(args, token);
          f32 values[kLength];
          QK_UNROLL for (int e = 0; e < kLength; ++e) {
            const auto sum = acc[Mma::template block<kBlocksN>(run, e)][j][Mma::element(e, column)];
            values[e] = mine.apply(static_cast<f32>(sum) * x_scale, e);
            if constexpr (kAdds)
              values[e] = addends.apply(values[e], (j * Mma::kColumns + column) % kBatch, e);
          }
          write(args, token, output, values);
        }
      }
    }
  }

  /// Loads those of a lane's tokens from number `first` on, of `count`; m0 is the wave's first
  /// token.
  template <class Mma, int kCount, int kTokens>
  static QK_DEVICE void load_addends(Addends<kCount, kTokens>& addends, const EpilogueArgs& args,
                                     int first, int count, int m0, int output) {
    const int lane = thread_index() % kWave;
    QK_UNROLL for (int i = 0; i < kTokens; ++i) {
      const int number = first + i, column = number % Mma::kColumns;
      const int token = m0 + 16 * (number / Mma::kColumns) + Mma::token(column, lane);
      if (number < count && token < args.m && output < args.n) addends.load(args, i, token, output);
    }
  }
};

}  // namespace qk
