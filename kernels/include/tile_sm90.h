// Tiles, shared memory and the order of work of the Hopper kernels.
//
// A block computes tiles of kN outputs x kM tokens, one after the other (persistent). One thread of
// the last warpgroup keeps a ring of kStages K steps full; the warpgroups before it multiply. They
// share a tile (kPingPong false: warpgroup c has outputs 64 kBlocks c ..) or take tiles in turns
// (true), so that one's epilogue runs under the other's matrix instructions. Or kTeam blocks (a
// cluster) have one tile, each a part of K; their sums meet in block 0.
#pragma once

#include "mma_sm90.h"
#include "weights_axis.h"

namespace qk {

struct Problem {
  int m, n, k;
  int group;  // token tiles that are walked together, so that they meet in L2
};

/// Blocks: groups of 64 outputs of a warpgroup. Staged: chunks of Chunk tokens that wait in shared
/// memory for the copy engine to write them out; with all of them, the next tile starts while the
/// last one is written. Large chunks take fewer barriers, small ones less memory and start to leave
/// earlier. Gated: half of the rows of w gate the other half, and y has a column for two of them
/// (gated_sm90.h). Adds: y is added to a residual, whose chunks arrive where those of y leave.
template <int N, int M, int Blocks, bool PingPong, int Team, int Staged, WeightKind W,
          int OutputBytes, int Chunk, bool Gated = false, bool Adds = QK_RESIDUAL == 1>
struct HopperTile {
  static constexpr int kN = N, kM = M, kBlocks = Blocks, kTeam = Team;
  static constexpr bool kPingPong = PingPong, kGated = Gated;
  static constexpr bool kAdds = Adds;
  static constexpr bool kSparse = W == WeightKind::kSparse, kInt4 = W == WeightKind::kInt4;
  static constexpr bool kHasMetadata = kSparse || kInt4;
  static constexpr int kPerMeta = kSparse ? 8 : 32;  // weights of a row for a byte of metadata
  static constexpr int kConsumers = PingPong ? 2 : N / (64 * Blocks);
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kOutputs = 64 * Blocks;  // of a warpgroup
  static constexpr int kColumns = Gated ? N / 2 : N,
                       kOwnColumns = Gated ? 64 : kOutputs;  // of y: tile, warpgroup
  static constexpr int kBlockStep =
      Gated ? N / 2 : 64;             // rows from one block of a warpgroup to the next
  static constexpr int kStepK = 128;  // K of a stage: a swizzled row of token codes
  static constexpr int kWeightRow = kHasMetadata ? kStepK / 2 : kStepK;
  static constexpr int kWeightBytes = N * kWeightRow, kTokenBytes = M * kStepK;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  // A warpgroup's staged outputs: boxes of kChunk rows of 128 bytes, swizzled over 8 rows.
  static constexpr int kBoxOutputs = 128 / OutputBytes, kBoxes = kOutputs / kBoxOutputs;
  static constexpr int kChunk = Chunk;
  static constexpr int kBoxBytes = kChunk * 128, kChunkBytes = kBoxes * kBoxBytes;
  static constexpr int kStaged = Staged < M / kChunk ? Staged : M / kChunk;
  static constexpr bool kCodes = OutputBytes == 1;  // codes of heads: codes_sm90.h
  static constexpr int kStagedBytes = Gated    ? M * kOwnColumns
                                      : kCodes ? kOutputs * (M + 16)
                                               : kStaged * kChunkBytes;
  // Biases: of codes in float32, else as outputs are.
  static constexpr int kBiasBytes = kCodes ? 4 : OutputBytes;
  static constexpr int kScaleBytes = 4 * (M + kOutputs) + kBiasBytes * kOutputs;
  static constexpr int kLimit = 227 * 1024;  // shared memory of a block
  static constexpr int kTailBytes = kConsumers * (kStagedBytes + kScaleBytes);
  static constexpr int kFullSets = PingPong ? 2 : 1;
  static constexpr int kFit = (kLimit - kTailBytes - 512) / kStageBytes;
  static constexpr int kStages = kFit < 16 ? kFit : 16;
  static constexpr int kScales = kStages * kStageBytes + kConsumers * kStagedBytes;
  static constexpr int kBarriers =
      kScales + kConsumers * kScaleBytes;  // full[kFullSets][kStages], empty[kStages]
  static constexpr int kAddedBarriers =
      kBarriers + 8 * (kFullSets + 1) * kStages;  // [kConsumers][kStaged], of residuals
  static constexpr int kSharedBytes = kAddedBarriers + (kAdds ? 8 * kConsumers * kStaged : 0);
  static_assert(PingPong ? N == 64 * Blocks : N % (64 * Blocks) == 0,
                "warpgroups cut the tile into 64-output blocks");
  static_assert(M % Chunk == 0 && Chunk % 16 == 0, "chunks are whole, and multiples of 16 tokens");
  static_assert(kConsumers <= 3, "registers for the sums of three warpgroups");
  static_assert(M % 16 == 0 && kStageBytes % 1024 == 0 && kBoxBytes % 1024 == 0,
                "swizzled boxes start on 1024 bytes");
  static_assert(kStages >= 2, "the ring needs two stages");
  static_assert(!Gated || (Blocks == 2 && Team == 1 && M % 32 == 0),
                "a warpgroup has 64 outputs and their gates");
  static_assert((Team - 1) * kConsumers * Blocks * M * 256 <= kStages * kStageBytes,
                "the sums of a team meet in the ring");
};

struct Position {
  int m, n;  // first token and output
};

/// Which tiles this block computes, and which K steps of them.
template <class Tile>
struct Schedule {
  int tiles_m, tiles_n;
  int first, step, total, group;
  int rank;
  int begin, count;  // K steps

  QK_DEVICE explicit Schedule(const Problem& p) {
    tiles_m = (p.m - 1) / Tile::kM + 1;
    tiles_n = (p.n - 1) / Tile::kColumns + 1;
    total = tiles_m * tiles_n;
    group = p.group;
    rank = Tile::kTeam == 1 ? 0 : cluster_rank();
    first = block_x() / Tile::kTeam;
    step = static_cast<int>(gridDim.x) / Tile::kTeam;
    const int steps = (p.k - 1) / Tile::kStepK + 1;
    begin = rank * steps / Tile::kTeam;
    count = (rank + 1) * steps / Tile::kTeam - begin;
  }

  QK_DEVICE Position position(int tile) const {
    const int start = tile / (group * tiles_n) * group;
    const int rows = tiles_m - start < group ? tiles_m - start : group;
    const int within = tile - start * tiles_n;
    return {(start + within % rows) * Tile::kM, within / rows * Tile::kColumns};
  }
};

/// The ring of stages. The copying thread meets every stage in order. A warpgroup that takes tiles
/// in turns skips stages, so it has full barriers of its own and counts their phases: on a shared
/// one it could take the end of a phase that it never waited for as its own.
template <class Tile>
struct Ring {
  u32 base;

  QK_DEVICE u32 weights(int stage) const { return base + stage * Tile::kStageBytes; }
  QK_DEVICE u32 tokens(int stage) const { return weights(stage) + Tile::kWeightBytes; }
  QK_DEVICE u32 full(int set, int stage) const {
    return base + Tile::kBarriers + 8 * (Tile::kFullSets > 1 ? set * Tile::kStages + stage : stage);
  }
  QK_DEVICE u32 empty(int stage) const {
    return base + Tile::kBarriers + 8 * (Tile::kFullSets * Tile::kStages + stage);
  }

  /// Of the residual in the buffers of a warpgroup.
  QK_DEVICE u32 added(int group) const {
    return base + Tile::kAddedBarriers + 8 * group * Tile::kStaged;
  }

  QK_DEVICE void init() const {
    constexpr int kReaders = 4 * (Tile::kPingPong ? 1 : Tile::kConsumers);
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      for (int set = 0; set < Tile::kFullSets; ++set) barrier_init(full(set, stage), 1);
      barrier_init(empty(stage), kReaders);
    }
    if constexpr (Tile::kAdds) {
      for (int i = 0; i < Tile::kConsumers * Tile::kStaged; ++i) barrier_init(added(0) + 8 * i, 1);
    }
    barrier_init_fence();
  }

  /// Says that the calling warp has read a stage.
  QK_DEVICE void release(int stage, int lane) const {
    if (lane == 0) barrier_arrive(empty(stage));
  }

  /// Copies K step `step` of the tile at `at` into a stage. One thread.
  template <class View>
  QK_DEVICE void fill(int stage, u32 ready, int step, Position at, const View& view,
                      const TensorMap& x, const TensorMap& w) const {
    barrier_expect(ready, Tile::kStageBytes);
    copy_box(weights(stage), view.map_of(w, at.n), ready, view.weights(step, at.n));
    copy_box(tokens(stage), x, ready, view.tokens(step, at.m));
  }
};

/// Where a reader is in the ring, and the parity of the phase that it waits for at every stage.
template <class Tile>
struct Reader {
  int stage = 0;
  u32 parities = 0;

  QK_DEVICE static int after(int stage) { return stage + 1 == Tile::kStages ? 0 : stage + 1; }
  /// Waits for the stage and goes on to the next one.
  QK_DEVICE int take(const Ring<Tile>& ring, int set) {
    const int taken = stage;
    barrier_wait(ring.full(set, taken), parities >> taken & 1);
    parities ^= 1u << taken;
    stage = after(taken);
    return taken;
  }
  QK_DEVICE void skip(int stages) { stage = (stage + stages) % Tile::kStages; }
};

}  // namespace qk
