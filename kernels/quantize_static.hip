// q[m, k] = fp8(clamp(x[m, k] * smooth[k] / scale, -max, max)), one scale for all
//
// x       io [M, K]                          smooth  f32 [K]; read with QK_SMOOTH alone
// scale   f32 [1], read
// q       fp8 codes [M, K]
// Any M and K; base pointers 16-byte aligned. Rounds to nearest even after a true f32 division
// (vector_io.h); the bytes equal torch's `(x.float() * smooth / scale).clamp(-max,
// max).to(fp8)`. NaN becomes the NaN code, never a number.
//
// Launch: 256 threads, grid (ceil(M * K / 8192), 1, 1). The tensor is one flat array: run r of a
// block, r = 0 and 1, gives thread t the 16 values at 8192 * block + 4096 * r + 16 * t, so every
// access but the last run's is 16 bytes.
#include "vector_io.h"

namespace {

constexpr int kThreads = QK_THREADS;
constexpr int kRuns = 2;
constexpr int kRun = 16;  // values: one 16-byte store of codes
constexpr int kBlockValues = kThreads * kRuns * kRun;
using Input = qk::Input<QK_SMOOTH != 0>;
static_assert(kBlockValues == 8192, "launch.json divides M * K by this number");

}  // namespace

QK_KERNEL(kThreads)
QK_SYMBOL(const void* x, const float* smooth, const float* scale, qk::u8* q, int m, int k) {
  qk::start();
  using Run = qk::RunOf<qk::Io(QK_IO), kRun>;
  const Input input{smooth};
  const qk::i64 total = static_cast<qk::i64>(m) * k;
  const qk::Divisor<qk::Format(QK_X_FORMAT)> divisor(scale[0]);
  QK_UNROLL for (int run = 0; run < kRuns; ++run) {
    const qk::i64 start = static_cast<qk::i64>(qk::block_x()) * kBlockValues +
                          (run * kThreads + qk::thread_index()) * kRun;
    if (start >= total) continue;
    const bool whole = start + kRun <= total;
    const int count = whole ? kRun : static_cast<int>(total - start);
    float values[kRun];
    Run::widen(values,
               Run::load_raw(static_cast<const typename Run::Memory*>(x) + start, whole, count));
    if constexpr (!Input::kPlain) {
      const int column = static_cast<int>(start % k);
      if (k % kRun == 0) {
        input.apply(values, column, true, kRun);
      } else {
        input.apply_across_rows(values, column, k);
      }
    }
    qk::write_codes(q + start, divisor.encode(values), whole, count);
  }
}

QK_HOST_ENTRY(kThreads, 0)
