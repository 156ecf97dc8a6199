// A product behind which an activation stands, as codes for the next product: what gemm.hip
// writes, activated, and quantize_static.hip's codes of it, to the last bit.
//
// q[i, prefix_columns + j] = code(act(y[i, j]) * smooth / scale), y = sum * x_scale * w_scale +
// bias rounded to io, act(y) likewise; before it the codes of the prefix.
#pragma once

#include "activation.h"
#include "raster.h"
#include "vector_io.h"

namespace qk {

struct ActivatedArgs {
  const f32* x_scale;  // [1] or [M]
  const f32* w_scale;  // [1] or [N]
  const void* bias;    // io [N] or null
  const void* prefix;  // io [M, prefix_columns] or null: prefix_columns is 0
  const f32* smooth;   // [prefix_columns + N] or null
  const f32* scale;    // [1]
  u8* q;               // [M, prefix_columns + N]
  int m, n;
  int prefix_columns;  // with a multiple of 16, N is one too

  QK_DEVICE int pitch() const { return prefix_columns + n; }
};

/// Numbers of kCount columns from `column` on; `other` past the end, and of null.
template <int kCount>
QK_DEVICE void load_columns(f32 (&numbers)[kCount], const f32* from, int column, int end,
                            f32 other) {
  QK_UNROLL for (int e = 0; e < kCount; ++e)
    numbers[e] = from != nullptr && column + e < end ? from[column + e] : other;
}

/// Codes of the prefix of `rows` rows of the product, by `count` threads, of which this is
/// number `index`.
template <Format kY, Io kIo>
QK_DEVICE void quantize_prefix(const ActivatedArgs& args, int first_row, int rows, int index,
                               int count) {
  using Type = IoType<kIo>;
  constexpr int kRun = sizeof(Vec16) / sizeof(typename Type::Memory);
  using Run = RunOf<kIo, kRun>;
  using Memory = typename Run::Memory;
  const int within = args.m - first_row < rows ? args.m - first_row : rows;
  const int per_row = args.prefix_columns / kRun, total = within * per_row;
  if (index >= total) return;
  const Memory* const from =
      static_cast<const Memory*>(args.prefix) + static_cast<i64>(first_row) * args.prefix_columns;
  const Divisor<kY> divisor(args.scale[0]);
  // The next one is under way while one is computed.
  typename Run::Held next = Run::hold(from + static_cast<i64>(index) * kRun);
  QK_NO_UNROLL for (int i = index; i < total; i += count) {
    const typename Run::Held held = next;
    if (i + count < total) next = Run::hold(from + static_cast<i64>(i + count) * kRun);
    const int row = i / per_row, column = (i - row * per_row) * kRun;
    f32 values[kRun];
    Run::widen(values, Run::raw_of(held));
    if (args.smooth != nullptr) Input<true>{args.smooth}.apply(values, column, true, kRun);
    store(args.q + static_cast<i64>(first_row + row) * args.pitch() + column,
          divisor.encode(values));
  }
}

/// A block's share of that: the blocks of its tokens' tiles take runs in turns.
template <class Tile, Format kY, Io kIo>
QK_DEVICE void share_prefix(const ActivatedArgs& args, TileOrigin origin) {
  if (args.prefix_columns == 0) return;
  const int tiles_n = (args.n - 1) / Tile::kN + 1;
  quantize_prefix<kY, kIo>(args, origin.m, Tile::kM,
                           origin.n / Tile::kN * Tile::kThreads + thread_index(),
                           tiles_n * Tile::kThreads);
}

template <Format kY, Io kIo>
struct ActivatedEpilogue {
  using Type = IoType<kIo>;
  using Memory = typename Type::Memory;

  /// What is one for all, or one for each.
  struct Scales {
    int per_token, per_channel;  // 0 or 1
  };

  /// m0, n0: first token and output of the calling wave's accumulators; act: of QK_ACT.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run(const ActivatedArgs& args, Scales scales, int act,
                            const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0) {
    if (act == QK_SILU) run_as<QK_SILU, Mma, kBlocksN, kBlocksM>(args, scales, acc, m0, n0);
    if (act == QK_GELU) run_as<QK_GELU, Mma, kBlocksN, kBlocksM>(args, scales, acc, m0, n0);
    if (act == QK_TANH) run_as<QK_TANH, Mma, kBlocksN, kBlocksM>(args, scales, acc, m0, n0);
  }

 private:
  template <int kAct, class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run_as(const ActivatedArgs& args, Scales scales,
                               const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0) {
    using Runs = typename Mma::template Runs<kBlocksN>;
    constexpr int kLength = Runs::kLength, kParts = kBlocksM * Mma::kColumns;
    const int lane = thread_index() % kWave;
    const Divisor<kY> divisor(args.scale[0]);
    f32 x_scale[kParts];
    QK_UNROLL for (int part = 0; part < kParts; ++part) {
      const int token = token_of<Mma>(part, m0, lane), last = args.m - 1;
      x_scale[part] = args.x_scale[(token < last ? token : last) * scales.per_token];
    }
    QK_UNROLL for (int run = 0; run < Runs::kCount; ++run) {
      const int column = n0 + Mma::template output<kBlocksN>(run, lane);
      const ColumnFactors<kLength> mine(args, scales, column);
      QK_UNROLL for (int part = 0; part < kParts; ++part) {
        const int token = token_of<Mma>(part, m0, lane);
        if (token >= args.m || column >= args.n) continue;
        f32 values[kLength];
        QK_UNROLL for (int e = 0; e < kLength; ++e) {
          const auto sum = acc[Mma::template block<kBlocksN>(run, e)][part / Mma::kColumns]
                              [Mma::element(e, part % Mma::kColumns)];
          values[e] = mine.template apply<kAct>(static_cast<f32>(sum) * x_scale[part], e);
        }
        write(args, token, column, divisor.encode(values));
      }
    }
  }

  template <class Mma>
  static QK_DEVICE int token_of(int part, int m0, int lane) {
    return m0 + 16 * (part / Mma::kColumns) + Mma::token(part % Mma::kColumns, lane);
  }

  /// What is done to kCount columns of sums times scales of tokens.
  template <int kCount>
  struct ColumnFactors {
    f32 scale[kCount], bias[kCount], smooth[kCount];

    QK_DEVICE ColumnFactors(const ActivatedArgs& args, Scales scales, int column) {
      QK_UNROLL for (int e = 0; e < kCount; ++e) {
        const bool inside = column + e < args.n;
        scale[e] = inside ? args.w_scale[(column + e) * scales.per_channel] : 0.0f;
        bias[e] = inside && args.bias != nullptr
                      ? Type::widen(static_cast<const Memory*>(args.bias)[column + e])
                      : 0.0f;
      }
      load_columns(smooth, args.smooth, args.prefix_columns + column, args.pitch(), 1.0f);
    }
    template <int kAct>
    QK_DEVICE f32 apply(f32 value, int e) const {
      const f32 y = rounded<kIo>(add_rounded(value * scale[e], bias[e]));
      return rounded<kIo>(activate<kAct>(y)) * smooth[e];
    }
  };

  template <int kCount>
  static QK_DEVICE void write(const ActivatedArgs& args, int token, int column,
                              const Codes<kCount>& codes) {
    u8* const target =
        args.q + static_cast<i64>(token) * args.pitch() + args.prefix_columns + column;
    if (args.n % kCount == 0) {
      store(target, codes);
    } else {
      QK_UNROLL for (int e = 0; e < kCount; ++e) {
        if (column + e < args.n) target[e] = codes.v[e];
      }
    }
  }
};

}  // namespace qk
