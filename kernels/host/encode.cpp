// From the rows of a 16- or 32-bit weight to scales, codes and 2:4 metadata: packing on the host.
//
//   amax_g = max |w|                    over the columns g of a row that share a scale
//   scale_g = amax_g / max(format)      1 where that is 0
//   code = round(clamp(w / scale_g))    ties to even; a true division: reciprocals differ
//
// Of several scales the first whose squared error is least: float64 terms, added in the order of
// quantkit/numerics/squared_error.py. A smoothed weight is w / column.
//
// The bytes are those of quantkit/packing/torch_encode.py, which is the oracle of the tests and the
// path without a compiler. Vectors are the compiler's, for AVX2, AVX-512 and NEON from one source;
// loops alone are left scalar by GCC 12, five times slower. A row at a time stays in the cache.
//
// Layout of a row on its way: blocks of 32 columns, plane j of a block holds columns 4 l + j in
// lane l. So the four of a 2:4 group are one lane of four vectors, and four codes become a word by
// shifts. A weight of a convolution (C, taps) is read channels last (taps, C).
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#ifdef __F16C__
#  include <immintrin.h>
#endif

namespace {

enum Source : int32_t { kHalf, kBfloat, kFloat };
enum Format : int32_t { kE4m3, kE5m2, kInt8, kInt4 };

constexpr int64_t kDone = -1;
constexpr int64_t kNoMemory = -2;
constexpr int64_t kOverflow = -3;

constexpr int64_t kLanes = 8, kPlanes = 4, kBlock = kLanes * kPlanes;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef uint16_t Pairs __attribute__((vector_size(2 * kLanes)));
typedef uint32_t Quad __attribute__((vector_size(2 * kLanes)));
typedef uint64_t Twins __attribute__((vector_size(2 * kLanes)));
static_assert(sizeof(Floats) == sizeof(Words), "a lane of one is a lane of the other");

// Of int4: the code that stands for the largest value, and the largest factor; a block of columns
// shares it (quantkit/numerics/nibbles.py).
constexpr float kLowestNibble = -8.0f;
constexpr float kMaxFactor = 15.0f;
// Sizes of factors that a search tries.
constexpr float kTriedFactors = 6.0f;

constexpr uint32_t kMagnitude = 0x7fffffffu;

// Adding it leaves an integer, rounded to even, in the low bits: its last place is 1.
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2**23

template <class To, class From>
To bits(From value) {
  return __builtin_bit_cast(To, value);
}

template <class Vector>
Vector load(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class Vector>
void store(void* to, Vector value) {
  std::memcpy(to, &value, sizeof value);
}

Words even(Words a, Words b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
Words odd(Words a, Words b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15); }
Quad lower(Quad a, Quad b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
Quad upper(Quad a, Quad b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }

// Bits of the largest magnitude: those of positive floats are in the order of the floats.
Ints larger(Ints largest, Words value) {
  const Ints magnitude = bits<Ints>(value & kMagnitude);
  return magnitude > largest ? magnitude : largest;
}

int32_t reduce(Ints a) {
  Ints b = __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
  a = a > b ? a : b;
  b = __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
  a = a > b ? a : b;
  return a[0] > a[1] ? a[0] : a[1];
}

// Column 4 l + j of a block goes to plane j, lane l.
void split(const uint16_t* block, Pairs* plane) {
  Quad word[kPlanes];
  for (int64_t i = 0; i < kPlanes; ++i) {
    const Pairs eight = load<Pairs>(block + i * kLanes);
    word[i] = bits<Quad>(__builtin_shufflevector(eight, eight, 0, 4, 1, 5, 2, 6, 3, 7));
  }
  for (int64_t half = 0; half < 2; ++half) {
    const Twins low = bits<Twins>(half ? upper(word[0], word[1]) : lower(word[0], word[1]));
    const Twins high = bits<Twins>(half ? upper(word[2], word[3]) : lower(word[2], word[3]));
    plane[2 * half] = bits<Pairs>(__builtin_shufflevector(low, high, 0, 2));
    plane[2 * half + 1] = bits<Pairs>(__builtin_shufflevector(low, high, 1, 3));
  }
}

// Each splits a block into planes of float32; from kBroken on, the bits of a magnitude are those of
// what was NaN or infinite.
struct Half {
  using Stored = uint16_t;
  static constexpr uint32_t kBroken = 143u << 23;
  static void planes(const Stored* block, Words* plane) {
    Pairs half[kPlanes];
    split(block, half);
    for (int64_t j = 0; j < kPlanes; ++j) plane[j] = widen(half[j]);
  }
#ifdef __F16C__
  static Words widen(Pairs half) { return bits<Words>(_mm256_cvtph_ps(bits<__m128i>(half))); }
#else
  static Words widen(Pairs stored) {
    const Words half = __builtin_convertvector(stored, Words);
    const Words magnitude = ((half & 0x7fffu) << 13) + (112u << 23);
    // A subnormal: with an implicit one too many, which the subtraction takes away exactly.
    const Floats implicit = bits<Floats>(magnitude + (1u << 23));
    const Words subnormal = bits<Words>(implicit - bits<float>(113u << 23));
    const Words wide = (half & 0x7c00u) == 0 ? subnormal : magnitude;
    return wide | (half & 0x8000u) << 16;
  }
#endif
};

struct Bfloat {
  using Stored = uint16_t;
  static constexpr uint32_t kBroken = 0x7f800000u;
  static void planes(const Stored* block, Words* plane) {
    Pairs half[kPlanes];
    split(block, half);
    for (int64_t j = 0; j < kPlanes; ++j) plane[j] = widen(half[j]);
  }
  static Words widen(Pairs value) { return __builtin_convertvector(value, Words) << 16; }
};

struct Float {
  using Stored = uint32_t;
  static constexpr uint32_t kBroken = 0x7f800000u;
  static void planes(const Stored* block, Words* plane) {
    const Words a = load<Words>(block), b = load<Words>(block + kLanes);
    const Words c = load<Words>(block + 2 * kLanes), d = load<Words>(block + 3 * kLanes);
    const Words e = even(a, b), f = even(c, d), g = odd(a, b), h = odd(c, d);
    plane[0] = even(e, f), plane[2] = odd(e, f);
    plane[1] = even(g, h), plane[3] = odd(g, h);
  }
};

// The float8 codes of finite values; what is beyond the format's range gets the code of its end.
template <int kMantissa, int kBias>
Words float_codes(Floats value, float max) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr uint32_t kSmallestNormal = uint32_t(128 - kBias) << 23;
  // Its last place is the format's smallest subnormal, 2**(1 - bias - mantissa).
  constexpr uint32_t kSubnormal = uint32_t(127 + 23 + 1 - kBias - kMantissa) << 23;
  const Words all = bits<Words>(value);
  const Ints size = bits<Ints>(all & kMagnitude), end = Ints{} + bits<int32_t>(max);
  const Words magnitude = bits<Words>(size < end ? size : end);
  const Words subnormal =
      bits<Words>(bits<Floats>(magnitude) + bits<float>(kSubnormal)) - kSubnormal;
  const Words half = ((magnitude >> kDropped) & 1u) + ((1u << (kDropped - 1)) - 1);
  const Words normal = ((magnitude + half) >> kDropped) - (uint32_t(127 - kBias) << kMantissa);
  const Words code = bits<Ints>(magnitude) < int32_t(kSmallestNormal) ? subnormal : normal;
  return code | (all >> 24 & 0x80u);
}

// The magnitudes that float8 codes stand for.
template <int kMantissa, int kBias>
Floats float_sizes(Floats value, float max) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr uint32_t kSmallestNormal = uint32_t(128 - kBias) << 23;
  constexpr uint32_t kSubnormal = uint32_t(127 + 23 + 1 - kBias - kMantissa) << 23;
  const Ints size = bits<Ints>(bits<Words>(value) & kMagnitude), end = Ints{} + bits<int32_t>(max);
  const Words magnitude = bits<Words>(size < end ? size : end);
  const float unit = bits<float>(kSubnormal);
  const Words subnormal = bits<Words>((bits<Floats>(magnitude) + unit) - unit);
  const Words half = ((magnitude >> kDropped) & 1u) + ((1u << (kDropped - 1)) - 1);
  const Words normal = (magnitude + half) >> kDropped << kDropped;
  return bits<Floats>(bits<Ints>(magnitude) < int32_t(kSmallestNormal) ? subnormal : normal);
}

Floats clamped(Floats value, float min, float max) {
  value = value < min ? Floats{} + min : value;
  return value > max ? Floats{} + max : value;
}

Words integer_codes(Floats value, float min, float max) {
  return bits<Words>(clamped(value, min, max) + kRoundToInteger) & 0xffu;
}

// Sizes of symmetric formats are what codes of |value| stand for; of int4 they have the sign.
Floats integer_sizes(Floats value, float min, float max) {
  return (clamped(value, min, max) + kRoundToInteger) - kRoundToInteger;
}

Floats magnitude(Floats value) { return bits<Floats>(bits<Words>(value) & kMagnitude); }

struct E4m3 {
  static constexpr float kMax = 448.0f;
  static Words codes(Floats value) { return float_codes<3, 7>(value, kMax); }
  static Floats values(Floats size) { return float_sizes<3, 7>(size, kMax); }
  static Floats sized(Floats weight) { return magnitude(weight); }
};
struct E5m2 {
  static constexpr float kMax = 57344.0f;
  static Words codes(Floats value) { return float_codes<2, 15>(value, kMax); }
  static Floats values(Floats size) { return float_sizes<2, 15>(size, kMax); }
  static Floats sized(Floats weight) { return magnitude(weight); }
};
struct Int8 {
  static constexpr float kMax = 127.0f;
  static Words codes(Floats value) { return integer_codes(value, -kMax, kMax); }
  static Floats values(Floats size) { return integer_sizes(size, 0.0f, kMax); }
  static Floats sized(Floats weight) { return magnitude(weight); }
};
struct Int4 {
  static constexpr float kMax = 7.0f;
  static Words codes(Floats value) { return integer_codes(value, kLowestNibble, kMax); }
  static Floats values(Floats value) { return integer_sizes(value, kLowestNibble, kMax); }
  static Floats sized(Floats weight) { return weight; }
};

// The squared error of a block whose codes stand for multiples of a unit. Columns of a lane are
// added first, then lanes: halves each time, as squared_error.py does.
template <class Format>
double block_error(const float* block, float step, double unit) {
  Doubles error[kPlanes];
  for (int64_t j = 0; j < kPlanes; ++j) {
    const Floats weight = Format::sized(load<Floats>(block + j * kLanes));
    const Doubles held = __builtin_convertvector(Format::values(weight / step), Doubles) * unit;
    const Doubles lost = held - __builtin_convertvector(weight, Doubles);
    error[j] = lost * lost;
  }
  Doubles sum = (error[0] + error[2]) + (error[1] + error[3]);
  sum += __builtin_shufflevector(sum, sum, 4, 5, 6, 7, 0, 1, 2, 3);
  sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5);
  return sum[0] + sum[1];
}

float power_of_two(float scale) {
  int exponent;
  const float mantissa = std::frexp(scale, &exponent);
  return std::ldexp(1.0f, exponent - (mantissa == 0.5f));
}

// A block of columns after the cast: code j of lane l is that of column 4 l + j.
struct Codes {
  Words plane[kPlanes];
};

template <class Format>
Codes encode(const float* block, float step) {
  Codes codes;
  for (int64_t j = 0; j < kPlanes; ++j) {
    codes.plane[j] = Format::codes(load<Floats>(block + j * kLanes) / step);
  }
  return codes;
}

Words in_order(const Codes& c) {
  return c.plane[0] | c.plane[1] << 8 | c.plane[2] << 16 | c.plane[3] << 24;
}

// Which two of a lane's four are kept: low | high << 2, ascending. The larger scores are, and of
// equal ones the lower positions.
Words two_of_four(const Ints* score) {
  const Ints a = score[0], b = score[1], c = score[2], d = score[3];
  // Comparisons are -1 where they hold.
  const Ints ab = a >= b, ac = a >= c, ad = a >= d, bc = b >= c, bd = b >= d, cd = c >= d;
  const Ints m0 = -(ab + ac + ad < -1), m1 = -(bc + bd - ab < 0);
  const Ints m2 = -(ac + bc - cd > -1), m3 = -(ad + bd + cd > -2);
  const Ints low = (1 - m0) * (2 - m1), high = 1 + m2 + m3 * (2 - m2);
  return bits<Words>(low | high << 2);
}

// The kept codes of a block, two a lane: first | second << 8.
Words kept_pairs(const Codes& c, Words nibbles) {
  const Words low = nibbles & 3u, high = nibbles >> 2;
  const Words first = low == 0 ? c.plane[0] : low == 1 ? c.plane[1] : c.plane[2];
  const Words second = high == 3 ? c.plane[3] : high == 2 ? c.plane[2] : c.plane[1];
  return first | second << 8;
}

// Rows to columns, of 8 x 8 numbers: pairs, then pairs of pairs, then halves.
void transpose(Pairs* v) {
  Pairs a[kLanes];
  for (int64_t i = 0; i < kLanes; i += 2) {
    a[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 8, 1, 9, 2, 10, 3, 11);
    a[i + 1] = __builtin_shufflevector(v[i], v[i + 1], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  Quad b[kLanes];
  for (int64_t i = 0; i < kLanes; i += 4)
    for (int64_t j = 0; j < 2; ++j) {
      b[i + 2 * j] = lower(bits<Quad>(a[i + j]), bits<Quad>(a[i + j + 2]));
      b[i + 2 * j + 1] = upper(bits<Quad>(a[i + j]), bits<Quad>(a[i + j + 2]));
    }
  for (int64_t i = 0; i < kPlanes; ++i) {
    const Twins low = bits<Twins>(b[i]), high = bits<Twins>(b[i + kPlanes]);
    v[2 * i] = bits<Pairs>(__builtin_shufflevector(low, high, 0, 2));
    v[2 * i + 1] = bits<Pairs>(__builtin_shufflevector(low, high, 1, 3));
  }
}

// (channels, taps) to (taps, channels), from one channel and tap on, up to another tap.
template <class Stored>
void move_some(const Stored* from, int64_t channels, int64_t taps, int64_t channel, int64_t tap,
               int64_t stop, Stored* to) {
  for (int64_t t = tap; t < stop; ++t)
    for (int64_t c = channel; c < channels; ++c) to[t * channels + c] = from[c * taps + t];
}

template <class Stored>
void move(const Stored* from, int64_t channels, int64_t taps, Stored* to) {
  move_some(from, channels, taps, 0, 0, taps, to);
}

template <>
void move(const uint16_t* from, int64_t channels, int64_t taps, uint16_t* to) {
  const int64_t whole_taps = taps / kLanes * kLanes, whole = channels / kLanes * kLanes;
  for (int64_t c = 0; c < whole; c += kLanes)
    for (int64_t t = 0; t < whole_taps; t += kLanes) {
      Pairs v[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) v[i] = load<Pairs>(from + (c + i) * taps + t);
      transpose(v);
      for (int64_t i = 0; i < kLanes; ++i) store(to + (t + i) * channels + c, v[i]);
    }
  // The ninth tap of 3 x 3, and channels that are no multiple of eight.
  move_some(from, channels, taps, 0, whole_taps, taps, to);
  move_some(from, channels, taps, whole, 0, whole_taps, to);
}

// What Python passes: quantkit/device/host/encoder.py has the same fields.
struct Job {
  const void* source;       // rows * channels * taps numbers, (rows, channels, taps)
  const float* importance;  // (K,) of the columns, channels last; null: all count the same
  const float* columns;     // (K,) that columns are divided by, channels last; null: by nothing
  const float* fractions;   // (tries,) of the scale that clips nothing; the best of them is taken
  float* scale;             // (rows, K / group), or one that is given where group is 0
  int8_t* factors;          // int4: (rows, K / 32)
  uint8_t* codes;           // (rows, K), half of it where sparse, half of it in int4
  uint8_t* meta;            // sparse: (rows, K / 8)
  float* amax;              // where codes is null: the largest magnitude that is kept, raised
  float* column_amax;       // or (K,) the largest magnitude of each column, raised
  double* errors;           // or (rows, tries), the squared errors of fractions of *scale
  int64_t rows, channels, taps;
  int64_t group;  // columns that share a scale, K or a multiple of 32; 0: all of the weight
  int64_t tries;
  int32_t dtype, format, sparse;
  int32_t pow2;  // fractions of the least power of two that is not below the scale
};

// One row on its way, in buffers that are used again.
class RowEncoder {
 public:
  explicit RowEncoder(const Job& job)
      : job_(job),
        k_(job.channels * job.taps),
        blocks_((k_ + kBlock - 1) / kBlock),
        row_(blocks_ * kBlock),
        nibbles_(job.sparse ? blocks_ * kLanes : 0),
        importance_(job.importance ? blocks_ * kBlock : 0),
        columns_(job.columns ? blocks_ * kBlock : 0, 1.0f),
        divided_(job.columns ? blocks_ * kBlock : 0),
        column_amax_(job.column_amax ? blocks_ * kBlock : 0),
        sums_(blocks_),
        moved_(blocks_ * kBlock),
        codes_(blocks_ * kBlock),
        meta_(job.sparse ? blocks_ * kBlock / 8 : 0) {
    for (int64_t i = 0; job.importance && i < k_; ++i) importance_[place(i)] = job.importance[i];
    for (int64_t i = 0; job.columns && i < k_; ++i) columns_[place(i)] = job.columns[i];
  }

  template <class Source>
  int64_t run() {
    using Stored = typename Source::Stored;
    const Stored* stored = static_cast<const Stored*>(job_.source);
    uint32_t largest = 0;
    for (int64_t r = 0; r < job_.rows; ++r) {
      const uint32_t amax = read<Source>(stored + r * k_);
      if (amax >= Source::kBroken) return r * k_ + first_broken<Source>(stored + r * k_);
      if (job_.column_amax) {
        note_columns();
        continue;
      }
      if (job_.columns && !divide()) return kOverflow;
      if (job_.sparse) choose();
      if (job_.columns) take_divided();
      // By magnitude alone, the largest is always kept.
      kept_ = job_.importance || job_.columns ? amax_bits(0, k_) : amax;
      largest = kept_ > largest ? kept_ : largest;
      write(r);
    }
    if (job_.amax && bits<float>(largest) > *job_.amax) *job_.amax = bits<float>(largest);
    raise_columns();
    return kDone;
  }

 private:
  // Where column i of a row lies.
  static int64_t place(int64_t i) {
    return i / kBlock * kBlock + i % kPlanes * kLanes + i % kBlock / kPlanes;
  }

  // Bits of the largest magnitude among columns from ``first`` on, of whole blocks.
  uint32_t amax_bits(int64_t first, int64_t count) const {
    Ints largest{};
    const int64_t stop = (first + count + kBlock - 1) / kBlock * kBlock;
    for (int64_t i = first; i < stop; i += kLanes) largest = larger(largest, load<Words>(&row_[i]));
    return uint32_t(reduce(largest));
  }

  // Fill the row, channels last; return the bits of its largest magnitude.
  template <class Source>
  uint32_t read(const typename Source::Stored* stored) {
    using Stored = typename Source::Stored;
    Stored* moved = reinterpret_cast<Stored*>(moved_.data());
    const bool ordered = job_.taps == 1 && k_ % kBlock == 0;
    if (!ordered) move(stored, job_.channels, job_.taps, moved);
    // Behind the last column are zeros, as the buffer was made.
    const Stored* from = ordered ? stored : moved;
    Ints largest{};
    for (int64_t i = 0; i < blocks_ * kBlock; i += kBlock) {
      Words plane[kPlanes];
      Source::planes(from + i, plane);
      for (int64_t j = 0; j < kPlanes; ++j) {
        largest = larger(largest, plane[j]);
        store(&row_[i + j * kLanes], plane[j]);
      }
    }
    return uint32_t(reduce(largest));
  }

  template <class Source>
  int64_t first_broken(const typename Source::Stored* stored) const {
    typename Source::Stored block[kBlock] = {};
    for (int64_t i = 0; i < k_; ++i) {
      block[0] = stored[i];
      Words plane[kPlanes];
      Source::planes(block, plane);
      if ((plane[0][0] & kMagnitude) >= Source::kBroken) return i;
    }
    return 0;
  }

  void note_columns() {
    for (int64_t i = 0; i < blocks_ * kBlock; i += kLanes)
      store(&column_amax_[i], larger(load<Ints>(&column_amax_[i]), load<Words>(&row_[i])));
  }

  void raise_columns() {
    for (int64_t i = 0; job_.column_amax && i < k_; ++i) {
      const float amax = bits<float>(column_amax_[place(i)]);
      if (amax > job_.column_amax[i]) job_.column_amax[i] = amax;
    }
  }

  // Tell whether all quotients are finite, those of columns that are not kept among them.
  bool divide() {
    Ints largest{};
    for (int64_t i = 0; i < blocks_ * kBlock; i += kLanes) {
      const Floats divided = load<Floats>(&row_[i]) / load<Floats>(&columns_[i]);
      largest = larger(largest, bits<Words>(divided));
      store(&divided_[i], divided);
    }
    return uint32_t(reduce(largest)) < Float::kBroken;
  }

  // Zeros stay as they are: of columns that are not kept, and those that have a sign.
  void take_divided() {
    for (int64_t i = 0; i < blocks_ * kBlock; i += kLanes) {
      const Words kept = load<Words>(&row_[i]);
      store(&row_[i], (kept & kMagnitude) == 0 ? kept : load<Words>(&divided_[i]));
    }
  }

  // Keep two of every four columns by |w| times the column's importance; zero the others.
  void choose() {
    for (int64_t b = 0; b < blocks_; ++b) {
      float* block = &row_[b * kBlock];
      Words value[kPlanes];
      Ints score[kPlanes];
      for (int64_t j = 0; j < kPlanes; ++j) {
        value[j] = load<Words>(block + j * kLanes);
        score[j] = bits<Ints>(value[j] & kMagnitude);
        if (job_.importance)
          score[j] = bits<Ints>(bits<Floats>(score[j]) *
                                load<Floats>(&importance_[b * kBlock + j * kLanes]));
      }
      const Words nibbles = two_of_four(score), low = nibbles & 3u, high = nibbles >> 2;
      store(&nibbles_[b * kLanes], nibbles);
      for (uint32_t j = 0; j < kPlanes; ++j) {
        const Words kept = (low == j || high == j) ? value[j] : Words{};
        store(block + j * kLanes, kept);
      }
    }
  }

  void write(int64_t r) {
    switch (job_.format) {
      case kE4m3:
        write_some<E4m3>(r);
        break;
      case kE5m2:
        write_some<E5m2>(r);
        break;
      case kInt8:
        write_some<Int8>(r);
        break;
      default:
        if (job_.codes) write_factored(r);
    }
  }

  template <class Format>
  void write_some(int64_t r) {
    if (job_.codes) write_scaled<Format>(r);
    for (int64_t t = 0; job_.errors && t < job_.tries; ++t)
      job_.errors[r * job_.tries + t] =
          squared_error<Format>(0, k_, *job_.scale * job_.fractions[t], kNoLimit);
  }

  // The squared error of columns of whole blocks. More than a limit may be any larger number:
  // sums of what is not negative only grow, but for their rounding.
  template <class Format>
  double squared_error(int64_t first, int64_t count, float scale, double limit) {
    constexpr double kRounding = 1.0 + 1e-9;
    const int64_t blocks = (count + kBlock - 1) / kBlock;
    double so_far = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      sums_[b] = block_error<Format>(&row_[first + b * kBlock], scale, double(scale));
      so_far += sums_[b];
      if (so_far > limit * kRounding) return so_far;
    }
    for (int64_t n = blocks; n > 1; n = (n + 1) / 2)
      for (int64_t i = 0; i < n / 2; ++i) sums_[i] += sums_[(n + 1) / 2 + i];
    return sums_[0];
  }

  template <class Format>
  float best_scale(int64_t first, int64_t count, float base) {
    base = job_.pow2 ? power_of_two(base) : base;
    if (job_.tries == 1) return base * job_.fractions[0];
    float best = base;
    double least = kNoLimit;
    for (int64_t t = 0; t < job_.tries; ++t) {
      const float scale = base * job_.fractions[t];
      const double error = squared_error<Format>(first, count, scale, least);
      if (error < least) best = scale, least = error;
    }
    return best;
  }

  template <class Format>
  void write_scaled(int64_t r) {
    const int64_t group = job_.group ? job_.group : k_, groups = k_ / group;
    for (int64_t g = 0; g < groups; ++g) {
      float scale = *job_.scale;
      if (job_.group) {
        const uint32_t amax = groups == 1 ? kept_ : amax_bits(g * group, group);
        scale = bits<float>(amax) / Format::kMax;
        scale = best_scale<Format>(g * group, group, scale > 0 ? scale : 1.0f);
        job_.scale[r * groups + g] = scale;
      }
      const int64_t stop = (g + 1) * group;
      for (int64_t i = g * group; i < stop; i += kBlock)
        put(i / kBlock, encode<Format>(&row_[i], scale));
    }
    copy_out(r, job_.sparse ? k_ / 2 : k_);
  }

  void write_factored(int64_t r) {
    float scale = bits<float>(kept_) / -kLowestNibble / kMaxFactor;
    scale = scale > 0 ? scale : 1.0f;
    job_.scale[r] = scale;
    for (int64_t b = 0; b < blocks_; ++b) {
      const float* block = &row_[b * kBlock];
      const float wanted = largest_of(block) / kLowestNibble;
      float size = __builtin_ceilf(__builtin_fabsf(wanted) / scale);
      size = size < 1.0f ? 1.0f : size > kMaxFactor ? kMaxFactor : size;
      const float start = wanted < 0 ? -size : size;
      const float factor = job_.tries > 1 ? best_factor(block, scale, start) : start;
      job_.factors[r * blocks_ + b] = int8_t(factor);
      put_nibbles(b, encode<Int4>(block, scale * factor));
    }
    copy_out(r, job_.sparse ? k_ / 4 : k_ / 2);
  }

  // Factors that were tried before cannot be better.
  static float best_factor(const float* block, float scale, float start) {
    const float size = __builtin_fabsf(start);
    float best = start;
    double least = block_error<Int4>(block, scale * start, double(scale) * double(start));
    for (const float sign : {1.0f, -1.0f})
      for (float step = 0; step < kTriedFactors && size - step >= 1.0f; ++step) {
        const float factor = sign * (size - step);
        if (factor == start) continue;
        const double error =
            block_error<Int4>(block, scale * factor, double(scale) * double(factor));
        if (error < least) best = factor, least = error;
      }
    return best;
  }

  // The value of largest size in a block, with its sign; of equals that of the lowest column.
  static float largest_of(const float* block) {
    Ints above{}, below{};
    for (int64_t j = 0; j < kPlanes; ++j) {
      const Words value = load<Words>(block + j * kLanes);
      const Ints positive = bits<Ints>(value), negative = bits<Ints>(value ^ ~kMagnitude);
      above = positive > above ? positive : above;
      below = negative > below ? negative : below;
    }
    const int32_t high = reduce(above), low = reduce(below), amax = high > low ? high : low;
    if (high != low) return bits<float>(high > low ? high : low | INT32_MIN);
    int64_t i = 0;
    while ((bits<int32_t>(block[place(i)]) & INT32_MAX) != amax) ++i;
    return block[place(i)];
  }

  // Two nibbles of positions a byte: lanes 2 i and 2 i + 1 of a block.
  Words put_meta(int64_t b) {
    const Words nibbles = load<Words>(&nibbles_[b * kLanes]);
    for (int64_t i = 0; i < kLanes / 2; ++i)
      meta_[b * kLanes / 2 + i] = uint8_t(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
    return nibbles;
  }

  void put(int64_t b, const Codes& codes) {
    if (job_.sparse) {
      const Words pairs = kept_pairs(codes, put_meta(b));
      store(&codes_[b * kBlock / 2], __builtin_convertvector(pairs, Pairs));
    } else {
      store(&codes_[b * kBlock], in_order(codes));
    }
  }

  // Code i of a group in the low half of a byte, i + group / 2 in the high one, each plus 8: bytes
  // are below 16, so that wider words may be shifted.
  void put_nibbles(int64_t b, Codes codes) {
    for (int64_t j = 0; j < kPlanes; ++j) codes.plane[j] = (codes.plane[j] + 8u) & 0xffu;
    if (job_.sparse) {
      uint64_t half[2];
      const Words pairs = kept_pairs(codes, put_meta(b));
      store(half, __builtin_convertvector(pairs, Pairs));
      store(&codes_[b * kBlock / 4], half[0] | half[1] << 4);
    } else {
      uint64_t quarter[4];
      store(quarter, in_order(codes));
      store(&codes_[b * kBlock / 2], quarter[0] | quarter[2] << 4);
      store(&codes_[b * kBlock / 2 + 8], quarter[1] | quarter[3] << 4);
    }
  }

  void copy_out(int64_t r, int64_t count) {
    std::memcpy(job_.codes + r * count, codes_.data(), count);
    if (job_.sparse) std::memcpy(job_.meta + r * (k_ / 8), meta_.data(), k_ / 8);
  }

  static constexpr double kNoLimit = std::numeric_limits<double>::infinity();

  const Job& job_;
  const int64_t k_, blocks_;
  std::vector<float> row_;
  std::vector<uint32_t> nibbles_;
  std::vector<float> importance_, columns_, divided_;
  std::vector<int32_t> column_amax_;
  std::vector<double> sums_;     // of blocks
  std::vector<uint32_t> moved_;  // wide enough for every kind of number
  std::vector<uint8_t> codes_, meta_;
  uint32_t kept_ = 0;  // bits of the row's largest magnitude that is kept
};

}  // namespace

/// Encode rows. -1: done; -2: no memory; -3: a quotient is infinite; else the index, as stored, of
/// the first number that is NaN or infinite. Thread-safe: everything that is written belongs to the
/// job.
extern "C" __attribute__((visibility("default"))) int64_t qk_encode_rows(const Job* job) {
  try {
    RowEncoder encoder(*job);
    switch (job->dtype) {
      case kHalf:
        return encoder.run<Half>();
      case kBfloat:
        return encoder.run<Bfloat>();
      default:
        return encoder.run<Float>();
    }
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}
