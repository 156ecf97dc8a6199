// What a block of the group norm's kernels has: 256 channels of 64 pixels, channels last.
//
// Lane l of every wave has the channels 8 l to 8 l + 7 of the block's 256, wave w the pixels w,
// w + 8, ... w + 56 of its 64: whole 16-byte loads that follow one another, and what belongs to
// channels alone is loaded once for eight pixels.
#pragma once

#include "vector_io.h"

namespace qk {

constexpr int kSlabRun = 8;  // channels of a lane
constexpr int kSlabChannels = 256;
constexpr int kSlabPixels = 64;  // of a block
constexpr int kSlabWaves = 8;
constexpr int kSlabTurns = kSlabPixels / kSlabWaves;  // pixels of a lane
static_assert(kSlabRun * kWave == kSlabChannels, "a wave has the block's channels");

template <Io kIo>
struct Slab {
  using Run = RunOf<kIo, kSlabRun>;
  using Memory = typename Run::Memory;
  int pixels, channels;        // of a picture
  int picture, chunk, chunks;  // of the block
  int channel;                 // the lane's first
  int first;                   // the wave's first pixel
  bool exists;                 // the lane has channels

  QK_DEVICE Slab(int m, int k) : pixels(m), channels(k) {
    chunks = (m + kSlabPixels - 1) / kSlabPixels;
    picture = block_y() / chunks;
    chunk = block_y() % chunks;
    channel = block_x() * kSlabChannels + thread_index() % kWave * kSlabRun;
    first = chunk * kSlabPixels + wave_index();
    exists = channel < k;
  }
  QK_DEVICE int pixel(int turn) const { return first + turn * kSlabWaves; }
  QK_DEVICE bool has(int turn) const { return exists && pixel(turn) < pixels; }
  /// Of the lane's first channel, from the tensor's first element.
  QK_DEVICE i64 offset(int turn) const {
    return (static_cast<i64>(picture) * pixels + pixel(turn)) * channels + channel;
  }

  /// The lane's values of all its pixels, as they lie in memory.
  QK_DEVICE void load(typename Run::Raw (&raw)[kSlabTurns], const void* x) const {
    QK_UNROLL for (int turn = 0; turn < kSlabTurns; ++turn) {
      if (has(turn)) {
        raw[turn] = Run::load_raw(static_cast<const Memory*>(x) + offset(turn), true, kSlabRun);
      }
    }
  }
  /// What is added to each pixel of the picture: io [n, k].
  QK_DEVICE void load_added(f32 (&added)[kSlabRun], const void* rows) const {
    load_columns(added, static_cast<const Memory*>(rows) + static_cast<i64>(picture) * channels);
  }
  /// Of a row io [k].
  QK_DEVICE void load_columns(f32 (&values)[kSlabRun], const void* row) const {
    Run::widen(values, Run::load_raw(static_cast<const Memory*>(row) + channel, exists, 0));
  }
  /// x + added, rounded as a sum of two tensors is.
  static QK_DEVICE void widen(f32 (&values)[kSlabRun], const typename Run::Raw& raw,
                              const f32 (&added)[kSlabRun], bool adds) {
    Run::widen(values, raw);
    if (!adds) return;
    QK_UNROLL for (int e = 0; e < kSlabRun; ++e)
      values[e] = rounded<kIo>(add_rounded(values[e], added[e]));
  }
};

/// Numbers seen so far: how many, their mean, and the sum of squared distances from it.
struct Moments {
  f32 count, mean, squares;

  /// Chan, Golub, LeVeque: exact where either has no numbers.
  QK_DEVICE void merge(const Moments& other) {
    if (other.count == 0.0f) return;
    const f32 all = count + other.count, apart = other.mean - mean, share = other.count / all;
    mean = add_rounded(mean, apart * share);
    squares = add_rounded(add_rounded(squares, other.squares), apart * apart * (count * share));
    count = all;
  }
};

}  // namespace qk
