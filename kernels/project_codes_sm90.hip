// codes[b * heads + h, t, c] = e4m3fn((sum_k x[i, k] * w[j, k]) * x_scale * w_scale[j] + bias[j]),
// i = b * tokens + t, j = h * d + c; on Hopper (sm_90a)
//
// x_map   tensor map of the codes u8 [M, K]: box kM x 128 bytes, 128-byte swizzle
// w_map   tensor map of the codes u8 [N, K]: box kN x 128 bytes, 128-byte swizzle
// x_scale f32 [1] or [M]       w_scale f32 [N], factors of heads in it       bias f32 [N] or null
// codes   e4m3fn [M / tokens * N / d, tokens, D], D = d up to a multiple of 16, zero behind d
// group   token tiles that are walked together, at least 1
// M a multiple of tokens, N of d, d of 8; K of 16; base pointers 16-byte aligned. Sums as
// loop_sm90.h says; scales and bias in f32, one rounding, saturated; NaN becomes the NaN code.
//
// Launch: 128 threads per multiplying warpgroup and 128 that copy, grid of at most one block per
// multiprocessor, dynamic shared memory kSharedBytes. quantkit/device/hopper/hopper_projections.py
// has the tiles. Lanes: the accumulators' map stands in mma_sm90.h.
#include "codes_sm90.h"
#include "gemm_sm90.h"

using Tile = qk::HopperTile<QK_TILE_N, QK_TILE_M, QK_BLOCKS, QK_PING_PONG == 1, QK_TEAM, QK_STAGED,
                            qk::WeightKind(QK_WEIGHTS), 1, QK_CHUNK>;
using Epilogue = qk::HopperCodesEpilogue<Tile, qk::Ends::kRows, QK_X_SCALE == QK_TOKEN>;
using Gemm = qk::HopperGemm<Tile, qk::Format(QK_W_CODES), qk::Format(QK_X_FORMAT), QK_ACCURATE == 1,
                            Epilogue>;
static_assert(Tile::kSharedBytes == QK_SHARED_BYTES, "hopper/gemm.py counts the shared memory");

QK_HOPPER_KERNEL(Tile::kThreads, Tile::kTeam)
QK_SYMBOL(const __grid_constant__ qk::TensorMap x_map, const float* x_scale,
          const __grid_constant__ qk::TensorMap w_map, QK_META_PARAMETER(w) const float* w_scale,
          const float* bias, qk::u8* codes, int m, int n, int k, int tokens, int d, int group) {
  extern __shared__ __align__(1024) qk::u8 shared[];
  Gemm::run({x_map,
             w_map,
             x_map,
             QK_META(w),
             {x_scale, w_scale, bias, {codes}, m, n, n, tokens, d},
             k,
             group,
             {}},
            shared);
}
