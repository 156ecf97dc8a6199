// sums[c, :, j] = max |x|, sum of x, sum of x^2 over the rows of chunk c; counts of |x| by bin
//
// x       io [m, k]           sums    f32 [n, 3, k]: n chunks of ceil(m / n) rows, the last shorter
// counts  u32 [n * ceil(k / 256), 658], one row for each block
// Any m and n, k a multiple of 8; base pointers 16-byte aligned. A lane adds its rows one after
// another, the waves of a block are added in their order. Chunks without rows have zeros.
//
// Launch: 256 threads, grid (ceil(k / 256), n, 1). Lane l of every wave has the channels 8 l to
// 8 l + 7 of the block's 256, wave w the rows w, w + 8, ... of its chunk.
#include "observe.h"

namespace {

using Run = qk::RunOf<qk::Io(QK_IO), 8>;
constexpr int kChannels = 256, kRun = 8, kWaves = QK_THREADS / qk::kWave;
constexpr int kTurns = 4;  // loads under way
constexpr int kMergeBytes = kWaves * kChannels * 4;
constexpr int kLdsBytes = kMergeBytes + qk::kCountBytes;
static_assert(kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");
static_assert(QK_THREADS == kChannels, "in the end a thread has a channel");

/// Puts a lane's eight numbers where a thread finds those of its channel, wave by wave.
struct Merge {
  qk::u8* lds;

  QK_DEVICE void put(const qk::f32 (&values)[kRun]) const {
    const int lane = qk::thread_index() % qk::kWave;
    qk::u8* const to = lds + 4 * (qk::wave_index() * kChannels + lane * kRun);
    qk::block_sync();
    QK_UNROLL for (int e = 0; e < kRun; ++e)
      qk::store(to + 4 * e, values[e]);
    qk::block_sync();
  }
  QK_DEVICE qk::f32 of(int wave) const {
    return qk::load<qk::f32>(lds + 4 * (wave * kChannels + qk::thread_index()));
  }
  QK_DEVICE qk::f32 sum() const {
    qk::f32 all = 0.0f;
    QK_UNROLL for (int wave = 0; wave < kWaves; ++wave)
      all = qk::add_rounded(all, of(wave));
    return all;
  }
  QK_DEVICE qk::f32 largest() const {
    qk::u32 all = 0;
    QK_UNROLL for (int wave = 0; wave < kWaves; ++wave) {
      const qk::u32 bits = qk::float_bits(of(wave));
      all = bits > all ? bits : all;
    }
    return qk::bits_float(all);
  }
};

}  // namespace

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x, qk::f32* sums, qk::u32* counts, int m, int n, int k) {
  QK_SHARED(lds, kLdsBytes);
  qk::start();
  const qk::Counts block_counts{lds + kMergeBytes};
  block_counts.clear();
  qk::block_sync();
  const int rows = (m + n - 1) / n, chunk = qk::block_y();
  const qk::i64 first = static_cast<qk::i64>(chunk) * rows;
  const int left = first < m ? static_cast<int>(m - first) : 0, count = left < rows ? left : rows;
  const int channel = qk::block_x() * kChannels + qk::thread_index() % qk::kWave * kRun;
  const auto* const from = static_cast<const Run::Memory*>(x) + first * k + channel;
  qk::ChannelSums mine[kRun];
  for (int row = qk::wave_index(); channel < k && row < count; row += kTurns * kWaves) {
    Run::Raw raw[kTurns];
    QK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      const int at = row + turn * kWaves;
      if (at < count) raw[turn] = Run::load_raw(from + static_cast<qk::i64>(at) * k, true, kRun);
    }
    QK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      if (row + turn * kWaves >= count) continue;
      qk::f32 values[kRun];
      Run::widen(values, raw[turn]);
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        mine[e].add(values[e], block_counts);
    }
  }
  const int own = qk::block_x() * kChannels + qk::thread_index();
  qk::f32* const to = sums + static_cast<qk::i64>(chunk) * 3 * k + own;
  const Merge merge{lds};
  qk::f32 numbers[kRun];
  QK_UNROLL for (int e = 0; e < kRun; ++e)
    numbers[e] = qk::bits_float(mine[e].amax);
  merge.put(numbers);
  if (own < k) to[0] = merge.largest();
  QK_UNROLL for (int e = 0; e < kRun; ++e)
    numbers[e] = mine[e].sum;
  merge.put(numbers);
  if (own < k) to[k] = merge.sum();
  QK_UNROLL for (int e = 0; e < kRun; ++e)
    numbers[e] = mine[e].squares;
  merge.put(numbers);
  if (own < k) to[2 * static_cast<qk::i64>(k)] = merge.sum();
  const int slabs = (k + kChannels - 1) / kChannels;
  block_counts.write(static_cast<qk::i64>(chunk) * slabs + qk::block_x(), counts);
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
