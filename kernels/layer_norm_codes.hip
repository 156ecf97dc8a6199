// q[i, j] = code(clamp(y[i, j] * smooth[j] * (1 / scale), -max, max)), with
// y = ((x[i, j] - mean_i) * inverse_i * weight[j] + bias[j]) * (1 + modulation_scale[b, j])
//     + modulation_shift[b, j]
//
// x       io [m, k]                          weight, bias   io [k] or null: ones, zeros
// modulation_scale, modulation_shift  io [m / rows, k] or null: zeros
// smooth  f32 [k], read with QK_SMOOTH alone
// scale   f32 [1]                            q              codes [m, k]
// mean_i is the row's mean where `centred`, else 0 (RMSNorm); inverse_i = 1 / sqrt(mean of squared
// distances from it + eps). A weight and its bias are one fused step; then norm, 1 + scale,
// products and sums are rounded to io, as tensors between are; row i is modulated by b = i / rows.
// Any m, k a multiple of 8; base pointers 16-byte aligned; eps are the bits of a float32. A NaN in
// a row makes all its codes NaN.
//
// Launch: 256 threads, grid (ceil(m * n / 256), 1, 1): n lanes share a row, 16, 32, 64, 128 or 256.
// Lane l takes the 8 values at 8 * n * step + 8 * l. Sums: the 8 of a run as a tree (of squares,
// the last four fused with the first four), runs in order, the lanes of a wave as a tree, waves in
// order. What a lane does not hold in registers is read again: rows of more than 6144 values.
#define QK_SUM 0
#include "row_norm.h"

QK_KERNEL_SHARING(QK_THREADS, kBlocks)
QK_SYMBOL(const void* x, const void* weight, const void* bias, const void* modulation_scale,
          const void* modulation_shift, const float* smooth, const float* scale, qk::u8* q, int m,
          int n, int k, int rows, int centred, int eps) {
  QK_SHARED(lds, kLdsBytes);
  write_norms({x, weight, bias, modulation_scale, modulation_shift, smooth, scale, q}, lds, m, n, k,
              rows, centred, eps);
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
