// scale[m] = max_k |x[m, k] * smooth[k]| / max, 1 where that is zero
// q[m, k]  = fp8(clamp(x[m, k] * smooth[k] / scale[m], -max, max))
//
// x       io [M, K]                          smooth  f32 [K]; read only with QK_SMOOTH = 1
// scale   f32 [M], written                   q       fp8 codes [M, K]
// Any M and K; base pointers 16-byte aligned. True f32 divisions and round to nearest even, as torch's. A NaN
// in a row makes its scale NaN and with it all its codes: it is passed on visibly, never turned into a number.
//
// Launch: 256 threads, grid (ceil(M / 8), 1, 1). A block has eight rows. A row is taken by 1, 2, 4 or all 8 of its
// waves, the fewest that hold it in registers, two runs of 16 values a lane: lane l of the row's wave w takes the values
// at (step * waves + w) * 512 + 16 * l. What is not held is read a second time: the end of a row that eight waves cannot
// hold (K > 8192), and most of a row that is no whole number of runs.
#include "vector_io.h"

namespace {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / qk::kWave;
constexpr int kStep = qk::kWave * qk::kRun;
constexpr bool kSmooth = QK_SMOOTH == 1;
constexpr qk::Format kFormat = qk::Format(QK_X_FORMAT);
static_assert(kRows == 8, "launch.json divides M by this number");

using Run = qk::RunOf<qk::Io(QK_IO)>;

/// The row that a wave works on; kWhole: all its runs are whole, and 16-byte aligned in x and q.
template <bool kWhole>
struct Row {
  const typename Run::Memory* x;
  const float* smooth;
  int k;

  QK_DEVICE void widen(float (&values)[qk::kRun], const Run::Raw& raw, int column) const {
    Run::widen(values, raw);
    if constexpr (kSmooth) {
      QK_UNROLL for (int e = 0; e < qk::kRun; ++e) {
        if (kWhole || column + e < k) values[e] *= smooth[column + e];
      }
    }
  }
  QK_DEVICE Run::Raw fetch(int column) const { return Run::fetch(x + column, kWhole, k - column); }

  /// Largest magnitude, as bits: they compare as the values do, with NaN above everything.
  QK_DEVICE qk::u32 largest(const Run::Raw& raw, int column) const {
    float values[qk::kRun];
    widen(values, raw, column);
    qk::u32 amax = 0;
    QK_UNROLL for (int e = 0; e < qk::kRun; ++e) {
      const qk::u32 magnitude = qk::float_bits(values[e]) & 0x7fffffffu;
      amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
  }

  QK_DEVICE void write(qk::u8* q, const Run::Raw& raw, int column, const qk::Divisor<kFormat>& divisor) const {
    float values[qk::kRun];
    widen(values, raw, column);
    qk::write_codes(q + column, values, divisor, kWhole, k - column);
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
QK_DEVICE void quantize(const typename Run::Memory* x, const float* smooth, float* scale, qk::u8* q, int m, int k,
                        qk::u8* lds) {
  const int wave = qk::wave_index(), lane = qk::thread_index() % qk::kWave;
  int waves = 1;
  while (waves < kRows && k > waves * kHeld * kStep) waves *= 2;
  const int stride = waves * kStep, start = wave % waves * kStep + lane * qk::kRun;
  // All waves take all turns, so that all meet at the barrier.
  for (int turn = 0; turn < waves; ++turn) {
    const int index = qk::block_x() * kRows + turn * (kRows / waves) + wave / waves;
    const int end = index < m ? k : 0;
    const qk::i64 offset = static_cast<qk::i64>(index) * k;
    const Row<kWhole> row{x + offset, smooth, k};
    typename Run::Raw held[kHeld];
    qk::u32 amax = 0;
    QK_UNROLL for (int step = 0; step < kHeld; ++step) {
      if (start + step * stride < end) held[step] = row.fetch(start + step * stride);
    }
    QK_UNROLL for (int step = 0; step < kHeld; ++step) {
      if (start + step * stride < end) amax = larger(amax, row.largest(held[step], start + step * stride));
    }
    for (int column = start + kHeld * stride; column < end; column += stride) {
      amax = larger(amax, row.largest(row.fetch(column), column));
    }
    amax = row_max(amax, lds + turn % 2 * kRows * 4, wave, waves);
    // Zero for a row of zeros, and when amax is so small that the quotient underflows: zeros would become NaN.
    const float quotient = qk::bits_float(amax) / qk::Fp8<kFormat>::kMax;
    const qk::Divisor<kFormat> divisor(quotient == 0.0f ? 1.0f : quotient);
    if (start == 0 && index < m) scale[index] = divisor.scale;
    QK_UNROLL for (int step = 0; step < kHeld; ++step) {
      if (start + step * stride < end) row.write(q + offset, held[step], start + step * stride, divisor);
    }
    for (int column = start + kHeld * stride; column < end; column += stride) {
      row.write(q + offset, row.fetch(column), column, divisor);
    }
  }
}

}  // namespace

QK_KERNEL(kThreads)
QK_SYMBOL(const void* x, const float* smooth, float* scale, qk::u8* q, int m, int k) {
  QK_SHARED(lds, 2 * kRows * 4);  // a maximum per wave, for every second turn
  const auto* const rows = static_cast<const typename Run::Memory*>(x);
  if (k % qk::kRun == 0) {
    quantize<true, 2>(rows, smooth, scale, q, m, k, lds);
  } else {
    quantize<false, 1>(rows, smooth, scale, q, m, k, lds);
  }
}

QK_HOST_ENTRY(kThreads, 2 * kRows * 4)
