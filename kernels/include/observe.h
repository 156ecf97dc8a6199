// What calibration wants to know of an input: sums by channel, and how many |x| fall into each bin.
//
// Bin b of a magnitude is its exponent and first mantissa bits, as
// quantkit/numerics/histogram.py has them. Magnitudes are compared as integers, so NaN and Inf
// stand above all others and stay. Counts are integers, so their order is free; sums have one
// order.
#pragma once

#include "vector_io.h"

namespace qk {

// Of histogram.py: bits of the mantissa that name a bin, the first binade, and how many bins.
constexpr int kBinBits = 4, kBinShift = 23 - kBinBits;
constexpr int kFirstBin = (-24 + 127) << kBinBits, kBins = ((16 + 24 + 1) << kBinBits) + 2;
// Lanes next to each other count apart: values that are alike are often neighbours.
constexpr int kCopies = 4;
constexpr int kCountBytes = kBins * kCopies * 4;

/// The counts of a block, in LDS.
struct Counts {
  u8* lds;

  QK_DEVICE void clear() const {
    for (int at = thread_index(); at < kBins * kCopies; at += QK_THREADS)
      store<u32>(lds + 4 * at, 0);
  }
  QK_DEVICE void add(u32 magnitude) const {
    const int bin = static_cast<int>(magnitude >> kBinShift) - (kFirstBin - 1);
    const int inside = bin < 0 ? 0 : bin < kBins ? bin : kBins - 1;
    add_shared(lds + 4 * (inside * kCopies + thread_index() % kCopies), 1);
  }
  /// After a barrier, by all threads.
  QK_DEVICE void write(i64 block, u32* counts) const {
    for (int bin = thread_index(); bin < kBins; bin += QK_THREADS) {
      u32 count = 0;
      QK_UNROLL for (int copy = 0; copy < kCopies; ++copy)
        count += load<u32>(lds + 4 * (bin * kCopies + copy));
      counts[block * kBins + bin] = count;
    }
  }
};

/// Of some values of a channel.
struct ChannelSums {
  u32 amax = 0;  // bits of f32
  f32 sum = 0.0f, squares = 0.0f;

  QK_DEVICE void add(f32 value, const Counts& counts) {
    const u32 magnitude = float_bits(value) & 0x7fffffffu;
    amax = magnitude > amax ? magnitude : amax;
    sum = add_rounded(sum, value);
    squares = multiply_add(value, value, squares);
    counts.add(magnitude);
  }
};

}  // namespace qk
