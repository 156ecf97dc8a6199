// A GEMM kernel of Hopper: the roles of a block's warpgroups, tile after tile.
#pragma once

#include "epilogue_sm90.h"
#include "loop_sm90.h"

namespace qk {

template <class View>
struct HopperOperands {
  const TensorMap& x;
  const TensorMap& w;
  const TensorMap& y;  // used when rows of y are a multiple of 16 bytes
  const u8* w_meta;  // null unless the weights are sparse
  EpilogueArgs out;
  int k, group;
  View view;
};

template <class Tile, Format kW, Format kX, bool kPromote, Io kIo, bool kPerToken, bool kPerChannel,
          class View = MatrixView<Tile>>
struct HopperGemm {
  using Loop = HopperLoop<Tile, kW, kX, kPromote, View>;
  using Epilogue = HopperEpilogue<Tile, kIo, kPerToken, kPerChannel, View>;
  using Operands = HopperOperands<View>;
  static constexpr bool kSplit = Tile::kShare == Share::kSplitK;

  static QK_DEVICE void run(const Operands& op, u8* shared) {
    const Ring<Tile> ring{shared_address(shared)};
    if (thread_index() == 0) {
      tensor_map_prefetch(op.x);
      tensor_map_prefetch(op.w);
      tensor_map_prefetch(op.y);
      ring.init();
    }
    sync();
    const Schedule<Tile> schedule({op.out.m, op.out.n, op.view.depth(op.k), op.group});
    const int group = wave_index() / 4;
    // 65536 registers, 168 a thread at first: the copying warpgroup hands its share to two multiplying ones.
    if (group == Tile::kConsumers) {
      if constexpr (Tile::kConsumers == 2) registers_shrink<40>();
      if (thread_index() == Tile::kConsumers * 128) produce(ring, schedule, op);
      if constexpr (kSplit) {
        cluster_sync();
        cluster_sync();
      }
    } else {
      if constexpr (Tile::kConsumers == 2) registers_grow<232>();
      consume(ring, schedule, op, shared, group);
    }
    // A block must not end while others still write into its memory.
    if constexpr (Ring<Tile>::kMulticast) cluster_sync();
  }

 private:
  static QK_DEVICE void sync() {
    if constexpr (Tile::kTeam > 1) {
      cluster_sync();
    } else {
      block_sync();
    }
  }

  static QK_DEVICE void produce(const Ring<Tile>& ring, const Schedule<Tile>& schedule, const Operands& op) {
    int stage = 0, parity = 1, set = 0;  // the first lap finds the ring empty
    for (int tile = schedule.first; tile < schedule.total; tile += schedule.step, set ^= 1) {
      const Position at = schedule.position(tile);
      for (int step = 0; step < schedule.count; ++step) {
        barrier_wait(ring.empty(stage), parity);
        ring.fill(stage, ring.full(set, stage), schedule.begin + step, at, schedule.rank, op.view, op.x, op.w);
        stage = Reader<Tile>::after(stage);
        if (stage == 0) parity ^= 1;
      }
    }
  }

  static QK_DEVICE void consume(const Ring<Tile>& ring, const Schedule<Tile>& schedule, const Operands& op,
                                u8* shared, int group) {
    const int thread = thread_index() % 128, lane = thread % 32;
    const int row = Tile::kPingPong ? 0 : group * Tile::kOutputs;
    u8* const staged = shared + Tile::kStages * Tile::kStageBytes + group * Tile::kStaged * Tile::kChunkBytes;
    f32* const scales = reinterpret_cast<f32*>(shared + Tile::kScales + group * Tile::kScaleBytes);
    const Epilogue epilogue{op.out, op.y, staged, scales, thread, group + 1, op.view};
    Reader<Tile> reader;
    int turn = 0;
    for (int tile = schedule.first; tile < schedule.total; tile += schedule.step, ++turn) {
      if (Tile::kPingPong && turn % 2 != group) {
        reader.skip(schedule.count);
        continue;
      }
      const Position at = schedule.position(tile);
      const Position mine = {at.m, at.n + row};
      const auto factors = epilogue.fetch(mine);
      Loop loop{ring, group, row, lane, nullptr, 0, op.k, op.view};
      if constexpr (Tile::kSparse) {
        const int first = mine.n + thread / 32 * 16 + (lane >> 2) + 8 * (lane & 1);
        loop.nibbles = op.w_meta + static_cast<i64>(first) * (op.k / 8);
        loop.rows_left = op.out.n - first;
      }
      typename Loop::Sums sums;
      loop.run(sums, reader, schedule.begin, schedule.count);
      if constexpr (kSplit) {
        gather(sums, ring, schedule.rank, group * 128 + thread);
        if (schedule.rank != 0) return;
      }
      epilogue.run(sums, factors, mine);
    }
    epilogue.finish();
  }

  /// Adds the sums of all blocks of the team in block 0, in order of rank.
  static QK_DEVICE void gather(typename Loop::Sums& sums, const Ring<Tile>& ring, int rank, int thread) {
    constexpr int kThreads = 128 * Tile::kConsumers, kCount = Tile::kBlocks * Loop::kSums;
    const auto place = [&](int from, int i) { return ring.base + 4 * (((from - 1) * kCount + i) * kThreads + thread); };
    cluster_sync();  // block 0 has read its ring
    if (rank > 0) {
      QK_UNROLL for (int i = 0; i < kCount; ++i) store_at(0, place(rank, i), sums[i / Loop::kSums][i % Loop::kSums]);
    }
    cluster_sync();
    if (rank > 0) return;
    for (int from = 1; from < Tile::kTeam; ++from) {
      QK_UNROLL for (int i = 0; i < kCount; ++i) {
        f32 other;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(other) : "r"(place(from, i)) : "memory");
        sums[i / Loop::kSums][i % Loop::kSums] += other;
      }
    }
  }
};

}  // namespace qk

#define QK_HOPPER_KERNEL(threads, team) \
  extern "C" __global__ void __cluster_dims__(team, 1, 1) __launch_bounds__(threads, 1)
