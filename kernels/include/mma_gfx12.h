// Matrix policy of RDNA4: WMMA 16x16x16 and SWMMAC 16x16x32 on fp8, bf8 and int8, straight from the
// codes.
#pragma once

#include "layout_gfx12.h"

namespace qk {

using Int2 = int __attribute__((ext_vector_type(2)));
using Int4 = int __attribute__((ext_vector_type(4)));
template <class T>
using Eight = T __attribute__((ext_vector_type(8)));

QK_DEVICE Int4 vector_of(const Vec16& words) { return __builtin_bit_cast(Int4, words.v); }

template <int kStep>
QK_DEVICE Int2 pair_of(Int4 words) {
  return __builtin_shufflevector(words, words, 2 * kStep, 2 * kStep + 1);
}

template <Format kW, Format kX>
struct DenseMma : LayoutGfx12 {
  using Sum = qk::Sum<kW, kX>;
  using Acc = Eight<Sum>;

  static QK_DEVICE Acc multiply_step(Int2 a, Int2 b, Acc acc) {
    if constexpr (kX == Format::kInt8) {
      return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, a, true, b, acc, false);
    } else {
      constexpr bool kW8 = kW == Format::kE4M3FN, kX8 = kX == Format::kE4M3FN;
      if constexpr (kW8 && kX8)
        return __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(a, b, acc);
      if constexpr (kW8 && !kX8)
        return __builtin_amdgcn_wmma_f32_16x16x16_fp8_bf8_w32_gfx12(a, b, acc);
      if constexpr (!kW8 && kX8)
        return __builtin_amdgcn_wmma_f32_16x16x16_bf8_fp8_w32_gfx12(a, b, acc);
      if constexpr (!kW8 && !kX8)
        return __builtin_amdgcn_wmma_f32_16x16x16_bf8_bf8_w32_gfx12(a, b, acc);
    }
  }

  template <int kStep, int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply_blocks(Acc (&acc)[kBlocksN][kBlocksM], const A (&a)[kBlocksN],
                                        const B (&b)[kBlocksM]) {
    QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
      const Int2 weights = pair_of<kStep>(vector_of(a[i]));
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
        acc[i][j] = multiply_step(weights, pair_of<kStep>(vector_of(b[j])), acc[i][j]);
      }
    }
  }

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM], const A (&a)[kBlocksN],
                                 const B (&b)[kBlocksM]) {
    multiply_blocks<0>(acc, a, b);
    multiply_blocks<1>(acc, a, b);
  }
  /// Fragments whose second half is zero.
  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply_half(Acc (&acc)[kBlocksN][kBlocksM], const A (&a)[kBlocksN],
                                      const B (&b)[kBlocksM]) {
    multiply_blocks<0>(acc, a, b);
  }
};

template <Format kW, Format kX>
struct SparseMma : SparseLayoutGfx12 {
  using Sum = qk::Sum<kW, kX>;
  using Acc = Eight<Sum>;

  static QK_DEVICE Acc multiply_step(Int2 a, Int4 b, Acc acc, short index) {
    if constexpr (kX == Format::kInt8) {
      return __builtin_amdgcn_swmmac_i32_16x16x32_iu8_w32(true, a, true, b, acc, index, false);
    } else {
      constexpr bool kW8 = kW == Format::kE4M3FN, kX8 = kX == Format::kE4M3FN;
      if constexpr (kW8 && kX8)
        return __builtin_amdgcn_swmmac_f32_16x16x32_fp8_fp8_w32(a, b, acc, index);
      if constexpr (kW8 && !kX8)
        return __builtin_amdgcn_swmmac_f32_16x16x32_fp8_bf8_w32(a, b, acc, index);
      if constexpr (!kW8 && kX8)
        return __builtin_amdgcn_swmmac_f32_16x16x32_bf8_fp8_w32(a, b, acc, index);
      if constexpr (!kW8 && !kX8)
        return __builtin_amdgcn_swmmac_f32_16x16x32_bf8_bf8_w32(a, b, acc, index);
    }
  }

  template <int kStep, int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply_blocks(Acc (&acc)[kBlocksN][kBlocksM], const A (&a)[kBlocksN],
                                        const B (&b)[kBlocksM]) {
    QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
      const Int2 weights = pair_of<kStep>(vector_of(a[i].codes));
      // The compiler folds the shift into the instruction's index key: no register is spent on it.
      const short index = static_cast<short>(a[i].nibbles >> (16 * kStep));
      QK_UNROLL for (int j = 0; j < kBlocksM; ++j) {
        acc[i][j] = multiply_step(weights, vector_of(b[j].steps[kStep]), acc[i][j], index);
      }
    }
  }

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM], const A (&a)[kBlocksN],
                                 const B (&b)[kBlocksM]) {
    multiply_blocks<0>(acc, a, b);
    multiply_blocks<1>(acc, a, b);
  }
};

/// 16-bit inputs and weights, a 16x16 block by 16 of K at a time.
template <Io kIo>
struct HalfMma : HalfLayoutGfx12 {
  using Acc = Eight<f32>;

  static QK_DEVICE Acc multiply(const Weights& weights, const Tokens& tokens, Acc acc) {
    if constexpr (kIo == Io::kF16) {
      using Half8 = Eight<_Float16>;
      return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(
          __builtin_bit_cast(Half8, tokens), __builtin_bit_cast(Half8, weights), acc);
    } else {
      using Short8 = Eight<short>;
      return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(
          __builtin_bit_cast(Short8, tokens), __builtin_bit_cast(Short8, weights), acc);
    }
  }
};

}  // namespace qk
