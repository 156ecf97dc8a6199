// y[b, v, u, n] = (sum_{r, s, c} x[b, v sy + r dy - top, u sx + s dx - left, c] * w[n, r, s, c])
//                 * x_scale * w_scale[n] + bias[n], x zero outside of the picture, w int4 codes and
//                 their scales
//
// x       int8 codes [B, H, W, C]                   x_scale  f32 [1]
// w       u8 [N, K/2]: 16 bytes hold 32 codes, byte i those of k = i (low nibble) and i + 16; K =
// taps C w_group i8 [N, K/32], -15 to 15: the weight is (code - 8) * w_group, an int8 w_scale f32
// [1] or [N]                            bias     io [N] or null y       io [B, OH, OW, N] As
// conv.hip, but C a multiple of 32. The weights become int8 on the way to LDS: weights.h.
#include "mma.h"
#include "epilogue.h"
#include "loop.h"
#include "picture.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::DenseMma<qk::Format::kInt8, qk::Format::kInt8>;
using Loop = qk::TileLoop<Tile, Mma, qk::Rows, qk::PictureTokens<Tile>, qk::Int4Weights<Tile>>;
using Epilogue = qk::Epilogue<qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;
static_assert(QK_X_SCALE != QK_TOKEN, "a pixel is part of many outputs: they share a scale");

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w, const qk::u8* w_group,
          const float* w_scale, const void* bias, QK_IF_RESIDUAL(const void* residual, ) void* y,
          int m, int n, int k, int height, int width, int channels, int out_height, int out_width,
          int taps_wide, int stride_y, int stride_x, int dilation_y, int dilation_x, int top,
          int left) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(m, n);
  typename Loop::Accumulators acc = {};
  Loop loop;
  loop.x.picture = {height,   width,    channels,   out_height, out_width, taps_wide,
                    stride_y, stride_x, dilation_y, dilation_x, top,       left};
  if (!loop.run(acc, {x, w, w_group, m, n, k}, lds, origin.m, origin.n)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>({x_scale, w_scale, bias, y, m, n QK_IF_RESIDUAL(, residual)}, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     origin.n + wave % Tile::kWavesN * Tile::kWaveN);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
