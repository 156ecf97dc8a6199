// One emulated matrix operation: all instructions of a wave's register tile over one chunk of K.
//
// Registers of 32 lanes -> logical matrices through the instruction's own tables (isa.h) ->
// products in the order of the instruction's slots -> accumulators back into the lanes' registers.
#pragma once

#include "config.h"
#include "isa.h"
#include "number.h"
#include "simd.h"

namespace qk {
namespace host {

/// What a lane hands in: its accumulators [kBlocksN][kBlocksM][8] and the registers of its
/// fragments.
struct LaneOperands {
  void* acc;
  const u8* a;
  const u8* b;
};

template <class Layout, class Isa, Number kWeights, Number kTokens, class Sum, int kBlocksN,
          int kBlocksM>
struct Matrix {
  static constexpr int kN = 16 * kBlocksN, kM = 16 * kBlocksM;
  static constexpr int kSteps = Layout::kSteps;        // instructions along K
  static constexpr int kParts = 16 / Isa::kColumns;    // instructions along a block's 16 tokens
  static constexpr int kDepth = kSteps * Isa::kDepth;  // K slots of the operation
  static constexpr int kWordsA = sizeof(typename Layout::A) / 4,
                       kWordsB = sizeof(typename Layout::B) / 4;
  static constexpr int kMetaWord = kSteps * Isa::kRegsA;
  static_assert(kWordsB == kParts * kSteps * Isa::kRegsB,
                "B fragments are the registers of every instruction");
  static_assert(kWordsA >= kSteps * Isa::kRegsA + Isa::kSparse,
                "A fragments: registers of every instruction, then metadata");

  struct Lanes {
    Sum* acc[kWave];
    const u8* a[kWave];
    const u8* b[kWave];
  };

  static constexpr int kBytes = Isa::kBytes;
  static constexpr int kKept =
      Isa::kSparse ? Isa::kDepth / 2 : Isa::kDepth;  // elements of a row of A
  static constexpr int kSlots = kSteps * kKept;
  static_assert(bytes_of(kWeights) == kBytes && bytes_of(kTokens) == kBytes,
                "operands have the instruction's width");

  /// Elements that lie side by side in one lane wherever a run of that length starts.
  static constexpr int run_length(Location (*location)(int, int), int rows, int depth) {
    int length = 16 / kBytes;
    for (int row = 0; row < rows; ++row) {
      for (int k = 0; k < depth; ++k) {
        while (location(row, k).lane != location(row, k / length * length).lane ||
               location(row, k).at != location(row, k / length * length).at + k % length * kBytes) {
          length /= 2;
        }
      }
    }
    return length;
  }
  static constexpr int kRunA = run_length(&Isa::a, 16, kKept);
  static constexpr int kRunB = run_length(&Isa::b, Isa::kColumns, Isa::kDepth);

  using ImageA = u8[kSlots][kN * kBytes];
  using ImageB = u8[kM][kDepth * kBytes];

  /// image[slot][row]: A transposed, so that the multiply loop reads vectors of outputs.
  static void gather_a(const Lanes& lanes, ImageA& image) {
    for (int block = 0; block < kBlocksN; ++block) {
      for (int slot = 0; slot < kSlots; slot += kRunA) {
        const int base = 4 * (block * kWordsA + slot / kKept * Isa::kRegsA);
        const u8* rows[16];
        for (int row = 0; row < 16; ++row) {
          const Location location = Isa::a(row, slot % kKept);
          rows[row] = lanes.a[location.lane] + base + location.at;
        }
        transpose_rows<kBytes, kRunA>(rows, &image[slot][16 * block * kBytes], sizeof image[0]);
      }
    }
  }

  static void gather_b(const Lanes& lanes, ImageB& image) {
    for (int block = 0; block < kBlocksM; ++block) {
      for (int column = 0; column < 16; ++column) {
        for (int k = 0; k < kDepth; k += kRunB) {
          const int step = column / Isa::kColumns * kSteps + k / Isa::kDepth;
          const Location location = Isa::b(column % Isa::kColumns, k % Isa::kDepth);
          const u8* const from =
              lanes.b[location.lane] + 4 * (block * kWordsB + step * Isa::kRegsB) + location.at;
          __builtin_memcpy(&image[16 * block + column][k * kBytes], from, kRunB * kBytes);
        }
      }
    }
  }

  /// Spreads the kept values over groups of four slots. Equal positions, which no valid file has,
  /// add up.
  static void expand(const Lanes& lanes, const f32 (*kept)[kN], f32 (*weights)[kN]) {
    u32 words[kN];
    for (int step = 0; step < kSteps; ++step) {
      for (int group = 0; group < Isa::kDepth / 4; ++group) {
        if (group == 0 || Isa::index(0, group).lane != Isa::index(0, group - 1).lane) {
          for (int n = 0; n < kN; ++n) {
            words[n] = load<u32>(lanes.a[Isa::index(n % 16, group).lane] +
                                 4 * (n / 16 * kWordsA + kMetaWord));
          }
        }
        const int shift = step * Isa::kIndexBits + Isa::index(0, group).at,
                  slot = step * kKept + 2 * group;
        for (u32 position = 0; position < 4; ++position) {
          f32* const row = weights[2 * slot + position];
          for (int n = 0; n < kN; ++n) {
            const u32 nibble = words[n] >> shift;
            const f32 first = (nibble & 3u) == position ? kept[slot][n] : 0.0f;
            row[n] = first + ((nibble >> 2 & 3u) == position ? kept[slot + 1][n] : 0.0f);
          }
        }
      }
    }
  }

  /// The tables read one half of the wave only; the other must agree, or the hardware would see
  /// something else.
  static bool halves_agree(const Lanes& lanes) {
    for (int lane = 0; lane < kWave / 2; ++lane) {
      if (__builtin_memcmp(lanes.a[lane], lanes.a[lane + kWave / 2], 4 * kBlocksN * kWordsA) != 0)
        return false;
      if (__builtin_memcmp(lanes.b[lane], lanes.b[lane + kWave / 2], 4 * kBlocksM * kWordsB) != 0)
        return false;
    }
    return true;
  }

  /// Address of D[n][m] in its lane's accumulators.
  static Sum* accumulator(const Lanes& lanes, int n, int m) {
    const Location location = Isa::d(n % 16, m % Isa::kColumns);
    const int part = m % 16 / Isa::kColumns;
    return lanes.acc[location.lane] + ((n / 16) * kBlocksM + m / 16) * 8 + part * Isa::kRegsD +
           location.at;
  }

  /// Whether a lane holds D in runs of eight rows, which the multiply loop can then update in
  /// location.
  static constexpr bool rows_in_runs() {
    for (int row = 0; row < 16; ++row) {
      if (Isa::d(row, 0).lane != Isa::d(row / 8 * 8, 0).lane || Isa::d(row, 0).at != row % 8)
        return false;
    }
    return true;
  }

  // Integers: one operation's sums are exact in f32, but what accumulates them is int32.
  static constexpr bool kExact = kTokens == Number::kInt8;
  static_assert(!kExact || kDepth * 128 * 128 <= 1 << 24, "f32 holds an operation's sums exactly");
  static constexpr bool kInPlace = rows_in_runs() && !kExact;

  /// sums(m, first run, vector index): 4 tokens x kColumns vectors at a time, slots in ascending
  /// order.
  template <class Runs>
  static void multiply_rows(const f32 (*weights)[kN], const f32 (*tokens)[kDepth], int m, int n,
                            const Runs& runs) {
    constexpr int kVectors =
        kN / Vector::kLanes < Vector::kColumns ? kN / Vector::kLanes : Vector::kColumns;
    Vector sums[4][kVectors];
    for (int t = 0; t < 4; ++t) {
      for (int c = 0; c < kVectors; ++c) sums[t][c] = runs.load(m + t, n + c * Vector::kLanes);
    }
    for (int k = 0; k < kDepth; ++k) {
      Vector row[kVectors];
      for (int c = 0; c < kVectors; ++c) row[c] = load_vector(&weights[k][n + c * Vector::kLanes]);
      for (int t = 0; t < 4; ++t) {
        for (int c = 0; c < kVectors; ++c)
          sums[t][c] = multiply_add(tokens[m + t][k], row[c], sums[t][c]);
      }
    }
    for (int t = 0; t < 4; ++t) {
      for (int c = 0; c < kVectors; ++c) runs.store(m + t, n + c * Vector::kLanes, sums[t][c]);
    }
  }

  template <class Runs>
  static void multiply(const f32 (*weights)[kN], const f32 (*tokens)[kDepth], const Runs& runs) {
    constexpr int kWidth =
        kN < Vector::kLanes * Vector::kColumns ? kN : Vector::kLanes * Vector::kColumns;
    static_assert(kN % kWidth == 0, "the multiply loop covers the outputs in whole vectors");
    for (int n = 0; n < kN; n += kWidth) {
      for (int m = 0; m < kM; m += 4) multiply_rows(weights, tokens, m, n, runs);
    }
  }

  struct InPlace {
    const Lanes& lanes;
    Vector load(int m, int n) const {
      return load_runs([&](int run) { return accumulator(lanes, n + 8 * run, m); }, 0);
    }
    void store(int m, int n, Vector sum) const {
      store_runs([&](int run) { return accumulator(lanes, n + 8 * run, m); }, 0, sum);
    }
  };
  struct Copied {
    f32 (*sums)[kN];
    Vector load(int m, int n) const { return load_vector(&sums[m][n]); }
    void store(int m, int n, Vector sum) const { store_vector(&sums[m][n], sum); }
  };

  struct alignas(64) Work {
    f32 weights[kDepth][kN], tokens[kM][kDepth];
    f32 kept[Isa::kSparse ? kSlots : 1][kN];
    f32 sums[kInPlace ? 1 : kM][kN];
    ImageA image_a;
    ImageB image_b;
  };
  static_assert(sizeof(Work) <= kWorkspaceBytes, "the logical matrices need workspace");

  static void run(void* const* payloads) {
    Lanes lanes;
    for (int lane = 0; lane < kWave; ++lane) {
      const LaneOperands& operands = *static_cast<const LaneOperands*>(payloads[lane]);
      lanes.acc[lane] = static_cast<Sum*>(operands.acc);
      lanes.a[lane] = operands.a;
      lanes.b[lane] = operands.b;
    }
    if constexpr (Isa::kMirrored) {
      if (!halves_agree(lanes)) fail("the halves of the wave hold different fragments");
    }
    auto& work = *reinterpret_cast<Work*>(workspace());
    gather_a(lanes, work.image_a);
    gather_b(lanes, work.image_b);
    decode_run<kTokens, kM * kDepth>(work.image_b[0], work.tokens[0]);
    if constexpr (Isa::kSparse) {
      decode_run<kWeights, kN * kSlots>(work.image_a[0], work.kept[0]);
      expand(lanes, work.kept, work.weights);
    } else {
      decode_run<kWeights, kN * kSlots>(work.image_a[0], work.weights[0]);
    }
    if constexpr (kInPlace) {
      multiply(work.weights, work.tokens, InPlace{lanes});
    } else {
      for (int m = 0; m < kM; ++m) {
        for (int n = 0; n < kN; ++n) work.sums[m][n] = kExact ? 0.0f : *accumulator(lanes, n, m);
      }
      multiply(work.weights, work.tokens, Copied{work.sums});
      for (int m = 0; m < kM; ++m) {
        for (int n = 0; n < kN; ++n) {
          const Sum sum = static_cast<Sum>(work.sums[m][n]);
          *accumulator(lanes, n, m) = kExact ? *accumulator(lanes, n, m) + sum : sum;
        }
      }
    }
  }
};

}  // namespace host
}  // namespace qk
