// AMD (clang, hipRTC): attributes of kernels, and operations of threads, waves and numbers.
#pragma once

#if defined(__GFX12__) && __clang_major__ < 22
#  error "gfx12 takes clang 22 (ROCm 7.2): earlier ones leave out waits for scalar registers"
#endif
// A builtin of waves of 32 lanes alone: lane_xor and any_lane would be wrong in others.
static_assert(__has_builtin(__builtin_amdgcn_ballot_w32), "kernels take waves of 32 lanes: no GCN");
#define QK_DEVICE __attribute__((device, always_inline)) inline
#define QK_KERNEL(threads) \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void
#if defined(__GFX11__)
#  define QK_KERNEL_SHARING(threads, blocks, waves)                                  \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads), \
                              amdgpu_waves_per_eu((threads) / 64, waves))) void
#else
#  define QK_KERNEL_SHARING(threads, blocks, waves) QK_KERNEL(threads)
#endif
#define QK_SHARED(name, bytes) __attribute__((shared, aligned(16))) static qk::u8 name[bytes]

#include "platform_device.h"

namespace qk {

/// The four registers of a Vec16 as a vector: as an array, the optimiser cuts some of the loads
/// into words and pairs those up badly.
using Words4 = u32 __attribute__((ext_vector_type(4)));
struct alignas(16) Vec16 {
  Words4 v;
};
template <>
QK_DEVICE Vec16 load<Vec16>(const void* address) {
  return {*static_cast<const Words4*>(address)};
}
template <>
QK_DEVICE void store<Vec16>(void* address, const Vec16& value) {
  *static_cast<Words4*>(address) = value.v;
}

QK_DEVICE int thread_index() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
/// A value that is the same in all lanes, in a scalar register.
QK_DEVICE int uniform(int value) { return __builtin_amdgcn_readfirstlane(value); }
QK_DEVICE int wave_index() { return uniform(thread_index() / kWave); }
QK_DEVICE int block_x() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
QK_DEVICE int block_y() { return static_cast<int>(__builtin_amdgcn_workgroup_id_y()); }
QK_DEVICE void block_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
QK_DEVICE void let_next_start() {}
QK_DEVICE void wait_for_previous() {}
/// Adds to a number in LDS, of which other threads add to the same: ds_add_u32.
QK_DEVICE void add_shared(void* address, u32 value) {
  __atomic_fetch_add(static_cast<u32*>(address), value, __ATOMIC_RELAXED);
}
QK_DEVICE u32 float_bits(f32 value) { return __builtin_bit_cast(u32, value); }
QK_DEVICE f32 bits_float(u32 bits) { return __builtin_bit_cast(f32, bits); }
QK_DEVICE u32 lane_xor(u32 value, int mask) {
  const int lane = thread_index() % kWave;
  return static_cast<u32>(__builtin_amdgcn_ds_bpermute((lane ^ mask) * 4, static_cast<int>(value)));
}
/// Larger one of each half, as unsigned 16-bit numbers: v_pk_max_u16.
QK_DEVICE u32 max_halves(u32 a, u32 b) {
  using Halves = u16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(
      u32, __builtin_elementwise_max(__builtin_bit_cast(Halves, a), __builtin_bit_cast(Halves, b)));
}
/// The value of the lane that differs in bit 4: what the other half of the wave has. Not lane_xor,
/// which goes through LDS.
QK_DEVICE f32 swap_halves(f32 value) {
  const u32 bits = float_bits(value);
  return bits_float(
      __builtin_amdgcn_permlanex16(bits, bits, 0x76543210u, 0xfedcba98u, false, false));
}
/// Whether it holds in any lane of the wave.
QK_DEVICE bool any_lane(bool condition) { return __builtin_amdgcn_ballot_w32(condition) != 0; }
/// The same number, but the compiler cannot know: a 32-bit offset that it widens before a loop
/// costs an addition per load.
QK_DEVICE u32 optimization_barrier(u32 value) {
  asm("" : "+v"(value));
  return value;
}
/// Products take another way for waves whose results all exist: inside.h.
#define QK_SPLITS_EDGES 1
/// No instruction moves across.
QK_DEVICE void schedule_barrier() { __builtin_amdgcn_sched_barrier(0); }
/// The value is computed here, with all lanes on. Else clang before 22 moves matrix instructions
/// into the branches that use their result (LLVM pull requests 165602, 178314), and these want
/// every lane of the wave.
template <class T>
QK_DEVICE void finish(T& value) {
  asm volatile("" : "+v"(value));
}
QK_DEVICE f32 half_to_float(u16 half) {
  return static_cast<f32>(__builtin_bit_cast(_Float16, half));
}
QK_DEVICE u16 float_to_half(f32 value) {
  return __builtin_bit_cast(u16, static_cast<_Float16>(value));
}
#define QK_PACKS_PAIRS 1
QK_DEVICE u32 pack_halves(f32 low, f32 high) {
  using Half2 = _Float16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, Half2{static_cast<_Float16>(low), static_cast<_Float16>(high)});
}
/// The high halves of two words: v_perm_b32.
QK_DEVICE u32 high_halves(u32 low, u32 high) {
  return __builtin_amdgcn_perm(high, low, 0x07060302u);
}
/// The low bytes of four words, the first one lowest.
QK_DEVICE u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
  const u32 low = __builtin_amdgcn_perm(b, a, 0x0c0c0400u);
  return __builtin_amdgcn_perm(d, c, 0x04000c0cu) | low;
}
/// Rounded in the high half of a word; of NaN something else.
QK_DEVICE u32 rounded_bfloat(f32 value) {
  const u32 bits = float_bits(value);
  return bits + (bits >> 16 & 1u) + 0x7fffu;
}
QK_DEVICE u32 pack_numbers_as_bfloats(f32 low, f32 high) {
  return high_halves(rounded_bfloat(low), rounded_bfloat(high));
}
QK_DEVICE u32 pack_bfloats(f32 low, f32 high) {
  const auto round = [](f32 value) {
    // Quiet, so that dropping the payload cannot make it an infinity.
    const u32 rounded = rounded_bfloat(value), nan = float_bits(value) | 0x400000u;
    return select(value != value, nan, rounded);
  };
  return high_halves(round(low), round(high));
}
#if defined(__GFX12__)
#  define QK_KEEPS_NAN 1
/// The value between -limit and limit; NaN stays NaN: v_maximumminimum_f32.
QK_DEVICE f32 clamp_number(f32 value, f32 limit) {
  return __builtin_elementwise_minimum(__builtin_elementwise_maximum(value, -limit), limit);
}
/// The larger one of two magnitudes, the first without its sign; NaN if one is: v_maximum3_f32.
QK_DEVICE f32 larger_magnitude(f32 so_far, f32 value) {
  return __builtin_elementwise_maximum(so_far, __builtin_fabsf(value));
}
#endif
QK_DEVICE f32 add_rounded(f32 a, f32 b) { return a + b; }  // -ffp-contract=off keeps it apart
QK_DEVICE f32 multiply_add(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }  // one rounding
QK_DEVICE f32 sqrt_rounded(f32 value) { return __builtin_sqrtf(value); }
QK_DEVICE f32 approx_exp2(f32 value) { return __builtin_amdgcn_exp2f(value); }       // v_exp_f32
QK_DEVICE f32 approx_reciprocal(f32 value) { return __builtin_amdgcn_rcpf(value); }  // v_rcp_f32
QK_DEVICE f32 clamp(f32 value, f32 limit) { return __builtin_amdgcn_fmed3f(value, -limit, limit); }
QK_DEVICE f32 maximum(f32 a, f32 b) { return __builtin_fmaxf(a, b); }
/// The limit where the value is NaN.
QK_DEVICE f32 lesser(f32 value, f32 limit) { return __builtin_fminf(value, limit); }
QK_DEVICE f32 round_up(f32 value) { return __builtin_ceilf(value); }
/// (code - 8) * s + 128 of four codes, 0 to 15, in the bytes of a word, |s| <= 15: none leaves its
/// byte. v_pk_mad_u16, since v_mul_lo_u32 takes four times as long.
QK_DEVICE u32 scale_codes(u32 codes, int s) {
  using Halves = u16 __attribute__((ext_vector_type(2)));
  const u16 half = static_cast<u16>(s);
  const Halves factor = {half, half};
  const Halves offset = factor * static_cast<u16>(-8 * 0x0101) + static_cast<u16>(0x8080);
  return __builtin_bit_cast(u32, __builtin_bit_cast(Halves, codes) * factor + offset);
}

#if defined(__GFX10__)
/// A sum and the products of the four int8 codes in each word: v_dot4c_i32_i8.
QK_DEVICE int dot4(u32 a, u32 b, int sum) {
  return __builtin_amdgcn_sdot4(static_cast<int>(a), static_cast<int>(b), sum, false);
}
#endif

/// Bytes 0 and 1, or 2 and 3, in the low halves of two f16 from 1024 to 1279: v_perm_b32.
QK_DEVICE u32 spread_low_bytes(u32 word) {
  return __builtin_amdgcn_perm(0x64646464u, word, 0x04010400u);
}
QK_DEVICE u32 spread_high_bytes(u32 word) {
  return __builtin_amdgcn_perm(0x64646464u, word, 0x04030402u);
}
/// Differences of the two f16 in a word: v_pk_add_f16.
QK_DEVICE u32 subtract_halves(u32 a, u32 b) {
  using Half2 = _Float16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, __builtin_bit_cast(Half2, a) - __builtin_bit_cast(Half2, b));
}

/// Sums of the two f16 in a word: v_pk_add_f16.
QK_DEVICE u32 add_halves(u32 a, u32 b) {
  using Half2 = _Float16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, __builtin_bit_cast(Half2, a) + __builtin_bit_cast(Half2, b));
}

/// Two f16 in a word, each times 2^8: v_pk_mul_f16, which keeps subnormals.
QK_DEVICE u32 scale_half_pair(u32 pair) {
  using Half2 = _Float16 __attribute__((ext_vector_type(2)));
  const Half2 factor = {static_cast<_Float16>(256.0f), static_cast<_Float16>(256.0f)};
  return __builtin_bit_cast(u32, __builtin_bit_cast(Half2, pair) * factor);
}

#if defined(__GFX12__)
/// e4m3fn codes of four values, clamped and rounded to nearest even, the first one lowest; NaN
/// becomes NaN. v_maximumminimum_f32 passes NaN on, which v_med3_f32 does not.
#  define QK_ENCODES_FOUR 1
QK_DEVICE u32 encode_four_e4m3fn(f32 a, f32 b, f32 c, f32 d) {
  const auto within = [](f32 value) {
    return __builtin_elementwise_minimum(__builtin_elementwise_maximum(value, -448.0f), 448.0f);
  };
  const int low = __builtin_amdgcn_cvt_pk_fp8_f32(within(a), within(b), 0, false);
  return static_cast<u32>(__builtin_amdgcn_cvt_pk_fp8_f32(within(c), within(d), low, true));
}
#endif

}  // namespace qk
