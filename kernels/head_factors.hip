// Factors and means that quantize heads, of chunks of their tokens (head_partials.hip):
//
//   mean_c    = sum over chunks / keys                      of keys and of values
//   range_c   = max(largest_c - mean_c, mean_c - smallest_c)
//   positive(x) = x where x > 0, else 1
//   q_range   = positive(max q_amax)                        k_range = positive(max_c range_c)
//   v_scale_c = positive(range_c / 448)
//   q_factor  = min(sqrt(tau k_range / q_range), (1 / q_range) 448)
//   k_factor  = min((1 / q_factor) tau, (1 / k_range) 448)
//
// With int8 codes q_factor is tau, k_factor 1. A NaN in sums is one in means, and none in scales.
//
// q_amax    f32 [n, m, k / 8]                 partials  f32 [n, 2, m, 3, k]
// k_mean, v_mean, v_scale  f32 [n, D], D = k up to a multiple of 16: 0, 0 and 1 from column k on
// q_factor, k_factor       f32 [n]
// m chunks, 32 at most, n rows of heads, k columns of a head, a multiple of 8 and at most 160; tau
// are the bits of a float32; base pointers 16-byte aligned.
//
// float32, every operation rounded by itself; square root and quotients to nearest.
//
// Launch: 512 threads, grid (n, 1, 1): a block has a row. Eight waves have its keys, eight its
// values: lane l of wave w has the columns 4 l to 4 l + 3, then those 128 further, of the chunks w,
// w + 8, ... in this order; a thread of a column adds what the waves have in theirs.
#include "codec.h"

namespace {

constexpr int kSlots = 8, kSides = 2, kNumbers = 3;  // waves of a side; keys, values
constexpr int kTurns = 4;                            // chunks of a wave, at most
constexpr int kQuad = 4, kMostColumns = 160, kWhole = 16, kRun = 8;
constexpr int kSideThreads = QK_THREADS / kSides, kWaves = QK_THREADS / qk::kWave;
constexpr int kSlotBytes = kMostColumns * 4, kNumberBytes = kSlots * kSlotBytes;
constexpr int kSideBytes = kNumbers * kNumberBytes, kMergeBytes = kSides * kSideBytes;
constexpr int kLdsBytes = kMergeBytes + kSides * kWaves * 4;
static_assert(kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");
static_assert(kSideThreads == kSlots * qk::kWave, "a side has eight waves");
static_assert(kSideThreads >= kMostColumns, "in the end a thread has a column");

constexpr float kLargest = qk::Codec<qk::Format::kE4M3FN>::kMax;
constexpr qk::u32 kInfinite = 0x7f800000u, kMagnitude = 0x7fffffffu;

struct alignas(16) Quad {
  float v[kQuad];
};

/// Of some chunks: sums, smallest and largest numbers of four columns.
struct Columns {
  Quad sum = {}, low, high;

  QK_DEVICE Columns() {
    QK_UNROLL for (int e = 0; e < kQuad; ++e) {
      low.v[e] = qk::bits_float(kInfinite);
      high.v[e] = -low.v[e];
    }
  }
  QK_DEVICE void add(const Quad (&chunk)[kNumbers]) {
    QK_UNROLL for (int e = 0; e < kQuad; ++e) {
      sum.v[e] = qk::add_rounded(sum.v[e], chunk[0].v[e]);
      low.v[e] = chunk[1].v[e] < low.v[e] ? chunk[1].v[e] : low.v[e];
      high.v[e] = chunk[2].v[e] > high.v[e] ? chunk[2].v[e] : high.v[e];
    }
  }
};

/// What a wave has of a row's keys or values, to LDS.
QK_DEVICE void merge_chunks(const float* row, int chunks, int k, int slot, qk::u8* lds) {
  const int lane = qk::thread_index() % qk::kWave;
  for (int column = lane * kQuad; column < k; column += qk::kWave * kQuad) {
    Quad quads[kTurns][kNumbers];
    QK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      const int chunk = slot + turn * kSlots;
      QK_UNROLL for (int i = 0; i < kNumbers; ++i) {
        if (chunk < chunks)
          quads[turn][i] = qk::load<Quad>(row + (chunk * kNumbers + i) * k + column);
      }
    }
    Columns columns;
    QK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
      if (slot + turn * kSlots < chunks) columns.add(quads[turn]);
    }
    qk::u8* const to = lds + slot * kSlotBytes + 4 * column;
    qk::store(to, columns.sum);
    qk::store(to + kNumberBytes, columns.low);
    qk::store(to + 2 * kNumberBytes, columns.high);
  }
}

/// The larger one; NaN where one is.
QK_DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }

/// The smaller one; NaN where one is.
QK_DEVICE float smaller(float a, float b) { return a < b || a != a ? a : b; }

/// Mean of a column, and how far the farthest number is from it.
struct Column {
  float mean, range;

  QK_DEVICE Column(const qk::u8* lds, int column, int keys) {
    float sum = 0.0f, low = qk::bits_float(kInfinite), high = -low;
    QK_UNROLL for (int slot = 0; slot < kSlots; ++slot) {
      const qk::u8* const from = lds + slot * kSlotBytes + 4 * column;
      const float smallest = qk::load<float>(from + kNumberBytes);
      const float largest = qk::load<float>(from + 2 * kNumberBytes);
      sum = qk::add_rounded(sum, qk::load<float>(from));
      low = smallest < low ? smallest : low;
      high = largest > high ? largest : high;
    }
    mean = sum / static_cast<float>(keys);
    const float above = qk::add_rounded(high, -mean), below = qk::add_rounded(mean, -low);
    // An infinite mean makes one of them NaN.
    range = larger(above, below);
  }
};

/// Bits of the largest one of a wave's numbers from 0 on; NaN is above all.
QK_DEVICE qk::u32 largest_of_wave(float number) {
  return qk::wave_max(qk::float_bits(number) & kMagnitude);
}

QK_DEVICE float positive(float number) { return number > 0.0f ? number : 1.0f; }

}  // namespace

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const float* q_amax, const float* partials, float* k_mean, float* q_factor,
          float* k_factor, float* v_mean, float* v_scale, int m, int n, int k, int keys, int tau) {
  static_cast<void>(n);
  QK_SHARED(lds, kLdsBytes);
  qk::start();
  const int row = qk::block_x(), thread = qk::thread_index(), wave = qk::wave_index();
  const int side = wave / kSlots, width = (k + kWhole - 1) / kWhole * kWhole;
  const qk::i64 head = static_cast<qk::i64>(row) * kSides + side;
  merge_chunks(partials + head * m * kNumbers * k, m, k, wave % kSlots, lds + side * kSideBytes);
  float q_largest = 0.0f;
  constexpr bool kUnit = QK_X_FORMAT == QK_E4M3FN;
  if constexpr (kUnit) {
    const int numbers = m * (k / kRun);
    const float* const from = q_amax + static_cast<qk::i64>(row) * numbers;
    qk::u32 best = 0;
    for (int at = thread; at < numbers; at += QK_THREADS) {
      const qk::u32 bits = qk::float_bits(from[at]) & kMagnitude;
      best = bits > best ? bits : best;
    }
    q_largest = qk::bits_float(best);
  }
  qk::block_sync();
  const int column = thread % kSideThreads;
  float range = 0.0f;
  if (column < width) {
    float mean = 0.0f;
    if (column < k) {
      const Column own(lds + side * kSideBytes, column, keys);
      mean = own.mean;
      range = own.range;
    }
    const qk::i64 at = static_cast<qk::i64>(row) * width + column;
    (side == 0 ? k_mean : v_mean)[at] = mean;
    if (side == 1) v_scale[at] = positive(range / kLargest);
  }
  const float score = qk::bits_float(static_cast<qk::u32>(tau));
  if constexpr (!kUnit) {
    if (thread == 0) {
      q_factor[row] = score;
      k_factor[row] = 1.0f;
    }
    return;
  }
  const qk::u32 q_bits = largest_of_wave(q_largest), k_bits = largest_of_wave(range);
  qk::u8* const by_wave = lds + kMergeBytes;
  if (thread % qk::kWave == 0) {
    qk::store(by_wave + 4 * wave, q_bits);
    qk::store(by_wave + 4 * (kWaves + wave), k_bits);
  }
  qk::block_sync();
  if (thread != 0) return;
  qk::u32 q_best = 0, k_best = 0;
  QK_UNROLL for (int w = 0; w < kWaves; ++w) {
    const qk::u32 bits = qk::load<qk::u32>(by_wave + 4 * w);
    q_best = bits > q_best ? bits : q_best;
  }
  QK_UNROLL for (int w = 0; w < kSlots; ++w) {
    const qk::u32 bits = qk::load<qk::u32>(by_wave + 4 * (kWaves + w));
    k_best = bits > k_best ? bits : k_best;
  }
  const float q_range = positive(qk::bits_float(q_best)),
              k_range = positive(qk::bits_float(k_best));
  const float even = qk::sqrt_rounded(score * k_range / q_range);
  const float a = smaller(even, 1.0f / q_range * kLargest);
  q_factor[row] = a;
  k_factor[row] = smaller(1.0f / a * score, 1.0f / k_range * kLargest);
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
