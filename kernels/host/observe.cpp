// What calibration wants to know of an input, in one pass over it: by channel c of x (outer, C, n)
//
//   amax_c = max |x|      sum_c = sum of x      squares_c = sum of x^2      counts_b = |x| in bin b
//
// float32; n is 1 where channels stand last, and the pixels of a picture where they come before.
// Bin b of a magnitude is its exponent and first mantissa bits (quantkit/numerics/histogram.py,
// which is the oracle of the tests and the path without a compiler). Magnitudes are compared as
// integers, so NaN and Inf stand above all others and stay. Sums are float32 over at most 32 terms
// a lane, then double. Vectors are the compiler's, from one source; threads share channels.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kLanes = 8, kTile = 4 * kLanes;
// Rows whose sums are float32.
constexpr int64_t kRows = 32;
// Vectors ahead of the one that is read: of channels last those of the next rows, which the CPU
// does not see coming. Inputs are rarely in a near cache: it halves the time.
constexpr int64_t kAhead = kRows;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

constexpr uint32_t kMagnitude = 0x7fffffffu;
// Of histogram.py: bits of the mantissa that name a bin, the first binade, and how many bins.
constexpr int kBinBits = 4, kShift = 23 - kBinBits;
constexpr int32_t kFirst = (-24 + 127) << kBinBits, kBins = ((16 + 24 + 1) << kBinBits) + 2;
// Values that are worth a thread.
constexpr int64_t kWork = 1 << 18;

// What Python passes: quantkit/device/host/observer.py has the same fields.
struct Observe {
  const float* x;   // (outer, channels, inner)
  uint32_t* amax;   // (channels), bits of float32
  double* sums;     // (channels)
  double* squares;  // (channels)
  double* counts;   // (bins)
  int64_t outer, channels, inner;
  int32_t threads;
};

template <class To, class From>
To bits(From value) {
  return __builtin_bit_cast(To, value);
}

// How often each bin was met. Neighbours are often alike, and an increment waits for the one before
// it in the same place: so they stand in different tables.
struct Counts {
  int64_t of[4][kBins] = {};

  // Of two vectors, in turns.
  void add(const Ints& first, const Ints& second) {
    int32_t one[kLanes], two[kLanes];
    std::memcpy(one, &first, sizeof one);
    std::memcpy(two, &second, sizeof two);
    for (int64_t l = 0; l < kLanes; ++l) {
      ++of[2 * l & 3][one[l]];
      ++of[(2 * l + 1) & 3][two[l]];
    }
  }
  void add(const Ints& bins) {
    for (int64_t l = 0; l < kLanes; ++l) ++of[l & 3][bins[l]];
  }
};

struct Lanes {
  Words amax = {};
  Floats sum = {}, square = {};

  // Returns the bins.
  Ints add(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    const Words magnitude = bits<Words>(x) & kMagnitude;
    amax = magnitude > amax ? magnitude : amax;
    sum += x;
    square += x * x;
    Ints bin = bits<Ints>(magnitude >> kShift) - (kFirst - 1);
    bin = bin < 0 ? Ints{} : bin;
    return bin > kBins - 1 ? Ints{} + (kBins - 1) : bin;
  }

  // Of `count` vectors, so many numbers apart.
  void add(const float* from, int64_t apart, int64_t count, Counts& counts) {
    for (; count > 1; count -= 2, from += 2 * apart) {
      __builtin_prefetch(from + kAhead * apart);
      __builtin_prefetch(from + (kAhead + 1) * apart);
      const Ints first = add(from);
      counts.add(first, add(from + apart));
    }
    if (count > 0) counts.add(add(from));
  }
};

// One number, where there is no whole vector of them.
struct Single {
  uint32_t amax = 0;
  float sum = 0, square = 0;

  void add(float x, Counts& counts) {
    const uint32_t magnitude = bits<uint32_t>(x) & kMagnitude;
    amax = magnitude > amax ? magnitude : amax;
    sum += x;
    square += x * x;
    int32_t bin = int32_t(magnitude >> kShift) - (kFirst - 1);
    bin = bin < 0 ? 0 : bin;
    ++counts.of[0][bin > kBins - 1 ? kBins - 1 : bin];
  }
};

struct Worker {
  const Observe& job;
  int64_t first, stop;  // channels
  Counts counts = {};

  void note(int64_t channel, uint32_t amax, float sum, float square) {
    if (amax > job.amax[channel]) job.amax[channel] = amax;
    job.sums[channel] += sum;
    job.squares[channel] += square;
  }

  void note(int64_t channel, const Lanes& lanes) {
    for (int64_t l = 0; l < kLanes; ++l)
      note(channel + l, lanes.amax[l], lanes.sum[l], lanes.square[l]);
  }

  // Channels last: a lane is a channel.
  void rows() {
    for (int64_t row = 0; row < job.outer; row += kRows) {
      const int64_t end = row + kRows < job.outer ? row + kRows : job.outer;
      int64_t c = first;
      for (; c + kLanes <= stop; c += kLanes) {
        Lanes lanes;
        lanes.add(job.x + row * job.channels + c, job.channels, end - row, counts);
        note(c, lanes);
      }
      for (; c < stop; ++c) {
        Single single;
        for (int64_t r = row; r < end; ++r) single.add(job.x[r * job.channels + c], counts);
        note(c, single.amax, single.sum, single.square);
      }
    }
  }

  // Pixels last: all lanes are of one channel.
  void runs() {
    for (int64_t o = 0; o < job.outer; ++o)
      for (int64_t c = first; c < stop; ++c) run(c, job.x + (o * job.channels + c) * job.inner);
  }

  void run(int64_t channel, const float* x) {
    constexpr int64_t kStep = kRows * kLanes;
    for (int64_t begin = 0; begin < job.inner; begin += kStep) {
      const int64_t end = begin + kStep < job.inner ? begin + kStep : job.inner;
      const int64_t vectors = (end - begin) / kLanes;
      int64_t i = begin + vectors * kLanes;
      Lanes lanes;
      lanes.add(x + begin, kLanes, vectors, counts);
      for (int64_t l = 0; l < kLanes; ++l)
        note(channel, lanes.amax[l], lanes.sum[l], lanes.square[l]);
      Single single;
      for (; i < end; ++i) single.add(x[i], counts);
      note(channel, single.amax, single.sum, single.square);
    }
  }

  void work() { job.inner == 1 ? rows() : runs(); }
};

int64_t thread_count(const Observe& job) {
  const int64_t tiles = (job.channels + kTile - 1) / kTile;
  const int64_t work = job.outer * job.channels * job.inner / kWork + 1;
  const int64_t most = work < tiles ? work : tiles;
  return most < job.threads ? most : job.threads;
}

}  // namespace

// Adds to sums, squares and counts, and raises amax: Python passes zeros.
extern "C" void qk_observe(const Observe* job) {
  const int64_t threads = thread_count(*job);
  const int64_t tiles = (job->channels + kTile - 1) / kTile;
  const auto begin = [&](int64_t i) {
    const int64_t channel = tiles * i / threads * kTile;
    return channel < job->channels ? channel : job->channels;
  };
  std::vector<Worker> workers;
  workers.reserve(size_t(threads));
  for (int64_t i = 0; i < threads; ++i) workers.push_back(Worker{*job, begin(i), begin(i + 1)});
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back(&Worker::work, &workers[size_t(i)]);
  if (threads > 0) workers[0].work();
  for (auto& other : others) other.join();
  for (const Worker& worker : workers)
    for (const auto& table : worker.counts.of)
      for (int32_t b = 0; b < kBins; ++b) job->counts[b] += double(table[b]);
}
