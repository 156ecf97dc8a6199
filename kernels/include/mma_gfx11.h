// Matrix policy of RDNA3: WMMA 16x16x16 on f16, after the exact widening of layout_gfx11.h.
#pragma once

#include "layout_gfx11.h"

namespace qk {

using Half16 = _Float16 __attribute__((ext_vector_type(16)));
using Float8 = f32 __attribute__((ext_vector_type(8)));

template <class Layout>
struct WidenedMma : Layout {
  using Acc = Float8;

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM],
                                 const typename Layout::A (&a)[kBlocksN],
                                 const typename Layout::B (&b)[kBlocksM]) {
    QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
      const Half16 weights = __builtin_bit_cast(Half16, a[i].v);
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
        acc[i][j] = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(
            weights, __builtin_bit_cast(Half16, b[j].v), acc[i][j]);
      }
    }
  }
};

template <Format kW, Format kX>
using DenseMma = WidenedMma<LayoutGfx11<kW, kX>>;
template <Format kW, Format kX>
using SparseMma = WidenedMma<SparseLayoutGfx11<kW, kX>>;

}  // namespace qk
