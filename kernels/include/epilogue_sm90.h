// From a warpgroup's sums to y on Hopper: scaled, biased, rounded, turned through shared memory
// into whole rows.
//
// y = sum * x_scale * w_scale + bias in f32, left to right, rounded once to io, as in epilogue.h;
// an int32 sum is rounded to f32 first. A
// lane holds two neighbouring tokens of an output, y has outputs contiguous: a chunk of tokens is
// transposed on the way into shared memory (stmatrix for 16-bit types) and leaves it 16 bytes at a
// time. A residual comes the same way back: the copy engine brings its chunks to where those of y
// will be, before the K loop as many as there is room for, and lanes change them in place.
#pragma once

#include "epilogue.h"
#include "token_scales_sm90.h"
#include "view_sm90.h"

namespace qk {

/// Two values rounded to a pair of io values, the first one lowest.
template <Io kIo>
QK_DEVICE u32 round_pair(f32 low, f32 high) {
  u32 pair;
  if constexpr (kIo == Io::kF16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  if constexpr (kIo == Io::kBF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <class Tile, Io kIo, bool kPerToken, bool kPerChannel, class TheView = MatrixView<Tile>>
struct HopperEpilogue {
  static constexpr bool kHasPrefix = false;
  static constexpr bool kAdds = Tile::kAdds;
  using Args = EpilogueArgs;
  using View = TheView;
  using Type = IoType<kIo>;
  using Memory = typename Type::Memory;
  static constexpr int kChunks = Tile::kM / Tile::kChunk;

  EpilogueArgs args;
  const TensorMap& map;  // of y
  u8* staged;            // the warpgroup's own: kStaged chunks
  f32* scales;           // likewise, kM
  int thread;            // of the warpgroup
  int barrier;           // the warpgroup's
  View view;
  struct {
    const TensorMap* map;
    u32 arrived;  // barriers of the staged chunks
  } residual = {};

  /// The thread's share of what the warpgroup multiplies and adds, loaded before the K loop hides
  /// the wait.
  struct Factors {
    f32 weight;
    TokenScales<Tile, kPerToken> tokens;
    Memory bias;
  };

  QK_DEVICE Factors load_factors(Position at) const {
    const int output = at.n + thread;
    const bool inside = thread < Tile::kOutputs && output < args.n;
    Factors factors{};
    if (inside) {
      factors.weight = args.w_scale[kPerChannel ? output : 0];
      if (args.bias != nullptr) factors.bias = static_cast<const Memory*>(args.bias)[output];
    }
    factors.tokens.load(args.x_scale, at.m, args.m, thread);
    return factors;
  }

  /// Asks for the residual of the first chunks, once the last tile's have left their buffers.
  QK_DEVICE void ask(Position at) const {
    if (thread != 0) return;
    store_wait<0>();
    QK_UNROLL for (int chunk = 0; chunk < Tile::kStaged; ++chunk)
      fetch(chunk, at);
  }

  template <class Sum>
  QK_DEVICE void run(const Sum (&sums)[Tile::kBlocks][Tile::kM / 2], const Factors& factors,
                     Position at) {
    factors.tokens.share(scales, thread);
    if (thread < Tile::kOutputs) {
      scales[Tile::kM + thread] = factors.weight;
      biases()[thread] = factors.bias;
    }
    const bool whole_vectors = args.n % static_cast<int>(sizeof(Vec16) / sizeof(Memory)) == 0;
    Lane mine;
    QK_UNROLL for (int chunk = 0; chunk < kChunks; ++chunk) {
      u8* const buffer = staged + chunk % Tile::kStaged * Tile::kChunkBytes;
      const int first = chunk * Tile::kChunk;
      if constexpr (kAdds) {
        if (chunk == 0) group_sync(barrier, 128);
        barrier_wait(arrived(chunk), chunk / Tile::kStaged % 2);
      } else if (chunk == 0 || kChunks > Tile::kStaged) {
        // The scales are there, and the buffer's last chunk has left it.
        if (thread == 0) store_wait<(kChunks > Tile::kStaged ? Tile::kStaged - 1 : 0)>();
        group_sync(barrier, 128);
      }
      if (chunk == 0) load_lane_factors(mine);
      Arrived here, next;
      if constexpr (kAhead) load_arrived(here, buffer, 0);
      QK_UNROLL for (int part = 0; part < Tile::kChunk; part += 16) {
        if constexpr (kAhead) {
          if (part + 16 < Tile::kChunk) load_arrived(next, buffer, part + 16);
        } else if constexpr (kAdds) {
          load_arrived(here, buffer, part);
        }
        stage_tokens(sums, mine, here, buffer, first, part);
        if constexpr (kAhead) here = next;
      }
      store_fence();
      group_sync(barrier, 128);
      if (!kAdds && !whole_vectors) {
        write(buffer, at, first);
      } else if (thread == 0) {
        QK_UNROLL for (int box = 0; box < Tile::kBoxes; ++box) {
          store_box(map, shared_address(buffer) + box * Tile::kBoxBytes,
                    view.outputs(at.m, first, at.n + box * Tile::kBoxOutputs));
        }
        store_commit();
        if constexpr (kAdds) {
          if (chunk + 1 >= Tile::kStaged && chunk + 1 < kChunks) {
            store_wait<Tile::kStaged - 1>();
            fetch(chunk + 1, at);
          }
          // An even number of phases in each tile, so that no parity has to be kept.
          if (chunk + Tile::kStaged >= kChunks && chunk / Tile::kStaged % 2 == 0)
            barrier_arrive(arrived(chunk));
        }
      }
    }
  }

  /// Before the block ends: its shared memory has been read.
  QK_DEVICE void finish() const {
    if (thread == 0) store_wait<0>();
  }

 private:
  /// Offset of 16 bytes in a chunk: rows of 128 bytes, their eight vectors swizzled by the row.
  static QK_DEVICE int staged_offset(int row, int byte) {
    return byte / 128 * Tile::kBoxBytes + row * 128 + ((byte % 128 / 16 ^ row % 8) * 16);
  }

  // Where registers allow it, the residual of the next sixteen tokens is loaded while that of these
  // is added.
  static constexpr bool kAhead = kAdds && Tile::kBlocks == 1;

  /// What the lane's outputs are multiplied with, and what is added.
  struct Lane {
    f32 weight[Tile::kBlocks][2], bias[Tile::kBlocks][2];
  };

  /// What the lane's values of sixteen tokens are added to.
  struct Arrived {
    u32 words[kAdds ? Tile::kBlocks : 1][2 * sizeof(Memory)];
    QK_DEVICE f32 value(int block, int i) const {
      if constexpr (sizeof(Memory) == 2) {
        return Type::widen(static_cast<Memory>(words[block][i / 2] >> 16 * (i % 2)));
      } else {
        return bits_float(words[block][i]);
      }
    }
  };

  QK_DEVICE Memory* biases() const {
    return reinterpret_cast<Memory*>(scales + Tile::kM + Tile::kOutputs);
  }
  /// Asks for a chunk of the residual. One thread.
  QK_DEVICE void fetch(int chunk, Position at) const {
    const u32 target = shared_address(staged + chunk % Tile::kStaged * Tile::kChunkBytes);
    barrier_expect(arrived(chunk), Tile::kChunkBytes);
    QK_UNROLL for (int box = 0; box < Tile::kBoxes; ++box) {
      copy_box(target + box * Tile::kBoxBytes, *residual.map, arrived(chunk),
               view.outputs(at.m, chunk * Tile::kChunk, at.n + box * Tile::kBoxOutputs));
    }
  }
  QK_DEVICE u32 arrived(int chunk) const { return residual.arrived + 8 * (chunk % Tile::kStaged); }

  QK_DEVICE void load_lane_factors(Lane& mine) const {
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      QK_UNROLL for (int half = 0; half < 2; ++half) {
        const int output = 64 * block + thread / 32 * 16 + thread % 32 / 4 + 8 * half;
        mine.weight[block][half] = scales[Tile::kM + output];
        mine.bias[block][half] = Type::widen(biases()[output]);
      }
    }
  }

  /// Sixteen tokens from `first + part` into rows part .. of a chunk.
  template <class Sum>
  QK_DEVICE void stage_tokens(const Sum (&sums)[Tile::kBlocks][Tile::kM / 2], const Lane& mine,
                              const Arrived& arrived, u8* buffer, int first, int part) const {
    const int lane = thread % 32, warp = thread / 32;
    f32 token[2][2];
    QK_UNROLL for (int i = 0; i < 4; ++i) {
      token[i / 2][i % 2] = scales[first + part + 8 * (i / 2) + 2 * (lane % 4) + i % 2];
    }
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      f32 values[2][2][2];  // eight tokens, half of the outputs, neighbouring tokens
      QK_UNROLL for (int i = 0; i < 8; ++i) {
        const int eight = i / 4, half = i / 2 % 2;
        const f32 sum =
            static_cast<f32>(sums[block][(first + part) / 2 + 4 * eight + 2 * half + i % 2]);
        values[eight][half][i % 2] = add_rounded(
            sum * token[eight][i % 2] * mine.weight[block][half], mine.bias[block][half]);
      }
      if constexpr (kAdds) {
        QK_UNROLL for (int i = 0; i < 8; ++i) {
          f32& value = values[i / 4][i / 2 % 2][i % 2];
          value = add_rounded(value, arrived.value(block, i));
        }
      }
      if constexpr (sizeof(Memory) == 2) {
        u32 words[4];
        QK_UNROLL for (int i = 0; i < 4; ++i) {
          words[i] = round_pair<kIo>(values[i / 2][i % 2][0], values[i / 2][i % 2][1]);
        }
        const int row = part + 8 * (lane / 16) + lane % 8,
                  column = 64 * block + 16 * warp + 8 * (lane / 8 % 2);
        store_transposed(shared_address(buffer + staged_offset(row, 2 * column)), words);
      } else {
        QK_UNROLL for (int i = 0; i < 8; ++i) {
          const int row = part + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
          const int column = 64 * block + 16 * warp + 8 * (i / 2 % 2) + lane / 4;
          store(buffer + staged_offset(row, 4 * column) + 4 * column % 16,
                values[i / 4][i / 2 % 2][i % 2]);
        }
      }
    }
  }

  /// Loads the residual from the places where `stage_tokens` will put the sum.
  QK_DEVICE void load_arrived(Arrived& arrived, const u8* buffer, int part) const {
    const int lane = thread % 32, warp = thread / 32;
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      if constexpr (sizeof(Memory) == 2) {
        const int row = part + 8 * (lane / 16) + lane % 8,
                  column = 64 * block + 16 * warp + 8 * (lane / 8 % 2);
        load_transposed(arrived.words[block],
                        shared_address(buffer + staged_offset(row, 2 * column)));
      } else {
        QK_UNROLL for (int i = 0; i < 8; ++i) {
          const int row = part + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
          const int column = 64 * block + 16 * warp + 8 * (i / 2 % 2) + lane / 4;
          arrived.words[block][i] =
              load<u32>(buffer + staged_offset(row, 4 * column) + 4 * column % 16);
        }
      }
    }
  }

  QK_DEVICE void write(const u8* buffer, Position at, int first) const {
    QK_NO_UNROLL for (int i = thread; i < Tile::kChunk * Tile::kOutputs; i += 128) {
      const int row = i / Tile::kOutputs, column = i % Tile::kOutputs;
      const int token = at.m + first + row, output = at.n + column,
                byte = column * static_cast<int>(sizeof(Memory));
      if (token >= args.m || output >= args.n) continue;
      static_cast<Memory*>(args.y)[static_cast<i64>(token) * args.n + output] =
          load<Memory>(buffer + staged_offset(row, byte) + byte % 16);
    }
  }
};

}  // namespace qk
