// What generated row kernels are made of: places of rows, numbers of a lane, and sums over a row.
//
// A kernel computes `kRows` rows of `kColumns` numbers, or, where nothing is reduced, one row that
// all blocks share. A block has kThreads threads, and kLanes of them a row: lane l takes the runs
// of kRun columns at (step * kLanes + l) * kRun, step = 0 ... kSteps - 1. Lanes without a run read
// a first one and write none.
#pragma once

#include "activation.h"
#include "vector_io.h"

namespace qk {
namespace rows {

QK_DEVICE f32 at_least(f32 a, f32 b) { return a != a || a > b ? a : b; }
QK_DEVICE f32 at_most(f32 a, f32 b) { return a != a || a < b ? a : b; }
QK_DEVICE f32 magnitude(f32 a) { return bits_float(float_bits(a) & 0x7fffffffu); }
QK_DEVICE f32 exponential(f32 a) {
  constexpr f32 kLog2E = 1.4426950408889634f;
  return approx_exp2(a * kLog2E);
}
QK_DEVICE f32 sigmoid(f32 a) { return approx_reciprocal(1.0f + exponential(-a)); }
QK_DEVICE f32 tangent(f32 a) { return 2.0f * sigmoid(2.0f * a) - 1.0f; }

/// Some values that lie side by side, moved at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T v[kCount];
};

/// kCount elements from `at` on, which is a multiple of kCount.
template <Io kIo, int kCount>
QK_DEVICE void read(f32 (&values)[kCount], const void* from, i64 at) {
  using Type = IoType<kIo>;
  using Memory = typename Type::Memory;
  constexpr int kMost = 16 / static_cast<int>(sizeof(Memory));
  constexpr int kPart = kCount < kMost ? kCount : kMost;
  QK_UNROLL for (int first = 0; first < kCount; first += kPart) {
    const auto part = load<Pack<Memory, kPart>>(static_cast<const Memory*>(from) + at + first);
    QK_UNROLL for (int e = 0; e < kPart; ++e)
      values[first + e] = Type::widen(part.v[e]);
  }
}

template <Io kIo>
QK_DEVICE f32 read_one(const void* from, i64 at) {
  using Type = IoType<kIo>;
  return Type::widen(
      load<typename Type::Memory>(static_cast<const typename Type::Memory*>(from) + at));
}

template <Io kIo, int kCount>
QK_DEVICE void write(const f32 (&values)[kCount], void* to, i64 at) {
  using Type = IoType<kIo>;
  using Memory = typename Type::Memory;
  constexpr int kMost = 16 / static_cast<int>(sizeof(Memory));
  constexpr int kPart = kCount < kMost ? kCount : kMost;
  QK_UNROLL for (int first = 0; first < kCount; first += kPart) {
    Pack<Memory, kPart> part;
    QK_UNROLL for (int e = 0; e < kPart; ++e)
      part.v[e] = Type::round(values[first + e]);
    store(static_cast<Memory*>(to) + at + first, part);
  }
}

/// Over one lane's numbers.
template <int kCount>
QK_DEVICE f32 sum_of(const f32 (&values)[kCount]) {
  f32 sums[kCount];
  QK_UNROLL for (int e = 0; e < kCount; ++e)
    sums[e] = values[e];
  QK_UNROLL for (int apart = kCount / 2; apart > 0; apart /= 2) {
    QK_UNROLL for (int e = 0; e < apart; ++e)
      sums[e] = add_rounded(sums[e], sums[e + apart]);
  }
  return sums[0];
}

struct Sum {
  static QK_DEVICE u32 of(u32 a, u32 b) {
    return float_bits(add_rounded(bits_float(a), bits_float(b)));
  }
};
/// Bits of magnitudes compare as these do, with NaN above everything.
struct Largest {
  static QK_DEVICE u32 of(u32 a, u32 b) { return a > b ? a : b; }
};

/// Over the kLanes lanes that share a row: those of a wave as a tree, waves in order. All threads
/// of a block call it, each time with other `words`: one of 4 bytes a wave.
template <class Of, int kLanes>
QK_DEVICE f32 over_row(u32 own, u8* words) {
  constexpr int kInWave = kLanes < kWave ? kLanes : kWave;
  QK_UNROLL for (int mask = kInWave / 2; mask > 0; mask /= 2)
    own = Of::of(own, lane_xor(own, mask));
  if constexpr (kLanes > kWave) {
    constexpr int kWaves = kLanes / kWave;
    const int wave = thread_index() / kWave, first = wave / kWaves * kWaves;
    if (thread_index() % kWave == 0) store(words + wave * 4, own);
    block_sync();
    constexpr int kPart = kWaves < 4 ? kWaves : 4;
    QK_UNROLL for (int part = 0; part < kWaves; part += kPart) {
      const auto others = load<Pack<u32, kPart>>(words + (first + part) * 4);
      QK_UNROLL for (int i = 0; i < kPart; ++i)
        own = part + i == 0 ? others.v[0] : Of::of(own, others.v[i]);
    }
  }
  return bits_float(own);
}

/// The codes of kCount numbers over a scale.
template <Format kFormat, int kCount>
QK_DEVICE void write_codes(const f32 (&values)[kCount], const Reciprocal<kFormat>& reciprocal,
                           void* to, i64 at) {
  u8* const codes = static_cast<u8*>(to) + at;
  if constexpr (kCount % 4 == 0) {
    store(codes, reciprocal.encode(values));
  } else {
    QK_UNROLL for (int e = 0; e < kCount; ++e)
      codes[e] = Codec<kFormat>::encode(values[e] * reciprocal.factor);
  }
}

}  // namespace rows
}  // namespace qk
