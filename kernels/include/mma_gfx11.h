// Matrix policy of RDNA3: WMMA 16x16x16 on int8 codes, or on f16 after the exact widening of
// layout_gfx11.h.
#pragma once

#include "layout_gfx11.h"

namespace qk {

using Half16 = _Float16 __attribute__((ext_vector_type(16)));
using Int4 = int __attribute__((ext_vector_type(4)));
template <class T>
using Eight = T __attribute__((ext_vector_type(8)));

template <class Layout, class Operand, class TheSum>
struct MmaGfx11 : Layout {
  using Sum = TheSum;
  using Acc = Eight<Sum>;

  static QK_DEVICE Eight<f32> multiply_step(Half16 a, Half16 b, Eight<f32> acc) {
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, acc);
  }
  static QK_DEVICE Eight<int> multiply_step(Int4 a, Int4 b, Eight<int> acc) {
    return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, a, true, b, acc, false);
  }

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM],
                                 const typename Layout::A (&a)[kBlocksN],
                                 const typename Layout::B (&b)[kBlocksM]) {
    QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
      const Operand weights = __builtin_bit_cast(Operand, a[i].v);
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
        acc[i][j] = multiply_step(weights, __builtin_bit_cast(Operand, b[j].v), acc[i][j]);
      }
    }
  }
};

/// What the matrix instruction takes of a row's 16 codes.
template <Format>
struct OperandOf {
  using Type = Half16;
};
template <>
struct OperandOf<Format::kInt8> {
  using Type = Int4;
};

template <Format kW, Format kX>
using DenseMma = MmaGfx11<LayoutGfx11<kW, kX>, typename OperandOf<kX>::Type, Sum<kW, kX>>;
template <Format kW, Format kX>
using SparseMma = MmaGfx11<SparseLayoutGfx11<kW, kX>, typename OperandOf<kX>::Type, Sum<kW, kX>>;

/// 16-bit inputs and weights, a 16x16 block by 16 of K at a time.
template <Io kIo>
struct HalfMma : HalfLayoutGfx11 {
  using Acc = Eight<f32>;

  static QK_DEVICE Acc multiply(const Weights& weights, const Tokens& tokens, Acc acc) {
    if constexpr (kIo == Io::kF16) {
      return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(Half16, tokens),
                                                        __builtin_bit_cast(Half16, weights), acc);
    } else {
      using Short16 = short __attribute__((ext_vector_type(16)));
      return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(__builtin_bit_cast(Short16, tokens),
                                                         __builtin_bit_cast(Short16, weights), acc);
    }
  }
};

}  // namespace qk
