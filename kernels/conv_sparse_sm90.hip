// y[b, v, u, n] = (sum_{r, s, c} x[b, v sy + r dy - top, u sx + s dx - left, c] * w[n, r, s, c])
//                 * x_scale * w_scale[n] + bias[n], x zero outside the picture,
//                 two of every four w[n, r, s, 4g .. 4g + 3] stored; on Hopper (sm_90a)
//
// w_map   tensor map of the kept codes u8 [N, taps, C/2]: box kN x 1 x 64 bytes, 64-byte swizzle
// w_meta  u8 [N, taps, C/8]: a nibble per group of four as in gemm_sparse.hip
// C a multiple of 32. Everything else as in conv_sm90.hip.
#include "epilogue_sm90.h"
#include "gemm_sm90.h"

using Tile = qk::HopperTile<QK_TILE_N, QK_TILE_M, QK_BLOCKS, QK_PING_PONG == 1, QK_TEAM, QK_STAGED,
                            qk::Stored::kSparse, QK_IO == QK_F32 ? 4 : 2, QK_CHUNK>;
using View = qk::PictureView<Tile>;
using Epilogue =
    qk::HopperEpilogue<Tile, qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL, View>;
using Gemm = qk::HopperGemm<Tile, qk::Format(QK_W_FORMAT), qk::Format(QK_X_FORMAT),
                            QK_ACCURATE == 1, Epilogue>;
static_assert(Tile::kSharedBytes == QK_SHARED_BYTES, "hopper/gemm.py counts the shared memory");
static_assert(QK_X_SCALE != QK_TOKEN, "a pixel is part of many outputs: they share a scale");

QK_HOPPER_KERNEL(Tile::kThreads, Tile::kTeam)
QK_SYMBOL(const __grid_constant__ qk::TensorMap x_map, const float* x_scale,
          const __grid_constant__ qk::TensorMap w_map, const qk::u8* w_meta, const float* w_scale,
          const void* bias, QK_IF_RESIDUAL(const void* residual, ) void* y,
          const __grid_constant__ qk::TensorMap y_map,
          QK_IF_RESIDUAL(const __grid_constant__ qk::TensorMap residual_map, ) int m, int n,
          int channels, int taps, int taps_wide, int wide_bits, int across, int down, int stride_x,
          int stride_y, int dilation_x, int dilation_y, int left, int top, int group) {
  extern __shared__ __align__(1024) qk::u8 shared[];
  const View view{channels, taps,     taps_wide,  wide_bits,  across, down,
                  stride_x, stride_y, dilation_x, dilation_y, left,   top};
  Gemm::run({x_map,
             w_map,
             y_map,
             w_meta,
             {x_scale, w_scale, bias, y, m, n QK_IF_RESIDUAL(, residual)},
             taps * channels,
             group,
             view QK_IF_RESIDUAL(, &residual_map)},
            shared);
}
