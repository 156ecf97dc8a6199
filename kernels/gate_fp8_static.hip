// q[m, k] = fp8(clamp(x[m, k] * gelu(x[m, K + k]) / scale, -max, max)), one scale for the whole tensor
//
// x       io [M, 2 K]: outputs, then their gates     scale   f32 [1], read
// q       fp8 codes [M, K]
// Any M and K; base pointers 16-byte aligned. Everything in f32: gelu.h says how near the product is, the division and the
// rounding (to nearest even) are those of quantize_fp8_static.hip. NaN becomes the NaN code, never a number.
//
// Launch: 256 threads, grid (ceil(M * K / 8192), 1, 1). q is one flat array: run r of a block, r = 0 and 1, gives thread t
// the 16 codes at 8192 * block + 4096 * r + 16 * t. Where K is a multiple of 16 they are of one row, and every access is 16
// bytes; else outputs and gates are read one by one.
#include "gelu.h"
#include "vector_io.h"

namespace {

constexpr int kThreads = 256;
constexpr int kRuns = 2;
constexpr int kRun = 16;  // values: one 16-byte store of codes
constexpr int kBlockValues = kThreads * kRuns * kRun;
static_assert(kBlockValues == 8192, "launch.json divides M * K by this number");

using Run = qk::RunOf<qk::Io(QK_IO), kRun>;
using Divisor = qk::Divisor<qk::Format(QK_X_FORMAT)>;

/// Codes of a run inside a row: `from` is its first output, and k values further its first gate.
QK_DEVICE void gate_run(qk::u8* q, const Run::Memory* from, int k, const Divisor& divisor) {
  float h[kRun], g[kRun];
  Run::widen(h, Run::fetch(from, true, kRun));
  Run::widen(g, Run::fetch(from + k, true, kRun));
  QK_UNROLL for (int e = 0; e < kRun; ++e) h[e] = qk::times_gelu(h[e], g[e]);
  qk::write_codes(q, divisor.encode(h), true, kRun);
}

/// The same of `count` codes one by one, which may go on in the next row.
QK_DEVICE void gate_across(qk::u8* q, const Run::Memory* row, int column, int count, int k, const Divisor& divisor) {
  QK_NO_UNROLL
  for (int e = 0; e < count; ++e) {
    const float h = Run::Type::widen(row[column]), g = Run::Type::widen(row[k + column]);
    q[e] = qk::encode_fp8<qk::Format(QK_X_FORMAT)>(divisor.divide(qk::times_gelu(h, g)));
    if (++column < k) continue;
    column = 0;
    row += 2 * k;
  }
}

}  // namespace

QK_KERNEL(kThreads)
QK_SYMBOL(const void* x, const float* scale, qk::u8* q, int m, int k) {
  const qk::i64 total = static_cast<qk::i64>(m) * k;
  const Divisor divisor(scale[0]);
  QK_UNROLL for (int run = 0; run < kRuns; ++run) {
    const qk::i64 start =
        static_cast<qk::i64>(qk::block_x()) * kBlockValues + (run * kThreads + qk::thread_index()) * kRun;
    if (start >= total) continue;
    const qk::i64 row = start / k;
    const int column = static_cast<int>(start - row * k);
    const Run::Memory* const first = static_cast<const Run::Memory*>(x) + 2 * row * k;
    if (k % kRun == 0) {
      gate_run(q + start, first + column, k, divisor);
    } else {
      gate_across(q + start, first, column, static_cast<int>(total - start < kRun ? total - start : kRun), k, divisor);
    }
  }
}

QK_HOST_ENTRY(kThreads, 0)
