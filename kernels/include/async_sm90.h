// What Hopper (sm_90a) has for moving data: mbarriers, bulk tensor copies (TMA), clusters, register
// budgets.
//
// Every address of shared memory is a 32-bit number, as PTX takes it. A barrier is 8 bytes; waits
// are on the parity of its phase: 0 for the first, 1 for the second, 0 for the third.
#pragma once

#include "platform.h"

namespace qk {

using u64 = unsigned long long;

/// A CUtensorMap, made on the host by cuTensorMapEncodeTiled and passed by value.
struct alignas(64) TensorMap {
  u64 words[16];
};

QK_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

QK_DEVICE void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
QK_DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives, and lets the phase end only after `bytes` more have been copied.
QK_DEVICE void barrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
QK_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
QK_DEVICE void barrier_wait(u32 barrier, int parity) {
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra finished;\n\t"
      "bra again;\n\t"
      "finished:\n\t"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

QK_DEVICE void tensor_map_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
/// Where a box begins in a tensor of kRank dimensions, the contiguous one first.
template <int kRank>
struct Coordinates {
  int at[4];
};

#define QK_COORDINATES "r"(origin.at[0]), "r"(origin.at[1]), "r"(origin.at[2]), "r"(origin.at[3])
// copy_box   a box of a tensor to shared memory; what lies outside the tensor (before it, too)
//            becomes zeros
// store_box  a box of shared memory to a tensor; what lies outside the tensor is left out. Belongs
//            to a group of copies of the calling thread
#define QK_COPIES(rank, coordinates)                                                     \
  QK_DEVICE void copy_box(u32 target, const TensorMap& map, u32 barrier,                 \
                          Coordinates<rank> origin) {                                    \
    asm volatile("cp.async.bulk.tensor." #rank                                           \
                 "d.shared::cluster.global.mbarrier::complete_tx::bytes"                 \
                 " [%4], [%5, " coordinates "], [%6];" ::QK_COORDINATES,                 \
                 "r"(target), "l"(&map), "r"(barrier)                                    \
                 : "memory");                                                            \
  }                                                                                      \
  QK_DEVICE void store_box(const TensorMap& map, u32 source, Coordinates<rank> origin) { \
    asm volatile("cp.async.bulk.tensor." #rank                                           \
                 "d.global.shared::cta.bulk_group"                                       \
                 " [%4, " coordinates "], [%5];" ::QK_COORDINATES,                       \
                 "l"(&map), "r"(source)                                                  \
                 : "memory");                                                            \
  }
QK_COPIES(2, "{%0, %1}")
QK_COPIES(3, "{%0, %1, %2}")
QK_COPIES(4, "{%0, %1, %2, %3}")

QK_DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until all but the last kPending groups of the calling thread have read their shared
/// memory.
template <int kPending>
QK_DEVICE void store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Shows the calling thread's writes to shared memory to the copy engine.
QK_DEVICE void store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

QK_DEVICE int cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
/// Waits for every thread of the cluster; shared memory written before is seen by all after.
QK_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
// store_at      writes to block `rank`, where `address` lies in this block
// load_shared   reads from this block
#define QK_SHARED_VALUES(Type, type, constraint)               \
  QK_DEVICE void store_at(int rank, u32 address, Type value) { \
    asm volatile(                                              \
        "{\n\t"                                                \
        ".reg .b32 remote;\n\t"                                \
        "mapa.shared::cluster.u32 remote, %0, %1;\n\t"         \
        "st.shared::cluster." type                             \
        " [remote], %2;\n\t"                                   \
        "}" ::"r"(address),                                    \
        "r"(rank), constraint(value)                           \
        : "memory");                                           \
  }                                                            \
  QK_DEVICE void load_shared(Type& value, u32 address) {       \
    asm volatile("ld.shared." type " %0, [%1];"                \
                 : "=" constraint(value)                       \
                 : "r"(address)                                \
                 : "memory");                                  \
  }
QK_SHARED_VALUES(f32, "f32", "f")
QK_SHARED_VALUES(int, "b32", "r")
QK_SHARED_VALUES(u32, "b32", "r")

/// Waits for the other threads of a group; ids 1 to 15, since 0 is the whole block's.
QK_DEVICE void group_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Counts the calling warp in without waiting.
QK_DEVICE void group_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
QK_DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
QK_DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Stores four transposed 8x8 matrices of 16-bit values. Register i of lane 4r + c holds elements
/// (r, 2c) and (r, 2c + 1) of matrix i; lane 8i + t gives the address of its column t (16 bytes).
QK_DEVICE void store_transposed(u32 address, const u32 (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}
/// The same of two; lanes 0 to 15 give addresses.
QK_DEVICE void store_transposed(u32 address, const u32 (&words)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(words[0]), "r"(words[1])
               : "memory");
}
/// Stores four 8x8 matrices of 16-bit values as they are; lane 8i + t gives the address of row t of
/// matrix i.
QK_DEVICE void store_matrices(u32 address, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

/// Loads what store_transposed stored at the same addresses.
QK_DEVICE void load_transposed(u32 (&words)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

}  // namespace qk
