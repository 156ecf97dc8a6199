// GEGLU behind a tile of sums: from outputs and their gates to codes for the next product.
//
// y = fp8(h gelu(g) / y_scale), h = sum * x_scale * w_scale + bias of row j of w and g of row N +
// j. A tile has kN / 2 columns of y. Its rows of w are chosen so that a lane holds h and g of the
// same tokens and columns: of kPeriod rows of the tile the first half are of outputs, the second
// half of their gates.
#pragma once

#include "epilogue.h"
#include "gelu.h"
#include "tile.h"
#include "vector_io.h"

namespace qk {

/// The runs of consecutive columns of y that a lane has, of a wave with kBlocksN blocks of rows.
/// Where it has several runs of rows, the second half of them are gates; where it has a single one,
/// the second half of that.
template <class Mma, int kBlocksN>
struct GatedRuns {
  using RowRuns = typename Mma::template Runs<kBlocksN>;
  static constexpr bool kWhole = RowRuns::kCount > 1;
  static constexpr int kCount = kWhole ? RowRuns::kCount / 2 : 1;
  static constexpr int kLength = kWhole ? RowRuns::kLength : RowRuns::kLength / 2;
  static constexpr int kPeriod = kWhole ? 16 * kBlocksN : RowRuns::kLength;
  static_assert(kBlocksN % 2 == 0, "half of a wave's rows gate the other half");

  /// First column of a run, from the wave's first one.
  static QK_DEVICE int column(int run, int lane) {
    return kWhole ? Mma::template output<kBlocksN>(run, lane)
                  : Mma::template output<kBlocksN>(0, lane) / 2;
  }
  static QK_DEVICE int run(int run, bool gate) { return kWhole && gate ? run + kCount : run; }
  static QK_DEVICE int element(int e, bool gate) { return !kWhole && gate ? e + kLength : e; }
};

/// Rows of w as a tile has them: see above.
template <class Mma, int kBlocksN>
struct GatedRows {
  static constexpr int kPeriod = GatedRuns<Mma, kBlocksN>::kPeriod;
  int count;  // columns of y from the tile's first one on
  int gates;  // rows from an output's to its gate's

  static QK_DEVICE GatedRows of_weights(const Operands& op, int n0) { return {op.n - n0, op.n}; }
  QK_DEVICE int operator()(int row) const {
    const int column = row / kPeriod * (kPeriod / 2) + row % (kPeriod / 2);
    return (column < count ? column : count - 1) + (row % kPeriod < kPeriod / 2 ? 0 : gates);
  }
};

/// Product: the Epilogue of the GEMM whose sums these are.
template <class Product, Format kY>
struct GatedEpilogue {
  /// m0, n0: first token and column of y of the calling wave's accumulators. args.n counts columns
  /// of y.
  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run(const EpilogueArgs& args, const f32* y_scale,
                            const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0, int n0) {
    constexpr int kLength = GatedRuns<Mma, kBlocksN>::kLength;
    if constexpr (QK_SPLITS_EDGES) {
      if (is_inside<16 * kBlocksM, 8 * kBlocksN, kLength>(args.m, args.n, m0, n0)) {
        run_inside<Mma>(args, y_scale, acc, m0, n0);
        return;
      }
    }
    run_at_edge<Mma>(args, y_scale, acc, m0, n0);
  }

 private:
  /// A lane's sums of a run of columns, of one token.
  template <class Mma, int kBlocksN, int kBlocksM>
  struct Sums {
    using Runs = GatedRuns<Mma, kBlocksN>;
    const typename Mma::Acc (&acc)[kBlocksN][kBlocksM];
    int run, i;

    QK_DEVICE f32 operator()(int e, bool gate) const {
      const int from = Runs::run(run, gate), at = Runs::element(e, gate);
      return static_cast<f32>(acc[Mma::template block<kBlocksN>(from, at)][i / Mma::kColumns]
                                 [Mma::element(at, i % Mma::kColumns)]);
    }
  };

  template <class Sums, class Factors, int kLength>
  static QK_DEVICE void compute(f32 (&values)[kLength], const Sums& sum, f32 x_scale,
                                const Factors& outputs, const Factors& gates) {
    QK_UNROLL for (int e = 0; e < kLength; ++e) {
      values[e] = times_gelu(outputs.apply(sum(e, false) * x_scale, e),
                             gates.apply(sum(e, true) * x_scale, e));
    }
  }

  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run_inside(const EpilogueArgs& args, const f32* y_scale,
                                   const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0,
                                   int n0) {
    using Runs = GatedRuns<Mma, kBlocksN>;
    constexpr int kLength = Runs::kLength, kTokens = kBlocksM * Mma::kColumns;
    const WaveDivisor<kY> divisor(y_scale[0]);
    const int lane = thread_index() % kWave;
    u8* const y = static_cast<u8*>(args.y) + (static_cast<i64>(m0) * args.n + n0);
    const u32 pitch = static_cast<u32>(args.n), across = Runs::column(0, lane);
    const auto apart = [](int run) { return Runs::column(run, 0) - Runs::column(0, 0); };
    u32 offsets[kTokens];
    f32 x_scale[kTokens];
    QK_UNROLL for (int i = 0; i < kTokens; ++i) {
      const u32 token = Mma::token(i % Mma::kColumns, lane), block = 16 * (i / Mma::kColumns);
      offsets[i] = optimization_barrier(token * pitch + across + block * pitch);
      x_scale[i] = Product::template token_scale_inside<Mma>(args, m0, i, lane);
    }
    typename Product::template Factors<kLength> outputs[Runs::kCount], gates[Runs::kCount];
    Product::load_factors(outputs, args, n0, across, apart);
    Product::load_factors(gates, args, args.n + n0, across, apart);
    QK_UNROLL for (int run = 0; run < Runs::kCount; ++run) {
      QK_UNROLL for (int i = 0; i < kTokens; ++i) {
        f32 values[kLength];
        compute(values, Sums<Mma, kBlocksN, kBlocksM>{acc, run, i}, x_scale[i], outputs[run],
                gates[run]);
        store(y + apart(run) + offsets[i], divisor.encode(values));
      }
    }
  }

  template <class Mma, int kBlocksN, int kBlocksM>
  static QK_DEVICE void run_at_edge(const EpilogueArgs& args, const f32* y_scale,
                                    const typename Mma::Acc (&acc)[kBlocksN][kBlocksM], int m0,
                                    int n0) {
    using Runs = GatedRuns<Mma, kBlocksN>;
    constexpr int kLength = Runs::kLength;
    const Divisor<kY> divisor(y_scale[0]);
    const int lane = thread_index() % kWave;
    QK_UNROLL for (int run = 0; run < Runs::kCount; ++run) {
      const int column = n0 + Runs::column(run, lane);
      const auto outputs = Product::template factors<kLength>(args, column, args.n);
      const auto gates = Product::template factors<kLength>(args, args.n + column, 2 * args.n);
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
        QK_UNROLL for (int part = 0; part < Mma::kColumns; ++part) {
          const int token = m0 + 16 * j + Mma::token(part, lane);
          if (token >= args.m || column >= args.n) continue;
          const f32 x_scale = Product::token_scale(args, token);
          const Sums<Mma, kBlocksN, kBlocksM> sums{acc, run, j * Mma::kColumns + part};
          f32 values[kLength];
          compute(values, sums, x_scale, outputs, gates);
          write(args, token, column, divisor.encode(values));
        }
      }
    }
  }

  template <int kCount>
  static QK_DEVICE void write(const EpilogueArgs& args, int token, int column,
                              const Codes<kCount>& codes) {
    u8* const target = static_cast<u8*>(args.y) + (static_cast<i64>(token) * args.n + column);
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
