// sums[i, :, c] = max |x|, sum of x, sum of x^2 over the pixels of channel c of picture i; counts
// of |x| by bin
//
// x       io [n, k, m], pixels last      sums  f32 [n, 3, k]
// counts  u32 [n * ceil(k / 8), 658], one row for each block
// Any m, n and k; the base pointer 16-byte aligned. A lane adds its pixels one after another, the
// lanes of a wave are added as a tree.
//
// Launch: 256 threads, grid (ceil(k / 8), n, 1); a wave has a channel, of which lane l reads the
// pixels 8 l to 8 l + 7 of every 256.
#include "observe.h"

namespace {

using Run = qk::RunOf<qk::Io(QK_IO), 8>;
constexpr int kRun = 8, kStep = kRun * qk::kWave, kWaves = QK_THREADS / qk::kWave;
constexpr int kTurns = 4;  // loads under way
static_assert(qk::kCountBytes == QK_LDS_BYTES, "launch.json states the LDS");

QK_DEVICE qk::f32 wave_sum(qk::f32 value) {
  QK_UNROLL for (int mask = qk::kWave / 2; mask > 0; mask /= 2)
    value = qk::add_rounded(value, qk::bits_float(qk::lane_xor(qk::float_bits(value), mask)));
  return value;
}

}  // namespace

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x, qk::f32* sums, qk::u32* counts, int m, int n, int k) {
  QK_SHARED(lds, qk::kCountBytes);
  qk::start();
  const qk::Counts block_counts{lds};
  block_counts.clear();
  qk::block_sync();
  const int channel = qk::block_x() * kWaves + qk::wave_index(), picture = qk::block_y();
  const int lane = qk::thread_index() % qk::kWave;
  const auto* const from =
      static_cast<const Run::Memory*>(x) + (static_cast<qk::i64>(picture) * k + channel) * m;
  const bool aligned = m % kRun == 0;
  qk::ChannelSums mine;
  for (int pixel = lane * kRun; channel < k && pixel < m; pixel += kTurns * kStep) {
    Run::Raw raw[kTurns];
    QK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      const int at = pixel + turn * kStep;
      if (at < m) raw[turn] = Run::load_raw(from + at, aligned, m - at);
    }
    QK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      const int left = m - (pixel + turn * kStep);
      if (left <= 0) continue;
      qk::f32 values[kRun];
      Run::widen(values, raw[turn]);
      QK_UNROLL for (int e = 0; e < kRun; ++e) {
        if (e < left) mine.add(values[e], block_counts);
      }
    }
  }
  const qk::u32 amax = qk::wave_max(mine.amax);
  const qk::f32 sum = wave_sum(mine.sum), squares = wave_sum(mine.squares);
  if (lane == 0 && channel < k) {
    qk::f32* const to = sums + static_cast<qk::i64>(picture) * 3 * k + channel;
    to[0] = qk::bits_float(amax);
    to[k] = sum;
    to[2 * static_cast<qk::i64>(k)] = squares;
  }
  qk::block_sync();
  const int blocks = (k + kWaves - 1) / kWaves;
  block_counts.write(static_cast<qk::i64>(picture) * blocks + qk::block_x(), counts);
}

QK_HOST_ENTRY(QK_THREADS, qk::kCountBytes)
