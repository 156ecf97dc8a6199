// The host (g++, clang++): kernels as functions, a fiber for each thread; the same operations in
// portable code, rounded as the GPUs round.
#pragma once

#include "runtime.h"
#define QK_DEVICE inline
#define QK_UNROLL
#define QK_UNROLL_FOUR
#define QK_UNROLL_CHUNKS
#define QK_NO_UNROLL
#define QK_KERNEL(threads) static void
#define QK_KERNEL_SHARING(threads, blocks, waves) static void
#define QK_SHARED(name, bytes) qk::u8* const name = qk::host::shared_memory(bytes)
#define QK_HOST_ENTRY(threads, lds_bytes)                                                   \
  extern "C" int QK_JOIN(QK_SYMBOL, _launch)(const unsigned grid[3], void* const* args,     \
                                             int os_threads, char* error, int error_size) { \
    static_assert((threads) % qk::kWave == 0, "a block is a whole number of waves");        \
    const auto call = qk::host::unpacker(&QK_SYMBOL);                                       \
    const qk::host::Launch launch{call.run,                                                 \
                                  reinterpret_cast<void (*)()>(&QK_SYMBOL),                 \
                                  args,                                                     \
                                  grid,                                                     \
                                  (threads),                                                \
                                  (lds_bytes),                                              \
                                  QK_STRING(QK_SYMBOL)};                                    \
    return qk::host::run(launch, os_threads, error, error_size);                            \
  }

namespace qk {

/// Four registers, moved by one 16-byte load or store.
struct alignas(16) Vec16 {
  u32 v[4];
};

QK_DEVICE int thread_index() { return host::current()->thread; }
QK_DEVICE int wave_index() { return thread_index() / kWave; }
QK_DEVICE int block_x() { return host::current()->block[0]; }
QK_DEVICE int block_y() { return host::current()->block[1]; }
QK_DEVICE void block_sync() { host::barrier(); }
QK_DEVICE void let_next_start() {}
QK_DEVICE void wait_for_previous() {}

QK_DEVICE u32 float_bits(f32 value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
QK_DEVICE f32 bits_float(u32 bits) {
  f32 value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
QK_DEVICE T load(const void* address) {
  T value;
  __builtin_memcpy(&value, address, sizeof(T));
  return value;
}
template <class T>
QK_DEVICE void store(void* address, const T& value) {
  __builtin_memcpy(address, &value, sizeof(T));
}

/// Adds to a number in LDS, of which other threads add to the same. A block's fibers take turns.
QK_DEVICE void add_shared(void* address, u32 value) { store(address, load<u32>(address) + value); }
QK_DEVICE int uniform(int value) { return value; }
QK_DEVICE u32 optimization_barrier(u32 value) { return value; }
/// Products take another way for waves whose results all exist: inside.h.
#define QK_SPLITS_EDGES 1
QK_DEVICE void schedule_barrier() {}
template <class T>
QK_DEVICE void finish(T&) {}

/// A sum and the products of the four int8 codes in each word.
QK_DEVICE int dot4(u32 a, u32 b, int sum) {
  for (int shift = 0; shift < 32; shift += 8)
    sum += static_cast<i8>(a >> shift) * static_cast<i8>(b >> shift);
  return sum;
}

/// Largest value over the wave. One rendezvous instead of five shuffles: a fiber switch is what
/// costs here.
QK_DEVICE u32 wave_max(u32 value) {
  host::wave_collective(
      [](void* const* lanes) {
        u32 best = 0;
        for (int lane = 0; lane < kWave; ++lane) {
          const u32 other = *static_cast<u32*>(lanes[lane]);
          best = other > best ? other : best;
        }
        for (int lane = 0; lane < kWave; ++lane) *static_cast<u32*>(lanes[lane]) = best;
      },
      &value);
  return value;
}

/// The value of the lane whose number differs in the bits of `mask`.
QK_DEVICE u32 lane_xor(u32 value, int mask) {
  struct Lane {
    u32 value, found;
    int mask;
  } mine{value, 0, mask};
  host::wave_collective(
      [](void* const* lanes) {
        for (int lane = 0; lane < kWave; ++lane) {
          Lane* const to = static_cast<Lane*>(lanes[lane]);
          to->found = static_cast<const Lane*>(lanes[lane ^ to->mask])->value;
        }
      },
      &mine);
  return mine.found;
}

/// The value of the lane that differs in bit 4: what the other half of the wave has.
QK_DEVICE f32 swap_halves(f32 value) {
  host::wave_collective(
      [](void* const* lanes) {
        for (int lane = 0; lane < kWave / 2; ++lane) {
          f32* const low = static_cast<f32*>(lanes[lane]);
          f32* const high = static_cast<f32*>(lanes[lane + kWave / 2]);
          const f32 kept = *low;
          *low = *high;
          *high = kept;
        }
      },
      &value);
  return value;
}
/// Whether it holds in any lane of the wave.
QK_DEVICE bool any_lane(bool condition) { return wave_max(condition ? 1u : 0u) != 0; }

/// Selects by a mask: g++ turns `?:` around a float operation into a branch, and then cannot
/// vectorise the loop.
QK_DEVICE u32 select(bool condition, u32 yes, u32 no) {
  const u32 mask = 0u - static_cast<u32>(condition);
  return (yes & mask) | (no & ~mask);
}

/// Larger one of each half, as unsigned 16-bit numbers.
QK_DEVICE u32 max_halves(u32 a, u32 b) {
  const u32 high = (a >> 16) > (b >> 16) ? a : b, low = (a & 0xffffu) > (b & 0xffffu) ? a : b;
  return (high & 0xffff0000u) | (low & 0xffffu);
}

QK_DEVICE f32 half_to_float(u16 half) {
  const u32 magnitude = half & 0x7fffu, sign = static_cast<u32>(half & 0x8000u) << 16;
  const u32 normal = (magnitude << 13) + (112u << 23);
  const u32 subnormal = float_bits(static_cast<f32>(static_cast<int>(magnitude)) * 0x1p-24f);
  const u32 special = 0x7f800000u | magnitude << 13;  // Inf and NaN keep their payload
  return bits_float(
      select(magnitude < 0x7c00u, select(magnitude < 0x0400u, subnormal, normal), special) | sign);
}
QK_DEVICE u16 float_to_half(f32 value) {
  constexpr u32 kTiny = 0x38800000u, kHuge = 0x47800000u, kInf = 0x7f800000u;  // 2^-14, 2^16
  const u32 bits = float_bits(value), magnitude = bits & 0x7fffffffu;
  const u32 normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  // The ulp of 0.5 is 2^-24.
  const u32 tiny = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  const u32 special = select(magnitude > kInf, 0x7e00u, 0x7c00u);
  const u32 finite = select(magnitude < kTiny, tiny, normal);
  return static_cast<u16>(select(magnitude < kHuge, finite, special) | (bits >> 16 & 0x8000u));
}
QK_DEVICE f32 add_rounded(f32 a, f32 b) { return a + b; }
QK_DEVICE f32 multiply_add(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }  // one rounding
QK_DEVICE f32 sqrt_rounded(f32 value) { return __builtin_sqrtf(value); }
// Within a few spacings, what the hardware's own instructions give; exp2 may make zero of a
// subnormal.
QK_DEVICE f32 approx_exp2(f32 value) { return __builtin_exp2f(value); }
QK_DEVICE f32 lesser(f32 value, f32 limit) { return value < limit ? value : limit; }
QK_DEVICE f32 round_up(f32 value) { return __builtin_ceilf(value); }
QK_DEVICE f32 approx_reciprocal(f32 value) { return 1.0f / value; }
/// Between -limit and limit; a NaN becomes any of these numbers.
QK_DEVICE f32 clamp(f32 value, f32 limit) {
  const f32 above = value > -limit ? value : -limit;
  return above < limit ? above : limit;
}
QK_DEVICE f32 maximum(f32 a, f32 b) { return a > b ? a : b; }
/// (code - 8) * s + 128 of four codes, 0 to 15, in the bytes of a word, |s| <= 15: none leaves its
/// byte.
QK_DEVICE u32 scale_codes(u32 codes, int s) {
  const u32 factor = static_cast<u32>(s);
  return codes * factor + (0x80808080u - 8 * 0x01010101u * factor);
}

/// Bytes 0 and 1, or 2 and 3, in the low halves of two f16 from 1024 to 1279.
QK_DEVICE u32 spread_low_bytes(u32 word) {
  return 0x64006400u | (word & 0xffu) | (word & 0xff00u) << 8;
}
QK_DEVICE u32 spread_high_bytes(u32 word) { return spread_low_bytes(word >> 16); }
/// Differences of the two f16 in a word.
QK_DEVICE u32 subtract_halves(u32 a, u32 b) {
  const f32 low = half_to_float(static_cast<u16>(a)) - half_to_float(static_cast<u16>(b));
  const f32 high =
      half_to_float(static_cast<u16>(a >> 16)) - half_to_float(static_cast<u16>(b >> 16));
  return float_to_half(low) | static_cast<u32>(float_to_half(high)) << 16;
}

/// Sums of the two f16 in a word.
QK_DEVICE u32 add_halves(u32 a, u32 b) {
  const f32 low = half_to_float(static_cast<u16>(a)) + half_to_float(static_cast<u16>(b));
  const f32 high =
      half_to_float(static_cast<u16>(a >> 16)) + half_to_float(static_cast<u16>(b >> 16));
  return float_to_half(low) | static_cast<u32>(float_to_half(high)) << 16;
}

/// Two f16 in a word, each times 2^8.
QK_DEVICE u32 scale_half_pair(u32 pair) {
  const u32 low = float_to_half(half_to_float(static_cast<u16>(pair)) * 0x1p8f);
  const u32 high = float_to_half(half_to_float(static_cast<u16>(pair >> 16)) * 0x1p8f);
  return low | high << 16;
}

}  // namespace qk
