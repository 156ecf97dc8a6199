// Tiles, shared memory and the order of work of the Hopper kernels.
//
// A block computes tiles of kN outputs x kM tokens, one after the other (persistent). One thread of the last
// warpgroup keeps a ring of kStages K steps full; the warpgroups before it multiply. They share a tile
// (kPingPong false: warpgroup c has outputs 64 kBlocks c ..) or take tiles in turns (true), so that one's
// epilogue runs under the other's matrix instructions. A team of blocks (a cluster) shares what all need:
//   kTokens   neighbouring outputs: each copies a part of the token rows into all blocks of the team
//   kWeights  neighbouring tokens: likewise the weight rows
//   kSplitK   one tile, each block a part of K; the sums meet in block 0. One tile per team.
#pragma once

#include "mma_sm90.h"

namespace qk {

enum class Share { kNothing, kTokens, kWeights, kSplitK };

struct Problem {
  int m, n, k;
  int group;  // token tiles that are walked together, so that they meet in L2
};

/// kBlocks: 64-output blocks of a warpgroup.
template <int N, int M, int Blocks, bool PingPong, Share kHow, int Team, bool Sparse, int OutputBytes>
struct HopperTile {
  static constexpr int kN = N, kM = M, kBlocks = Blocks, kTeam = Team;
  static constexpr bool kPingPong = PingPong, kSparse = Sparse;
  static constexpr Share kShare = kHow;
  static constexpr int kConsumers = PingPong ? 2 : N / (64 * Blocks);
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStepK = 128;  // K of a stage: a swizzled row of token codes
  static constexpr int kWeightRow = Sparse ? kStepK / 2 : kStepK;
  static constexpr int kWeightBytes = N * kWeightRow, kTokenBytes = M * kStepK;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  // An epilogue chunk: tokens x outputs of a warpgroup, rows 16 bytes apart modulo 128 to avoid bank conflicts.
  static constexpr int kOutputs = 64 * Blocks;
  static constexpr int kChunk = OutputBytes == 2 ? (M % 32 == 0 ? 32 : 16) : 16;
  static constexpr int kPitch = kOutputs * OutputBytes + 16;
  static constexpr int kChunkBytes = kChunk * kPitch;
  static constexpr int kScaleBytes = M * 4;
  static constexpr int kTailBytes = kConsumers * (kChunkBytes + kScaleBytes);
  static constexpr int kLimit = 227 * 1024;  // shared memory of a block
  static constexpr int kFit = (kLimit - kTailBytes - 256) / kStageBytes;
  static constexpr int kStages = kFit < 16 ? kFit : 16;
  static constexpr int kTail = kStages * kStageBytes;
  static constexpr int kBarriers = kTail + kTailBytes;  // full[kStages], empty[kStages]
  static constexpr int kSharedBytes = kBarriers + 16 * kStages;
  static_assert(PingPong ? N == 64 * Blocks : N % (64 * Blocks) == 0, "warpgroups cut the tile into 64-output blocks");
  static_assert(M % 16 == 0 && kTail % 16 == 0 && kBarriers % 8 == 0, "alignment");
  static_assert(kHow != Share::kTokens || M / Team % 8 == 0, "each block of a team copies whole swizzle atoms");
  static_assert((kHow == Share::kNothing) == (Team == 1), "a team shares something");
  static_assert(kHow != Share::kSplitK || (Team - 1) * kConsumers * Blocks * M * 256 <= kTail, "sums meet in the ring");
};

struct Position {
  int m, n;  // first token and output
};

/// Which tiles this block computes, and which K steps of them.
template <class Tile>
struct Schedule {
  int tiles_m, tiles_n;  // of teams
  int first, step, total, group;
  int rank;
  int begin, count;  // K steps

  QK_DEVICE explicit Schedule(const Problem& p) {
    constexpr int kTeamM = Tile::kM * (Tile::kShare == Share::kWeights ? Tile::kTeam : 1);
    constexpr int kTeamN = Tile::kN * (Tile::kShare == Share::kTokens ? Tile::kTeam : 1);
    tiles_m = (p.m - 1) / kTeamM + 1;
    tiles_n = (p.n - 1) / kTeamN + 1;
    total = tiles_m * tiles_n;
    group = p.group;
    rank = Tile::kTeam == 1 ? 0 : cluster_rank();
    first = block_x() / Tile::kTeam;
    step = static_cast<int>(gridDim.x) / Tile::kTeam;
    const int steps = (p.k - 1) / Tile::kStepK + 1;
    const bool split = Tile::kShare == Share::kSplitK;
    begin = split ? rank * steps / Tile::kTeam : 0;
    count = (split ? (rank + 1) * steps / Tile::kTeam : steps) - begin;
  }

  QK_DEVICE Position position(int tile) const {
    const int start = tile / (group * tiles_n) * group;
    const int rows = tiles_m - start < group ? tiles_m - start : group;
    const int within = tile - start * tiles_n;
    int m = start + within % rows, n = within / rows;
    if (Tile::kShare == Share::kWeights) m = m * Tile::kTeam + rank;
    if (Tile::kShare == Share::kTokens) n = n * Tile::kTeam + rank;
    return {m * Tile::kM, n * Tile::kN};
  }
};

/// The ring of stages. `Spot` walks it; its lap's parity tells the phases of the barriers apart.
template <class Tile>
struct Ring {
  u32 base;

  struct Spot {
    int stage, parity;
    QK_DEVICE explicit Spot(int step) : stage(step % Tile::kStages), parity(step / Tile::kStages & 1) {}
    QK_DEVICE void advance() {
      if (++stage == Tile::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  QK_DEVICE u32 weights(int stage) const { return base + stage * Tile::kStageBytes; }
  QK_DEVICE u32 tokens(int stage) const { return weights(stage) + Tile::kWeightBytes; }
  QK_DEVICE u32 full(int stage) const { return base + Tile::kBarriers + 8 * stage; }
  QK_DEVICE u32 empty(int stage) const { return full(Tile::kStages + stage); }

  static constexpr bool kMulticast = Tile::kShare == Share::kTokens || Tile::kShare == Share::kWeights;

  QK_DEVICE void init() const {
    constexpr int kReaders = 4 * (Tile::kPingPong ? 1 : Tile::kConsumers) * (kMulticast ? Tile::kTeam : 1);
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), kReaders);
    }
    barrier_init_fence();
  }

  /// Says that the calling warp has read a stage, to every block that may write into it.
  QK_DEVICE void release(int stage, int lane) const {
    if (kMulticast) {
      if (lane < Tile::kTeam) barrier_arrive_at(empty(stage), lane);
    } else if (lane == 0) {
      barrier_arrive(empty(stage));
    }
  }

  /// Copies K step `k` of the tile at `at` into a stage. One thread.
  QK_DEVICE void fill(int stage, int k, Position at, int rank, const TensorMap& x, const TensorMap& w) const {
    constexpr u16 kAll = (1 << Tile::kTeam) - 1;
    barrier_expect(full(stage), Tile::kStageBytes);
    if (Tile::kShare == Share::kWeights) {
      constexpr int kRows = Tile::kN / Tile::kTeam;
      copy_box_to(kAll, weights(stage) + rank * kRows * Tile::kWeightRow, w, full(stage), k * Tile::kWeightRow,
                  at.n + rank * kRows);
    } else {
      copy_box(weights(stage), w, full(stage), k * Tile::kWeightRow, at.n);
    }
    if (Tile::kShare == Share::kTokens) {
      constexpr int kRows = Tile::kM / Tile::kTeam;
      copy_box_to(kAll, tokens(stage) + rank * kRows * Tile::kStepK, x, full(stage), k * Tile::kStepK,
                  at.m + rank * kRows);
    } else {
      copy_box(tokens(stage), x, full(stage), k * Tile::kStepK, at.m);
    }
  }
};

}  // namespace qk
