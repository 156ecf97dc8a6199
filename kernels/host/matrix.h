// One emulated matrix operation: all instructions of a wave's register tile over one chunk of K.
//
// Registers of 32 lanes -> logical matrices through the instruction's own tables (isa.h) -> products in the order
// of the instruction's slots -> accumulators back into the lanes' registers.
#pragma once

#include "config.h"
#include "isa.h"
#include "number.h"
#include "simd.h"

namespace qk {
namespace host {

/// What a lane deposits: its accumulators [kBlocksN][kBlocksM][8] and the words of its fragments.
struct LaneOperands {
  f32* acc;
  const u32* a;
  const u32* b;
};

template <class Layout, class Isa, Number kWeights, Number kTokens, int kBlocksN, int kBlocksM>
struct Matrix {
  static constexpr int kN = 16 * kBlocksN, kM = 16 * kBlocksM;
  static constexpr int kSteps = Layout::kSteps;         // instructions along K
  static constexpr int kParts = 16 / Isa::kColumns;     // instructions along a block's 16 tokens
  static constexpr int kDepth = kSteps * Isa::kDepth;   // K slots of the operation
  static constexpr int kWordsA = sizeof(typename Layout::A) / 4, kWordsB = sizeof(typename Layout::B) / 4;
  static_assert(kWordsB == kParts * kSteps * Isa::kRegsB, "B fragments are the registers of every instruction");
  static_assert(kWordsA == kSteps * Isa::kRegsA + Isa::kSparse, "A fragments may carry one word of metadata");
  static_assert((kN + kM) * kDepth * 4 + kN * kM * 4 <= kWorkspaceBytes, "the logical matrices need workspace");

  struct Lanes {
    f32* acc[kWave];
    const u8* a[kWave];
    const u8* b[kWave];
  };

  static constexpr int kRegsStepA = 4 * Isa::kRegsA, kRegsStepB = 4 * Isa::kRegsB;  // bytes

  /// weights[slot][row]: transposed, so that the multiply loop reads vectors of outputs.
  static void decode_dense_a(const Lanes& lanes, f32 (*weights)[kN]) {
    for (int block = 0; block < kBlocksN; ++block) {
      for (int step = 0; step < kSteps; ++step) {
        const int base = block * kWordsA * 4 + step * kRegsStepA;
        for (int row = 0; row < 16; ++row) {
          for (int k = 0; k < Isa::kDepth; ++k) {
            const Place place = Isa::a(row, k);
            weights[step * Isa::kDepth + k][16 * block + row] = decode<kWeights>(lanes.a[place.lane] + base + place.at);
          }
        }
      }
    }
  }

  static void decode_sparse_a(const Lanes& lanes, f32 (*weights)[kN]) {
    for (int k = 0; k < kDepth; ++k) {
      for (int row = 0; row < kN; ++row) weights[k][row] = 0.0f;
    }
    for (int block = 0; block < kBlocksN; ++block) {
      for (int step = 0; step < kSteps; ++step) {
        const int base = block * kWordsA * 4 + step * kRegsStepA, word = (block + 1) * kWordsA - 1;
        for (int row = 0; row < 16; ++row) {
          for (int group = 0; group < Isa::kDepth / 4; ++group) {
            const Place index = Isa::index(row, group);
            const u32 bits = load<u32>(lanes.a[index.lane] + 4 * word) >> (step * Isa::kIndexBits + index.at);
            const int k = step * Isa::kDepth + 4 * group;
            const Place first = Isa::a(row, 2 * group), second = Isa::a(row, 2 * group + 1);
            weights[k + (bits & 3)][16 * block + row] += decode<kWeights>(lanes.a[first.lane] + base + first.at);
            weights[k + (bits >> 2 & 3)][16 * block + row] += decode<kWeights>(lanes.a[second.lane] + base + second.at);
          }
        }
      }
    }
  }

  static void decode_b(const Lanes& lanes, f32 (*tokens)[kDepth]) {
    for (int block = 0; block < kBlocksM; ++block) {
      for (int part = 0; part < kParts; ++part) {
        for (int step = 0; step < kSteps; ++step) {
          const int base = block * kWordsB * 4 + (part * kSteps + step) * kRegsStepB;
          for (int column = 0; column < Isa::kColumns; ++column) {
            f32* const token = tokens[16 * block + Isa::kColumns * part + column] + step * Isa::kDepth;
            for (int k = 0; k < Isa::kDepth; ++k) {
              const Place place = Isa::b(column, k);
              token[k] = decode<kTokens>(lanes.b[place.lane] + base + place.at);
            }
          }
        }
      }
    }
  }

  /// Address of D[n][m] in its lane's accumulators.
  static f32* accumulator(const Lanes& lanes, int n, int m) {
    const Place place = Isa::d(n % 16, m % Isa::kColumns);
    const int part = m % 16 / Isa::kColumns;
    return lanes.acc[place.lane] + ((n / 16) * kBlocksM + m / 16) * 8 + part * Isa::kRegsD + place.at;
  }

  /// Whether a lane holds D in runs of eight rows, which the multiply loop can then update in place.
  static constexpr bool rows_in_runs() {
    for (int row = 0; row < 16; ++row) {
      if (Isa::d(row, 0).lane != Isa::d(row / 8 * 8, 0).lane || Isa::d(row, 0).at != row % 8) return false;
    }
    return true;
  }

  /// sums(m, first run, vector index): 4 tokens x kColumns vectors at a time, slots in ascending order.
  template <class Runs>
  static void multiply_rows(const f32 (*weights)[kN], const f32 (*tokens)[kDepth], int m, int n, const Runs& runs) {
    constexpr int kVectors = kN / Vector::kLanes < Vector::kColumns ? kN / Vector::kLanes : Vector::kColumns;
    Vector sums[4][kVectors];
    for (int t = 0; t < 4; ++t) {
      for (int c = 0; c < kVectors; ++c) sums[t][c] = runs.load(m + t, n + c * Vector::kLanes);
    }
    for (int k = 0; k < kDepth; ++k) {
      Vector row[kVectors];
      for (int c = 0; c < kVectors; ++c) row[c] = load_vector(&weights[k][n + c * Vector::kLanes]);
      for (int t = 0; t < 4; ++t) {
        for (int c = 0; c < kVectors; ++c) sums[t][c] = multiply_add(tokens[m + t][k], row[c], sums[t][c]);
      }
    }
    for (int t = 0; t < 4; ++t) {
      for (int c = 0; c < kVectors; ++c) runs.store(m + t, n + c * Vector::kLanes, sums[t][c]);
    }
  }

  template <class Runs>
  static void multiply(const f32 (*weights)[kN], const f32 (*tokens)[kDepth], const Runs& runs) {
    constexpr int kWidth = kN < Vector::kLanes * Vector::kColumns ? kN : Vector::kLanes * Vector::kColumns;
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

  static void run(void* const* payloads) {
    Lanes lanes;
    for (int lane = 0; lane < kWave; ++lane) {
      const LaneOperands& operands = *static_cast<const LaneOperands*>(payloads[lane]);
      lanes.acc[lane] = operands.acc;
      lanes.a[lane] = reinterpret_cast<const u8*>(operands.a);
      lanes.b[lane] = reinterpret_cast<const u8*>(operands.b);
    }
    auto* const weights = reinterpret_cast<f32(*)[kN]>(workspace());
    auto* const tokens = reinterpret_cast<f32(*)[kDepth]>(workspace() + sizeof(f32) * kDepth * kN);
    if constexpr (Isa::kSparse) {
      decode_sparse_a(lanes, weights);
    } else {
      decode_dense_a(lanes, weights);
    }
    decode_b(lanes, tokens);
    if constexpr (rows_in_runs()) {
      multiply(weights, tokens, InPlace{lanes});
    } else {
      auto* const sums = reinterpret_cast<f32(*)[kN]>(workspace() + sizeof(f32) * kDepth * (kN + kM));
      for (int m = 0; m < kM; ++m) {
        for (int n = 0; n < kN; ++n) sums[m][n] = *accumulator(lanes, n, m);
      }
      multiply(weights, tokens, Copied{sums});
      for (int m = 0; m < kM; ++m) {
        for (int n = 0; n < kN; ++n) *accumulator(lanes, n, m) = sums[m][n];
      }
    }
  }
};

}  // namespace host
}  // namespace qk
