// What GPUs of both vendors share: how loops unroll, accesses of memory, and the maximum of a wave.
// Included once QK_DEVICE is there.
#pragma once

#define QK_UNROLL _Pragma("unroll")
#define QK_UNROLL_FOUR _Pragma("unroll 4")
#define QK_UNROLL_CHUNKS _Pragma("unroll kUnroll")
#define QK_NO_UNROLL _Pragma("unroll 1")
#define QK_HOST_ENTRY(threads, lds_bytes)

namespace qk {

QK_DEVICE u32 select(bool condition, u32 yes, u32 no) { return condition ? yes : no; }

template <class T>
QK_DEVICE T load(const void* address) {
  return *static_cast<const T*>(address);
}
template <class T>
QK_DEVICE void store(void* address, const T& value) {
  *static_cast<T*>(address) = value;
}

/// The value of the lane whose number differs in the bits of `mask`.
QK_DEVICE u32 lane_xor(u32 value, int mask);

/// Largest value over the wave, in every lane.
QK_DEVICE u32 wave_max(u32 value) {
  QK_UNROLL for (int mask = kWave / 2; mask > 0; mask /= 2) {
    const u32 other = lane_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

}  // namespace qk
