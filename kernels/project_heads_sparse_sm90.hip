// Three products of an input that end in e4m3fn codes of heads, as in project_heads_sm90.hip, two
// of every four w[j, 4g .. 4g + 3] stored; Hopper (sm_90a)
//
// wq_map, wk_map, wv_map  tensor maps of the kept codes u8 [N, K/2]: box kN x 64 bytes, 64-byte
//         swizzle
// wq_meta, wk_meta, wv_meta  u8 [N, K/8]: a nibble per group of four as in gemm_sparse.hip
// K a multiple of 32. Everything else as in project_heads_sm90.hip.
#include "codes_sm90.h"
#include "gemm_sm90.h"

using Tile = qk::HopperTile<QK_TILE_N, QK_TILE_M, QK_BLOCKS, QK_PING_PONG == 1, QK_TEAM, QK_STAGED,
                            qk::Stored::kSparse, 1, QK_CHUNK>;
using Epilogue = qk::HopperCodesEpilogue<Tile, qk::Ends::kHeads, QK_X_SCALE == QK_TOKEN>;
using Gemm = qk::HopperGemm<Tile, qk::Format(QK_W_FORMAT), qk::Format(QK_X_FORMAT),
                            QK_ACCURATE == 1, Epilogue>;
static_assert(Tile::kSharedBytes == QK_SHARED_BYTES, "hopper/gemm.py counts the shared memory");

QK_HOPPER_KERNEL(Tile::kThreads, Tile::kTeam)
QK_SYMBOL(const __grid_constant__ qk::TensorMap x_map, const float* x_scale,
          const __grid_constant__ qk::TensorMap wq_map, const qk::u8* wq_meta,
          const __grid_constant__ qk::TensorMap wk_map, const qk::u8* wk_meta,
          const __grid_constant__ qk::TensorMap wv_map, const qk::u8* wv_meta, const float* w_scale,
          const float* bias, qk::u8* q_codes, qk::u8* k_codes, qk::u8* v_codes, int m, int n, int k,
          int tokens, int d, int group) {
  extern __shared__ __align__(1024) qk::u8 shared[];
  if (qk::thread_index() == 0) {
    qk::tensor_map_prefetch(wk_map);
    qk::tensor_map_prefetch(wv_map);
  }
  const int rows = ((n - 1) / Tile::kN + 1) * Tile::kN;
  Gemm::run({x_map,
             wq_map,
             x_map,
             wq_meta,
             {x_scale, w_scale, bias, {q_codes, k_codes, v_codes}, m, 3 * rows, n, tokens, d},
             k,
             group,
             {{{}, &wk_map, &wv_map, rows}, wk_meta, wv_meta, n}},
            shared);
}
