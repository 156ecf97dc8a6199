// y[m, n] = (sum_k x[m, k] * w[n, k]) * x_scale * w_scale[n] + bias[n], w int4 codes and their
// scales
//
// x       int8 codes [M, K], K contiguous           x_scale  f32 [1] or [M]
// w       u8 [N, K/2]: 16 bytes hold 32 codes, byte i those of k = i (low nibble) and i + 16
// w_group i8 [N, K/32], -15 to 15: the weight is (code - 8) * w_group, an int8
// w_scale f32 [1] or [N]                            bias     io [N] or null
// y       io [M, N]
// M, N any size >= 1; K a multiple of 32; base pointers 16-byte aligned. int32 accumulation, scales
// and bias in f32, one rounding to io (nearest even).
//
// Launch: Tile::kThreads threads, grid (ceil(N / kN), ceil(M / kM), 1); see launch.json.
// The GEMM of gemm.hip on weights that become int8 on the way to LDS: weights.h.
#include "mma.h"
#include "epilogue.h"
#include "loop.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::DenseMma<qk::Format::kInt8, qk::Format::kInt8>;
using Loop = qk::TileLoop<Tile, Mma, qk::Rows, qk::MatrixTokens<Tile>, qk::Int4Weights<Tile>>;
using Epilogue = qk::Epilogue<qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w, const qk::u8* w_group,
          const float* w_scale, const void* bias,
          QK_IF_RESIDUAL(const void* residual, const void* gate, ) void* y, int m, int n,
          int k QK_IF_RESIDUAL(, int rows)) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(m, n);
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {x, w, w_group, m, n, k}, lds, origin.m, origin.n)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>({x_scale, w_scale, bias, y, m, n QK_IF_RESIDUAL(, residual, gate, rows)}, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     origin.n + wave % Tile::kWavesN * Tile::kWaveN);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
