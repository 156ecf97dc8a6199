// y[m, n] = code(clamp(h * gelu(g) / y_scale, -max, max)) as in geglu_sm90.hip, two of every
// four w[j, 4g .. 4g + 3] stored; Hopper (sm_90a)
//
// w_map   tensor map of the kept codes u8 [2, N, K/2]: box 2 x kN / 2 x 64 bytes, 64-byte swizzle
// w_meta  u8 [2 N, K/8]: a nibble per group of four as in gemm_sparse.hip
// N a multiple of 16, K of 32. Everything else as in geglu_sm90.hip.
#include "gated_sm90.h"
#include "gemm_sm90.h"

using Tile = qk::HopperTile<QK_TILE_N, QK_TILE_M, QK_BLOCKS, QK_PING_PONG == 1, QK_TEAM, QK_STAGED,
                            qk::Stored::kSparse, 4, QK_CHUNK, true>;
using Epilogue = qk::HopperGatedEpilogue<Tile, qk::Format(QK_Y_FORMAT), qk::Io(QK_IO),
                                         QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;
using Gemm = qk::HopperGemm<Tile, qk::Format(QK_W_FORMAT), qk::Format(QK_X_FORMAT),
                            QK_ACCURATE == 1, Epilogue>;
static_assert(Tile::kSharedBytes == QK_SHARED_BYTES, "hopper/gemm.py counts the shared memory");

QK_HOPPER_KERNEL(Tile::kThreads, Tile::kTeam)
QK_SYMBOL(const __grid_constant__ qk::TensorMap x_map, const float* x_scale,
          const __grid_constant__ qk::TensorMap w_map, const qk::u8* w_meta, const float* w_scale,
          const void* bias, const float* y_scale, void* y, int m, int n, int k, int group) {
  extern __shared__ __align__(1024) qk::u8 shared[];
  Gemm::run({x_map, w_map, x_map, w_meta, {x_scale, w_scale, bias, y_scale, y, m, n}, k, group},
            shared);
}
