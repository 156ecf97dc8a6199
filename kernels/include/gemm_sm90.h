// A GEMM kernel of Hopper: the roles of a block's warpgroups, tile after tile.
#pragma once

#include "loop_w4a8_sm90.h"

namespace qk {

template <class Args, class View>
struct HopperOperands {
  const TensorMap& x;
  const TensorMap& w;
  const TensorMap& y;  // used when rows of y are a multiple of 16 bytes
  const u8* w_meta;    // positions of sparse weights, factors of int4 ones; null for others
  Args out;
  int k, group;
  View view;
  const TensorMap* residual = nullptr;
};

template <class Tile, Format kW, Format kX, bool kPromote, class Epilogue>
struct HopperGemm {
  using View = typename Epilogue::View;
  using Loop = typename HopperLoopOf<Tile::kInt4>::template Loop<Tile, kW, kX, kPromote, View>;
  using Operands = HopperOperands<typename Epilogue::Args, View>;
  // 65536 registers, the same for every thread at first (168, or 128 beside three multiplying
  // warpgroups): the copying warpgroup hands its share over.
  static constexpr int kCopying = Tile::kConsumers == 3 ? 32 : 40,
                       kMultiplying = Tile::kConsumers == 3 ? 160 : 232;
  static constexpr bool kSplit = Tile::kTeam > 1;

  static QK_DEVICE void run(const Operands& op, u8* shared) {
    const Ring<Tile> ring{shared_address(shared)};
    const Schedule<Tile> schedule({op.out.m, op.out.n, op.view.depth(op.k), op.group});
    const int group = wave_index() / 4;
    const bool copies = thread_index() == Tile::kConsumers * 128;
    if (copies) {
      tensor_map_prefetch(op.x);
      tensor_map_prefetch(op.w);
      ring.init();
    }
    if (thread_index() == 0) {
      tensor_map_prefetch(op.y);
      if constexpr (Tile::kAdds) tensor_map_prefetch(*op.residual);
    }
    start();
    if constexpr (kSplit) cluster_sync();
    if (group == Tile::kConsumers) {
      if constexpr (Tile::kConsumers > 1) registers_shrink<kCopying>();
      if (wave_index() == Tile::kConsumers * 4) group_arrive(kReady, kReadyThreads);
      if (copies) produce(ring, schedule, op);
      if constexpr (Epilogue::kHasPrefix) {
        const int index = thread_index() - Tile::kConsumers * 128 - 32;
        if (index >= 0) Epilogue::write_prefix(op.out, block_x() * 96 + index, gridDim.x * 96);
      }
      if constexpr (kSplit) {
        cluster_sync();
        cluster_sync();
      }
    } else {
      if constexpr (Tile::kConsumers > 1) registers_grow<kMultiplying>();
      consume(ring, schedule, op, shared, group);
    }
  }

 private:
  // The copying warp says that the ring is there and goes on: it need not wait for the others.
  static constexpr int kReady = Tile::kConsumers + 1, kReadyThreads = Tile::kConsumers * 128 + 32;

  static QK_DEVICE void produce(const Ring<Tile>& ring, const Schedule<Tile>& schedule,
                                const Operands& op) {
    int stage = 0, parity = 1, set = 0;  // the first lap finds the ring empty
    for (int tile = schedule.first; tile < schedule.total; tile += schedule.step, set ^= 1) {
      const Position at = schedule.position(tile);
      for (int step = 0; step < schedule.count; ++step) {
        barrier_wait(ring.empty(stage), parity);
        ring.fill(stage, ring.full(set, stage), schedule.begin + step, at, op.view, op.x, op.w);
        stage = Reader<Tile>::after(stage);
        if (stage == 0) parity ^= 1;
      }
    }
  }

  static QK_DEVICE void consume(const Ring<Tile>& ring, const Schedule<Tile>& schedule,
                                const Operands& op, u8* shared, int group) {
    const int thread = thread_index() % 128;
    const int row = Tile::kPingPong ? 0 : group * Tile::kOwnColumns;
    const int turn = Tile::kPingPong ? group : 0, turns = Tile::kPingPong ? 2 : 1;
    u8* const staged = shared + Tile::kStages * Tile::kStageBytes + group * Tile::kStagedBytes;
    f32* const scales = reinterpret_cast<f32*>(shared + Tile::kScales + group * Tile::kScaleBytes);
    Epilogue epilogue{op.out, op.y, staged, scales, thread, group + 1, op.view};
    if constexpr (Tile::kAdds) epilogue.residual = {op.residual, ring.added(group)};
    Reader<Tile> reader;
    reader.skip(turn * schedule.count);
    group_sync(kReady, kReadyThreads);
    int tile = schedule.first + turn * schedule.step;
    if (tile >= schedule.total) return;
    const int lane = thread % 32;
    const auto output_of = [&](int index) {
      return schedule.position(index).n + row + thread / 32 * 16 + lane / 4;
    };
    Loop loop{
        ring,           group,          row,    lane, op.w_meta, 0, output_of(tile), op.out.n, op.k,
        schedule.begin, schedule.count, op.view};
    typename Loop::Metadata meta;
    if constexpr (Tile::kHasMetadata) loop.load_metadata(meta, schedule.count);
    while (tile < schedule.total) {
      const Position at = schedule.position(tile), mine = {at.m, at.n + row};
      const auto factors = epilogue.load_factors(mine);
      tile += turns * schedule.step;
      if constexpr (Tile::kHasMetadata) {
        loop.output = loop.next_output;
        loop.next_output = output_of(tile < schedule.total ? tile : schedule.first);
      }
      typename Loop::Sums sums;
      loop.run(sums, reader, meta, [&] {
        if constexpr (Tile::kAdds) {
          if (schedule.rank == 0) epilogue.ask(mine);
        }
      });
      if constexpr (kSplit) {
        reduce_team(sums, ring, schedule.rank, group * 128 + thread);
        if (schedule.rank != 0) return;
      }
      reader.skip((turns - 1) * schedule.count);
      // Or the compiler computes the epilogue's addresses ahead and keeps them through the K loop.
      asm volatile("" : "+r"(epilogue.thread));
      epilogue.run(sums, factors, mine);
    }
    epilogue.finish();
  }

  /// Adds the sums of all blocks of the team in block 0, in order of rank.
  static QK_DEVICE void reduce_team(typename Loop::Sums& sums, const Ring<Tile>& ring, int rank,
                                    int thread) {
    constexpr int kThreads = 128 * Tile::kConsumers, kCount = Tile::kBlocks * Loop::kSums;
    const auto partial_sum = [&](int from, int i) {
      return ring.base + 4 * (((from - 1) * kCount + i) * kThreads + thread);
    };
    cluster_sync();  // block 0 has read its ring
    if (rank > 0) {
      QK_UNROLL for (int i = 0; i < kCount; ++i)
        store_at(0, partial_sum(rank, i), sums[i / Loop::kSums][i % Loop::kSums]);
    }
    cluster_sync();
    if (rank > 0) return;
    for (int from = 1; from < Tile::kTeam; ++from) {
      QK_UNROLL for (int i = 0; i < kCount; ++i) {
        typename Loop::Sum other;
        load_shared(other, partial_sum(from, i));
        sums[i / Loop::kSums][i % Loop::kSums] += other;
      }
    }
  }
};

}  // namespace qk

#define QK_HOPPER_KERNEL(threads, team) \
  extern "C" __global__ void __cluster_dims__(team, 1, 1) __launch_bounds__(threads, 1)
