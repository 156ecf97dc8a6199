// y[m, n] = (sum_k x[m, k] * w[n, k]) * x_scale * w_scale[n] + bias[n]
//
// x       8-bit codes [M, K], K contiguous          x_scale  f32 [1] or [M]
// w       dense, codes [N, K]                       w_scale  f32 [1] or [N]
//         sparse, codes [N, K/2] and w_meta u8 [N, K/8]
//         int4, u8 [N, K/2] and w_group i8 [N, K/32]: weights_axis.h
// bias    io [N] or null                            y        io [M, N]
// M, N any size >= 1; K a multiple of 16, with sparse and int4 weights of 32; base pointers 16-byte
// aligned. Sums in f32, of int8 in int32; scales and bias in f32, one rounding to io (nearest
// even).
//
// Launch: Tile::kThreads threads, grid (ceil(N / kN), ceil(M / kM), 1); see launch.json.
// Lanes: product.h.
#include "product.h"
#include "epilogue.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::VariantMma;
using Loop = qk::VariantLoop<Tile>;
using Epilogue = qk::Epilogue<qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w,
          QK_META_PARAMETER(w) const float* w_scale, const void* bias,
          QK_IF_RESIDUAL(const void* residual, ) void* y, int m, int n, int k) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(m, n);
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {x, w, QK_META(w), m, n, k}, lds, origin.m, origin.n)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>({x_scale, w_scale, bias, y, m, n QK_IF_RESIDUAL(, residual)}, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     origin.n + wave % Tile::kWavesN * Tile::kWaveN);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
