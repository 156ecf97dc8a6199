// What dynamic scales of attention follow from, by chunk of tokens: the largest |q| of runs of 8
// columns; of each column of keys and of values their sum, the smallest and the largest.
//
// x_q       io [B, q_tokens, q_pitch]: heads side by side from column c_q on; row n of heads is
//           picture * heads + head
// x_k, x_v  io [B, keys, k_pitch or v_pitch], from the columns c_k and c_v on
// q_amax    f32 [n, chunks, d / 8]
// partials  f32 [n, 2, chunks, 3, d]: keys, then values
// m is the larger one of q_tokens and keys; k = d, columns and pitches are multiples of 8; base
// pointers 16-byte aligned. chunks = ceil(m / rows) of rows = 32 * ceil(m / 1024) tokens: 32 at
// most. A chunk without tokens has 0, 0, inf and -inf.
// NaN makes q_amax and sums NaN; smallest and largest are those of the numbers.
//
// Launch: 256 threads, grid (chunks, 3 * ceil(n k / 256), 1): blocks of queries, of keys, of
// values. Lane l of every wave has run i = 32 * block + l of all heads' columns, which is
//
//   head row i / (d / 8), columns 8 (i % (d / 8)) to 8 (i % (d / 8)) + 7
//
// so that lanes next to each other read columns next to each other, across heads. Wave w has the
// tokens w, w + 8, ... of its chunk and adds them in this order, the block the waves in theirs.
#include "vector_io.h"

namespace {

constexpr int kRun = 8, kWaves = QK_THREADS / qk::kWave, kColumns = qk::kWave * kRun;
constexpr int kTurns = 4;                                 // loads under way
constexpr int kUnit = kWaves * kTurns, kMostChunks = 32;  // of tokens; of a picture
constexpr int kNumbers = 3;                               // sum, smallest, largest
constexpr int kLdsBytes = kNumbers * kWaves * kColumns * 4;
static_assert(kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");
static_assert(QK_THREADS == kColumns, "in the end a thread has a column, and launch.json says so");
static_assert(kUnit == 32 && kUnit * kMostChunks == 1024, "launch.json divides by these numbers");

using Run = qk::RunOf<qk::Io(QK_IO), kRun>;
constexpr qk::u32 kInfinite = 0x7f800000u;

/// Heads side by side in the columns of a projection's tokens.
struct Projection {
  const void* x;
  int tokens, pitch, column;
};

/// The tokens of a chunk that a lane has, of the run of columns that it has.
struct Lane {
  const Run::Memory* from;
  qk::i64 pitch;
  int count;  // tokens of the chunk; 0 where there is no run

  QK_DEVICE Lane(const Projection& of, int row, int run, int heads, int d, int first, int rows) {
    const qk::i64 token = static_cast<qk::i64>(row / heads) * of.tokens + first;
    from = static_cast<const Run::Memory*>(of.x) +
           (token * of.pitch + of.column + row % heads * d + run * kRun);
    pitch = of.pitch;
    const int left = of.tokens - first;
    count = left < 0 ? 0 : left < rows ? left : rows;
  }

  /// Calls each(raw) for the wave's tokens in order.
  template <class Each>
  QK_DEVICE void for_each(const Each& each) const {
    for (int token = qk::wave_index(); token < count; token += kUnit) {
      Run::Raw raw[kTurns];
      QK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
        const int at = token + turn * kWaves;
        if (at < count) raw[turn] = Run::load_raw(from + at * pitch, true, kRun);
      }
      QK_UNROLL for (int turn = 0; turn < kTurns; ++turn) {
        if (token + turn * kWaves < count) each(raw[turn]);
      }
    }
  }
};

/// The largest magnitude of a run over the block's waves, to all lanes' runs of q_amax.
QK_DEVICE void largest(const Lane& lane, qk::u8* lds, qk::f32* to, bool exists) {
  qk::u32 best = 0;
  lane.for_each([&](const Run::Raw& raw) {
    const qk::u32 bits = Run::amax_bits(raw);
    best = bits > best ? bits : best;
  });
  const int thread = qk::thread_index();
  qk::store(lds + 4 * thread, best);
  qk::block_sync();
  if (qk::wave_index() != 0 || !exists) return;
  QK_UNROLL for (int wave = 1; wave < kWaves; ++wave) {
    const qk::u32 bits = qk::load<qk::u32>(lds + 4 * (wave * qk::kWave + thread));
    best = bits > best ? bits : best;
  }
  *to = qk::bits_float(best);
}

/// Sum, largest and minus the smallest number of each column of a lane.
struct Spread {
  qk::f32 numbers[kNumbers][kRun];

  QK_DEVICE Spread() {
    QK_UNROLL for (int e = 0; e < kRun; ++e) {
      numbers[0][e] = 0.0f;
      numbers[1][e] = numbers[2][e] = -qk::bits_float(kInfinite);
    }
  }
  QK_DEVICE void add(const qk::f32 (&values)[kRun]) {
    QK_UNROLL for (int e = 0; e < kRun; ++e) {
      numbers[0][e] = qk::add_rounded(numbers[0][e], values[e]);
      numbers[1][e] = qk::maximum(-values[e], numbers[1][e]);
      numbers[2][e] = qk::maximum(values[e], numbers[2][e]);
    }
  }
  /// Where a thread finds those of its column, wave by wave.
  QK_DEVICE void put(qk::u8* lds) const {
    struct alignas(16) Quad {
      qk::f32 v[4];
    };
    const int at = qk::wave_index() * kColumns + qk::thread_index() % qk::kWave * kRun;
    QK_UNROLL for (int i = 0; i < kNumbers; ++i) {
      QK_UNROLL for (int e = 0; e < kRun; e += 4) {
        const auto& own = numbers[i];
        const Quad quad{{own[e], own[e + 1], own[e + 2], own[e + 3]}};
        qk::store(lds + 4 * (i * kWaves * kColumns + at + e), quad);
      }
    }
  }
};

/// Calls each(number) for what the waves have of a thread's column.
template <class Each>
QK_DEVICE void for_each_wave(const qk::u8* lds, int number, const Each& each) {
  QK_UNROLL for (int wave = 0; wave < kWaves; ++wave) {
    const int at = (number * kWaves + wave) * kColumns + qk::thread_index();
    each(qk::load<qk::f32>(lds + 4 * at));
  }
}

}  // namespace

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* x_q, const void* x_k, const void* x_v, qk::f32* q_amax, qk::f32* partials,
          int m, int n, int k, int q_tokens, int keys, int q_pitch, int k_pitch, int v_pitch,
          int c_q, int c_k, int c_v, int heads) {
  QK_SHARED(lds, kLdsBytes);
  qk::start();
  const int runs = k / kRun, rows = (m + kUnit * kMostChunks - 1) / (kUnit * kMostChunks) * kUnit;
  const int chunks = (m + rows - 1) / rows, chunk = qk::block_x();
  const int across = (n * k + kColumns - 1) / kColumns, part = qk::block_y() / across;
  const int first = qk::block_y() % across * qk::kWave;
  const Projection of = part == 0   ? Projection{x_q, q_tokens, q_pitch, c_q}
                        : part == 1 ? Projection{x_k, keys, k_pitch, c_k}
                                    : Projection{x_v, keys, v_pitch, c_v};
  const int own = first + qk::thread_index() % qk::kWave;
  const bool exists = own < n * runs;
  // Lanes that have none take part in barriers, with the last one's.
  const int slot = exists ? own : n * runs - 1, row = slot / runs, run = slot % runs;
  const Lane lane(of, row, run, heads, k, chunk * rows, rows);
  if (part == 0) {
    const qk::i64 at = (static_cast<qk::i64>(row) * chunks + chunk) * runs + run;
    largest(lane, lds, q_amax + at, exists);
    return;
  }
  Spread spread;
  lane.for_each([&](const Run::Raw& raw) {
    qk::f32 values[kRun];
    Run::widen(values, raw);
    spread.add(values);
  });
  spread.put(lds);
  qk::block_sync();
  const int mine = first * kRun + qk::thread_index(), place = mine / k;
  if (place >= n) return;
  qk::f32 sum = 0.0f, below = -qk::bits_float(kInfinite), above = below;
  for_each_wave(lds, 0, [&](qk::f32 number) { sum = qk::add_rounded(sum, number); });
  for_each_wave(lds, 1, [&](qk::f32 number) { below = qk::maximum(number, below); });
  for_each_wave(lds, 2, [&](qk::f32 number) { above = qk::maximum(number, above); });
  const qk::i64 head = static_cast<qk::i64>(place) * 2 + part - 1;
  qk::f32* const to = partials + (head * chunks + chunk) * kNumbers * k + mine % k;
  to[0] = sum;
  to[k] = -below;
  to[2 * k] = above;
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
