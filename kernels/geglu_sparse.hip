// y[m, j] = fp8(clamp(h * gelu(g) / y_scale, -max, max)), h and g as in geglu.hip, two of every
// four w[:, 4g .. 4g+3] stored
//
// x       fp8 codes [M, K], K contiguous            x_scale  f32 [1] or [M]
// w       fp8 codes [2 N, K/2]: outputs, then their gates; the kept ones, as in gemm_sparse.hip
// w_meta  u8 [2 N, K/8]: their positions            w_scale  f32 [1] or [2 N]
// bias    io [2 N] or null                          y_scale  f32 [1]
// y       fp8 codes [M, N]
// M, N any size >= 1; K a multiple of 32; base pointers 16-byte aligned. The product, the gate
// (gelu.h says how near) and the division in f32, one rounding to the code (nearest even). NaN
// becomes the NaN code.
//
// Launch: Tile::kThreads threads, grid (ceil(2 N / kN), ceil(M / kM), 1); see launch.json.
// A tile is gemm_sparse.hip's with kN / 2 columns of y and the rows that gate them: gated.h.
// Codes as in geglu.hip.
#include "mma.h"
#include "direct.h"
#include "gated.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::SparseMma<qk::Format(QK_W_FORMAT), qk::Format(QK_X_FORMAT)>;
using Loop = qk::LoopOf<Tile, Mma, qk::GatedRows<Mma, Tile::kBlocksN>>;
using Product = qk::Epilogue<qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;
using Epilogue = qk::GatedEpilogue<Product, qk::Format(QK_Y_FORMAT)>;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w, const qk::u8* w_meta,
          const float* w_scale, const void* bias, const float* y_scale, qk::u8* y, int m, int n,
          int k) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(m, 2 * n);
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {x, w, w_meta, m, n, k}, lds, origin.m, origin.n / 2)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>({x_scale, w_scale, bias, y, m, n}, y_scale, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     (origin.n + wave % Tile::kWavesN * Tile::kWaveN) / 2);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
