// codes[b * heads + h, t, c] = e4m3fn((sum_k x[i, k] * w[j, k]) * x_scale * w_scale[j] + bias[j]),
// i = b * tokens + t, j = h * d + c
//
// x       8-bit codes [M, K], K contiguous          x_scale  f32 [1], or [M] with per_token 1
// w       dense, codes [N, K]; sparse, codes [N, K/2] and w_meta u8 [N, K/8]; int4, u8 [N, K/2] and
//         w_group i8 [N, K/32]: weights_axis.h
// w_scale f32 [N], factors of heads in it           bias     f32 [N] or null
// codes   e4m3fn [M / tokens * N / d, tokens, D], D = d up to a multiple of 16, zero behind d
// M a multiple of tokens, N of d, d of 8; K of 16, with sparse and int4 weights of 32; base
// pointers 16-byte aligned. Sums, scales and bias in f32, one rounding, saturated; NaN becomes the
// NaN code.
//
// Launch: Tile::kThreads threads, grid (ceil(N / kN), ceil(M / kM), 1); see launch.json.
// The product of gemm.hip, with another end: codes_epilogue.h.
#include "product.h"
#include "codes_epilogue.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::VariantMma;
using Loop = qk::VariantLoop<Tile>;
using Epilogue = qk::CodeRows;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w,
          QK_META_PARAMETER(w) const float* w_scale, const float* bias, qk::u8* codes, int m, int n,
          int k, int tokens, int d, int per_token) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(m, n);
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {x, w, QK_META(w), m, n, k}, lds, origin.m, origin.n)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>({x_scale, w_scale, bias, codes, m, n, tokens, d, per_token}, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     origin.n + wave % Tile::kWavesN * Tile::kWaveN);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
