// Three products of an input that end in e4m3fn codes of heads, as in project_heads.hip, two of
// every four w[j, 4g .. 4g+3] stored.
//
// wq, wk, wv  8-bit codes [N, K/2]: the kept ones
// wq_meta, wk_meta, wv_meta  u8 [N, K/8]: their positions, as in gemm_sparse.hip
// K a multiple of 32. Everything else as in project_heads.hip.
//
// Launch: Tile::kThreads threads, grid (ceil(N / kN), 3 ceil(M / kM), 1): a third of the blocks for
// each; see launch.json. 2:4 weights can only be A: codes of values turn in LDS.
#include "mma.h"
#include "direct.h"
#include "codes_epilogue.h"
#include "raster.h"

using Tile = qk::VariantTile;
using Mma = qk::SparseMma<qk::Format(QK_W_FORMAT), qk::Format(QK_X_FORMAT)>;
using Loop = qk::LoopOf<Tile, Mma>;
using Columns = qk::TurnedColumns<Tile, Mma>;

static_assert(!Tile::kDirect, "all waves have sums, and meet before codes turn");
static_assert(Columns::kBytes <= Loop::kLdsBytes, "codes turn where operands were");
static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS of every tile");

QK_KERNEL(Tile::kThreads)
QK_SYMBOL(const qk::u8* x, const float* x_scale, const qk::u8* wq, const qk::u8* wq_meta,
          const qk::u8* wk, const qk::u8* wk_meta, const qk::u8* wv, const qk::u8* wv_meta,
          const float* w_scale, const float* bias, qk::u8* q_codes, qk::u8* k_codes,
          qk::u8* v_codes, int m, int n, int k, int tokens, int d, int per_token) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const int tiles_m = (m - 1) / Tile::kM + 1, tiles_n = (n - 1) / Tile::kN + 1;
  const int part = qk::block_y() / tiles_m;
  const int index = qk::block_y() % tiles_m * tiles_n + qk::block_x();
  const qk::TileOrigin origin = qk::tile_at<Tile>(index, m, n);
  const qk::u8* const w = part == 0 ? wq : part == 1 ? wk : wv;
  const qk::u8* const meta = part == 0 ? wq_meta : part == 1 ? wk_meta : wv_meta;
  typename Loop::Accumulators acc = {};
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
    Columns::run(args, acc, lds, origin.m, origin.n);
  }
}

QK_HOST_ENTRY(Tile::kThreads, Loop::kLdsBytes)
