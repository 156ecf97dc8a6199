// sum[i, j] = x[i, j] + gate[i / rows, j] * added[i, j], and q the codes of its norm
//
// x, added  io [m, k]                        gate  io [m / rows, k] or null: ones
// sum       io [m, k]                        all else as layer_norm_codes.hip has it
// Product and sum are rounded to io, as tensors between are.
//
// Launch: as layer_norm_codes.
#define QK_SUM 1
#include "row_norm.h"

QK_KERNEL_SHARING(QK_THREADS, kBlocks)
QK_SYMBOL(const void* x, const void* added, const void* gate, const void* weight, const void* bias,
          const void* modulation_scale, const void* modulation_shift, const float* smooth,
          const float* scale, void* sum, qk::u8* q, int m, int n, int k, int rows, int centred,
          int eps) {
  QK_SHARED(lds, kLdsBytes);
  write_norms(
      {x, weight, bias, modulation_scale, modulation_shift, smooth, scale, q, added, gate, sum},
      lds, m, n, k, rows, centred, eps);
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
