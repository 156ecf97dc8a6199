// y[b, v, u, n] = (sum_{r, s, c} x[b, v sy + r dy - top, u sx + s dx - left, c] * w[n, r, s, c])
//                 * x_scale * w_scale[n] + bias[n], x zero outside of the picture
//
// x       8-bit codes [B, H, W, C]                  x_scale  f32 [1]
// w       dense, codes [N, K], K = taps C           w_scale  f32 [1] or [N]
//         sparse, codes [N, K/2] and w_meta u8 [N, K/8]
//         int4, u8 [N, K/2] and w_group i8 [N, K/32]: weights_axis.h
// bias    io [N] or null                            y        io [B, OH, OW, N]
// m = B OH OW, k = K; the other numbers as picture.h has them. Up to 32 taps; C a multiple of 16,
// with sparse and int4 weights of 32, and at least 64; fewer than 2^31 codes in x; base pointers
// 16-byte aligned. Sums in f32, of int8 in int32; scales and bias in f32, one rounding to io
// (nearest even).
//
// Launch: Tile::kThreads threads, grid (ceil(N / kN), ceil(m / kM), 1); see launch.json.
// The GEMM of gemm.hip over windows that picture.h reads from the picture: the same sums in the
// same order.
#include "product.h"
#include "epilogue.h"
#include "picture.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::VariantMma;
using Loop = qk::VariantLoop<Tile, qk::ClampedRows, qk::PictureTokens<Tile>>;
using Epilogue = qk::Epilogue<qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;
static_assert(QK_X_SCALE != QK_TOKEN, "a pixel is part of many outputs: they share a scale");

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w,
          QK_META_PARAMETER(w) const float* w_scale, const void* bias,
          QK_IF_RESIDUAL(const void* residual, ) void* y, int m, int n, int k, int height,
          int width, int channels, int out_height, int out_width, int taps_wide, int stride_y,
          int stride_x, int dilation_y, int dilation_x, int top, int left) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(m, n);
  typename Loop::Accumulators acc = {};
  Loop loop;
  loop.x.picture = {height,   width,    channels,   out_height, out_width, taps_wide,
                    stride_y, stride_x, dilation_y, dilation_x, top,       left};
  if (!loop.run(acc, {x, w, QK_META(w), m, n, k}, lds, origin.m, origin.n)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>({x_scale, w_scale, bias, y, m, n QK_IF_RESIDUAL(, residual)}, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     origin.n + wave % Tile::kWavesN * Tile::kWaveN);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
