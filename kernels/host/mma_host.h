// The matrix policy of the host: any layout of include/ over the instruction that it was written
// for. QK_HOST_LAYOUT chooses; the emulated instruction runs in host/matrix.h. RDNA2's lanes
// multiply for themselves, so that policy is the card's own.
#pragma once

#include "matrix.h"

#if QK_HOST_LAYOUT == QK_GFX12
#  include "layout_gfx12.h"
#elif QK_HOST_LAYOUT == QK_GFX11
#  include "layout_gfx11.h"
#elif QK_HOST_LAYOUT == QK_SM89
#  include "layout_sm89.h"
#elif QK_HOST_LAYOUT == QK_GFX10
#  include "mma_gfx10.h"
#else
#  error "QK_HOST_LAYOUT is QK_GFX12, QK_GFX11, QK_SM89 or QK_GFX10"
#endif

namespace qk {

/// kWeights, kTokens: number formats of the operands as the instruction sees them.
template <class Layout, class Isa, host::Number kWeights, host::Number kTokens, class TheSum>
struct HostMma : Layout {
  using Sum = TheSum;
  struct Acc {
    Sum v[8];
    Sum& operator[](int e) { return v[e]; }
    const Sum& operator[](int e) const { return v[e]; }
  };

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM],
                                 const typename Layout::A (&a)[kBlocksN],
                                 const typename Layout::B (&b)[kBlocksM]) {
    host::LaneOperands mine{acc[0][0].v, reinterpret_cast<const u8*>(a),
                            reinterpret_cast<const u8*>(b)};
    host::wave_collective(
        &host::Matrix<Layout, Isa, kWeights, kTokens, Sum, kBlocksN, kBlocksM>::run, &mine);
  }
  /// Fragments whose second half is zero.
  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply_half(Acc (&acc)[kBlocksN][kBlocksM],
                                      const typename Layout::A (&a)[kBlocksN],
                                      const typename Layout::B (&b)[kBlocksM]) {
    multiply(acc, a, b);
  }
};

/// The same numbers as the codes are.
template <class Layout, class Isa, Format kW, Format kX>
using CodesMma = HostMma<Layout, Isa, host::number_of(kW), host::number_of(kX), Sum<kW, kX>>;

#if QK_HOST_LAYOUT == QK_GFX12
template <Format kW, Format kX>
using DenseMma = CodesMma<LayoutGfx12, host::IsaGfx12, kW, kX>;
template <Format kW, Format kX>
using SparseMma = CodesMma<SparseLayoutGfx12, host::SparseIsaGfx12, kW, kX>;
#elif QK_HOST_LAYOUT == QK_GFX11
template <class Layout, Format kX>
struct MmaGfx11 {
  using Type = HostMma<Layout, host::IsaGfx11, host::Number::kF16, host::Number::kF16, f32>;
};
template <class Layout>
struct MmaGfx11<Layout, Format::kInt8> {
  using Type = CodesMma<Layout, host::IsaIu8Gfx11, Format::kInt8, Format::kInt8>;
};
template <Format kW, Format kX>
using DenseMma = typename MmaGfx11<LayoutGfx11<kW, kX>, kX>::Type;
template <Format kW, Format kX>
using SparseMma = typename MmaGfx11<SparseLayoutGfx11<kW, kX>, kX>::Type;
#elif QK_HOST_LAYOUT == QK_SM89
/// One instruction, which has half of a block's tokens: the other half are zeros.
struct StepSm89 : OutputsSm89 {
  static constexpr bool kSparse = false;
  static constexpr int kSteps = 1;
  struct A {
    u32 v[4];
  };
  struct B {
    u32 v[4];  // [part][register]
  };
};
template <Format kW, Format kX>
struct DenseMma : CodesMma<LayoutSm89, host::IsaSm89, kW, kX> {
  using Sum = qk::Sum<kW, kX>;

  static QK_DEVICE void multiply_step(Sum* d, const u32* a, const u32* b) {
    using Step = CodesMma<StepSm89, host::IsaSm89, kW, kX>;
    typename Step::Acc acc[1][1] = {{{{d[0], d[1], d[2], d[3]}}}};
    const StepSm89::A rows[1] = {{{a[0], a[1], a[2], a[3]}}};
    const StepSm89::B columns[1] = {{{b[0], b[1]}}};
    Step::multiply(acc, rows, columns);
    QK_UNROLL for (int e = 0; e < 4; ++e)
      d[e] = acc[0][0][e];
  }
};
template <Format kW, Format kX>
using SparseMma = CodesMma<SparseLayoutSm89, host::SparseIsaSm89, kW, kX>;
#endif

/// 16-bit inputs and weights, a 16x16 block at a time. kTokensFirst: tokens are the instruction's
/// A.
template <class Layout, class Isa, Io kIo, bool kTokensFirst>
struct HostHalfMma : Layout {
  static constexpr host::Number kNumber =
      kIo == Io::kF16 ? host::Number::kF16 : host::Number::kBF16;
  struct Acc {
    f32 v[8];
    f32& operator[](int e) { return v[e]; }
    const f32& operator[](int e) const { return v[e]; }
  };

  static QK_DEVICE Acc multiply(const typename Layout::Weights& weights,
                                const typename Layout::Tokens& tokens, Acc acc) {
    const u8 *w = reinterpret_cast<const u8*>(&weights), *x = reinterpret_cast<const u8*>(&tokens);
    host::LaneOperands mine{acc.v, kTokensFirst ? x : w, kTokensFirst ? w : x};
    host::wave_collective(&host::Matrix<Layout, Isa, kNumber, kNumber, f32, 1, 1>::run, &mine);
    return acc;
  }
};

#if QK_HOST_LAYOUT == QK_GFX12
template <Io kIo>
using HalfMma = HostHalfMma<HalfLayoutGfx12, host::IsaHalfGfx12, kIo, true>;
#elif QK_HOST_LAYOUT == QK_GFX11
template <Io kIo>
using HalfMma = HostHalfMma<HalfLayoutGfx11, host::IsaGfx11, kIo, true>;
#elif QK_HOST_LAYOUT == QK_SM89
template <Io kIo>
using HalfMma = HostHalfMma<HalfLayoutSm89, host::IsaHalfSm89, kIo, false>;
#endif

}  // namespace qk
