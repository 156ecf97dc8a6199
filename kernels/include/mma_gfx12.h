// Matrix policy of RDNA4: WMMA 16x16x16 and SWMMAC 16x16x32 on fp8 and bf8, straight from the codes.
#pragma once

#include "layout_gfx12.h"

namespace qk {

using Int2 = int __attribute__((ext_vector_type(2)));
using Int4 = int __attribute__((ext_vector_type(4)));
using Float8 = f32 __attribute__((ext_vector_type(8)));

template <Format kW, Format kX>
struct DenseMma : LayoutGfx12 {
  using Acc = Float8;

  static QK_DEVICE Float8 multiply_step(Int2 a, Int2 b, Float8 acc) {
    constexpr bool kW8 = kW == Format::kE4M3FN, kX8 = kX == Format::kE4M3FN;
    if constexpr (kW8 && kX8) return __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(a, b, acc);
    if constexpr (kW8 && !kX8) return __builtin_amdgcn_wmma_f32_16x16x16_fp8_bf8_w32_gfx12(a, b, acc);
    if constexpr (!kW8 && kX8) return __builtin_amdgcn_wmma_f32_16x16x16_bf8_fp8_w32_gfx12(a, b, acc);
    if constexpr (!kW8 && !kX8) return __builtin_amdgcn_wmma_f32_16x16x16_bf8_bf8_w32_gfx12(a, b, acc);
  }

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM], const A (&a)[kBlocksN], const B (&b)[kBlocksM]) {
    QK_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      QK_UNROLL
      for (int i = 0; i < kBlocksN; ++i) {
        const Int2 weights = {static_cast<int>(a[i].v[2 * step]), static_cast<int>(a[i].v[2 * step + 1])};
        QK_UNROLL
        for (int j = 0; j < kBlocksM; ++j) {
          const Int2 tokens = {static_cast<int>(b[j].v[2 * step]), static_cast<int>(b[j].v[2 * step + 1])};
          acc[i][j] = multiply_step(weights, tokens, acc[i][j]);
        }
      }
    }
  }
};

template <Format kW, Format kX>
struct SparseMma : SparseLayoutGfx12 {
  using Acc = Float8;

  static QK_DEVICE Float8 multiply_step(Int2 a, Int4 b, Float8 acc, short index) {
    constexpr bool kW8 = kW == Format::kE4M3FN, kX8 = kX == Format::kE4M3FN;
    if constexpr (kW8 && kX8) return __builtin_amdgcn_swmmac_f32_16x16x32_fp8_fp8_w32(a, b, acc, index);
    if constexpr (kW8 && !kX8) return __builtin_amdgcn_swmmac_f32_16x16x32_fp8_bf8_w32(a, b, acc, index);
    if constexpr (!kW8 && kX8) return __builtin_amdgcn_swmmac_f32_16x16x32_bf8_fp8_w32(a, b, acc, index);
    if constexpr (!kW8 && !kX8) return __builtin_amdgcn_swmmac_f32_16x16x32_bf8_bf8_w32(a, b, acc, index);
  }

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM], const A (&a)[kBlocksN], const B (&b)[kBlocksM]) {
    QK_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      QK_UNROLL
      for (int i = 0; i < kBlocksN; ++i) {
        const Int2 weights = {static_cast<int>(a[i].v[2 * step]), static_cast<int>(a[i].v[2 * step + 1])};
        // The compiler folds the shift into the instruction's index key: no register is spent on it.
        const short index = static_cast<short>(a[i].v[4] >> (16 * step));
        QK_UNROLL
        for (int j = 0; j < kBlocksM; ++j) {
          const u32* const v = &b[j].v[4 * step];
          const Int4 tokens = {static_cast<int>(v[0]), static_cast<int>(v[1]), static_cast<int>(v[2]),
                               static_cast<int>(v[3])};
          acc[i][j] = multiply_step(weights, tokens, acc[i][j], index);
        }
      }
    }
  }
};

}  // namespace qk
