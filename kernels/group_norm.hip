// y[n, t, c] = act(norm), with norm as group_norm_codes.hip has it
//
// y       io [n, m, k]                       all else as there
//
// Launch: as group_norm_codes.
#include "group_norm.h"

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x, const void* added, const float* partials, const void* weight,
          const void* bias, void* y, int m, int n, int k, int groups, int eps) {
  QK_SHARED(lds, kLdsBytes);
  qk::start();
  const Picture picture{x, added, partials, weight, bias, m, k, groups, eps};
  for_each_normed(picture, lds, [&](Values& values, int, qk::i64 at) {
    Run::store_raw(static_cast<Slab::Memory*>(y) + at, Run::narrow(values));
  });
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
