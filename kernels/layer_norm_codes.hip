// q[i, j] = code(clamp((y[i, j] - shift[j]) * smooth[j] / scale, -max, max)), with
// y = ((x[i, j] - mean_i) * inverse_i * weight[j] + bias[j]) * (1 + up[b, j]) + by[b, j]
// With QK_SUM all of that is of x + gate[b, j] * added[i, j], which is written, too.
//
// x       io [m, k]                          weight, bias   io [k] or null: ones, zeros
// up, by  io [m / rows, k] or null           smooth, shift  f32 [k], read with QK_INPUT alone
// scale   f32 [1]                            q              codes [m, k]
// added   io [m, k], sum io [m, k]           gate           io [m / rows, k] or null: ones
// mean_i is the row's mean where `centred`, else 0 (RMSNorm); inverse_i = 1 / sqrt(mean of squared
// distances from it + eps). Norm, 1 + up, products and sums are rounded to io, as tensors between
// are; row i is modulated by b = i / rows. Any m, k a multiple of 8; base pointers
// 16-byte aligned; eps are the bits of a float32. A NaN in a row makes all its codes NaN.
//
// Launch: 256 threads, grid (ceil(m / 8), 1, 1): a wave has a row. Lane l takes the 8 values at
// 256 * step + 8 * l. Sums: the 8 of a run as a tree, runs in order, lanes as a tree. What a lane
// does not hold in registers is read again: rows of more than 4096 16-bit values.
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

/// What is normed: x, or x + gate * added.
struct Source {
  const Memory* x;
#if QK_SUM
  const Memory* added;
  const Memory* gate;
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

}  // namespace

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x,
#if QK_SUM
          const void* added, const void* gate,
#endif
          const void* weight, const void* bias, const void* up, const void* by, const float* smooth,
          const float* shift, const float* scale,
#if QK_SUM
          void* sum,
#endif
          qk::u8* q, int m, int k, int rows, int centred, int eps) {
  const int index = qk::block_x() * kRows + qk::wave_index();
  const int start = qk::thread_index() % qk::kWave * kRun;
  // All waves take part: those without a row do the last one's, and write nothing.
  const int mine = index < m ? index : m - 1;
#if QK_SUM
  const qk::i64 first = static_cast<qk::i64>(mine) * k;
  const auto* const gates = static_cast<const Memory*>(gate);
  const Source source{static_cast<const Memory*>(x) + first,
                      static_cast<const Memory*>(added) + first,
                      gates == nullptr ? gates : gates + static_cast<qk::i64>(mine / rows) * k};
  Memory* const sums = static_cast<Memory*>(sum) + first;
#else
  const Source source{static_cast<const Memory*>(x) + static_cast<qk::i64>(mine) * k};
#endif
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
  const qk::Divisor<qk::Format(QK_X_FORMAT)> divisor(scale[0]);
  const Input input{shift, smooth};
  const qk::i64 modulated = static_cast<qk::i64>(mine / rows) * k;
  const auto* const ups = static_cast<const Memory*>(up);
  const auto* const bys = static_cast<const Memory*>(by);
  qk::u8* const codes = q + static_cast<qk::i64>(mine) * k;
  row.for_each(start, [&](const Values& values, int column) {
    Values y, numbers;
#if QK_SUM
    Run::store_raw(sums + column, Run::narrow(values));
#endif
    QK_UNROLL for (int e = 0; e < kRun; ++e)
      y[e] = (values[e] - mean) * inverse;
    if (weight != nullptr) {
      read(numbers, weight, column);
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        y[e] *= numbers[e];
    }
    if (bias != nullptr) {
      read(numbers, bias, column);
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

QK_HOST_ENTRY(QK_THREADS, 0)
