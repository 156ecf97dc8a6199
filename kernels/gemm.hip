// y[m, n] = (sum_k x[m, k] * w[n, k]) * x_scale * w_scale[n] + bias[n]
//
// x       fp8 codes [M, K], K contiguous            x_scale  f32 [1] or [M]
// w       fp8 codes [N, K], K contiguous            w_scale  f32 [1] or [N]
// bias    io [N] or null                            y        io [M, N]
// M, N any size >= 1; K a multiple of 16; base pointers 16-byte aligned. f32 accumulation, scales
// and bias in f32, one rounding to io (nearest even).
//
// Launch: Tile::kThreads threads, grid (ceil(N / kN), ceil(M / kM), 1); see launch.json.
// Per wave: kWaveM tokens x kWaveN outputs as 16x16 blocks. Weights are the A operand and tokens
// the B operand of the matrix instruction, so that a lane holds runs of consecutive outputs of a
// token: on gfx12 lane (h, r) = (lane / 16, lane % 16) holds y[16j + r, 16i + 8h + e], e = 0..7.
// The other layouts stand in layout_*.h.
#include "mma.h"
#include "direct.h"
#include "epilogue.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::DenseMma<qk::Format(QK_W_FORMAT), qk::Format(QK_X_FORMAT)>;
using Loop = qk::LoopOf<Tile, Mma>;
using Epilogue = qk::Epilogue<qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w, const float* w_scale,
          const void* bias, QK_IF_RESIDUAL(const void* residual, const void* gate, ) void* y, int m,
          int n, int k QK_IF_RESIDUAL(, int rows)) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(m, n);
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {x, w, nullptr, m, n, k}, lds, origin.m, origin.n)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>({x_scale, w_scale, bias, y, m, n QK_IF_RESIDUAL(, residual, gate, rows)}, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     origin.n + wave % Tile::kWavesN * Tile::kWaveN);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
