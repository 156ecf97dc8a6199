// partials[n, chunk, c] = (mean, sum of squared distances from it) of x[n, t, c] + added[n, c] over
// the 64 pixels t of a chunk
//
// x         io [n, m, k], channels last      added  io [n, k] or null
// partials  f32 [n, ceil(m / 64), k, 2]
// Any m and n, k a multiple of 8; base pointers 16-byte aligned. Sums are rounded to io before they
// are used. Each wave adds its pixels by Welford's rule, one after another; the waves of a block
// are merged in their order (norm_slab.h), so results do not depend on the launch. NaN makes both
// NaN.
//
// Launch: 256 threads, grid (ceil(k / 256), n * ceil(m / 64), 1); lanes as norm_slab.h says.
#include "norm_slab.h"

namespace {

constexpr qk::Io kIo = qk::Io(QK_IO);
constexpr int kLdsBytes = qk::kSlabWaves * qk::kSlabChannels * 2 * 4;
static_assert(kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");
static_assert(QK_THREADS == qk::kSlabChannels, "in the end a thread has a channel");

struct Pair {
  float mean, squares;
};

}  // namespace

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x, const void* added, float* partials, int m, int n, int k) {
  QK_SHARED(lds, kLdsBytes);
  const qk::Slab<kIo> slab(m, k);
  typename qk::Slab<kIo>::Run::Raw raw[qk::kSlabTurns];
  slab.load(raw, x);
  float more[qk::kSlabRun] = {};
  if (added != nullptr) slab.load_added(more, added);
  float mean[qk::kSlabRun] = {}, squares[qk::kSlabRun] = {};
  QK_UNROLL for (int turn = 0; turn < qk::kSlabTurns; ++turn) {
    if (!slab.has(turn)) continue;
    float values[qk::kSlabRun];
    qk::Slab<kIo>::widen(values, raw[turn], more, added != nullptr);
    QK_UNROLL for (int e = 0; e < qk::kSlabRun; ++e) {
      const float from = values[e] - mean[e];
      mean[e] = qk::add_rounded(mean[e], from * (1.0f / static_cast<float>(turn + 1)));
      squares[e] = qk::add_rounded(squares[e], from * (values[e] - mean[e]));
    }
  }
  const int lane = qk::thread_index() % qk::kWave;
  QK_UNROLL for (int e = 0; e < qk::kSlabRun; ++e) {
    const int at = qk::wave_index() * qk::kSlabChannels + lane * qk::kSlabRun + e;
    qk::store(lds + at * sizeof(Pair), Pair{mean[e], squares[e]});
  }
  qk::block_sync();
  const int channel = qk::block_x() * qk::kSlabChannels + qk::thread_index();
  if (channel >= k) return;
  const int left = m - slab.chunk * qk::kSlabPixels;
  qk::Moments all{0.0f, 0.0f, 0.0f};
  QK_UNROLL for (int wave = 0; wave < qk::kSlabWaves; ++wave) {
    const auto part =
        qk::load<Pair>(lds + (wave * qk::kSlabChannels + qk::thread_index()) * sizeof(Pair));
    const int seen = left > wave ? (left - wave + qk::kSlabWaves - 1) / qk::kSlabWaves : 0;
    const int count = seen < qk::kSlabTurns ? seen : qk::kSlabTurns;
    all.merge({static_cast<float>(count), part.mean, part.squares});
  }
  const qk::i64 at = static_cast<qk::i64>(qk::block_y()) * k + channel;
  qk::store(partials + 2 * at, Pair{all.mean, all.squares});
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
