// How the group norm's kernels share a picture with channels last among blocks and threads.
//
// A picture is cut into at most 128 chunks of equally many pixels, a multiple of 16, the last one
// shorter; a block has a chunk. k / 8 threads that follow one another have a pixel, 8 channels
// each, so THREADS / (k / 8) pixels are read at a time, whole 16-byte loads that follow one
// another, and a thread has the same channels in all turns: what belongs to channels is loaded
// once. k is at most 8 * THREADS.
#pragma once

#include "vector_io.h"

namespace qk {

constexpr int kSlabRun = 8;       // channels of a thread
constexpr int kSlabChunks = 128;  // of a picture, at most
constexpr int kSlabUnit = 16;     // pixels of a chunk are a multiple of it
constexpr int kSlabTurns = 4;     // loads under way

/// a / b, 0 <= a < 2^20: a quarter of the instructions of a division. The quotient of a + 1 / 2 is
/// farther from whole numbers than two roundings are.
QK_DEVICE int quotient(int a, int b) {
  return static_cast<int>((static_cast<f32>(a) + 0.5f) * approx_reciprocal(static_cast<f32>(b)));
}

template <Io kIo, int kThreads>
struct Slab {
  using Run = RunOf<kIo, kSlabRun>;
  using Raw = typename Run::Raw;
  using Memory = typename Run::Memory;
  int pixels, channels;       // of a picture
  int picture, chunk, count;  // of the block; count: its pixels
  int slots, slot;            // pixels at a time, and the thread's among them
  int channel;                // the thread's first
  int full, more;             // turns of all slots; slots with one more
  int turns;                  // pixels of the thread
  i64 begin;                  // the block's first value

  QK_DEVICE Slab(int m, int k) : pixels(m), channels(k) {
    const int runs = k / kSlabRun;
    slots = quotient(kThreads, runs);
    slot = quotient(thread_index(), runs);
    channel = (thread_index() - slot * runs) * kSlabRun;
    chunk = block_x();
    picture = block_y();
    count = pixels_of(chunk);
    full = count / slots;
    more = count - full * slots;
    turns = slot < slots ? turns_of(slot) : 0;
    begin = (static_cast<i64>(picture) * m + chunk * whole()) * k;
  }
  /// Pixels of a chunk that is not the last one.
  QK_DEVICE int whole() const {
    constexpr int kSmallest = kSlabChunks * kSlabUnit;
    return (pixels + kSmallest - 1) / kSmallest * kSlabUnit;
  }
  QK_DEVICE int chunks() const { return (pixels + whole() - 1) / whole(); }
  QK_DEVICE int pixels_of(int which) const {
    const int left = pixels - which * whole();
    return left < whole() ? left : whole();
  }
  QK_DEVICE int turns_of(int which) const { return full + (which < more); }
  /// Of the thread's pixel, from the block's first value.
  QK_DEVICE int offset(int turn) const { return (slot + turn * slots) * channels + channel; }
  QK_DEVICE const Memory* at(const void* x, int turn) const {
    return static_cast<const Memory*>(x) + begin + offset(turn);
  }
  /// Numbers of the thread's channels, of a row io [k]; zeros without one.
  QK_DEVICE Raw load_columns(const void* row, i64 first) const {
    typename Run::Held held = {};
    if (row != nullptr && turns > 0)
      held = Run::hold(static_cast<const Memory*>(row) + first + channel);
    return Run::raw_of(held);
  }
};

/// The thread's pixels in order, or with kLastFirst in the other one: the loads of kSlabTurns of
/// them are always under way.
template <class Slab, bool kLastFirst>
struct Stream {
  const Slab& slab;
  const void* x;
  typename Slab::Run::Held held[kSlabTurns];

  QK_DEVICE Stream(const Slab& of, const void* from) : slab(of), x(from) {
    QK_UNROLL for (int i = 0; i < kSlabTurns; ++i)
      read(i, i);
  }
  QK_DEVICE int place(int turn) const { return kLastFirst ? slab.turns - 1 - turn : turn; }
  QK_DEVICE void read(int i, int turn) {
    if (turn < slab.turns) held[i] = Slab::Run::hold(slab.at(x, place(turn)));
  }
  /// Calls each(raw, turn) for all of them; once.
  template <class Each>
  QK_DEVICE void for_each(const Each& each) {
    QK_NO_UNROLL for (int turn = 0; turn < slab.turns; turn += kSlabTurns) {
      QK_UNROLL for (int i = 0; i < kSlabTurns; ++i) {
        if (turn + i >= slab.turns) continue;
        const auto raw = Slab::Run::raw_of(held[i]);
        read(i, turn + i + kSlabTurns);
        each(raw, place(turn + i));
      }
    }
  }
};

/// Lanes that share a group: a power of two, at most a wave.
template <int kThreads>
struct GroupLanes {
  int lanes, bits;

  QK_DEVICE explicit GroupLanes(int groups) : lanes(kWave), bits(5) {
    QK_UNROLL for (int i = 0; i < 5; ++i) {
      if (lanes * groups > kThreads) {
        lanes /= 2;
        bits -= 1;
      }
    }
  }
  QK_DEVICE int lane() const { return thread_index() & (lanes - 1); }
  /// Over the lanes of a group, as a tree; every lane gets the sum.
  QK_DEVICE f32 sum(f32 own) const {
    QK_UNROLL for (int mask = kWave / 2; mask > 0; mask /= 2) {
      if (mask < lanes) own = add_rounded(own, bits_float(lane_xor(float_bits(own), mask)));
    }
    return own;
  }
  /// Calls each(group, exists): all lanes take part, those beyond the last group with that one.
  template <class Each>
  QK_DEVICE void for_each(int groups, const Each& each) const {
    QK_NO_UNROLL for (int first = 0; first < groups; first += kThreads >> bits) {
      const int group = first + (thread_index() >> bits);
      each(group < groups ? group : groups - 1, group < groups);
    }
  }
};

/// Mean, and sum of squared distances from it; or 1 / sqrt(variance + eps) in its place.
struct Pair {
  f32 mean, squares;
};

}  // namespace qk
