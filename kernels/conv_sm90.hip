// y[b, v, u, n] = (sum_{r, s, c} x[b, v sy + r dy - top, u sx + s dx - left, c] * w[n, r, s, c])
//                 * x_scale * w_scale[n] + bias[n], x zero outside the picture; on Hopper (sm_90a)
//
// x_map   tensor map of the codes u8 [B, H, W, C]: box 1 x kM / wide x wide x 128 bytes, of every
//         sy-th row and sx-th column, 128-byte swizzle
// w_map   tensor map of the codes u8 [N, taps, C]: box kN x 1 x 128 bytes, 128-byte swizzle; of
//         sparse and int4 weights [N, taps, C/2]: box kN x 1 x 64 bytes, 64-byte swizzle
// w_meta  u8 [N, taps, C/8] of sparse weights, w_group i8 [N, taps, C/32] of int4 ones:
//         weights_axis.h
// y_map   tensor map of y: box 32 pixels of a tile in order (min(wide, 32) of a row) x 128 bytes,
//         128-byte swizzle
// x_scale f32 [1]              w_scale f32 [1] or [N]
// bias    io [N] or null       y       io [B, OH, OW, N]
// m       kM times the number of token tiles, B x across x down
// taps, taps_wide, wide_bits, across, down   as view_sm90.h has them; wide = 2^wide_bits, at least
//         8, divides kM
// group   token tiles that are walked together, at least 1
// Any B, H, W, OH, OW, N >= 1 whose rows of y are a multiple of 16 bytes; C a multiple of 16, with
// sparse and int4 weights of 32; base pointers 16-byte aligned. Sums as loop_sm90.h says, of
// integers in int32; scales and bias in f32, one rounding to io (nearest even).
//
// Launch: 128 threads per multiplying warpgroup and 128 that copy, grid of at most one block per
// multiprocessor, dynamic shared memory kSharedBytes. quantkit/device/hopper/hopper_conv.py has the
// geometry. Lanes: the accumulators' map stands in mma_sm90.h.
#include "epilogue_sm90.h"
#include "gemm_sm90.h"

using Tile = qk::HopperTile<QK_TILE_N, QK_TILE_M, QK_BLOCKS, QK_PING_PONG == 1, QK_TEAM, QK_STAGED,
                            qk::WeightKind(QK_WEIGHTS), QK_IO == QK_F32 ? 4 : 2, QK_CHUNK>;
using View = qk::PictureView<Tile>;
using Epilogue =
    qk::HopperEpilogue<Tile, qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL, View>;
using Gemm = qk::HopperGemm<Tile, qk::Format(QK_W_CODES), qk::Format(QK_X_FORMAT), QK_ACCURATE == 1,
                            Epilogue>;
static_assert(Tile::kSharedBytes == QK_SHARED_BYTES, "hopper/gemm.py counts the shared memory");
static_assert(QK_X_SCALE != QK_TOKEN, "a pixel is part of many outputs: they share a scale");

QK_HOPPER_KERNEL(Tile::kThreads, Tile::kTeam)
QK_SYMBOL(const __grid_constant__ qk::TensorMap x_map, const float* x_scale,
          const __grid_constant__ qk::TensorMap w_map, QK_META_PARAMETER(w) const float* w_scale,
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
             QK_META(w),
             {x_scale, w_scale, bias, y, m, n QK_IF_RESIDUAL(, residual)},
             taps * channels,
             group,
             view QK_IF_RESIDUAL(, &residual_map)},
            shared);
}
