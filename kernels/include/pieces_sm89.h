// What attention on sm_89 and later asks of shared memory beyond loads and stores: copies that take
// no registers, and operands that lie across lanes.
#pragma once

#include "platform.h"

namespace qk {

#if defined(QK_NVIDIA)
/// An address in shared memory.
using Shared = u32;
QK_DEVICE Shared in_shared(u8* lds) { return static_cast<u32>(__cvta_generic_to_shared(lds)); }

/// Copies 16 bytes from memory to shared memory.
QK_DEVICE void copy_piece(Shared target, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
}
/// The same, or writes zeros.
QK_DEVICE void copy_piece_or_zeros(Shared target, const u8* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
/// Waits for the calling thread's copies.
QK_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// The thread's index, read anew: what follows from it then takes no registers between two tiles.
QK_DEVICE u32 fresh_thread_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

/// Word i: bytes 4t .. 4t + 3 of row g of the i-th of kCount pieces, each 8 rows of 16 bytes in
/// shared memory. Lane 8i + r gives the address of row r of piece i.
template <int kCount>
QK_DEVICE void load_pieces(u32* words, Shared address) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "ldmatrix has these");
  if constexpr (kCount == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(words[0])
                 : "r"(address)
                 : "memory");
  }
}

#else  // the host
using Shared = u8*;
QK_DEVICE Shared in_shared(u8* lds) { return lds; }
QK_DEVICE void copy_piece(Shared target, const u8* from) { store(target, load<Vec16>(from)); }
QK_DEVICE void copy_piece_or_zeros(Shared target, const u8* from, bool there) {
  store(target, there ? load<Vec16>(from) : Vec16{});
}
QK_DEVICE void wait_for_copies() {}
QK_DEVICE u32 fresh_thread_index() { return static_cast<u32>(thread_index()); }

template <int kCount>
QK_DEVICE void load_pieces(u32* words, Shared address) {
  struct Lane {
    const u8* row;
    u32* words;
  } mine{address, words};
  host::wave_collective(
      [](void* const* lanes) {
        for (int to = 0; to < kWave; ++to) {
          for (int i = 0; i < kCount; ++i) {
            const u8* const row = static_cast<const Lane*>(lanes[8 * i + to / 4])->row;
            static_cast<Lane*>(lanes[to])->words[i] = load<u32>(row + 4 * (to % 4));
          }
        }
      },
      &mine);
}
#endif

}  // namespace qk
