// y[m, j] = int8(clamp(h * gelu(g) / y_scale, -127, 127)), h and g as in geglu.hip, w int4 codes
// and their scales
//
// x       int8 codes [M, K], K contiguous           x_scale  f32 [1] or [M]
// w       u8 [2 N, K/2]: 16 bytes hold 32 codes, byte i those of k = i (low nibble) and i + 16;
//         outputs, then their gates
// w_group i8 [2 N, K/32], -15 to 15: the weight is (code - 8) * w_group, an int8
// w_scale f32 [1] or [2 N]                          bias     io [2 N] or null
// y_scale f32 [1]                                   y        int8 codes [M, N]
// As geglu.hip, but K a multiple of 32. The weights become int8 on the way to LDS: weights.h.
#include "mma.h"
#include "gated.h"
#include "loop.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::DenseMma<qk::Format::kInt8, qk::Format::kInt8>;
using Loop = qk::TileLoop<Tile, Mma, qk::GatedRows<Mma, Tile::kBlocksN>, qk::MatrixTokens<Tile>,
                          qk::Int4Weights<Tile>>;
using Product = qk::Epilogue<qk::Io(QK_IO), QK_X_SCALE == QK_TOKEN, QK_W_SCALE == QK_CHANNEL>;
using Epilogue = qk::GatedEpilogue<Product, qk::Format(QK_Y_FORMAT)>;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* w, const qk::u8* w_group,
          const float* w_scale, const void* bias, const float* y_scale, qk::u8* y, int m, int n,
          int k) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const qk::TileOrigin origin = qk::tile_origin<Tile>(m, 2 * n);
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {x, w, w_group, m, n, k}, lds, origin.m, origin.n / 2)) return;
  const int wave = qk::wave_index();
  Epilogue::run<Mma>({x_scale, w_scale, bias, y, m, n}, y_scale, acc,
                     origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                     (origin.n + wave % Tile::kWavesN * Tile::kWaveN) / 2);
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
