// q[i, p + j] = code(clamp(act(y[i, j]) * smooth / scale, -max, max)), p = prefix_columns,
// y[i, j] = (sum_k x[i, k] * w[j, k]) * x_scale * w_scale + bias[j], and before it the codes of
// prefix[i]
//
// x       8-bit codes [M, K], K contiguous          x_scale  f32 [1], or [M] with per_token 1
// w       dense, codes [N, K]                       w_scale  f32 [1], or [N] with per_channel 1
//         sparse, codes [N, K/2] and w_meta u8 [N, K/8]
//         int4, u8 [N, K/2] and w_group i8 [N, K/32]: weights_axis.h
// bias    io [N] or null                            prefix   io [M, p] or null: p is 0
// smooth  f32 [p + N] or null                       scale    f32 [1]
// q       8-bit codes [M, p + N]
// act     of QK_ACT: silu, gelu or gelu with tanh (activation.h)
// M, N any size >= 1, with a prefix N and p multiples of 16; K a multiple of 16, with sparse and
// int4 weights of 32; base pointers 16-byte aligned. y and act(y) are rounded to io, as gemm.hip
// writes y; then quantize_static.hip's codes. NaN becomes the NaN code.
//
// Launch: Tile::kThreads threads, grid (ceil(N / kN), ceil(M / kM), 1); see launch.json.
// The product of gemm.hip, with another end: activated.h. Blocks share the prefix of their tokens.
#include "product.h"
#include "activated.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::VariantMma;
using Loop = qk::VariantLoop<Tile>;
using Epilogue = qk::ActivatedEpilogue<qk::Format(QK_Y_FORMAT), qk::Io(QK_IO)>;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w,
          QK_META_PARAMETER(w) const float* w_scale, const void* bias, const void* prefix,
          const float* smooth, const float* scale, qk::u8* q, int m, int n, int k,
          int prefix_columns, int act, int per_token, int per_channel) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(m, n);
  const qk::ActivatedArgs args{x_scale, w_scale, bias, prefix, smooth,
                               scale,   q,       m,    n,      prefix_columns};
  qk::share_prefix<Tile, qk::Format(QK_Y_FORMAT), qk::Io(QK_IO)>(args, origin);
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {x, w, QK_META(w), m, n, k}, lds, origin.m, origin.n)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>(args, {per_token, per_channel}, act, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     origin.n + wave % Tile::kWavesN * Tile::kWaveN);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
