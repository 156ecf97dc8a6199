// What kernels are written in: types, thread indices, LDS, barriers, wave operations, 16-byte
// accesses and 16-bit float conversions, from one header for AMD, NVIDIA and the host each: they
// alone know vendors, with mma_*.h and softmax.h. No standard header is included, so that the
// run-time compilers need nothing but this folder.
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

// QK_KERNEL_SHARING: `blocks` of the kernel shall fit a multiprocessor at once, and `waves` a SIMD
// at most, where the compiler has to be told.

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
#  include "platform_host.h"
#elif defined(__AMDGCN__) || defined(__HIP__) || defined(__HIPCC_RTC__)
#  define QK_AMD 1
#  include "platform_amd.h"
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#  define QK_NVIDIA 1
#  include "platform_nvidia.h"
#else
#  error "quantkit kernels compile for AMD, NVIDIA, or the host with -DQK_HOST=1"
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

#ifndef QK_PACKS_PAIRS
/// Two values as f16, or as bf16, as the functions of one round them, the first one lowest.
QK_DEVICE u32 pack_halves(f32 low, f32 high) {
  return float_to_half(low) | static_cast<u32>(float_to_half(high)) << 16;
}
QK_DEVICE u32 pack_bfloats(f32 low, f32 high) {
  return float_to_bfloat(low) | static_cast<u32>(float_to_bfloat(high)) << 16;
}
/// The same of what is not NaN.
QK_DEVICE u32 pack_numbers_as_bfloats(f32 low, f32 high) {
  const auto round = [](f32 value) {
    const u32 bits = float_bits(value);
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  return round(low) | round(high) << 16;
}
/// The low bytes of four words, the first one lowest.
QK_DEVICE u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
  return (a & 0xffu) | (b & 0xffu) << 8 | (c & 0xffu) << 16 | d << 24;
}
#endif

#ifndef QK_KEEPS_NAN
/// The value between -limit and limit; NaN stays NaN.
QK_DEVICE f32 clamp_number(f32 value, f32 limit) {
  return bits_float(select(value != value, float_bits(value), float_bits(clamp(value, limit))));
}
/// The larger one of two magnitudes, the first without its sign; NaN if one is: they compare as
/// their bits do, with NaN above everything.
QK_DEVICE f32 larger_magnitude(f32 so_far, f32 value) {
  const u32 bits = float_bits(value) & 0x7fffffffu;
  return bits_float(select(float_bits(so_far) > bits, float_bits(so_far), bits));
}
#endif

#ifndef QK_ROUNDS_PAIRS
/// The same, but that NaN may be another one.
QK_DEVICE u32 halves_of(f32 low, f32 high) { return pack_halves(low, high); }
QK_DEVICE u32 bfloats_of(f32 low, f32 high) { return pack_bfloats(low, high); }
#endif

#ifndef QK_ADDS_BFLOATS
/// Sums of the two bf16 in a word.
QK_DEVICE u32 add_bfloats(u32 a, u32 b) {
  return bfloats_of(bits_float(a << 16) + bits_float(b << 16),
                    bits_float(a & 0xffff0000u) + bits_float(b & 0xffff0000u));
}
#endif

}  // namespace qk
