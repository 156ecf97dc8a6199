// Matrix policy of NVIDIA sm_89 and later, where FP8's PTX is emulated and int8's is not: mma
// m16n8k32 and mma.sp m16n8k64.
#pragma once

#include "layout_sm89.h"

namespace qk {

/// A lane's two m16n8 results of a 16x16 block.
template <class Sum>
struct AccSm89 {
  Sum v[8];
  QK_DEVICE Sum& operator[](int e) { return v[e]; }
  QK_DEVICE const Sum& operator[](int e) const { return v[e]; }
};

// sum: type of the sums, and the constraint of its registers.
#define QK_MMA(sum, a_type, b_type, registers)                                        \
  asm volatile("mma.sync.aligned.m16n8k32.row.col." sum "." a_type "." b_type "." sum \
               " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"               \
               : registers(d[0]), registers(d[1]), registers(d[2]), registers(d[3])   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#define QK_MMA_SPARSE(sum, a_type, b_type, registers)                                              \
  asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col." sum "." a_type "." b_type \
               "." sum " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;"  \
               : registers(d[0]), registers(d[1]), registers(d[2]), registers(d[3])                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]),      \
                 "r"(b[3]), "r"(a[4]))

template <Format kW, Format kX>
struct DenseMma : LayoutSm89 {
  using Sum = qk::Sum<kW, kX>;
  using Acc = AccSm89<Sum>;

  static QK_DEVICE void multiply_step(Sum* d, const u32* a, const u32* b) {
    if constexpr (kX == Format::kInt8) {
      QK_MMA("s32", "s8", "s8", "+r");
    } else {
      constexpr bool kW8 = kW == Format::kE4M3FN, kX8 = kX == Format::kE4M3FN;
      if constexpr (kW8 && kX8) QK_MMA("f32", "e4m3", "e4m3", "+f");
      if constexpr (kW8 && !kX8) QK_MMA("f32", "e4m3", "e5m2", "+f");
      if constexpr (!kW8 && kX8) QK_MMA("f32", "e5m2", "e4m3", "+f");
      if constexpr (!kW8 && !kX8) QK_MMA("f32", "e5m2", "e5m2", "+f");
    }
  }

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM], const A (&a)[kBlocksN],
                                 const B (&b)[kBlocksM]) {
    QK_UNROLL for (int step = 0; step < kSteps; ++step) {
      QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
        QK_UNROLL for (int part = 0; part < 2 * kBlocksM; ++part) {
          multiply_step(acc[i][part / 2].v + 4 * (part % 2), a[i].v + 4 * step,
                        b[part / 2].v + 4 * (part % 2) + 2 * step);
        }
      }
    }
  }
};

template <Format kW, Format kX>
struct SparseMma : SparseLayoutSm89 {
  using Sum = qk::Sum<kW, kX>;
  using Acc = AccSm89<Sum>;

  static QK_DEVICE void multiply_step(Sum* d, const u32* a, const u32* b) {
    if constexpr (kX == Format::kInt8) {
      QK_MMA_SPARSE("s32", "s8", "s8", "+r");
    } else {
      constexpr bool kW8 = kW == Format::kE4M3FN, kX8 = kX == Format::kE4M3FN;
      if constexpr (kW8 && kX8) QK_MMA_SPARSE("f32", "e4m3", "e4m3", "+f");
      if constexpr (kW8 && !kX8) QK_MMA_SPARSE("f32", "e4m3", "e5m2", "+f");
      if constexpr (!kW8 && kX8) QK_MMA_SPARSE("f32", "e5m2", "e4m3", "+f");
      if constexpr (!kW8 && !kX8) QK_MMA_SPARSE("f32", "e5m2", "e5m2", "+f");
    }
  }

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM], const A (&a)[kBlocksN],
                                 const B (&b)[kBlocksM]) {
    QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
      QK_UNROLL for (int part = 0; part < 2 * kBlocksM; ++part) {
        multiply_step(acc[i][part / 2].v + 4 * (part % 2), a[i].v, b[part / 2].v + 4 * (part % 2));
      }
    }
  }
};

#undef QK_MMA
#undef QK_MMA_SPARSE

#define QK_MMA_HALF(type)                                                   \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

/// 16-bit inputs and weights, a 16x16 block by 16 of K at a time.
template <Io kIo>
struct HalfMma : HalfLayoutSm89 {
  using Acc = AccSm89<f32>;

  static QK_DEVICE Acc multiply(const Weights& weights, const Tokens& tokens, Acc acc) {
    QK_UNROLL for (int part = 0; part < 2; ++part) {
      f32* const d = acc.v + 4 * part;
      const u32 *const a = weights.v, *const b = tokens.v + 2 * part;
      if constexpr (kIo == Io::kF16) QK_MMA_HALF("f16");
      if constexpr (kIo == Io::kBF16) QK_MMA_HALF("bf16");
    }
    return acc;
  }
};

#undef QK_MMA_HALF

}  // namespace qk
