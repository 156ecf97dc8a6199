// NVIDIA (NVRTC): attributes of kernels, and operations of threads, waves and numbers.
#pragma once

#define QK_DEVICE __device__ __forceinline__
#define QK_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define QK_KERNEL_SHARING(threads, blocks, waves) \
  extern "C" __global__ void __launch_bounds__(threads, blocks)
#define QK_SHARED(name, bytes) __shared__ __align__(16) qk::u8 name[bytes]

#include "platform_device.h"

namespace qk {

/// Four registers, moved by one 16-byte load or store.
struct alignas(16) Vec16 {
  u32 v[4];
};

QK_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
QK_DEVICE int wave_index() { return __shfl_sync(0xffffffffu, thread_index() / kWave, 0); }
QK_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
QK_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
QK_DEVICE void block_sync() { __syncthreads(); }
QK_DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
QK_DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Adds to a number in shared memory, of which other threads add to the same.
QK_DEVICE void add_shared(void* address, u32 value) {
  atomicAdd(static_cast<u32*>(address), value);
}
QK_DEVICE u32 float_bits(f32 value) { return __float_as_uint(value); }
QK_DEVICE f32 bits_float(u32 bits) { return __uint_as_float(bits); }
QK_DEVICE int uniform(int value) { return value; }
QK_DEVICE u32 optimization_barrier(u32 value) { return value; }
/// Products take another way for waves whose results all exist: inside.h. Not timed here.
#define QK_SPLITS_EDGES 0
QK_DEVICE void schedule_barrier() {}
template <class T>
QK_DEVICE void finish(T&) {}
QK_DEVICE u32 lane_xor(u32 value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
QK_DEVICE bool any_lane(bool condition) { return __any_sync(0xffffffffu, condition) != 0; }
/// Larger one of each half, as unsigned 16-bit numbers.
QK_DEVICE u32 max_halves(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  const u32 high = max(a >> 16, b >> 16), low = max(a & 0xffffu, b & 0xffffu);
  return high << 16 | low;
#endif
}
QK_DEVICE f32 half_to_float(u16 half) {
  f32 value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
QK_DEVICE u16 float_to_half(f32 value) {
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
QK_DEVICE f32 add_rounded(f32 a, f32 b) { return __fadd_rn(a, b); }  // NVRTC would fuse a plain sum
QK_DEVICE f32 multiply_add(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }
QK_DEVICE f32 sqrt_rounded(f32 value) { return __fsqrt_rn(value); }
QK_DEVICE f32 approx_exp2(f32 value) {
  f32 power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
  return power;
}
QK_DEVICE f32 approx_reciprocal(f32 value) {
  f32 inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(value));
  return inverse;
}

QK_DEVICE f32 clamp(f32 value, f32 limit) { return fminf(fmaxf(value, -limit), limit); }
QK_DEVICE f32 maximum(f32 a, f32 b) { return fmaxf(a, b); }
QK_DEVICE f32 lesser(f32 value, f32 limit) { return value < limit ? value : limit; }
QK_DEVICE f32 round_up(f32 value) { return ceilf(value); }
QK_DEVICE u32 scale_codes(u32 codes, int s) {
  const u32 factor = static_cast<u32>(s);
  return codes * factor + (0x80808080u - 8 * 0x01010101u * factor);
}

/// Bytes 0 and 1, or 2 and 3, in the low halves of two f16 from 1024 to 1279.
QK_DEVICE u32 spread_low_bytes(u32 word) { return __byte_perm(word, 0x64646464u, 0x4140); }
QK_DEVICE u32 spread_high_bytes(u32 word) { return __byte_perm(word, 0x64646464u, 0x4342); }
/// Differences of the two f16 in a word.
QK_DEVICE u32 subtract_halves(u32 a, u32 b) {
  u32 pair;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
/// Sums of the two f16 in a word.
QK_DEVICE u32 add_halves(u32 a, u32 b) {
  u32 pair;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
/// Two values as f16, or as bf16, the first one lowest.
#define QK_ROUNDS_PAIRS 1
QK_DEVICE u32 halves_of(f32 low, f32 high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
QK_DEVICE u32 bfloats_of(f32 low, f32 high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#if __CUDA_ARCH__ >= 890
/// The two e4m3fn codes in the low half of a word as f16, exactly; NaN stays NaN.
#  define QK_WIDENS_PAIRS 1
QK_DEVICE u32 halves_of_e4m3fn(u32 codes) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(codes)));
  return pair;
}

/// Two values as FP8 codes, clamped and rounded to nearest even, the first one lowest; NaN becomes
/// NaN.
#  define QK_ENCODES_PAIRS 1
QK_DEVICE u32 encode_pair_e4m3fn(f32 low, f32 high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
QK_DEVICE u32 encode_pair_e5m2(f32 low, f32 high) {
  u16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
#else
/// Two f16 in a word, each times 2^8.
QK_DEVICE u32 scale_half_pair(u32 pair) {
  u32 scaled;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(pair), "r"(0x5c005c00u));
  return scaled;
}
#endif
#if __CUDA_ARCH__ >= 900
#  define QK_ADDS_BFLOATS 1
/// Sums of the two bf16 in a word.
QK_DEVICE u32 add_bfloats(u32 a, u32 b) {
  u32 pair;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
#endif

}  // namespace qk
