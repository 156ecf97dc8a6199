// q[i, p + j] = code(clamp(act(y[i, j]) * smooth / scale, -max, max)), p = prefix_columns,
// y[i, j] = (sum_k x[i, k] * w[j, k]) * x_scale * w_scale + bias[j], and before it the codes of
// prefix[i]; on Hopper (sm_90a)
//
// x_map   tensor map of the codes u8 [M, K]: box kM x 128 bytes, 128-byte swizzle
// w_map   tensor map of the codes u8 [N, K]: box kN x 128 bytes, 128-byte swizzle; of sparse and
//         int4 weights [N, K/2]: box kN x 64 bytes, 64-byte swizzle
// w_meta  u8 [N, K/8] of sparse weights, w_group i8 [N, K/32] of int4 ones: weights_axis.h
// x_scale f32 [1] or [M]       w_scale f32 [1] or [N]       bias io [N] or null
// prefix  io [M, p] or null: p is 0                         smooth        f32 [p + N] or null
// scale   f32 [1]              q u8 [M, p + N]
// group   token tiles that are walked together, at least 1
// M, N any size >= 1, with a prefix N and p multiples of 16; K a multiple of 16, with sparse and
// int4 weights of 32; base pointers 16-byte aligned. Sums as loop_sm90.h says; y and act(y) are
// rounded to io.
//
// Launch: 128 threads per multiplying warpgroup and 128 that copy, grid of at most one block per
// multiprocessor (with teams: one team per tile), dynamic shared memory kSharedBytes.
// quantkit/device/hopper/hopper_gemm.py has the tiles and all these numbers. Lanes: the
// accumulators' map stands in mma_sm90.h.
#include "activated_sm90.h"
#include "gemm_sm90.h"

using Tile = qk::HopperTile<QK_TILE_N, QK_TILE_M, QK_BLOCKS, QK_PING_PONG == 1, QK_TEAM, QK_STAGED,
                            qk::WeightKind(QK_WEIGHTS), 1, QK_CHUNK>;
using Epilogue = qk::HopperActivatedEpilogue<Tile, qk::Format(QK_Y_FORMAT), qk::Io(QK_IO),
                                             QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL,
                                             QK_ACT, QK_CHANGES == 1>;
using Gemm = qk::HopperGemm<Tile, qk::Format(QK_W_CODES), qk::Format(QK_X_FORMAT), QK_ACCURATE == 1,
                            Epilogue>;
static_assert(Tile::kSharedBytes == QK_SHARED_BYTES, "hopper/gemm.py counts the shared memory");

QK_HOPPER_KERNEL(Tile::kThreads, Tile::kTeam)
QK_SYMBOL(const __grid_constant__ qk::TensorMap x_map, const float* x_scale,
          const __grid_constant__ qk::TensorMap w_map, QK_META_PARAMETER(w) const float* w_scale,
          const void* bias, const void* prefix, const float* smooth, const float* scale, qk::u8* q,
          int m, int n, int k, int prefix_columns, int group) {
  extern __shared__ __align__(1024) qk::u8 shared[];
  Gemm::run({x_map,
             w_map,
             x_map,
             QK_META(w),
             {x_scale, w_scale, bias, prefix, smooth, scale, q, m, n, prefix_columns},
             k,
             group,
             {}},
            shared);
}
