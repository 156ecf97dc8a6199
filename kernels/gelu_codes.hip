// q[i, j] = code(clamp(y[i, j] * smooth[j] / scale, -max, max)), with
// y[i] = prefix[i], then act(x[i]): two rows side by side
//
// x       io [m, k - n]                      prefix         io [m, n] or null: n is 0
// scale   f32 [1], read                      smooth         f32 [k], read with QK_SMOOTH alone
// q       codes [m, k]
// act is silu, gelu or gelu with tanh (activation.h), rounded to io, as a tensor between is. Any m
// and k without `prefix`; with it n and k are multiples of 16. Base pointers 16-byte aligned.
// Divides and rounds as quantize_static. NaN becomes the NaN code.
//
// Launch: 256 threads, grid (ceil(m * k / 8192), 1, 1). The codes are one flat array: run r of a
// block, r = 0 and 1, gives thread t the 16 at 8192 * block + 4096 * r + 16 * t, so every access
// but the last run's is 16 bytes. With `prefix` a run lies in one of the two rows.
#include "activation.h"
#include "vector_io.h"

namespace {

constexpr int kThreads = QK_THREADS;
constexpr int kRuns = 2;
constexpr int kRun = 16;  // values: one 16-byte store of codes
constexpr int kBlockValues = kThreads * kRuns * kRun;
constexpr qk::Io kIo = qk::Io(QK_IO);
using Run = qk::RunOf<kIo, kRun>;
using Memory = typename Run::Memory;
using Input = qk::Input<QK_SMOOTH != 0>;
static_assert(kBlockValues == 8192, "launch.json divides M * K by this number");
static_assert(QK_LDS_BYTES == 0, "launch.json states the LDS");

/// Where a run's values begin, and which column of q is theirs.
struct RunSource {
  const Memory* from;
  int column;
  bool acts;  // they are x's

  /// start: of the run in q; offset: from the block's first code.
  QK_DEVICE RunSource(const Memory* x, const Memory* prefix, qk::i64 start, int offset, int n,
                      int k)
      : from(x + start), column(0), acts(true) {
    if (Input::kPlain && n == 0) return;
    // The block's place is the same in all lanes: a lane divides 32 bits alone.
    const qk::i64 first = static_cast<qk::i64>(qk::block_x()) * kBlockValues, row = first / k;
    const qk::u32 at = static_cast<qk::u32>(first - row * k) + static_cast<qk::u32>(offset);
    const qk::u32 rows = at / static_cast<qk::u32>(k);
    column = static_cast<int>(at - rows * static_cast<qk::u32>(k));
    if (n == 0) return;
    acts = column >= n;
    from = acts ? x + (row + rows) * (k - n) + (column - n) : prefix + (row + rows) * n + column;
  }
};

}  // namespace

QK_KERNEL(kThreads)
QK_SYMBOL(const void* x, const void* prefix, const float* smooth, const float* scale, qk::u8* q,
          int m, int n, int k) {
  qk::start();
  const Input input{smooth};
  const qk::i64 total = static_cast<qk::i64>(m) * k;
  const qk::i64 first = static_cast<qk::i64>(qk::block_x()) * kBlockValues;
  const qk::Divisor<qk::Format(QK_X_FORMAT)> divisor(scale[0]);
  // Both runs are under way before the first one is computed.
  typename Run::Raw raw[kRuns];
  int columns[kRuns];
  bool acts[kRuns];
  QK_UNROLL for (int run = 0; run < kRuns; ++run) {
    const int offset = (run * kThreads + qk::thread_index()) * kRun;
    const qk::i64 start = first + offset;
    if (start >= total) continue;
    const bool whole = start + kRun <= total;
    const RunSource place(static_cast<const Memory*>(x), static_cast<const Memory*>(prefix), start,
                          offset, n, k);
    raw[run] = Run::load_raw(place.from, whole, whole ? kRun : static_cast<int>(total - start));
    columns[run] = place.column;
    acts[run] = place.acts;
  }
  QK_UNROLL for (int run = 0; run < kRuns; ++run) {
    const qk::i64 start = first + (run * kThreads + qk::thread_index()) * kRun;
    if (start >= total) continue;
    const bool whole = start + kRun <= total;
    float values[kRun];
    Run::widen(values, raw[run]);
    if (acts[run]) {
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        values[e] = qk::rounded<kIo>(qk::activate<QK_ACT>(values[e]));
    }
    if constexpr (!Input::kPlain) {
      if (k % kRun == 0) {
        input.apply(values, columns[run], true, kRun);
      } else {
        input.apply_across_rows(values, columns[run], k);
      }
    }
    qk::write_codes(q + start, divisor.encode(values), whole,
                    whole ? kRun : static_cast<int>(total - start));
  }
}

QK_HOST_ENTRY(kThreads, 0)
