// y[m, n] = code(clamp(h * gelu(g) / y_scale, -max, max)) as in geglu_sm90.hip, w int4 codes
// and their factors; Hopper (sm_90a)
//
// w_map   tensor map of the codes u8 [2, N, K/2], two a byte as in gemm_w4a8.hip: box 2 x kN / 2 x
//         64 bytes, 64-byte swizzle
// w_group i8 [2 N, K/32], -15 to 15: the weight is (code - 8) * w_group, an int8
// N a multiple of 16, K of 32. Everything else as in geglu_sm90.hip.
#include "gated_sm90.h"
#include "gemm_sm90.h"

using Tile = qk::HopperTile<QK_TILE_N, QK_TILE_M, QK_BLOCKS, QK_PING_PONG == 1, QK_TEAM, QK_STAGED,
                            qk::Stored::kInt4, 4, QK_CHUNK, true>;
using Epilogue = qk::HopperGatedEpilogue<Tile, qk::Format(QK_Y_FORMAT), qk::Io(QK_IO),
                                         QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;
using Gemm = qk::HopperGemm<Tile, qk::Format::kInt8, qk::Format::kInt8, false, Epilogue>;
static_assert(Tile::kSharedBytes == QK_SHARED_BYTES, "hopper/gemm.py counts the shared memory");

QK_HOPPER_KERNEL(Tile::kThreads, Tile::kTeam)
QK_SYMBOL(const __grid_constant__ qk::TensorMap x_map, const float* x_scale,
          const __grid_constant__ qk::TensorMap w_map, const qk::u8* w_group, const float* w_scale,
          const void* bias, const float* y_scale, void* y, int m, int n, int k, int group) {
  extern __shared__ __align__(1024) qk::u8 shared[];
  Gemm::run({x_map, w_map, x_map, w_group, {x_scale, w_scale, bias, y_scale, y, m, n}, k, group},
            shared);
}
