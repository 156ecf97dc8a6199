// The product of a variant: its tile, matrix instruction and loop, whatever the weights.
//
// Per wave: kWaveM tokens x kWaveN outputs as 16x16 blocks. Weights are the A operand and tokens
// the B operand of the matrix instruction, so that a lane holds runs of consecutive outputs of a
// token: on gfx12 lane (h, r) = (lane / 16, lane % 16) holds y[16j + r, 16i + 8h + e], e = 0..7.
// The other layouts stand in layout_*.h.
//
// Sparse weights are the sparse A operand; their metadata rides in the padding of their LDS rows
// and reaches the matrix instruction as it lies on disk: on gfx12 lane (h, r) takes the 32-bit word
// at row r, K 32h. Targets without a sparse instruction expand the codes to dense fragments in
// registers (layout_gfx11.h). Int4 weights become int8 on the way to LDS: weights.h.
#pragma once

#include "mma.h"
#include "direct.h"
#include "weights_axis.h"

namespace qk {

template <WeightKind>
struct VariantOf {
  using Mma = DenseMma<Format(QK_W_CODES), Format(QK_X_FORMAT)>;
  template <class Tile>
  using Stored = CodeWeights<Tile, false>;
};
template <>
struct VariantOf<WeightKind::kSparse> {
  using Mma = SparseMma<Format(QK_W_CODES), Format(QK_X_FORMAT)>;
  template <class Tile>
  using Stored = CodeWeights<Tile, true>;
};
template <>
struct VariantOf<WeightKind::kInt4> {
  using Mma = DenseMma<Format(QK_W_CODES), Format(QK_X_FORMAT)>;
  template <class Tile>
  using Stored = Int4Weights<Tile>;
};

using VariantMma = VariantOf<WeightKind(QK_WEIGHTS)>::Mma;

/// WeightRows and Tokens: as of TileLoop.
template <class Tile, class WeightRows = ClampedRows, class Tokens = MatrixTokens<Tile>>
using VariantLoop = LoopOf<Tile, VariantMma, WeightRows, Tokens,
                           typename VariantOf<WeightKind(QK_WEIGHTS)>::template Stored<Tile>>;

}  // namespace qk
