// sum[i, j] = x[i, j] + gate[i / rows, j] * added[i, j], and q the codes of its norm
//
// x, added  io [m, k]                        gate  io [m / rows, k] or null: ones
// sum       io [m, k]                        all else as layer_norm_codes.hip has it
// Product and sum are rounded to io, as tensors between are.
//
// Launch: as layer_norm_codes.
#define QK_SUM 1
#include "row_norm.h"

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x, const void* added, const void* gate, const void* weight, const void* bias,
          const void* up, const void* by, const float* smooth, const float* shift,
          const float* scale, void* sum, qk::u8* q, int m, int k, int rows, int centred, int eps) {
  const int index = qk::block_x() * kRows + qk::wave_index();
  // All waves take part: those without a row do the last one's, and write nothing.
  const int mine = index < m ? index : m - 1;
  const qk::i64 first = static_cast<qk::i64>(mine) * k;
  const auto* const gates = static_cast<const Memory*>(gate);
  const Source source{static_cast<const Memory*>(x) + first,
                      static_cast<const Memory*>(added) + first,
                      gates == nullptr ? gates : gates + static_cast<qk::i64>(mine / rows) * k,
                      static_cast<Memory*>(sum) + first};
  write_norm(source, {weight, bias, up, by, smooth, shift, scale, q}, index, mine, m, k, rows,
             centred, eps);
}

QK_HOST_ENTRY(QK_THREADS, 0)
