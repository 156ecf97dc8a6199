// Three products of an input that end in e4m3fn codes of heads: queries q and keys k as
// project_codes.hip writes them, values v as project_values.hip does.
//
// x       8-bit codes [M, K], K contiguous          x_scale  f32 [1], or [M] with per_token 1
// wq, wk, wv  dense, codes [N, K]; sparse, codes [N, K/2], and wq_meta, wk_meta, wv_meta u8
//         [N, K/8]: weights_axis.h
// w_scale f32 [3, N], factors of heads in it        bias     f32 [3, N]
// q, k    e4m3fn [M / tokens * N / d, tokens, D], D = d up to a multiple of 16, zero behind d
// v       e4m3fn [M / tokens * N / d, D, pitch], pitch = tokens up to a multiple of 16, zero behind
//         d and tokens
// M a multiple of tokens, N of d, d of 8; K of 16, with sparse weights of 32; base pointers
// 16-byte aligned. Sums, scales and bias in f32, one rounding, saturated; NaN becomes the NaN code.
//
// Launch: Tile::kThreads threads, grid (ceil(N / kN), 3 ceil(M / kM), 1): a third of the blocks for
// each; see launch.json. Of values tokens are A and dense weights B, in as many square tiles;
// sparse weights can only be A, and codes of values turn in LDS.
#include "product.h"
#include "codes_epilogue.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::VariantMma;
using Loop = qk::VariantLoop<Tile>;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

#if QK_WEIGHTS == QK_WEIGHTS_SPARSE
using ValueColumns = qk::TurnedColumns<Tile, Mma>;

static_assert(!Tile::kDirect, "all waves have sums, and meet before codes turn");
static_assert(ValueColumns::kBytes <= Loop::kLdsBytes, "codes turn where operands were");
#else
using MmaColumns = qk::DenseMma<qk::Format(QK_X_FORMAT), qk::Format(QK_W_CODES)>;
using LoopColumns = qk::LoopOf<Tile, MmaColumns>;

static_assert(Tile::kM == Tile::kN, "values have as many tiles as queries");
static_assert(LoopColumns::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

/// One product of rows of `b` (the outputs of a lane's run are rows of `a`).
template <class Loop, class Mma, class Epilogue>
QK_DEVICE void project(const qk::CodesArgs& args, const qk::u8* b, const qk::u8* a, qk::u8* lds,
                       qk::TileOrigin origin, int rows, int columns, int k) {
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {b, a, nullptr, rows, columns, k}, lds, origin.m, origin.n)) return;
  const int wave = qk::wave_index();
  Epilogue::template run<Mma>(args, acc, origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                              origin.n + wave % Tile::kWavesN * Tile::kWaveN);
}
#endif

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* wq,
          QK_META_PARAMETER(wq) const qk::u8* wk, QK_META_PARAMETER(wk) const qk::u8* wv,
          QK_META_PARAMETER(wv) const float* w_scale, const float* bias, qk::u8* q_codes,
          qk::u8* k_codes, qk::u8* v_codes, int m, int n, int k, int tokens, int d, int per_token) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const int tiles_m = (m - 1) / Tile::kM + 1, tiles_n = (n - 1) / Tile::kN + 1;
  const int part = qk::block_y() / tiles_m;
  const int index = qk::block_y() % tiles_m * tiles_n + qk::block_x();
#if QK_WEIGHTS == QK_WEIGHTS_SPARSE
  const qk::TileOrigin origin = qk::tile_at<Tile>(index, m, n);
  const qk::u8* const w = part == 0 ? wq : part == 1 ? wk : wv;
  const qk::u8* const meta = part == 0 ? wq_meta : part == 1 ? wk_meta : wv_meta;
  Loop::Accumulators acc = {};
  Loop loop;
  loop.run(acc, {x, w, meta, m, n, k}, lds, origin.m, origin.n);
  qk::u8* const codes = part == 0 ? q_codes : part == 1 ? k_codes : v_codes;
  const float* const scale = w_scale + part * n;
  const qk::CodesArgs args{x_scale, scale, bias + part * n, codes, m, n, tokens, d, per_token};
  if (part < 2) {
    const int wave = qk::wave_index();
    qk::CodeRows::run<Mma>(args, acc, origin.m + wave / Tile::kWavesN * Tile::kWaveM,
                           origin.n + wave % Tile::kWavesN * Tile::kWaveN);
  } else {
    ValueColumns::run(args, acc, lds, origin.m, origin.n);
  }
#else
  const qk::CodesArgs args{x_scale,
                           w_scale + part * n,
                           bias + part * n,
                           part == 0   ? q_codes
                           : part == 1 ? k_codes
                                       : v_codes,
                           m,
                           n,
                           tokens,
                           d,
                           per_token};
  if (part < 2) {
    project<Loop, Mma, qk::CodeRows>(args, x, part == 0 ? wq : wk, lds,
                                     qk::tile_at<Tile>(index, m, n), m, n, k);
  } else {
    project<LoopColumns, MmaColumns, qk::CodeColumns>(args, wv, x, lds,
                                                      qk::tile_at<Tile>(index, n, m), n, m, k);
  }
#endif
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
