// q[i, j] = code(clamp((y[i, j] - shift[j]) * smooth[j] / scale, -max, max)), with
// y = ((x[i, j] - mean_i) * inverse_i * weight[j] + bias[j]) * (1 + up[b, j]) + by[b, j]
//
// x       io [m, k]                          weight, bias   io [k] or null: ones, zeros
// up, by  io [m / rows, k] or null           smooth, shift  f32 [k], read with QK_INPUT alone
// scale   f32 [1]                            q              codes [m, k]
// mean_i is the row's mean where `centred`, else 0 (RMSNorm); inverse_i = 1 / sqrt(mean of squared
// distances from it + eps). Norm, 1 + up, products and sums are rounded to io, as tensors between
// are; row i is modulated by b = i / rows. Any m, k a multiple of 8; base pointers
// 16-byte aligned; eps are the bits of a float32. A NaN in a row makes all its codes NaN.
//
// Launch: 256 threads, grid (ceil(m / 8), 1, 1): a wave has a row. Lane l takes the 8 values at
// 256 * step + 8 * l. Sums: the 8 of a run as a tree, runs in order, lanes as a tree. What a lane
// does not hold in registers is read again: rows of more than 4096 16-bit values.
#define QK_SUM 0
#include "row_norm.h"

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x, const void* weight, const void* bias, const void* up, const void* by,
          const float* smooth, const float* shift, const float* scale, qk::u8* q, int m, int k,
          int rows, int centred, int eps) {
  const int index = qk::block_x() * kRows + qk::wave_index();
  // All waves take part: those without a row do the last one's, and write nothing.
  const int mine = index < m ? index : m - 1;
  const Source source{static_cast<const Memory*>(x) + static_cast<qk::i64>(mine) * k};
  write_norm(source, {weight, bias, up, by, smooth, shift, scale, q}, index, mine, m, k, rows,
             centred, eps);
}

QK_HOST_ENTRY(QK_THREADS, 0)
