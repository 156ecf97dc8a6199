// y[m, n] = code(clamp(h * gelu(g) / y_scale, -max, max)), h = z[m, n], g = z[m, N + n],
// z[m, j] = (sum_k x[m, k] * w[j, k]) * x_scale * w_scale[j] + bias[j], j < 2 N; on Hopper (sm_90a)
//
// x_map   tensor map of the codes u8 [M, K]: box kM x 128 bytes, 128-byte swizzle
// w_map   tensor map of the codes u8 [2, N, K]: box 2 x kN / 2 x 128 bytes, 128-byte swizzle; of
//         sparse and int4 weights [2, N, K/2]: box 2 x kN / 2 x 64 bytes, 64-byte swizzle
// w_meta  u8 [2 N, K/8] of sparse weights, w_group i8 [2 N, K/32] of int4 ones: weights_axis.h
// x_scale f32 [1] or [M]       w_scale f32 [1] or [2 N]     bias io [2 N] or null
// y_scale f32 [1]              y u8 [M, N]
// group   token tiles that are walked together, at least 1
// M any size >= 1; N and K multiples of 16, with sparse and int4 weights K of 32; base pointers
// 16-byte aligned. Sums as loop_sm90.h says; the rest in f32 as in gated_sm90.h: z is not rounded
// to io.
//
// Launch: 128 threads per multiplying warpgroup and 128 that copy, grid of at most one block per
// multiprocessor, dynamic shared memory kSharedBytes. quantkit/device/hopper/hopper_geglu.py has
// the tiles. Lanes: the accumulators' map stands in mma_sm90.h.
#include "gated_sm90.h"
#include "gemm_sm90.h"

using Tile = qk::HopperTile<QK_TILE_N, QK_TILE_M, QK_BLOCKS, QK_PING_PONG == 1, QK_TEAM, QK_STAGED,
                            qk::WeightKind(QK_WEIGHTS), 4, QK_CHUNK, true>;
using Epilogue = qk::HopperGatedEpilogue<Tile, qk::Format(QK_Y_FORMAT), qk::Io(QK_IO),
                                         QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;
using Gemm = qk::HopperGemm<Tile, qk::Format(QK_W_CODES), qk::Format(QK_X_FORMAT), QK_ACCURATE == 1,
                            Epilogue>;
static_assert(Tile::kSharedBytes == QK_SHARED_BYTES, "hopper/gemm.py counts the shared memory");

QK_HOPPER_KERNEL(Tile::kThreads, Tile::kTeam)
QK_SYMBOL(const __grid_constant__ qk::TensorMap x_map, const float* x_scale,
          const __grid_constant__ qk::TensorMap w_map, QK_META_PARAMETER(w) const float* w_scale,
          const void* bias, const float* y_scale, void* y, int m, int n, int k, int group) {
  extern __shared__ __align__(1024) qk::u8 shared[];
  Gemm::run({x_map, w_map, x_map, QK_META(w), {x_scale, w_scale, bias, y_scale, y, m, n}, k, group},
            shared);
}
