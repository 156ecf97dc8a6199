// The matrix policy of the host: any layout of include/ over the instruction that it was written
// for. QK_HOST_LAYOUT chooses; the emulated instruction runs in host/matrix.h.
#pragma once

#include "matrix.h"

#if QK_HOST_LAYOUT == QK_GFX12
#  include "layout_gfx12.h"
#elif QK_HOST_LAYOUT == QK_GFX11
#  include "layout_gfx11.h"
#elif QK_HOST_LAYOUT == QK_SM89
#  include "layout_sm89.h"
#else
#  error "QK_HOST_LAYOUT is QK_GFX12, QK_GFX11 or QK_SM89"
#endif

namespace qk {

/// kWeights, kTokens: number formats of the operands as the instruction sees them.
template <class Layout, class Isa, host::Number kWeights, host::Number kTokens>
struct HostMma : Layout {
  struct Acc {
    f32 v[8];
    f32& operator[](int e) { return v[e]; }
    const f32& operator[](int e) const { return v[e]; }
  };

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM],
                                 const typename Layout::A (&a)[kBlocksN],
                                 const typename Layout::B (&b)[kBlocksM]) {
    host::LaneOperands mine{acc[0][0].v, reinterpret_cast<const u8*>(a),
                            reinterpret_cast<const u8*>(b)};
    host::wave_collective(&host::Matrix<Layout, Isa, kWeights, kTokens, kBlocksN, kBlocksM>::run,
                          &mine);
  }
};

constexpr host::Number number(Format format) {
  return format == Format::kE4M3FN ? host::Number::kE4M3FN : host::Number::kE5M2;
}

#if QK_HOST_LAYOUT == QK_GFX12
template <Format kW, Format kX>
using DenseMma = HostMma<LayoutGfx12, host::IsaGfx12, number(kW), number(kX)>;
template <Format kW, Format kX>
using SparseMma = HostMma<SparseLayoutGfx12, host::SparseIsaGfx12, number(kW), number(kX)>;
#elif QK_HOST_LAYOUT == QK_GFX11
template <Format kW, Format kX>
using DenseMma =
    HostMma<LayoutGfx11<kW, kX>, host::IsaGfx11, host::Number::kF16, host::Number::kF16>;
template <Format kW, Format kX>
using SparseMma =
    HostMma<SparseLayoutGfx11<kW, kX>, host::IsaGfx11, host::Number::kF16, host::Number::kF16>;
#else
template <Format kW, Format kX>
using DenseMma = HostMma<LayoutSm89, host::IsaSm89, number(kW), number(kX)>;
template <Format kW, Format kX>
using SparseMma = HostMma<SparseLayoutSm89, host::SparseIsaSm89, number(kW), number(kX)>;
#endif

}  // namespace qk
