// Hopper's warpgroup matrix instruction on FP8 and int8: wgmma m64nNk32, and wgmma.sp m64nNk64 with
// 2:4 weights.
//
// Weights are A (64 outputs), tokens are B (N of them), both K-contiguous in shared memory,
// swizzled as the copy engine leaves them; A may lie in registers instead. Four warps issue
// together; warp w of them holds outputs 16w .. 16w + 15. With g = lane / 4 and t = lane % 4:
//   A   a[i], four codes each: output 16w + g + 8 (i % 2), k = 16 (i / 2) + 4t .. + 3
//   D   acc[4j + e], j < N / 8: token 8j + 2t + e % 2, output 16w + g + 8 (e / 2)
//   sp  metadata word of a step of 64 K: output 16w + g + 8 (t % 2), groups
//       8 (t / 2) .. 8 (t / 2) + 7, as on disk
// Source: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "async_sm90.h"
#include "config.h"

namespace qk {

/// Where an operand lies: rows of kRowBytes (64 or 128), swizzled over 8 rows. Adding 1 moves it by
/// 16 bytes.
template <int kRowBytes>
QK_DEVICE u64 operand_at(u32 address) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "the swizzles in use");
  constexpr u64 kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr u64 kEightRows = 8 * kRowBytes / 16;
  return (address & 0x3ffffu) >> 4 | 1ull << 16 | kEightRows << 32 | kSwizzle << 62;
}

/// Orders registers that were touched by other instructions before the matrix instructions that
/// follow.
QK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
QK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most kPending committed groups are unfinished.
template <int kPending>
QK_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from reading the sums before the wait above it.
template <int kCount>
QK_DEVICE void settle(f32 (&sums)[kCount]) {
  QK_UNROLL for (int i = 0; i < kCount; ++i)
    asm volatile("" : "+f"(sums[i])::"memory");
}
template <int kCount>
QK_DEVICE void settle(int (&sums)[kCount]) {
  QK_UNROLL for (int i = 0; i < kCount; ++i)
    asm volatile("" : "+r"(sums[i])::"memory");
}

/// d = w x^T (+ d when `keep` is not 0); specialised below for every N in use.
template <int kTokens>
struct Wgmma;

// Register lists: eight at a time, then what a tile of N tokens holds (N / 2 of them).
#define QK_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QK_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define QK_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define QK_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define QK_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define QK_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define QK_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define QK_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define QK_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define QK_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define QK_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define QK_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define QK_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define QK_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define QK_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define QK_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define QK_REGISTERS_16 QK_R0
#define QK_REGISTERS_32 QK_REGISTERS_16 ", " QK_R1
#define QK_REGISTERS_64 QK_REGISTERS_32 ", " QK_R2 ", " QK_R3
#define QK_REGISTERS_96 QK_REGISTERS_64 ", " QK_R4 ", " QK_R5
#define QK_REGISTERS_128 QK_REGISTERS_96 ", " QK_R6 ", " QK_R7
#define QK_REGISTERS_144 QK_REGISTERS_128 ", " QK_R8
#define QK_REGISTERS_160 QK_REGISTERS_128 ", " QK_R8 ", " QK_R9
#define QK_REGISTERS_176 QK_REGISTERS_160 ", " QK_R10
#define QK_REGISTERS_192 QK_REGISTERS_160 ", " QK_R10 ", " QK_R11
#define QK_REGISTERS_256 QK_REGISTERS_192 ", " QK_R12 ", " QK_R13 ", " QK_R14 ", " QK_R15
// s: the constraint of a sum.
#define QK_D(s, i) s(d[i]), s(d[i + 1]), s(d[i + 2]), s(d[i + 3])
#define QK_D8(s, i) QK_D(s, i), QK_D(s, i + 4)
#define QK_SUMS_16(s) QK_D8(s, 0)
#define QK_SUMS_32(s) QK_SUMS_16(s), QK_D8(s, 8)
#define QK_SUMS_64(s) QK_SUMS_32(s), QK_D8(s, 16), QK_D8(s, 24)
#define QK_SUMS_96(s) QK_SUMS_64(s), QK_D8(s, 32), QK_D8(s, 40)
#define QK_SUMS_128(s) QK_SUMS_96(s), QK_D8(s, 48), QK_D8(s, 56)
#define QK_SUMS_144(s) QK_SUMS_128(s), QK_D8(s, 64)
#define QK_SUMS_160(s) QK_SUMS_128(s), QK_D8(s, 64), QK_D8(s, 72)
#define QK_SUMS_176(s) QK_SUMS_160(s), QK_D8(s, 80)
#define QK_SUMS_192(s) QK_SUMS_160(s), QK_D8(s, 80), QK_D8(s, 88)
#define QK_SUMS_256(s) QK_SUMS_192(s), QK_D8(s, 96), QK_D8(s, 104), QK_D8(s, 112), QK_D8(s, 120)

// `behind`: the factors of A and B, which float types have.
#define QK_FLOAT ", 1, 1"
#define QK_DENSE(n, s, types, behind, w, x, keep)                                        \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " keep                              \
               ", 0;\n\t"                                                                \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32." types " {" QK_REGISTERS_##n \
               "}, " w ", " x ", p" behind ";\n\t}"                                      \
               : QK_SUMS_##n(s)                                                          \
               : "l"(weights), "l"(tokens), "r"(keep_sums))
#define QK_SPARSE(n, s, types, behind, w, x, meta, keep)                                    \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " keep                                 \
               ", 0;\n\t"                                                                   \
               "wgmma.mma_async.sp.sync.aligned.m64n" #n "k64." types " {" QK_REGISTERS_##n \
               "}, " w ", " x ", " meta ", 0, p" behind ";\n\t}"                            \
               : QK_SUMS_##n(s)                                                             \
               : "l"(weights), "l"(tokens), "r"(metadata), "r"(keep_sums))
#define QK_HELD(n, a0, a1, a2, a3, x, keep)                                              \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " keep                              \
               ", 0;\n\t"                                                                \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" QK_REGISTERS_##n \
               "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " x ", p;\n\t}"                     \
               : QK_SUMS_##n("+r")                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(keep_sums))
// i0 .. i5: the numbers of the operands after the sums.
#define QK_WGMMA(n, i0, i1, i2, i3, i4, i5)                                                        \
  template <>                                                                                      \
  struct Wgmma<n> {                                                                                \
    template <Format kW, Format kX>                                                                \
    static QK_DEVICE void dense(Sum<kW, kX> (&d)[n / 2], u64 weights, u64 tokens, int keep_sums) { \
      constexpr bool kInteger = kX == Format::kInt8, kW4 = kW == Format::kE4M3FN,                  \
                     kX4 = kX == Format::kE4M3FN;                                                  \
      if constexpr (kInteger) QK_DENSE(n, "+r", "s32.s8.s8", "", i0, i1, i2);                      \
      else if constexpr (kW4 && kX4) QK_DENSE(n, "+f", "f32.e4m3.e4m3", QK_FLOAT, i0, i1, i2);     \
      else if constexpr (kW4) QK_DENSE(n, "+f", "f32.e4m3.e5m2", QK_FLOAT, i0, i1, i2);            \
      else if constexpr (kX4) QK_DENSE(n, "+f", "f32.e5m2.e4m3", QK_FLOAT, i0, i1, i2);            \
      else QK_DENSE(n, "+f", "f32.e5m2.e5m2", QK_FLOAT, i0, i1, i2);                               \
    }                                                                                              \
    template <Format kW, Format kX>                                                                \
    static QK_DEVICE void sparse(Sum<kW, kX> (&d)[n / 2], u64 weights, u64 tokens, u32 metadata,   \
                                 int keep_sums) {                                                  \
      constexpr bool kInteger = kX == Format::kInt8, kW4 = kW == Format::kE4M3FN,                  \
                     kX4 = kX == Format::kE4M3FN;                                                  \
      if constexpr (kInteger) QK_SPARSE(n, "+r", "s32.s8.s8", "", i0, i1, i2, i3);                 \
      else if constexpr (kW4 && kX4)                                                               \
        QK_SPARSE(n, "+f", "f32.e4m3.e4m3", QK_FLOAT, i0, i1, i2, i3);                             \
      else if constexpr (kW4) QK_SPARSE(n, "+f", "f32.e4m3.e5m2", QK_FLOAT, i0, i1, i2, i3);       \
      else if constexpr (kX4) QK_SPARSE(n, "+f", "f32.e5m2.e4m3", QK_FLOAT, i0, i1, i2, i3);       \
      else QK_SPARSE(n, "+f", "f32.e5m2.e5m2", QK_FLOAT, i0, i1, i2, i3);                          \
    }                                                                                              \
    /* int8 weights in registers, which stay as they are until the instruction has ended. */       \
    static QK_DEVICE void held(int (&d)[n / 2], const u32 (&a)[4], u64 tokens, int keep_sums) {    \
      QK_HELD(n, i0, i1, i2, i3, i4, i5);                                                          \
    }                                                                                              \
  };
QK_WGMMA(16, "%8", "%9", "%10", "%11", "%12", "%13")
QK_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21")
QK_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37")
QK_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53")
QK_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69")
QK_WGMMA(144, "%72", "%73", "%74", "%75", "%76", "%77")
QK_WGMMA(160, "%80", "%81", "%82", "%83", "%84", "%85")
QK_WGMMA(176, "%88", "%89", "%90", "%91", "%92", "%93")
QK_WGMMA(192, "%96", "%97", "%98", "%99", "%100", "%101")
QK_WGMMA(256, "%128", "%129", "%130", "%131", "%132", "%133")

}  // namespace qk
