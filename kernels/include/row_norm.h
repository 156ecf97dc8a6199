// Norms of rows that end in codes: what layer_norm_codes and sum_norm_codes share. The source
// defines QK_SUM: 1 where rows are sums, which are written, too.
#pragma once

#include "vector_io.h"

namespace {

constexpr int kRun = 8;
constexpr int kStep = qk::kWave * kRun;
constexpr int kRows = QK_THREADS / qk::kWave;
constexpr qk::Io kIo = qk::Io(QK_IO);
using Run = qk::RunOf<kIo, kRun>;
using Memory = typename Run::Memory;
using Input = qk::Input<(QK_INPUT & QK_SHIFT) != 0, (QK_INPUT & QK_SMOOTH) != 0>;
using Values = float[kRun];
// Runs that a lane keeps: 64 registers.
constexpr int kHeld = 256 / static_cast<int>(sizeof(Run::Raw));
static_assert(kRows == 8, "launch.json divides M by this number");
static_assert(QK_LDS_BYTES == 0, "launch.json states the LDS");

QK_DEVICE float sum_of_run(const Values& values) {
  Values sums;
  QK_UNROLL for (int e = 0; e < kRun; ++e)
    sums[e] = values[e];
  QK_UNROLL for (int apart = kRun / 2; apart > 0; apart /= 2) {
    QK_UNROLL for (int e = 0; e < apart; ++e)
      sums[e] = qk::add_rounded(sums[e], sums[e + apart]);
  }
  return sums[0];
}

QK_DEVICE float sum_of_lanes(float sum) {
  QK_UNROLL for (int mask = qk::kWave / 2; mask > 0; mask /= 2)
    sum = qk::add_rounded(sum, qk::bits_float(qk::lane_xor(qk::float_bits(sum), mask)));
  return sum;
}

/// The row that is normed: of x, or with QK_SUM of x + gate * added.
struct Source {
  const Memory* x;
#if QK_SUM
  const Memory* added;
  const Memory* gate;
  Memory* sum;
#endif

  /// further: beyond `start`, the lane's first column, in steps that are known to the compiler.
  QK_DEVICE typename Run::Raw load_raw(int start, int further) const {
#if QK_SUM
    Values values, more, factors;
    Run::widen(values, Run::load_raw(x + start + further, true, kRun));
    Run::widen(more, Run::load_raw(added + start + further, true, kRun));
    if (gate != nullptr) {
      Run::widen(factors, Run::load_raw(gate + start + further, true, kRun));
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        more[e] = qk::rounded<kIo>(factors[e] * more[e]);
    }
    QK_UNROLL for (int e = 0; e < kRun; ++e)
      values[e] = qk::add_rounded(values[e], more[e]);
    return Run::narrow(values);
#else
    return Run::load_raw(x + start + further, true, kRun);
#endif
  }
};

/// A row: the lane's runs, held or read again.
struct Row {
  Source source;
  int k;
  typename Run::Raw held[kHeld];

  QK_DEVICE Row(const Source& from, int columns, int start) : source(from), k(columns) {
    QK_UNROLL for (int step = 0; step < kHeld; ++step) {
      if (start + step * kStep < k) held[step] = source.load_raw(start, step * kStep);
    }
  }

  /// Calls each(values, column) for all runs of the lane, in order.
  template <class Each>
  QK_DEVICE void for_each(int start, const Each& each) const {
    Values values;
    QK_UNROLL for (int step = 0; step < kHeld; ++step) {
      const int column = start + step * kStep;
      if (column >= k) continue;
      Run::widen(values, held[step]);
      each(values, column);
    }
    QK_NO_UNROLL for (int next = start + kHeld * kStep; next < k; next += kStep) {
      // Else clang counts pointers up, one for each operand, by additions with a carry.
      const int column = static_cast<int>(qk::opaque(static_cast<qk::u32>(next)));
      Run::widen(values, source.load_raw(column, 0));
      each(values, column);
    }
  }
};

QK_DEVICE void read(Values& values, const void* from, int column) {
  Run::widen(values, Run::load_raw(static_cast<const Memory*>(from) + column, true, kRun));
}

/// y * (1 + up) + by, each step rounded to io.
QK_DEVICE void modulate(Values& values, const Memory* up, const Memory* by) {
  Values numbers;
  if (up != nullptr) {
    Run::widen(numbers, Run::load_raw(up, true, kRun));
    QK_UNROLL for (int e = 0; e < kRun; ++e) {
      const float factor = qk::rounded<kIo>(qk::add_rounded(1.0f, numbers[e]));
      values[e] = qk::rounded<kIo>(values[e] * factor);
    }
  }
  if (by != nullptr) {
    Run::widen(numbers, Run::load_raw(by, true, kRun));
    QK_UNROLL for (int e = 0; e < kRun; ++e)
      values[e] = qk::rounded<kIo>(qk::add_rounded(values[e], numbers[e]));
  }
}

/// What every launch has: the operands between rows and codes, as layer_norm_codes.hip says.
struct Operands {
  const void *weight, *bias, *up, *by;
  const float *smooth, *shift, *scale;
  qk::u8* q;
};

/// Writes the codes of the wave's row: of row `index`, where that is below m, else nothing.
QK_DEVICE void write_norm(const Source& source, const Operands& operands, int index, int mine,
                          int m, int k, int rows, int centred, int eps) {
  const int start = qk::thread_index() % qk::kWave * kRun;
  const Row row(source, k, start);
  float mean = 0.0f;
  if (centred != 0) {
    row.for_each(start, [&](const Values& values, int) {
      mean = qk::add_rounded(mean, sum_of_run(values));
    });
    mean = sum_of_lanes(mean) / static_cast<float>(k);
  }
  float squares = 0.0f;
  row.for_each(start, [&](const Values& values, int) {
    Values apart;
    QK_UNROLL for (int e = 0; e < kRun; ++e) {
      const float from = values[e] - mean;
      apart[e] = from * from;
    }
    squares = qk::add_rounded(squares, sum_of_run(apart));
  });
  const float variance = sum_of_lanes(squares) / static_cast<float>(k);
  const float inverse =
      1.0f / qk::sqrt_rounded(qk::add_rounded(variance, qk::bits_float(static_cast<qk::u32>(eps))));
  if (index >= m) return;
  const qk::Divisor<qk::Format(QK_X_FORMAT)> divisor(operands.scale[0]);
  const Input input{operands.shift, operands.smooth};
  const qk::i64 modulated = static_cast<qk::i64>(mine / rows) * k;
  const auto* const ups = static_cast<const Memory*>(operands.up);
  const auto* const bys = static_cast<const Memory*>(operands.by);
  qk::u8* const codes = operands.q + static_cast<qk::i64>(mine) * k;
  row.for_each(start, [&](const Values& values, int column) {
    Values y, numbers;
#if QK_SUM
    Run::store_raw(source.sum + column, Run::narrow(values));
#endif
    QK_UNROLL for (int e = 0; e < kRun; ++e)
      y[e] = (values[e] - mean) * inverse;
    if (operands.weight != nullptr) {
      read(numbers, operands.weight, column);
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        y[e] *= numbers[e];
    }
    if (operands.bias != nullptr) {
      read(numbers, operands.bias, column);
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        y[e] = qk::add_rounded(y[e], numbers[e]);
    }
    QK_UNROLL for (int e = 0; e < kRun; ++e)
      y[e] = qk::rounded<kIo>(y[e]);
    modulate(y, ups == nullptr ? ups : ups + modulated + column,
             bys == nullptr ? bys : bys + modulated + column);
    input.apply(y, column, true, kRun);
    qk::write_codes(codes + column, divisor.encode(y), true, kRun);
  });
}

}  // namespace
