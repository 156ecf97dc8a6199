// Which tile a block computes: groups of kGroupM tile rows are walked column by column, so that
// blocks that run at the same time share weight columns and token rows in L2.
#pragma once

#include "config.h"

namespace qk {

constexpr int kGroupM = 8;

struct TileOrigin {
  int m, n;
};

/// Tile `index` of the ceil(n / kN) * ceil(m / kM).
template <class Tile>
QK_DEVICE TileOrigin tile_at(int index, int m, int n) {
  const int tiles_m = (m - 1) / Tile::kM + 1, tiles_n = (n - 1) / Tile::kN + 1;
  const int first = index / (kGroupM * tiles_n) * kGroupM;
  const int rows = tiles_m - first < kGroupM ? tiles_m - first : kGroupM;
  const int within = index - first * tiles_n;
  // The division runs in vector registers: without `uniform`, all that is computed from it would
  // stay there.
  return {uniform((first + within % rows) * Tile::kM), uniform(within / rows * Tile::kN)};
}

/// The grid is (ceil(n / kN), ceil(m / kM)); every tile is visited once, in the order of `tile_at`:
/// its group is known without a division, and so is its place where the group is full.
template <class Tile>
QK_DEVICE TileOrigin tile_origin(int m, int n) {
#if !QK_SPLITS_EDGES
  return tile_at<Tile>(block_y() * ((n - 1) / Tile::kN + 1) + block_x(), m, n);
#else
  const u32 tiles_m = static_cast<u32>(m - 1) / Tile::kM + 1,
            tiles_n = static_cast<u32>(n - 1) / Tile::kN + 1;
  const u32 row = block_y(), first = row / kGroupM * kGroupM, left = tiles_m - first;
  const u32 within = (row - first) * tiles_n + block_x();
  if (left >= kGroupM) {
    return {static_cast<int>((first + within % kGroupM) * Tile::kM),
            static_cast<int>(within / kGroupM * Tile::kN)};
  }
  return {uniform(static_cast<int>((first + within % left) * Tile::kM)),
          uniform(static_cast<int>(within / left * Tile::kN))};
#endif
}

}  // namespace qk
