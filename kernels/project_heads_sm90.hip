// Three products of an input that end in e4m3fn codes of heads, on Hopper (sm_90a): queries q and
// keys k as project_codes_sm90.hip writes them, values v as project_values_sm90.hip does.
//
// x_map   tensor map of the codes u8 [M, K]: box kM x 128 bytes, 128-byte swizzle
// wq_map, wk_map, wv_map  tensor maps of the codes u8 [N, K]: box kN x 128 bytes, 128-byte swizzle;
//         of sparse weights [N, K/2]: box kN x 64 bytes, 64-byte swizzle
// wq_meta, wk_meta, wv_meta  u8 [N, K/8] of sparse weights: weights_axis.h
// x_scale f32 [1] or [M]       w_scale f32 [3, N], factors of heads in it     bias f32 [3, N]
// q, k    e4m3fn [M / tokens * N / d, tokens, D], D = d up to a multiple of 16, zero behind d
// v       e4m3fn [M / tokens * N / d, D, pitch], pitch = tokens up to a multiple of 16, zero behind
//         d and tokens
// group   token tiles that are walked together, at least 1
// M a multiple of tokens, N of d, d of 8; K of 16, with sparse weights of 32; base pointers
// 16-byte aligned. Sums as loop_sm90.h says; scales and bias in f32, one rounding, saturated; NaN
// becomes the NaN code.
//
// Launch: 128 threads per multiplying warpgroup and 128 that copy, grid of at most one block per
// multiprocessor, dynamic shared memory kSharedBytes. quantkit/device/hopper/hopper_projections.py
// has the tiles, each of which has rows of one weight. Lanes: the accumulators' map stands in
// mma_sm90.h.
#include "codes_sm90.h"
#include "gemm_sm90.h"

using Tile = qk::HopperTile<QK_TILE_N, QK_TILE_M, QK_BLOCKS, QK_PING_PONG == 1, QK_TEAM, QK_STAGED,
                            qk::WeightKind(QK_WEIGHTS), 1, QK_CHUNK>;
using Epilogue = qk::HopperCodesEpilogue<Tile, qk::Ends::kHeads, QK_X_SCALE == QK_TOKEN>;
using Gemm = qk::HopperGemm<Tile, qk::Format(QK_W_CODES), qk::Format(QK_X_FORMAT), QK_ACCURATE == 1,
                            Epilogue>;
static_assert(Tile::kSharedBytes == QK_SHARED_BYTES, "hopper/gemm.py counts the shared memory");

QK_HOPPER_KERNEL(Tile::kThreads, Tile::kTeam)
QK_SYMBOL(const __grid_constant__ qk::TensorMap x_map, const float* x_scale,
          const __grid_constant__ qk::TensorMap wq_map,
          QK_META_PARAMETER(wq) const __grid_constant__ qk::TensorMap wk_map,
          QK_META_PARAMETER(wk) const __grid_constant__ qk::TensorMap wv_map,
          QK_META_PARAMETER(wv) const float* w_scale, const float* bias, qk::u8* q_codes,
          qk::u8* k_codes, qk::u8* v_codes, int m, int n, int k, int tokens, int d, int group) {
  extern __shared__ __align__(1024) qk::u8 shared[];
  if (qk::thread_index() == 0) {
    qk::tensor_map_prefetch(wk_map);
    qk::tensor_map_prefetch(wv_map);
  }
  const int rows = ((n - 1) / Tile::kN + 1) * Tile::kN;
  Gemm::run({x_map,
             wq_map,
             x_map,
             QK_META(wq),
             {x_scale, w_scale, bias, {q_codes, k_codes, v_codes}, m, 3 * rows, n, tokens, d},
             k,
             group,
             {{}, &wk_map, &wv_map, rows, QK_META(wk), QK_META(wv), n}},
            shared);
}
