// q[n, t, c] = code(clamp((act(norm) - shift[c]) * smooth[c] / scale, -max, max)), with
// norm = (x[n, t, c] + added[n, c] - mean) * (inverse * weight[c]) + bias[c]
//
// x       io [n, m, k], channels last        moments        f32 [n, groups, 2], of group_moments
// added   io [n, k] or null: zeros           weight, bias   io [k] or null: ones, zeros
// scale   f32 [1]                            smooth, shift  f32 [k], read with QK_INPUT alone
// q       codes [n, m, k]
// act is silu with QK_SILU, else it gives y. The sum, the norm and act are rounded to io, as
// tensors between are. Any m and n, k a multiple of 8; base pointers 16-byte aligned. NaN becomes
// the NaN code.
//
// Launch: 256 threads, grid (ceil(k / 256), n * ceil(m / 64), 1); lanes as norm_slab.h says.
#include "activation.h"
#include "norm_slab.h"

namespace {

constexpr qk::Io kIo = qk::Io(QK_IO);
using Input = qk::Input<(QK_INPUT & QK_SHIFT) != 0, (QK_INPUT & QK_SMOOTH) != 0>;
using Values = float[qk::kSlabRun];
static_assert(QK_LDS_BYTES == 0, "launch.json states the LDS");

/// What a norm needs of a lane's channels.
struct Channels {
  Values mean, factor, bias;

  QK_DEVICE Channels(const qk::Slab<kIo>& slab, const float* moments, const void* weight,
                     const void* added, int groups) {
    const int width = slab.channels / groups;
    if (weight != nullptr) {
      slab.load_columns(factor, weight);
    }
    if (added != nullptr) {
      slab.load_columns(bias, added);
    }
    int group = slab.channel / width, within = slab.channel % width;
    QK_UNROLL for (int e = 0; e < qk::kSlabRun; ++e) {
      const float* const of = moments + 2 * (slab.picture * groups + group);
      mean[e] = slab.exists ? of[0] : 0.0f;
      const float inverse = slab.exists ? of[1] : 0.0f;
      factor[e] = weight != nullptr ? inverse * factor[e] : inverse;
      if (added == nullptr) bias[e] = 0.0f;
      within = within + 1 < width ? within + 1 : 0;
      group += within == 0;
    }
  }

  QK_DEVICE void apply(Values& values) const {
    QK_UNROLL for (int e = 0; e < qk::kSlabRun; ++e) {
      const float y = qk::rounded<kIo>(qk::add_rounded((values[e] - mean[e]) * factor[e], bias[e]));
      values[e] = QK_ACT == QK_IDENTITY ? y : qk::rounded<kIo>(qk::activate<QK_ACT>(y));
    }
  }
};

}  // namespace

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x, const void* added, const float* moments, const void* weight,
          const void* bias, const float* smooth, const float* shift, const float* scale, qk::u8* q,
          int m, int n, int k, int groups) {
  const qk::Slab<kIo> slab(m, k);
  typename qk::Slab<kIo>::Run::Raw raw[qk::kSlabTurns];
  slab.load(raw, x);
  Values more = {};
  if (added != nullptr) slab.load_added(more, added);
  const Channels channels(slab, moments, weight, bias, groups);
  const Input input{shift, smooth};
  const qk::Divisor<qk::Format(QK_X_FORMAT)> divisor(scale[0]);
  QK_UNROLL for (int turn = 0; turn < qk::kSlabTurns; ++turn) {
    if (!slab.has(turn)) continue;
    Values values;
    qk::Slab<kIo>::widen(values, raw[turn], more, added != nullptr);
    channels.apply(values);
    input.apply(values, slab.channel, true, qk::kSlabRun);
    qk::write_codes(q + slab.offset(turn), divisor.encode(values), true, qk::kSlabRun);
  }
}

QK_HOST_ENTRY(QK_THREADS, 0)
