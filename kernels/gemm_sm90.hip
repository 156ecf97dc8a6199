// y[m, n] = (sum_k x[m, k] * w[n, k]) * x_scale * w_scale[n] + bias[n], on Hopper (sm_90a)
//
// x_map   tensor map of the codes u8 [M, K]: box kM x 128 bytes, 128-byte swizzle
// w_map   tensor map of the codes u8 [N, K]: box kN x 128 bytes, 128-byte swizzle; of sparse and
//         int4 weights [N, K/2]: box kN x 64 bytes, 64-byte swizzle
// w_meta  u8 [N, K/8] of sparse weights, w_group i8 [N, K/32] of int4 ones: weights_axis.h
// y_map   tensor map of y: box kChunk x 128 bytes, 128-byte swizzle; read only where the rows of y
//         are a multiple of 16 bytes
// x_scale f32 [1] or [M]       w_scale f32 [1] or [N]       bias io [N] or null       y io [M, N]
// group   token tiles that are walked together, at least 1
// M, N any size >= 1; K a multiple of 16, with sparse and int4 weights of 32; base pointers 16-byte
// aligned. Sums as loop_sm90.h says, of integers in int32; scales and bias in f32, one rounding to
// io (nearest even).
//
// Launch: 128 threads per multiplying warpgroup and 128 that copy, grid of at most one block per
// multiprocessor (with teams: one team per tile), dynamic shared memory kSharedBytes.
// quantkit/device/hopper/hopper_gemm.py has the tiles and all these numbers. Lanes: the
// accumulators' map stands in mma_sm90.h.
#include "epilogue_sm90.h"
#include "gemm_sm90.h"

using Tile = qk::HopperTile<QK_TILE_N, QK_TILE_M, QK_BLOCKS, QK_PING_PONG == 1, QK_TEAM, QK_STAGED,
                            qk::WeightKind(QK_WEIGHTS), QK_IO == QK_F32 ? 4 : 2, QK_CHUNK>;
using Epilogue =
    qk::HopperEpilogue<Tile, qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;
using Gemm = qk::HopperGemm<Tile, qk::Format(QK_W_CODES), qk::Format(QK_X_FORMAT), QK_ACCURATE == 1,
                            Epilogue>;
static_assert(Tile::kSharedBytes == QK_SHARED_BYTES, "hopper/gemm.py counts the shared memory");

QK_HOPPER_KERNEL(Tile::kThreads, Tile::kTeam)
QK_SYMBOL(const __grid_constant__ qk::TensorMap x_map, const float* x_scale,
          const __grid_constant__ qk::TensorMap w_map, QK_META_PARAMETER(w) const float* w_scale,
          const void* bias, QK_IF_RESIDUAL(const void* residual, ) void* y,
          const __grid_constant__ qk::TensorMap y_map,
          QK_IF_RESIDUAL(const __grid_constant__ qk::TensorMap residual_map, ) int m, int n, int k,
          int group) {
  extern __shared__ __align__(1024) qk::u8 shared[];
  Gemm::run({x_map,
             w_map,
             y_map,
             QK_META(w),
             {x_scale, w_scale, bias, y, m, n QK_IF_RESIDUAL(, residual)},
             k,
             group QK_IF_RESIDUAL(, {}, &residual_map)},
            shared);
}
