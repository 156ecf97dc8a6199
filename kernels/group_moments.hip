// moments[n, g] = (mean, 1 / sqrt(variance + eps)) of a picture's group of channels
//
// partials  f32 [n, ceil(pixels / 64), k, 2], of group_partials
// moments   f32 [n, m, 2]
// k channels are a multiple of m groups; eps are the bits of a float32.
//
// Launch: 256 threads, grid (m, n, 1): a block has a group. Its partial moments, chunk by
// chunk and channel by channel, go to the threads in turn, which merge theirs in order; then lanes
// merge with the lane 16, 8, 4, 2 and 1 away, the lower one first, and the waves in order: results
// do not depend on the launch.
#include "norm_slab.h"

namespace {

constexpr int kWaves = QK_THREADS / qk::kWave;
constexpr int kLdsBytes = kWaves * 12;
static_assert(kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");

struct Pair {
  float mean, squares;
};

QK_DEVICE float from_lane(float value, int mask) {
  return qk::bits_float(qk::lane_xor(qk::float_bits(value), mask));
}

QK_DEVICE void merge_lanes(qk::Moments& own, int lane) {
  QK_UNROLL for (int mask = qk::kWave / 2; mask > 0; mask /= 2) {
    const qk::Moments other{from_lane(own.count, mask), from_lane(own.mean, mask),
                            from_lane(own.squares, mask)};
    const bool low = (lane & mask) == 0;
    qk::Moments first = low ? own : other;
    first.merge(low ? other : own);
    own = first;
  }
}

}  // namespace

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const float* partials, float* moments, int m, int n, int k, int pixels, int eps) {
  QK_SHARED(lds, kLdsBytes);
  const int width = k / m, chunks = (pixels + qk::kSlabPixels - 1) / qk::kSlabPixels;
  const int group = qk::block_x(), picture = qk::block_y();
  qk::Moments own{0.0f, 0.0f, 0.0f};
  QK_NO_UNROLL for (int entry = qk::thread_index(); entry < chunks * width; entry += QK_THREADS) {
    const int chunk = entry / width, channel = group * width + entry % width;
    const qk::i64 at = (static_cast<qk::i64>(picture) * chunks + chunk) * k + channel;
    const auto part = qk::load<Pair>(partials + 2 * at);
    const int left = pixels - chunk * qk::kSlabPixels;
    const int count = left < qk::kSlabPixels ? left : qk::kSlabPixels;
    own.merge({static_cast<float>(count), part.mean, part.squares});
  }
  const int lane = qk::thread_index() % qk::kWave;
  merge_lanes(own, lane);
  if (lane == 0) qk::store(lds + qk::wave_index() * sizeof(qk::Moments), own);
  qk::block_sync();
  if (qk::thread_index() != 0) return;
  qk::Moments all{0.0f, 0.0f, 0.0f};
  QK_UNROLL for (int wave = 0; wave < kWaves; ++wave)
    all.merge(qk::load<qk::Moments>(lds + wave * sizeof(qk::Moments)));
  const float variance = all.squares / all.count;
  const float root =
      qk::sqrt_rounded(qk::add_rounded(variance, qk::bits_float(static_cast<qk::u32>(eps))));
  qk::store(moments + 2 * (picture * m + group), Pair{all.mean, 1.0f / root});
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
