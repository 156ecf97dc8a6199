// scale[m] = max_k |x[m, k] * smooth[k]| / max, 1 where that is zero
// q[m, k]  = fp8(clamp(x[m, k] * smooth[k] / scale[m], -max, max))
//
// x       io [M, K]                          smooth  f32 [K]; read only with QK_SMOOTH = 1
// scale   f32 [M], written                   q       fp8 codes [M, K]
// Any M and K; base pointers 16-byte aligned. True f32 divisions and round to nearest even, as torch's. A NaN
// in a row makes its scale NaN and with it all its codes: it is passed on visibly, never turned into a number.
//
// Launch: 256 threads, grid (ceil(M / 8), 1, 1). One wave per row: lane l takes the 16 values at 512 * step +
// 16 * l, so the maximum needs no barrier. The second pass finds the row in cache (a row of 5120 f16 is 10
// KB).
#include "vector_io.h"

namespace {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / qk::kWave;
constexpr int kStep = qk::kWave * qk::kRun;
constexpr bool kSmooth = QK_SMOOTH == 1;
constexpr qk::Format kFormat = qk::Format(QK_X_FORMAT);
static_assert(kRows == 8, "launch.json divides M by this number");

using Run = qk::RunOf<qk::Io(QK_IO)>;

/// Sixteen smoothed values of a row from `column`; zeros beyond its end.
QK_DEVICE void read_smoothed(float (&values)[qk::kRun], const typename Run::Memory* row, const float* smooth,
                             int column, int k, bool aligned) {
  Run::read(values, row + column, aligned, k - column);
  if constexpr (kSmooth) {
    QK_UNROLL for (int e = 0; e < qk::kRun; ++e) {
      if (aligned || column + e < k) values[e] *= smooth[column + e];
    }
  }
}

}  // namespace

QK_KERNEL(kThreads)
QK_SYMBOL(const void* x, const float* smooth, float* scale, qk::u8* q, int m, int k) {
  const int index = qk::block_x() * kRows + qk::wave_index(), lane = qk::thread_index() % qk::kWave;
  if (index >= m) return;  // whole waves leave
  const typename Run::Memory* const row =
      static_cast<const typename Run::Memory*>(x) + static_cast<qk::i64>(index) * k;
  const bool aligned = k % qk::kRun == 0;  // then every run is whole, and 16-byte aligned in x and q
  float values[qk::kRun];
  qk::u32 amax = 0;  // magnitudes compare as their bits, with NaN above everything
  for (int column = lane * qk::kRun; column < k; column += kStep) {
    read_smoothed(values, row, smooth, column, k, aligned);
    QK_UNROLL for (int e = 0; e < qk::kRun; ++e) {
      const qk::u32 magnitude = qk::float_bits(values[e]) & 0x7fffffffu;
      amax = magnitude > amax ? magnitude : amax;
    }
  }
  amax = qk::wave_max(amax);
  // Zero for a row of zeros, and when amax is so small that the quotient underflows: zeros would become NaN.
  const float quotient = qk::bits_float(amax) / qk::Fp8<kFormat>::kMax;
  const float divisor = quotient == 0.0f ? 1.0f : quotient;
  if (lane == 0) scale[index] = divisor;
  for (int column = lane * qk::kRun; column < k; column += kStep) {
    read_smoothed(values, row, smooth, column, k, aligned);
    qk::write_codes<kFormat>(q + static_cast<qk::i64>(index) * k + column, values, divisor, aligned, k - column);
  }
}

QK_HOST_ENTRY(kThreads, 0)
