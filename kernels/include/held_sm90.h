// Hopper's warpgroup matrix instruction with the rows of A in registers, as attention multiplies:
// wgmma m64nNk32 of e4m3fn (float32 sums) and int8 (int32 sums).
//
// Lanes: mma_sm90.h. N: tiles of keys, and a head's columns with 8 more for the sums of codes.
#pragma once

#include "mma_sm90.h"

namespace qk {

/// d = a b^T (+ d when `keep` is not 0); a stays as it is until the instruction has ended.
template <int kColumns>
struct HeldWgmma;

// Registers 8i .. 8i + 3, behind the eights of mma_sm90.h.
#define QK_H1 "%8, %9, %10, %11"
#define QK_H2 "%16, %17, %18, %19"
#define QK_H3 "%24, %25, %26, %27"
#define QK_H4 "%32, %33, %34, %35"
#define QK_H5 "%40, %41, %42, %43"
#define QK_H6 "%48, %49, %50, %51"
#define QK_H7 "%56, %57, %58, %59"
#define QK_H8 "%64, %65, %66, %67"
#define QK_H9 "%72, %73, %74, %75"
#define QK_H10 "%80, %81, %82, %83"
#define QK_REGISTERS_48 QK_REGISTERS_32 ", " QK_R2
#define QK_REGISTERS_80 QK_REGISTERS_64 ", " QK_R4
#define QK_REGISTERS_112 QK_REGISTERS_96 ", " QK_R6
#define QK_SUMS_48(s) QK_SUMS_32(s), QK_D8(s, 16)
#define QK_SUMS_80(s) QK_SUMS_64(s), QK_D8(s, 32)
#define QK_SUMS_112(s) QK_SUMS_96(s), QK_D8(s, 48)
#define QK_REGISTERS_24 QK_REGISTERS_16 ", " QK_H1
#define QK_REGISTERS_40 QK_REGISTERS_32 ", " QK_H2
#define QK_REGISTERS_56 QK_REGISTERS_48 ", " QK_H3
#define QK_REGISTERS_72 QK_REGISTERS_64 ", " QK_H4
#define QK_REGISTERS_88 QK_REGISTERS_80 ", " QK_H5
#define QK_REGISTERS_104 QK_REGISTERS_96 ", " QK_H6
#define QK_REGISTERS_120 QK_REGISTERS_112 ", " QK_H7
#define QK_REGISTERS_136 QK_REGISTERS_128 ", " QK_H8
#define QK_REGISTERS_152 QK_REGISTERS_144 ", " QK_H9
#define QK_REGISTERS_168 QK_REGISTERS_160 ", " QK_H10
#define QK_SUMS_24(s) QK_SUMS_16(s), QK_D(s, 8)
#define QK_SUMS_40(s) QK_SUMS_32(s), QK_D(s, 16)
#define QK_SUMS_56(s) QK_SUMS_48(s), QK_D(s, 24)
#define QK_SUMS_72(s) QK_SUMS_64(s), QK_D(s, 32)
#define QK_SUMS_88(s) QK_SUMS_80(s), QK_D(s, 40)
#define QK_SUMS_104(s) QK_SUMS_96(s), QK_D(s, 48)
#define QK_SUMS_120(s) QK_SUMS_112(s), QK_D(s, 56)
#define QK_SUMS_136(s) QK_SUMS_128(s), QK_D(s, 64)
#define QK_SUMS_152(s) QK_SUMS_144(s), QK_D(s, 72)
#define QK_SUMS_168(s) QK_SUMS_160(s), QK_D(s, 80)

#define QK_HELD_ROWS(n, s, types, behind, a0, a1, a2, a3, x, keep)                       \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " keep                              \
               ", 0;\n\t"                                                                \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32." types " {" QK_REGISTERS_##n \
               "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " x ", p" behind ";\n\t}"           \
               : QK_SUMS_##n(s)                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep_sums))
#define QK_HELD_WGMMA(n, i0, i1, i2, i3, i4, i5)                                               \
  template <>                                                                                  \
  struct HeldWgmma<n> {                                                                        \
    static QK_DEVICE void multiply(f32 (&d)[n / 2], const u32 (&a)[4], u64 b, int keep_sums) { \
      QK_HELD_ROWS(n, "+f", "f32.e4m3.e4m3", QK_FLOAT, i0, i1, i2, i3, i4, i5);                \
    }                                                                                          \
    static QK_DEVICE void multiply(int (&d)[n / 2], const u32 (&a)[4], u64 b, int keep_sums) { \
      QK_HELD_ROWS(n, "+r", "s32.s8.s8", "", i0, i1, i2, i3, i4, i5);                          \
    }                                                                                          \
  };
QK_HELD_WGMMA(24, "%12", "%13", "%14", "%15", "%16", "%17")
QK_HELD_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21")
QK_HELD_WGMMA(40, "%20", "%21", "%22", "%23", "%24", "%25")
QK_HELD_WGMMA(56, "%28", "%29", "%30", "%31", "%32", "%33")
QK_HELD_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37")
QK_HELD_WGMMA(72, "%36", "%37", "%38", "%39", "%40", "%41")
QK_HELD_WGMMA(88, "%44", "%45", "%46", "%47", "%48", "%49")
QK_HELD_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53")
QK_HELD_WGMMA(104, "%52", "%53", "%54", "%55", "%56", "%57")
QK_HELD_WGMMA(120, "%60", "%61", "%62", "%63", "%64", "%65")
QK_HELD_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69")
QK_HELD_WGMMA(136, "%68", "%69", "%70", "%71", "%72", "%73")
QK_HELD_WGMMA(152, "%76", "%77", "%78", "%79", "%80", "%81")
QK_HELD_WGMMA(168, "%84", "%85", "%86", "%87", "%88", "%89")

}  // namespace qk
