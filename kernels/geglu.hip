// y[m, j] = code(clamp(h * gelu(g) / y_scale, -max, max)), h = p[m, j] and g = p[m, N + j] of the
// product p = (sum_k x[m, k] * w[:, k]) * x_scale * w_scale + bias
//
// x       8-bit codes [M, K], K contiguous          x_scale  f32 [1] or [M]
// w       outputs, then their gates                 w_scale  f32 [1] or [2 N]
//         dense, codes [2 N, K]
//         sparse, codes [2 N, K/2] and w_meta u8 [2 N, K/8]
//         int4, u8 [2 N, K/2] and w_group i8 [2 N, K/32]: weights_axis.h
// bias    io [2 N] or null                          y_scale  f32 [1]
// y       8-bit codes [M, N]
// M, N any size >= 1; K a multiple of 16, with sparse and int4 weights of 32; base pointers 16-byte
// aligned. p, the gate (gelu.h says how near) and the division in f32, one rounding to the code
// (nearest even). NaN becomes the NaN code.
//
// Launch: Tile::kThreads threads, grid (ceil(2 N / kN), ceil(M / kM), 1); see launch.json.
// A tile is gemm.hip's with kN / 2 columns of y and the rows that gate them: gated.h. On gfx12
// lane (h, r) = (lane / 16, lane % 16) of a wave with 64 rows holds y[16j + r, 16i + 8h + e], i = 0
// and 1, e = 0..7.
#include "product.h"
#include "gated.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::VariantMma;
using Loop = qk::VariantLoop<Tile, qk::GatedRows<Mma, Tile::kBlocksN>>;
using Product = qk::Epilogue<qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;
using Epilogue = qk::GatedEpilogue<Product, qk::Format(QK_Y_FORMAT)>;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w,
          QK_META_PARAMETER(w) const float* w_scale, const void* bias, const float* y_scale,
          qk::u8* y, int m, int n, int k) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(m, 2 * n);
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {x, w, QK_META(w), m, n, k}, lds, origin.m, origin.n / 2)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>({x_scale, w_scale, bias, y, m, n}, y_scale, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     (origin.n + wave % Tile::kWavesN * Tile::kWaveN) / 2);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
