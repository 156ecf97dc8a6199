// Matrix policy of NVIDIA sm_89 (and later, where the same PTX is emulated): mma m16n8k32 and
// mma.sp m16n8k64.
#pragma once

#include "layout_sm89.h"

namespace qk {

/// A lane's two m16n8 results of a 16x16 block.
struct AccSm89 {
  f32 v[8];
  QK_DEVICE f32& operator[](int e) { return v[e]; }
  QK_DEVICE const f32& operator[](int e) const { return v[e]; }
};

#define QK_MMA(a_type, b_type)                                              \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." a_type "." b_type   \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#define QK_MMA_SPARSE(a_type, b_type)                                                          \
  asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.f32." a_type "." b_type \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;"  \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]),  \
                 "r"(b[3]), "r"(a[4]))

template <Format kW, Format kX>
struct DenseMma : LayoutSm89 {
  using Acc = AccSm89;

  static QK_DEVICE void multiply_step(f32* d, const u32* a, const u32* b) {
    constexpr bool kW8 = kW == Format::kE4M3FN, kX8 = kX == Format::kE4M3FN;
    if constexpr (kW8 && kX8) QK_MMA("e4m3", "e4m3");
    if constexpr (kW8 && !kX8) QK_MMA("e4m3", "e5m2");
    if constexpr (!kW8 && kX8) QK_MMA("e5m2", "e4m3");
    if constexpr (!kW8 && !kX8) QK_MMA("e5m2", "e5m2");
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
  using Acc = AccSm89;

  static QK_DEVICE void multiply_step(f32* d, const u32* a, const u32* b) {
    constexpr bool kW8 = kW == Format::kE4M3FN, kX8 = kX == Format::kE4M3FN;
    if constexpr (kW8 && kX8) QK_MMA_SPARSE("e4m3", "e4m3");
    if constexpr (kW8 && !kX8) QK_MMA_SPARSE("e4m3", "e5m2");
    if constexpr (!kW8 && kX8) QK_MMA_SPARSE("e5m2", "e4m3");
    if constexpr (!kW8 && !kX8) QK_MMA_SPARSE("e5m2", "e5m2");
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

}  // namespace qk
