// 2:4 codes as the dense rows that targets without a sparse instruction multiply.
#pragma once

#include "config.h"

namespace qk {

/// A group of four from its two kept codes (low byte first) and its nibble of positions.
QK_DEVICE u32 expand_group(u32 kept, u32 nibble) {
  return (kept & 0xffu) << (nibble << 3 & 24u) | (kept >> 8 & 0xffu) << (nibble << 1 & 24u);
}

/// Sixteen codes of a row in LDS from eight kept ones and their nibbles.
QK_DEVICE Vec16 expand_run(const u8* kept_codes, const u8* positions) {
  struct alignas(8) Kept {
    u32 v[2];
  };
  const Kept kept = load<Kept>(kept_codes);
  const u32 nibbles = load<u16>(positions);
  Vec16 codes;
  QK_UNROLL for (int group = 0; group < 4; ++group) {
    codes.v[group] = expand_group(kept.v[group / 2] >> (16 * (group % 2)), nibbles >> (4 * group));
  }
  return codes;
}

}  // namespace qk
