// v[n, c, t] = e4m3fn(clamp((x[n, t, c] - mean[n % scales, c]) * (1 / scale[n % scales, c]),
//                           -448, 448)), or float16 of the same between -65504 and 65504 (QK_PV 1)
//
// first   io [B, T1, pitch]: heads from `first_column` on, row n = picture * heads + head
// second  io [B, T2, pitch] or null: tokens behind the first
// mean    f32 [scales, D] or null        scale  f32 [scales, D]
// v       [n, D, ceil(m / 16) * 16], m = T1 + T2, n = B * heads, D = d up to a multiple of
//         16; zero from column d on and from token m on
//
// d, columns and pitches are multiples of 8; base pointers 16-byte aligned; k is D. float32, every
// operation rounded by itself; 1 / scale is the largest finite number where it would be infinite.
// NaN stays one.
//
// Launch: 256 threads, grid (ceil(m / 64), ceil(n * k / 256), 1), as values.h cuts them.
#include "values.h"

static_assert(QK_LDS_BYTES == 0, "launch.json states the LDS");

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* first, const void* second, const float* mean, const float* scale, qk::u8* v,
          int m, int n, int k, int first_tokens, int first_pitch, int first_column,
          int second_pitch, int second_column, int heads, int d, int scales) {
  qk::start();
  const qk::Stream before{first, nullptr, first_tokens, first_pitch, first_column};
  const qk::Stream behind{second == nullptr ? first : second, nullptr, m - first_tokens,
                          second_pitch, second_column};
  const qk::Values<qk::Io(QK_IO), qk::Pv(QK_PV)> values{before, behind, mean,   scale,
                                                        heads,  d,      scales, k};
  values.transpose(v, m, n, qk::block_x(), qk::block_y());
}

QK_HOST_ENTRY(QK_THREADS, 0)
