// What attention reads of a head.
#pragma once

#include "platform.h"

namespace qk {

/// One head: where its codes lie.
struct Head {
  const u8* q;         // [queries, kD]
  const u8* k;         // [keys, kD]
  const u8* v;         // [kD, pitch] values, of which `keys` columns count and the others are zero
  const f32* q_scale;  // [queries], of int8 codes
  const f32* k_scale;  // [ceil(keys / 16)], of int8 codes
  int queries, keys, pitch;
};

}  // namespace qk
