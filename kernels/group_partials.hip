// partials[n, g, chunk] = (mean, sum of squared distances from it) of x[n, t, c] + added[n, c] over
// the pixels t of a chunk and the channels c of a group
//
// x         io [n, m, k], channels last      added  io [n, k] or null
// partials  f32 [n, groups, chunks, 2]
// Any m and n, k a multiple of 8 and of groups, at most 4096; base pointers 16-byte aligned. Sums
// x + added are rounded to io before they are used. NaN makes both NaN.
//
// A thread adds, pixel by pixel, what its channels are beyond their first pixel, and the squares of
// that: large means cost no digits, whatever a picture holds. In the block's LDS stand mean and
// squares of a thread's channels; lanes share a group, add what they have in order, slots before
// channels, as differences from the first one, and as a tree among them: results do not depend on
// the launch.
//
// Launch: 512 threads, grid (chunks, n, 1); threads as norm_slab.h says.
#include "norm_slab.h"

namespace {

constexpr qk::Io kIo = qk::Io(QK_IO);
using Slab = qk::Slab<kIo, QK_THREADS>;
using Values = float[qk::kSlabRun];
constexpr int kLdsBytes = QK_THREADS * qk::kSlabRun * sizeof(qk::Pair);
static_assert(kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");

QK_DEVICE qk::Pair part_of(const qk::u8* lds, int k, int slot, int channel) {
  return qk::load<qk::Pair>(lds + (slot * k + channel) * sizeof(qk::Pair));
}

/// The moments of the thread's channels, over its pixels.
QK_DEVICE void moments(const Slab& slab, const void* x, const void* added, qk::u8* lds) {
  const auto more = slab.load_columns(added, static_cast<qk::i64>(slab.picture) * slab.channels);
  const auto widen = [&](Values& values, const Slab::Raw& raw) {
    Slab::Run::widen(values, Slab::Run::add(raw, more));
  };
  Values first = {}, sums = {}, squares = {};
  if (slab.turns > 0) widen(first, Slab::Run::load_raw(slab.at(x, 0), true, qk::kSlabRun));
  qk::Stream<Slab, false>(slab, x).for_each([&](const Slab::Raw& raw, int) {
    Values values;
    widen(values, raw);
    QK_UNROLL for (int e = 0; e < qk::kSlabRun; ++e) {
      const float apart = values[e] - first[e];
      sums[e] = qk::add_rounded(sums[e], apart);
      squares[e] = qk::multiply_add(apart, apart, squares[e]);
    }
  });
  if (slab.slot >= slab.slots) return;
  const float share = slab.turns > 0 ? 1.0f / static_cast<float>(slab.turns) : 0.0f;
  QK_UNROLL for (int e = 0; e < qk::kSlabRun; ++e) {
    const float mean = sums[e] * share;
    const qk::Pair part{qk::add_rounded(first[e], mean),
                        qk::add_rounded(squares[e], -(sums[e] * mean))};
    qk::store(lds + (slab.slot * slab.channels + slab.channel + e) * sizeof(qk::Pair), part);
  }
}

}  // namespace

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x, const void* added, float* partials, int m, int n, int k, int groups) {
  QK_SHARED(lds, kLdsBytes);
  const Slab slab(m, k);
  qk::start();
  moments(slab, x, added, lds);
  qk::block_sync();
  const qk::GroupLanes<QK_THREADS> lanes(groups);
  const int width = qk::quotient(k, groups), chunks = slab.chunks();
  const float share = 1.0f / static_cast<float>(slab.count * width);
  lanes.for_each(groups, [&](int group, bool exists) {
    // Calls each(part, its pixels) for the lane's channels.
    const auto for_each = [&](const auto& each) {
      QK_UNROLL_FOUR for (int slot = 0; slot < slab.slots; ++slot) {
        const float pixels = static_cast<float>(slab.turns_of(slot));
        QK_NO_UNROLL for (int c = lanes.lane(); c < width; c += lanes.lanes)
          each(part_of(lds, k, slot, group * width + c), pixels);
      }
    };
    const float origin = part_of(lds, k, 0, group * width).mean;
    float sum = 0.0f, squares = 0.0f;
    for_each([&](const qk::Pair& part, float pixels) {
      sum = qk::add_rounded(sum, pixels * (part.mean - origin));
    });
    const float mean = qk::add_rounded(origin, lanes.sum(sum) * share);
    for_each([&](const qk::Pair& part, float pixels) {
      const float apart = part.mean - mean;
      squares = qk::add_rounded(squares, qk::add_rounded(part.squares, pixels * (apart * apart)));
    });
    squares = lanes.sum(squares);
    const int at = (slab.picture * groups + group) * chunks + slab.chunk;
    if (exists && lanes.lane() == 0) qk::store(partials + 2 * at, qk::Pair{mean, squares});
  });
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
