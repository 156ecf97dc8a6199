// The only file that knows vendors: types, thread indices, LDS, barriers, wave operations, 16-byte
// accesses and 16-bit float conversions for AMD (clang, hipRTC), NVIDIA (NVRTC) and the host (g++,
// clang++). No standard header is included, so that the run-time compilers need nothing but this
// folder.
#pragma once

namespace qk {

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using f32 = float;

// Every target runs wave32: RDNA in its matrix mode, NVIDIA always, the host by choice.
constexpr int kWave = 32;

}  // namespace qk

#define QK_STRING_(text) #text
#define QK_STRING(text) QK_STRING_(text)
#define QK_JOIN_(a, b) a##b
#define QK_JOIN(a, b) QK_JOIN_(a, b)

// QK_KERNEL_SHARING: `blocks` of the kernel shall fit a multiprocessor at once, where the compiler
// has to be told.

// A kernel's blocks may start before the kernel ahead of it in the stream has ended, on NVIDIA from
// compute capability 9.0 on (programmatic dependent launch): the launch and what a block does
// before it reads are then over when the last blocks of that kernel end.
//
//   wait_for_previous()  returns when all kernels ahead have ended and their writes are seen. Every
//                        thread calls it before it touches device memory: what it reads may not be
//                        there yet, and what it writes may still be read. Weights are no exception,
//                        a kernel may have written them just now; prefetches are.
//   let_next_start()     the next kernel may start once all blocks have said so, or ended. Its
//                        blocks take what room there is and wait, so it is said at once.
//   start()              both.
//
// Every kernel waits (a test compiles them and looks), so every launch is made this way. Waiting is
// what keeps order beyond neighbours, too: a kernel that ends has waited for those before it.

#if defined(QK_HOST) && QK_HOST
// ---------------------------------------------------------------------------------------- host
#  include "runtime.h"
#  define QK_DEVICE inline
#  define QK_UNROLL
#  define QK_UNROLL_FOUR
#  define QK_UNROLL_CHUNKS
#  define QK_NO_UNROLL
#  define QK_KERNEL(threads) static void
#  define QK_KERNEL_SHARING(threads, blocks) static void
#  define QK_SHARED(name, bytes) qk::u8* const name = qk::host::shared_memory(bytes)
#  define QK_HOST_ENTRY(threads, lds_bytes)                                                   \
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
QK_DEVICE u32 opaque(u32 value) { return value; }
QK_DEVICE void schedule_barrier() {}
template <class T>
QK_DEVICE void finish(T&) {}

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

/// Sums and products of the two f16 in a word.
QK_DEVICE u32 add_halves(u32 a, u32 b) {
  const f32 low = half_to_float(static_cast<u16>(a)) + half_to_float(static_cast<u16>(b));
  const f32 high =
      half_to_float(static_cast<u16>(a >> 16)) + half_to_float(static_cast<u16>(b >> 16));
  return float_to_half(low) | static_cast<u32>(float_to_half(high)) << 16;
}
QK_DEVICE u32 multiply_halves(u32 a, u32 b) {
  const f32 low = half_to_float(static_cast<u16>(a)) * half_to_float(static_cast<u16>(b));
  const f32 high =
      half_to_float(static_cast<u16>(a >> 16)) * half_to_float(static_cast<u16>(b >> 16));
  return float_to_half(low) | static_cast<u32>(float_to_half(high)) << 16;
}

/// Two f16 in a word, each times 2^8.
QK_DEVICE u32 scale_half_pair(u32 pair) {
  const u32 low = float_to_half(half_to_float(static_cast<u16>(pair)) * 0x1p8f);
  const u32 high = float_to_half(half_to_float(static_cast<u16>(pair >> 16)) * 0x1p8f);
  return low | high << 16;
}

}  // namespace qk

#else
// ------------------------------------------------------------------------------------- devices
#  define QK_UNROLL _Pragma("unroll")
#  define QK_UNROLL_FOUR _Pragma("unroll 4")
#  define QK_UNROLL_CHUNKS _Pragma("unroll kUnroll")
#  define QK_NO_UNROLL _Pragma("unroll 1")
#  define QK_HOST_ENTRY(threads, lds_bytes)
#  if defined(__AMDGCN__) || defined(__HIP__) || defined(__HIPCC_RTC__)
#    define QK_AMD 1
#    if defined(__GFX12__) && __clang_major__ < 22
#      error "gfx12 takes clang 22 (ROCm 7.2): earlier ones leave out waits for scalar registers"
#    endif
#    define QK_DEVICE __attribute__((device, always_inline)) inline
#    define QK_KERNEL(threads) \
      extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void
#    define QK_KERNEL_SHARING(threads, blocks) QK_KERNEL(threads)
#    define QK_SHARED(name, bytes) __attribute__((shared, aligned(16))) static qk::u8 name[bytes]
#  elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#    define QK_NVIDIA 1
#    define QK_DEVICE __device__ __forceinline__
#    define QK_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#    define QK_KERNEL_SHARING(threads, blocks) \
      extern "C" __global__ void __launch_bounds__(threads, blocks)
#    define QK_SHARED(name, bytes) __shared__ __align__(16) qk::u8 name[bytes]
#  else
#    error "quantkit kernels compile for AMD, NVIDIA, or the host with -DQK_HOST=1"
#  endif

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

#  if defined(QK_AMD)

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
QK_DEVICE u32 opaque(u32 value) {
  asm("" : "+v"(value));
  return value;
}
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
QK_DEVICE f32 add_rounded(f32 a, f32 b) { return a + b; }  // -ffp-contract=off keeps it apart
QK_DEVICE f32 multiply_add(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }  // one rounding
QK_DEVICE f32 sqrt_rounded(f32 value) { return __builtin_sqrtf(value); }
QK_DEVICE f32 approx_exp2(f32 value) { return __builtin_amdgcn_exp2f(value); }       // v_exp_f32
QK_DEVICE f32 approx_reciprocal(f32 value) { return __builtin_amdgcn_rcpf(value); }  // v_rcp_f32
QK_DEVICE f32 clamp(f32 value, f32 limit) { return __builtin_amdgcn_fmed3f(value, -limit, limit); }
QK_DEVICE f32 maximum(f32 a, f32 b) { return __builtin_fmaxf(a, b); }
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

/// Sums and products of the two f16 in a word: v_pk_add_f16, v_pk_mul_f16.
QK_DEVICE u32 add_halves(u32 a, u32 b) {
  using Half2 = _Float16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, __builtin_bit_cast(Half2, a) + __builtin_bit_cast(Half2, b));
}
QK_DEVICE u32 multiply_halves(u32 a, u32 b) {
  using Half2 = _Float16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, __builtin_bit_cast(Half2, a) * __builtin_bit_cast(Half2, b));
}

/// Two f16 in a word, each times 2^8: v_pk_mul_f16, which keeps subnormals.
QK_DEVICE u32 scale_half_pair(u32 pair) {
  using Half2 = _Float16 __attribute__((ext_vector_type(2)));
  const Half2 factor = {static_cast<_Float16>(256.0f), static_cast<_Float16>(256.0f)};
  return __builtin_bit_cast(u32, __builtin_bit_cast(Half2, pair) * factor);
}

#    if defined(__GFX12__)
/// e4m3fn codes of four values, clamped and rounded to nearest even, the first one lowest; NaN
/// becomes NaN. v_maximumminimum_f32 passes NaN on, which v_med3_f32 does not.
#      define QK_ENCODES_FOUR 1
QK_DEVICE u32 encode_four_e4m3fn(f32 a, f32 b, f32 c, f32 d) {
  const auto within = [](f32 value) {
    return __builtin_elementwise_minimum(__builtin_elementwise_maximum(value, -448.0f), 448.0f);
  };
  const int low = __builtin_amdgcn_cvt_pk_fp8_f32(within(a), within(b), 0, false);
  return static_cast<u32>(__builtin_amdgcn_cvt_pk_fp8_f32(within(c), within(d), low, true));
}
#    endif

#  else  // NVIDIA

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
#    if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#    endif
}
QK_DEVICE void wait_for_previous() {
#    if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#    endif
}
/// Adds to a number in shared memory, of which other threads add to the same.
QK_DEVICE void add_shared(void* address, u32 value) {
  atomicAdd(static_cast<u32*>(address), value);
}
QK_DEVICE u32 float_bits(f32 value) { return __float_as_uint(value); }
QK_DEVICE f32 bits_float(u32 bits) { return __uint_as_float(bits); }
QK_DEVICE int uniform(int value) { return value; }
QK_DEVICE u32 opaque(u32 value) { return value; }
QK_DEVICE void schedule_barrier() {}
template <class T>
QK_DEVICE void finish(T&) {}
QK_DEVICE u32 lane_xor(u32 value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
QK_DEVICE bool any_lane(bool condition) { return __any_sync(0xffffffffu, condition) != 0; }
/// Larger one of each half, as unsigned 16-bit numbers.
QK_DEVICE u32 max_halves(u32 a, u32 b) {
#    if __CUDA_ARCH__ >= 900
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#    else
  const u32 high = max(a >> 16, b >> 16), low = max(a & 0xffffu, b & 0xffffu);
  return high << 16 | low;
#    endif
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
/// Sums and products of the two f16 in a word.
QK_DEVICE u32 add_halves(u32 a, u32 b) {
  u32 pair;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
QK_DEVICE u32 multiply_halves(u32 a, u32 b) {
  u32 pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
/// Two values as f16, or as bf16, the first one lowest.
#    define QK_ROUNDS_PAIRS 1
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
/// The two e4m3fn codes in the low half of a word as f16, exactly; NaN stays NaN.
#    define QK_WIDENS_PAIRS 1
QK_DEVICE u32 halves_of_e4m3fn(u32 codes) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(codes)));
  return pair;
}

/// Two values as FP8 codes, clamped and rounded to nearest even, the first one lowest; NaN becomes
/// NaN.
#    define QK_ENCODES_PAIRS 1
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

#  endif

/// Largest value over the wave, in every lane.
QK_DEVICE u32 wave_max(u32 value) {
  QK_UNROLL for (int mask = kWave / 2; mask > 0; mask /= 2) {
    const u32 other = lane_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

}  // namespace qk
#endif

namespace qk {

QK_DEVICE void start() {
  let_next_start();
  wait_for_previous();
}

QK_DEVICE f32 bfloat_to_float(u16 bfloat) { return bits_float(static_cast<u32>(bfloat) << 16); }
QK_DEVICE u16 float_to_bfloat(f32 value) {
  const u32 bits = float_bits(value);
  const u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  // Quiet, so that dropping the payload cannot make it an infinity.
  const u32 nan = bits >> 16 | 0x40u;
  return static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

#ifndef QK_ROUNDS_PAIRS
/// Two values as f16, or as bf16, the first one lowest.
QK_DEVICE u32 halves_of(f32 low, f32 high) {
  return float_to_half(low) | static_cast<u32>(float_to_half(high)) << 16;
}
QK_DEVICE u32 bfloats_of(f32 low, f32 high) {
  return float_to_bfloat(low) | static_cast<u32>(float_to_bfloat(high)) << 16;
}
#endif

/// Sums and products of the two bf16 in a word.
QK_DEVICE u32 add_bfloats(u32 a, u32 b) {
#if defined(QK_NVIDIA) && __CUDA_ARCH__ >= 900
  u32 pair;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#else
  return bfloats_of(bits_float(a << 16) + bits_float(b << 16),
                    bits_float(a & 0xffff0000u) + bits_float(b & 0xffff0000u));
#endif
}
QK_DEVICE u32 multiply_bfloats(u32 a, u32 b) {
#if defined(QK_NVIDIA) && __CUDA_ARCH__ >= 900
  u32 pair;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#else
  return bfloats_of(bits_float(a << 16) * bits_float(b << 16),
                    bits_float(a & 0xffff0000u) * bits_float(b & 0xffff0000u));
#endif
}

}  // namespace qk
