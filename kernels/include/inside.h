// Waves whose tokens and outputs all exist, as most are: no lane is ever off, and what they read
// and write lies at 32-bit offsets from addresses that all lanes share. Masks and 64-bit addresses
// would be half of what the end of a product issues.
#pragma once

#include "config.h"

namespace qk {

/// Whether the kRows x kColumns values from (m0, n0) on exist, in rows of n values that begin on
/// multiples of kAligned values and have offsets of 32 bits. The same in all lanes.
template <int kRows, int kColumns, int kAligned>
QK_DEVICE bool is_inside(int m, int n, int m0, int n0) {
  constexpr int kLongest = 1 << 22;
  static_assert(kRows <= 1 << 7, "4 bytes of so many rows shall have offsets of 32 bits");
  return m0 + kRows <= m && n0 + kColumns <= n && n % kAligned == 0 && n < kLongest;
}

/// The value `bytes` after an address that all lanes share.
template <class T>
QK_DEVICE T load_beyond(const void* base, u32 bytes) {
  return load<T>(static_cast<const u8*>(base) + bytes);
}

/// kCount numbers from there on.
template <int kCount>
QK_DEVICE void load_beyond(f32 (&numbers)[kCount], const f32* base, u32 bytes) {
  QK_UNROLL for (int e = 0; e < kCount; ++e)
    numbers[e] = load<f32>(static_cast<const u8*>(static_cast<const void*>(base + e)) + bytes);
}

}  // namespace qk
