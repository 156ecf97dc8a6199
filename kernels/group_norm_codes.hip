// q[n, t, c] = code(clamp(act(norm) * smooth[c] * (1 / scale), -max, max)),
// with norm = (x[n, t, c] + added[n, c] - mean) * (inverse * weight[c]) + bias[c], fused
//
// x       io [n, m, k], channels last        partials       f32 [n, groups, chunks,
//                                                           2], of group_partials
// added   io [n, k] or null: zeros           weight, bias   io [k] or null: ones, zeros
// scale   f32 [1]                            smooth         f32 [k], read with QK_SMOOTH alone
// q       codes [n, m, k]
// mean, inverse, act and what is rounded: as group_norm.h says. Any m and n, k a multiple of 8 and
// of groups, at most 4096; base pointers 16-byte aligned; eps are the bits of a float32. NaN
// becomes the NaN code.
//
// Launch: 512 threads, grid (chunks, n, 1); threads as norm_slab.h says.
#include "group_norm.h"

namespace {

constexpr qk::Format kFormat = qk::Format(QK_X_FORMAT);
using Input = qk::Input<QK_SMOOTH != 0>;

}  // namespace

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x, const void* added, const float* partials, const void* weight,
          const void* bias, const float* smooth, const float* scale, qk::u8* q, int m, int n, int k,
          int groups, int eps) {
  QK_SHARED(lds, kLdsBytes);
  qk::start();
  const qk::Reciprocal<kFormat> reciprocal(scale[0]);
  const Input input{smooth};
  const Picture picture{x, added, partials, weight, bias, m, k, groups, eps};
  for_each_normed(picture, lds, [&](Values& values, int channel, qk::i64 at) {
    input.apply(values, channel, true, qk::kSlabRun);
    qk::write_codes(q + at, reciprocal.encode(values), true, qk::kSlabRun);
  });
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
