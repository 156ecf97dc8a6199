// Rows of codes in Hopper's shared memory as its matrix instructions read them, and copies that put
// them there: by threads, or of attention's keys by the copy engine.
#pragma once

#include "async_sm90.h"

namespace qk {

/// Rows of kBytes in shared memory as the matrix instruction reads them: panels of kWidth bytes,
/// in which 16-byte pieces change places over 8 rows.
template <int kRows, int kBytes>
struct Panels {
  static_assert(kBytes % 32 == 0 && kRows % 8 == 0, "whole instructions");
  static constexpr int kWidth = kBytes % 128 == 0 ? 128 : kBytes % 64 == 0 ? 64 : 32;
  static constexpr int kPanelBytes = kRows * kWidth, kTotal = kRows * kBytes;
  static constexpr int kPieces = kWidth / 16;

  /// Where the 16 bytes of a row from `byte` on lie.
  static QK_DEVICE u32 offset(int row, int byte) {
    const int panel = byte / kWidth, piece = byte % kWidth / 16;
    return panel * kPanelBytes + row * kWidth + 16 * (piece ^ (row * kWidth / 128 & (kPieces - 1)));
  }
  /// The operand of the `step`-th 32 bytes of all rows.
  static QK_DEVICE u64 operand(u32 address, int step) {
    constexpr u64 kSwizzle = kWidth == 128 ? 1 : kWidth == 64 ? 2 : 3;
    const int byte = 32 * step;
    const u32 at = address + byte / kWidth * kPanelBytes + byte % kWidth;
    return (at & 0x3ffffu) >> 4 | 1ull << 16 | static_cast<u64>(8 * kWidth / 16) << 32 |
           kSwizzle << 62;
  }
};

/// Copies 16 bytes to shared memory.
QK_DEVICE void copy_piece(u32 target, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
}
/// The same, or writes zeros.
QK_DEVICE void copy_piece_or_zeros(u32 target, const u8* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
/// Copies 4 bytes to shared memory.
QK_DEVICE void copy_word(u32 target, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(from) : "memory");
}
/// copy_box of keys: `group` is the first 16.
QK_DEVICE void copy_keys(u32 target, const TensorMap& map, u32 barrier, int column, int group) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %5, %5, %5, %4}], [%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(group), "r"(0)
      : "memory");
}
/// Arrives at a barrier when the calling thread's copies so far have been written.
QK_DEVICE void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Which 16-byte pieces of rows of kBytes a copying thread has: one of every kRows rows, always the
/// same of a row, so that addresses of all but the first are that one's and a constant.
template <int kBytes>
struct PieceOf {
  static constexpr int kNeeded = (kBytes + 15) / 16;
  static constexpr int kLanes = kNeeded > 8 ? 16 : kNeeded > 4 ? 8 : kNeeded > 2 ? 4 : kNeeded;
  static constexpr int kRows = 128 / kLanes;
  int row, byte;

  explicit QK_DEVICE PieceOf(int thread) : row(thread / kLanes), byte(thread % kLanes * 16) {}
  QK_DEVICE bool exists() const { return kLanes == kNeeded || byte < kBytes; }
};

}  // namespace qk
