// A picture's group norm of partial moments, for the kernels that write it or its codes.
//
// mean and inverse = 1 / sqrt(variance + eps) are those of the picture's group: every block merges
// its partial moments, lane by lane in order, as differences from the first chunk's, and the lanes
// of a group as a tree. QK_ACT stands behind the norm: silu with QK_SILU, else nothing. The sum
// with what is added, the norm and what stands behind it are rounded to io, as tensors between are.
// Pixels are read last ones first: those that group_partials read last are still in the cache.
#pragma once

#include "activation.h"
#include "norm_slab.h"

namespace {

constexpr qk::Io kIo = qk::Io(QK_IO);
using Slab = qk::Slab<kIo, QK_THREADS>;
using Run = Slab::Run;
using Values = float[qk::kSlabRun];
constexpr int kLdsBytes = QK_THREADS * qk::kSlabRun * sizeof(qk::Pair);
static_assert(kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");

/// What is normed, and by what; null as group_norm_codes.hip has it.
struct Picture {
  const void *x, *added;
  const float* partials;
  const void *weight, *bias;
  int m, k, groups, eps;
};

/// Leaves mean and inverse of the picture's groups in LDS.
QK_DEVICE void merge(const Slab& slab, const float* partials, int groups, float eps, qk::u8* lds) {
  const qk::GroupLanes<QK_THREADS> lanes(groups);
  const int width = qk::quotient(slab.channels, groups), chunks = slab.chunks();
  const float share = 1.0f / (static_cast<float>(slab.pixels) * static_cast<float>(width));
  lanes.for_each(groups, [&](int group, bool exists) {
    const float* const of = partials + 2 * (slab.picture * groups + group) * chunks;
    const auto for_each = [&](const auto& each) {
      QK_UNROLL_FOUR for (int chunk = lanes.lane(); chunk < chunks; chunk += lanes.lanes) each(
          qk::load<qk::Pair>(of + 2 * chunk), static_cast<float>(slab.pixels_of(chunk) * width));
    };
    const float origin = of[0];
    float sum = 0.0f, squares = 0.0f;
    for_each([&](const qk::Pair& part, float number) {
      sum = qk::add_rounded(sum, number * (part.mean - origin));
    });
    const float mean = qk::add_rounded(origin, lanes.sum(sum) * share);
    for_each([&](const qk::Pair& part, float number) {
      const float apart = part.mean - mean;
      squares = qk::add_rounded(squares, qk::add_rounded(part.squares, number * (apart * apart)));
    });
    const float variance = lanes.sum(squares) * share;
    const float inverse = 1.0f / qk::sqrt_rounded(qk::add_rounded(variance, eps));
    if (exists && lanes.lane() == 0)
      qk::store(lds + group * sizeof(qk::Pair), qk::Pair{mean, inverse});
  });
}

/// What a norm needs of a thread's channels.
struct Channels {
  Values mean, factor, bias;

  QK_DEVICE Channels(const Slab& slab, const qk::u8* lds, const void* weight, const void* added,
                     int groups) {
    const int width = qk::quotient(slab.channels, groups);
    Run::widen(factor, slab.load_columns(weight, 0));
    Run::widen(bias, slab.load_columns(added, 0));
    int group = qk::quotient(slab.channel, width), within = slab.channel - group * width;
    QK_UNROLL for (int e = 0; e < qk::kSlabRun; ++e) {
      const auto of = qk::load<qk::Pair>(lds + group * sizeof(qk::Pair));
      mean[e] = of.mean;
      factor[e] = weight != nullptr ? of.squares * factor[e] : of.squares;
      within = within + 1 < width ? within + 1 : 0;
      group += within == 0;
    }
  }

  /// The norm and what follows, each rounded to io.
  QK_DEVICE void apply(Values& values) const {
    QK_UNROLL for (int e = 0; e < qk::kSlabRun; ++e)
      values[e] = qk::multiply_add(values[e] - mean[e], factor[e], bias[e]);
    Run::widen(values, Run::narrow(values));
    if constexpr (QK_ACT != QK_IDENTITY) {
      QK_UNROLL for (int e = 0; e < qk::kSlabRun; ++e)
        values[e] = qk::activate<QK_ACT>(values[e]);
      Run::widen(values, Run::narrow(values));
    }
  }
};

/// Calls each(values, the first one's channel, its place among all) for every run of the block.
template <class Each>
QK_DEVICE void for_each_normed(const Picture& of, qk::u8* lds, const Each& each) {
  const Slab slab(of.m, of.k);
  qk::Stream<Slab, true> stream(slab, of.x);
  merge(slab, of.partials, of.groups, qk::bits_float(static_cast<qk::u32>(of.eps)), lds);
  qk::block_sync();
  if (slab.turns == 0) return;
  const auto more = slab.load_columns(of.added, static_cast<qk::i64>(slab.picture) * of.k);
  const Channels channels(slab, lds, of.weight, of.bias, of.groups);
  stream.for_each([&](const Slab::Raw& raw, int turn) {
    Values values;
    Run::widen(values, Run::add(raw, more));
    channels.apply(values);
    each(values, slab.channel, slab.begin + slab.offset(turn));
  });
}

}  // namespace
