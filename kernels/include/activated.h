// A product behind which an activation stands, as codes for the next product: what gemm.hip
// writes, activated, and quantize_static.hip's codes of it, to the last bit.
//
// q[i, prefix_columns + j] = code(act(y[i, j]) * smooth / scale), y = sum * x_scale * w_scale +
// bias rounded to io, act(y) likewise; before it the codes of the prefix.
#pragma once

#include "activation.h"
#include "inside.h"
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

  /// m0, n0: first token and output of the calling wave's accumulators; act: of QK_ACT. Runs are
  /// taken in a loop: unrolled, code is larger than its cache.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run(const ActivatedArgs& args, Scales scales, int act,
                            const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0) {
    using Runs = typename Mma::template Runs<kBlocksN>;
    constexpr int kLength = Runs::kLength, kParts = kBlocksM * Mma::kColumns;
    const int lane = thread_index() % kWave, across = Mma::template output<kBlocksN>(0, lane);
    const bool inside = is_inside<16 * kBlocksM, 16 * kBlocksN, kLength>(args.m, args.pitch(), m0,
                                                                         args.prefix_columns + n0);
    const WaveDivisor<kY> divisor(args.scale[0]);
    const u32 pitch = static_cast<u32>(args.pitch());
    u8* const q = args.q + static_cast<i64>(m0) * args.pitch() + args.prefix_columns + n0;
    u32 offsets[kParts];
    f32 x_scale[kParts];
    QK_UNROLL for (int part = 0; part < kParts; ++part) {
      offsets[part] = optimization_barrier(token_of<Mma>(part, lane) * pitch + across);
      const int token = m0 + token_of<Mma>(part, lane), last = args.m - 1;
      x_scale[part] = args.x_scale[(token < last ? token : last) * scales.per_token];
    }
    QK_NO_UNROLL for (int run = 0; run < Runs::kCount; ++run) {
      const int apart = 16 * run;
      const ColumnFactors<kLength> factors(args, scales, n0 + apart, across, inside);
      f32 values[kParts * kLength];
      QK_UNROLL for (int which = 0; which < Runs::kCount; ++which) {
        if (which == run) load_sums<Mma>(values, acc, x_scale, which);
      }
      QK_UNROLL for (int i = 0; i < kParts * kLength; ++i)
        values[i] = factors.product(values[i], i % kLength);
      if (act == QK_SILU) activate_all<QK_SILU>(values);
      if (act == QK_GELU) activate_all<QK_GELU>(values);
      if (act == QK_TANH) activate_all<QK_TANH>(values);
      QK_UNROLL for (int part = 0; part < kParts; ++part) {
        f32 changed[kLength];
        QK_UNROLL for (int e = 0; e < kLength; ++e)
          changed[e] = rounded<kIo>(values[part * kLength + e]) * factors.smooth[e];
        const Codes<kLength> codes = divisor.encode(changed);
        if (inside) {
          store(q + apart + offsets[part], codes);
        } else {
          write(args, m0 + token_of<Mma>(part, lane), n0 + apart + across, codes);
        }
      }
    }
  }

 private:
  /// Of the wave's first token.
  template <class Mma>
  static QK_DEVICE int token_of(int part, int lane) {
    return 16 * (part / Mma::kColumns) + Mma::token(part % Mma::kColumns, lane);
  }

  /// A run's sums times scales of tokens.
  template <class Mma, int kBlocksN, int kBlocksM, int kParts, int kCount>
  static QK_DEVICE void load_sums(f32 (&values)[kCount],
                                  const typename Mma::Acc (&acc)[kBlocksN][kBlocksM],
                                  const f32 (&x_scale)[kParts], int run) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      const int part = i / (kCount / kParts), e = i % (kCount / kParts);
      const auto sum = acc[Mma::template block<kBlocksN>(run, e)][part / Mma::kColumns]
                          [Mma::element(e, part % Mma::kColumns)];
      values[i] = static_cast<f32>(sum) * x_scale[part];
    }
  }

  template <int kAct, int kCount>
  static QK_DEVICE void activate_all(f32 (&values)[kCount]) {
    QK_UNROLL for (int i = 0; i < kCount; ++i)
      values[i] = activate<kAct>(values[i]);
  }

  /// What is done to kCount columns of sums times scales of tokens, from column `first` + `across`
  /// on; all lanes share `first`. inside: all exist.
  template <int kCount>
  struct ColumnFactors {
    f32 scale[kCount], bias[kCount], smooth[kCount];

    QK_DEVICE ColumnFactors(const ActivatedArgs& args, Scales scales, int first, int across,
                            bool inside) {
      QK_UNROLL for (int e = 0; e < kCount; ++e) {
        scale[e] = args.w_scale[0];
        bias[e] = 0.0f;
        smooth[e] = 1.0f;
      }
      if (inside) {
        load_inside(args, scales, first, across);
      } else {
        load_clamped(args, scales, first, across);
      }
    }
    /// As it is once it has been written.
    QK_DEVICE f32 product(f32 value, int e) const {
      return rounded<kIo>(add_rounded(value * scale[e], bias[e]));
    }

   private:
    QK_DEVICE void load_inside(const ActivatedArgs& args, Scales scales, int first, u32 across) {
      const u32 bytes = optimization_barrier(across * sizeof(f32));
      if (scales.per_channel) load_beyond(scale, args.w_scale + first, bytes);
      if (args.smooth != nullptr)
        load_beyond(smooth, args.smooth + args.prefix_columns + first, bytes);
      if (args.bias == nullptr) return;
      const Memory* const biases = static_cast<const Memory*>(args.bias) + first;
      const u32 offset = optimization_barrier(across * sizeof(Memory));
      QK_UNROLL for (int e = 0; e < kCount; ++e)
        bias[e] = Type::widen(load_beyond<Memory>(biases + e, offset));
    }

    /// Of columns that do not exist, those of the last one.
    QK_DEVICE void load_clamped(const ActivatedArgs& args, Scales scales, int first, int across) {
      QK_UNROLL for (int e = 0; e < kCount; ++e) {
        const int column = first + across + e < args.n ? first + across + e : args.n - 1;
        scale[e] = args.w_scale[column * scales.per_channel];
        if (args.smooth != nullptr) smooth[e] = args.smooth[args.prefix_columns + column];
        if (args.bias != nullptr)
          bias[e] = Type::widen(static_cast<const Memory*>(args.bias)[column]);
      }
    }
  };

  template <int kCount>
  static QK_DEVICE void write(const ActivatedArgs& args, int token, int column,
                              const Codes<kCount>& codes) {
    if (token >= args.m || column >= args.n) return;
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
