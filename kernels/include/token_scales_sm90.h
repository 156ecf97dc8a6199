// The scales of a tile's tokens on Hopper: threads of a warpgroup load them before the K loop,
// which hides the wait, and hand them on behind it.
#pragma once

#include "tile_sm90.h"

namespace qk {

template <class Tile, bool kPerToken>
struct TokenScales {
  static constexpr int kCount = (Tile::kM + 127) / 128;

  f32 of[kCount];

  /// m: the tile's first token, of `tokens`; thread: of the warpgroup.
  QK_DEVICE void load(const f32* scale, int m, int tokens, int thread) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      const int token = m + 128 * i + thread;
      of[i] = kPerToken ? (token < tokens ? scale[token] : 0.0f) : scale[0];
    }
  }

  /// Writes them to kM floats of shared memory.
  QK_DEVICE void share(f32* scales, int thread) const {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      if (128 * i + thread < Tile::kM) scales[128 * i + thread] = of[i];
    }
  }
};

}  // namespace qk
