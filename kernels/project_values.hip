// codes[b * heads + h, c, t] = e4m3fn((sum_k x[i, k] * w[j, k]) * x_scale * w_scale[j] + bias[j]),
// i = b * tokens + t, j = h * d + c
//
// x       8-bit codes [M, K], K contiguous          x_scale  f32 [1], or [M] with per_token 1
// w       8-bit codes [N, K], K contiguous
// w_scale f32 [N], factors of heads in it           bias     f32 [N] or null
// codes   e4m3fn [M / tokens * N / d, D, pitch], D = d and pitch = tokens up to multiples of 16,
//         zero behind d and tokens
// M a multiple of tokens, N of d, d of 8; K of 16; base pointers 16-byte aligned. Sums, scales and
// bias in f32, one rounding, saturated; NaN becomes the NaN code.
//
// Launch: Tile::kThreads threads, grid (ceil(M / kN), ceil(N / kM), 1); see launch.json.
// The product of gemm.hip with the operands exchanged: tokens are A and weights B, so that a lane
// has runs of consecutive tokens of an output. 2:4 weights can only be A.
#include "mma.h"
#include "direct.h"
#include "codes_epilogue.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::DenseMma<qk::Format(QK_X_FORMAT), qk::Format(QK_W_FORMAT)>;
using Loop = qk::LoopOf<Tile, Mma>;
using Epilogue = qk::CodeColumns;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w, const float* w_scale,
          const float* bias, qk::u8* codes, int m, int n, int k, int tokens, int d, int per_token) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(n, m);
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {w, x, nullptr, n, m, k}, lds, origin.m, origin.n)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>({x_scale, w_scale, bias, codes, m, n, tokens, d, per_token}, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     origin.n + wave % Tile::kWavesN * Tile::kWaveN);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
