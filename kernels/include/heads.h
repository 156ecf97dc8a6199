// Values of attention's heads, from one or two streams of tokens: norm, rotation, mean, factor.
//
//   row n = picture * heads + head; tokens of the second stream stand behind those of the first
//   r       = 1 / sqrt(sum_c(x_c x_c) * (1 / d) + eps)       where the stream has a weight
//   u_c     = x_c * r * weight_c
//   v_c     = u_c * cos_c + rotated(u)_c * sin_c             where there is a rotation
//   value_c = (v_c - mean_c) * factor                        columns from d on are zero
//
// rotated(u), in pairs: -u_1 u_0 -u_3 u_2 ...; in halves: -u_{d/2} ... -u_{d-1} u_0 ... u_{d/2-1}.
//
// float32, every operation rounded by itself in this order; square root and quotients to nearest.
// The sum: the squares of a run of 8 columns are added as four pairs 4 apart, two 2 apart and one;
// runs likewise, neighbours first, a power of two of them.
#pragma once

#include "vector_io.h"

namespace qk {

/// Columns of a run: one 16-byte load of 16-bit values. Runs of the widest row, and columns whose
/// codes fill 16 bytes.
constexpr int kRun = 8, kMostRuns = 32, kWhole = 16;

/// Tokens of a projection. Other projections may lie beside it.
struct Stream {
  const void* x;       // io [pictures, tokens, pitch]
  const void* weight;  // [d] of the norm, or null
  int tokens, pitch, column;
};

/// What all rows share.
struct Heads {
  const f32* cos;  // f32 [tokens, d], as sin
  const f32* sin;
  int heads, d, scales;
  f32 eps;

  QK_DEVICE int padded() const { return (d + kWhole - 1) / kWhole * kWhole; }
};

/// A row of heads: the n-th of all pictures.
struct HeadRow {
  int row, picture, head, numbers;

  QK_DEVICE HeadRow(const Heads& all, int n)
      : row(n), picture(n / all.heads), head(n % all.heads), numbers(n % all.scales) {}

  /// The next one, without another division; the last of `count` stays.
  QK_DEVICE void advance(const Heads& all, int count) {
    if (row + 1 >= count) return;
    ++row;
    head = head + 1 < all.heads ? head + 1 : 0;
    picture += head == 0;
    numbers = numbers + 1 < all.scales ? numbers + 1 : 0;
  }
};

/// Which token and columns a lane has: `lanes`, a power of two, take a row, with kRuns runs each.
template <int kRuns>
struct LanePosition {
  int token, column;
  bool exists;

  QK_DEVICE LanePosition(int lanes, int tokens, int columns, int block) {
    const int shift = (lanes > 1) + (lanes > 2) + (lanes > 4) + (lanes > 8) + (lanes > 16);
    const int thread = thread_index();
    token = (block * QK_THREADS + thread) >> shift;
    column = (thread & (lanes - 1)) * kRuns * kRun;
    exists = token < tokens && column < columns;
    // Lanes that have none take part in sums over others.
    token = token < tokens ? token : tokens - 1;
  }
};

/// The columns of a row that a lane has, run by run.
template <int kRuns>
struct HeadColumns {
  int from[kRuns];    // the runs' first columns; of those beyond the row its last run's, to have
  bool there[kRuns];  // no branch around a load

  QK_DEVICE HeadColumns(int column, int d) {
    QK_UNROLL for (int p = 0; p < kRuns; ++p) {
      there[p] = column + kRun * p < d;
      from[p] = there[p] ? column + kRun * p : d - kRun;
    }
  }
};

/// They as they lie in memory.
template <Io kIo, int kRuns>
struct RawColumns {
  using Run = RunOf<kIo, kRun>;
  using Memory = typename Run::Memory;
  typename Run::Raw runs[kRuns];

  QK_DEVICE void load(const Memory* row, const HeadColumns<kRuns>& columns) {
    QK_UNROLL for (int p = 0; p < kRuns; ++p)
      runs[p] = Run::load_raw(row + columns.from[p], true, kRun);
  }

  QK_DEVICE void widen(f32 (&values)[kRuns * kRun]) const {
    QK_UNROLL for (int p = 0; p < kRuns; ++p) {
      f32 run[kRun];
      Run::widen(run, runs[p]);
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        values[kRun * p + e] = run[e];
    }
  }
};

template <Io kIo, int kRuns>
QK_DEVICE void load_columns(f32 (&values)[kRuns * kRun], const void* row,
                            const HeadColumns<kRuns>& columns) {
  RawColumns<kIo, kRuns> raw;
  raw.load(static_cast<const typename IoType<kIo>::Memory*>(row), columns);
  raw.widen(values);
}

enum class Rotary { kNone = QK_NONE, kPairs = QK_PAIRS, kHalves = QK_HALVES };

/// A token's rotation in a lane's columns.
template <Rotary kRotary, int kRuns>
struct Turn {
  f32 cosine[kRuns * kRun], sine[kRuns * kRun];

  QK_DEVICE Turn(const Heads& all, int token, const HeadColumns<kRuns>& columns) {
    if constexpr (kRotary != Rotary::kNone) {
      const i64 at = static_cast<i64>(token) * all.d;
      load_columns<Io::kF32, kRuns>(cosine, all.cos + at, columns);
      load_columns<Io::kF32, kRuns>(sine, all.sin + at, columns);
    }
  }
};

/// 1 / the root of the mean square of rows' columns, in all their lanes. Rows at once, as a lane
/// waits for its neighbours.
template <int kRuns, int kRows>
QK_DEVICE void inverse_roots(f32 (&roots)[kRows], const f32 (&values)[kRows][kRuns * kRun],
                             const Heads& all, const HeadColumns<kRuns>& columns, int lanes) {
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    f32 sums[kRuns];
    QK_UNROLL for (int p = 0; p < kRuns; ++p) {
      f32 squares[kRun];
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        squares[e] = values[i][kRun * p + e] * values[i][kRun * p + e];
      QK_UNROLL for (int apart = kRun / 2; apart > 0; apart /= 2) {
        QK_UNROLL for (int e = 0; e < apart; ++e)
          squares[e] = add_rounded(squares[e], squares[e + apart]);
      }
      sums[p] = columns.there[p] ? squares[0] : 0.0f;
    }
    roots[i] = kRuns == 2 ? add_rounded(sums[0], sums[kRuns - 1]) : sums[0];
  }
  QK_UNROLL for (int mask = 1; mask < kMostRuns / kRuns; mask *= 2) {
    if (lanes > mask) {
      QK_UNROLL for (int i = 0; i < kRows; ++i)
        roots[i] = add_rounded(roots[i], bits_float(lane_xor(float_bits(roots[i]), mask)));
    }
  }
  const f32 share = 1.0f / static_cast<f32>(all.d);
  QK_UNROLL for (int i = 0; i < kRows; ++i)
    roots[i] = 1.0f / sqrt_rounded(add_rounded(roots[i] * share, all.eps));
}

/// A lane's token and columns in a projection of one or two streams, of any head.
template <Io kIo, Io kWeight, int kRuns>
struct Side {
  static constexpr int kColumns = kRuns * kRun;
  using Memory = typename IoType<kIo>::Memory;
  using WeightMemory = typename IoType<kWeight>::Memory;
  using Values = f32[kColumns];
  const Heads& all;
  const HeadColumns<kRuns>& columns;
  const Memory* x;  // of the stream's first picture
  i64 picture;      // elements from one to the next
  const WeightMemory* norm;
  bool any_norm;  // of one of the streams
  Values weight;

  QK_DEVICE Side(const Heads& heads, const Stream& first, const Stream& second,
                 const HeadColumns<kRuns>& from, int place)
      : all(heads), columns(from) {
    const bool behind = place >= first.tokens;
    const int token = behind ? place - first.tokens : place;
    const int pitch = behind ? second.pitch : first.pitch;
    x = static_cast<const Memory*>(behind ? second.x : first.x) +
        (static_cast<i64>(token) * pitch + (behind ? second.column : first.column));
    picture = static_cast<i64>(behind ? second.tokens : first.tokens) * pitch;
    norm = static_cast<const WeightMemory*>(behind ? second.weight : first.weight);
    any_norm = first.weight != nullptr || second.weight != nullptr;
    QK_UNROLL for (int e = 0; e < kColumns; ++e)
      weight[e] = 1.0f;
    if (norm != nullptr) load_columns<kWeight, kRuns>(weight, norm, columns);
  }

  QK_DEVICE const Memory* row_of(const HeadRow& row) const {
    return x + (row.picture * picture + row.head * all.d);
  }

  /// x_c * r * weight_c of the columns half a head from the lane's, whose runs are whole, too.
  QK_DEVICE void load_partners(Values& values, const Memory* row, f32 r) const {
    const int half = all.d / 2;
    QK_UNROLL for (int p = 0; p < kRuns; ++p) {
      const int at = columns.from[p] < half ? columns.from[p] + half : columns.from[p] - half;
      f32 run[kRun];
      RunOf<kIo, kRun>::widen(run, RunOf<kIo, kRun>::load_raw(row + at, true, kRun));
      if (norm != nullptr) {
        using Numbers = RunOf<kWeight, kRun>;
        f32 scale[kRun];
        Numbers::widen(scale, Numbers::load_raw(norm + at, true, kRun));
        QK_UNROLL for (int e = 0; e < kRun; ++e)
          run[e] = run[e] * r * scale[e];
      }
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        values[kRun * p + e] = columns.from[p] < half ? -run[e] : run[e];
    }
  }

  /// Norm and rotation of the values of a row, whose inverse root is r.
  template <Rotary kRotary>
  QK_DEVICE void finish(Values& values, f32 r, const HeadRow& row,
                        const Turn<kRotary, kRuns>& turn) const {
    if (any_norm) {
      // Of a stream without a norm both are 1.
      r = norm != nullptr ? r : 1.0f;
      QK_UNROLL for (int e = 0; e < kColumns; ++e)
        values[e] = values[e] * r * weight[e];
    }
    if constexpr (kRotary != Rotary::kNone) {
      Values other;
      if constexpr (kRotary == Rotary::kHalves) {
        load_partners(other, row_of(row), r);
      } else {
        QK_UNROLL for (int e = 0; e < kColumns; ++e)
          other[e] = e % 2 == 0 ? -values[e + 1] : values[e - 1];
      }
      QK_UNROLL for (int e = 0; e < kColumns; ++e)
        values[e] = add_rounded(values[e] * turn.cosine[e], other[e] * turn.sine[e]);
    }
  }
};

/// (values - mean) * factor.
template <int kRuns>
QK_DEVICE void centre_and_scale(f32 (&values)[kRuns * kRun], const f32* mean,
                                const HeadColumns<kRuns>& columns, f32 factor) {
  if (mean != nullptr) {
    f32 means[kRuns * kRun];
    load_columns<Io::kF32, kRuns>(means, mean, columns);
    QK_UNROLL for (int e = 0; e < kRuns * kRun; ++e)
      values[e] = add_rounded(values[e], -means[e]);
  }
  QK_UNROLL for (int e = 0; e < kRuns * kRun; ++e)
    values[e] *= factor;
}

/// e4m3fn codes of a run, zero where it is no column.
QK_DEVICE Codes<kRun> encode_there(const f32 (&values)[kRun], bool there) {
  Codes<kRun> codes = encode_run<Format::kE4M3FN>(values);
  QK_UNROLL for (int i = 0; i < kRun / 4; ++i)
    codes.words[i] = there ? codes.words[i] : 0u;
  return codes;
}

}  // namespace qk
