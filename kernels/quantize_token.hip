// scale[m] = max_k |x[m, k] * smooth[k]| / max, 1 where that is zero
// q[m, k]  = fp8(clamp(x[m, k] * smooth[k] / scale[m], -max, max))
//
// x       io [M, K]                          smooth  f32 [K]; read with QK_SMOOTH alone
// scale   f32 [M], written
// q       fp8 codes [M, K]
// Any M and K; base pointers 16-byte aligned. True f32 divisions and round to nearest even, as
// torch's. A NaN in a row makes its scale NaN and with it all its codes: it is passed on visibly,
// never turned into a number.
//
// Launch: 256 threads, grid (ceil(M / 8), 1, 1). A block has eight rows. A row is taken by 1, 2, 4
// or all 8 of its waves, the fewest that hold it in registers, in runs of 8 values: lane l of the
// row's wave w takes the values at (step * waves + w) * 256 + 8 * l. What is not held is read a
// second time: the end of a row of more than 16384 16-bit values, and most of a row that is no
// whole number of runs.
#include "vector_io.h"

namespace {

constexpr int kThreads = QK_THREADS;
constexpr int kRows = kThreads / qk::kWave;
constexpr int kRun = 8;  // values: one 16-byte load of 16-bit ones
constexpr int kStep = qk::kWave * kRun;
constexpr qk::Format kFormat = qk::Format(QK_X_FORMAT);
constexpr int kLdsBytes = 2 * kRows * 4;  // a maximum per wave, for every second turn
static_assert(kRows == 8, "launch.json divides M by this number");
static_assert(kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");

using Run = qk::RunOf<qk::Io(QK_IO), kRun>;
using Input = qk::Input<QK_SMOOTH != 0>;
// Runs that a lane keeps: 32 registers.
constexpr int kHeld = 128 / static_cast<int>(sizeof(Run::Raw));

/// The row that a wave works on; kWhole: all its runs are whole, and 16-byte aligned in x.
template <bool kWhole>
struct Row {
  const typename Run::Memory* x;
  Input input;
  int k;

  QK_DEVICE void widen(float (&values)[kRun], const Run::Raw& raw, int column) const {
    Run::widen(values, raw);
    input.apply(values, column, kWhole, k - column);
  }
  QK_DEVICE Run::Raw load_raw(int column) const {
    return Run::load_raw(x + column, kWhole, k - column);
  }

  /// Largest magnitude, as bits.
  QK_DEVICE qk::u32 amax_bits(const Run::Raw& raw, int column) const {
    if constexpr (Input::kPlain) return Run::amax_bits(raw);
    float values[kRun];
    widen(values, raw, column);
    return qk::amax_bits_of(values);
  }

  QK_DEVICE void write(qk::u8* q, const Run::Raw& raw, int column,
                       const qk::Divisor<kFormat>& divisor) const {
    float values[kRun];
    widen(values, raw, column);
    qk::write_codes(q + column, divisor.encode(values), kWhole, k - column);
  }
  /// False: the codes are not certain, and have to be written again.
  QK_DEVICE bool write_fast(qk::u8* q, const Run::Raw& raw, int column,
                            const qk::FastDivisor<kFormat>& divisor) const {
    float values[kRun];
    widen(values, raw, column);
    qk::Codes<kRun> codes;
    const bool certain = divisor.encode(codes, values);
    qk::write_codes(q + column, codes, kWhole, k - column);
    return certain;
  }
};

QK_DEVICE qk::u32 larger(qk::u32 a, qk::u32 b) { return a > b ? a : b; }

/// Largest value over the waves that share a row. All waves of the block call it.
QK_DEVICE qk::u32 row_max(qk::u32 value, qk::u8* maxima, int wave, int waves) {
  value = qk::wave_max(value);
  if (waves == 1) return value;
  if (qk::thread_index() % qk::kWave == 0) qk::store(maxima + wave * 4, value);
  qk::block_sync();
  for (int other = 0; other < waves; ++other) {
    value = larger(value, qk::load<qk::u32>(maxima + (wave / waves * waves + other) * 4));
  }
  return value;
}

template <bool kWhole, int kHeld>
QK_DEVICE void quantize(const typename Run::Memory* x, const Input& input, float* scales, qk::u8* q,
                        int m, int k, qk::u8* lds) {
  const int wave = qk::wave_index(), lane = qk::thread_index() % qk::kWave;
  int waves = 1;
  while (waves < kRows && k > waves * kHeld * kStep) waves *= 2;
  const int stride = waves * kStep, start = wave % waves * kStep + lane * kRun;
  // All waves take all turns, so that all meet at the barrier.
  for (int turn = 0; turn < waves; ++turn) {
    const int index = qk::block_x() * kRows + turn * (kRows / waves) + wave / waves;
    const int end = index < m ? k : 0;
    const qk::i64 offset = static_cast<qk::i64>(index) * k;
    const Row<kWhole> row{x + offset, input, k};
    qk::u8* const codes = q + offset;
    typename Run::Raw held[kHeld];
    qk::u32 amax = 0;
    QK_UNROLL for (int step = 0; step < kHeld; ++step) {
      if (start + step * stride < end) held[step] = row.load_raw(start + step * stride);
    }
    QK_UNROLL for (int step = 0; step < kHeld; ++step) {
      if (start + step * stride < end)
        amax = larger(amax, row.amax_bits(held[step], start + step * stride));
    }
    for (int column = start + kHeld * stride; column < end; column += stride) {
      amax = larger(amax, row.amax_bits(row.load_raw(column), column));
    }
    amax = row_max(amax, lds + turn % 2 * kRows * 4, wave, waves);
    // Zero for a row of zeros, and when amax is so small that the quotient underflows: zeros would
    // become NaN.
    const float quotient = qk::bits_float(amax) / qk::Codec<kFormat>::kMax;
    const float scale = quotient == 0.0f ? 1.0f : quotient;
    if (start == 0 && index < m) scales[index] = scale;
    const qk::FastDivisor<kFormat> fast(scale);
    qk::u32 again = 0;  // bit by step
    QK_UNROLL for (int step = 0; step < kHeld; ++step) {
      const int column = start + step * stride;
      if (column < end && !row.write_fast(codes, held[step], column, fast)) again |= 1u << step;
    }
    // What is not certain, and what is not held; a rolled loop, so that the long way stands in the
    // code once.
    const qk::Divisor<kFormat> divisor(scale);
    QK_NO_UNROLL for (int column = start; again != 0; column += stride, again >>= 1) {
      if (again & 1) row.write(codes, row.load_raw(column), column, divisor);
    }
    QK_NO_UNROLL for (int column = start + kHeld * stride; column < end; column += stride) {
      row.write(codes, row.load_raw(column), column, divisor);
    }
  }
}

}  // namespace

// Three blocks are 24 waves of 80 registers; with two, large inputs took a tenth longer on an H200.
// Smoothing needs more registers.
QK_KERNEL_SHARING(kThreads, Input::kPlain ? 3 : 2, 16)
QK_SYMBOL(const void* x, const float* smooth, float* scale, qk::u8* q, int m, int k) {
  QK_SHARED(lds, kLdsBytes);
  qk::start();
  const auto* const rows = static_cast<const typename Run::Memory*>(x);
  const Input input{smooth};
  if (k % kRun != 0) {
    quantize<false, 1>(rows, input, scale, q, m, k, lds);
  } else {
    quantize<true, kHeld>(rows, input, scale, q, m, k, lds);
  }
}

QK_HOST_ENTRY(kThreads, kLdsBytes)
