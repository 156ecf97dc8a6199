// Values of attention's heads, from one or two streams of tokens: norm, rotation, mean, factor.
//
//   row n = picture * heads + head; tokens of the second stream stand behind those of the first
//   r       = 1 / sqrt(sum_c(x_c x_c) / d + eps)             where the stream has a weight
//   u_c     = x_c * r * weight_c
//   v_c     = u_c * cos_c + rotated(u)_c * sin_c             where there is a rotation
//   value_c = (v_c - mean_c) * factor                        columns from d on are zero
//
// rotated(u), in pairs: -u_1 u_0 -u_3 u_2 ...; in halves: -u_{d/2} ... -u_{d-1} u_0 ... u_{d/2-1}.
//
// float32, every operation rounded by itself in this order; square root and quotients to nearest.
// The sum: a lane has 16 columns, whose squares are added as eight pairs 8 apart, four 4 apart, two
// and one; lanes likewise, the first half of a row's to its second half, a power of two of them.
#pragma once

#include "vector_io.h"

namespace qk {

/// Columns of a lane: one 16-byte store of codes. Lanes of the widest row.
constexpr int kColumns = 16, kMostLanes = 16;

/// Tokens of a projection. Other projections may lie beside it.
struct Stream {
  const void* x;      // io [pictures, tokens, pitch]
  const f32* weight;  // f32 [d] of the norm, or null
  int tokens, pitch, column;
};

/// What all rows share.
struct Heads {
  Stream first, second;
  const f32* cos;  // f32 [tokens, d], as sin
  const f32* sin;
  const f32* mean;    // f32 [scales, D] or null
  const f32* factor;  // f32 [scales]
  int heads, d, scales;
  f32 eps;

  QK_DEVICE int tokens() const { return first.tokens + second.tokens; }
  QK_DEVICE int padded() const { return (d + kColumns - 1) / kColumns * kColumns; }
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

/// The 16 columns of a row that a lane has, in two runs of 8.
struct Columns {
  int from[2];    // the runs' first columns; of those beyond the row its last run's, to have no
  bool there[2];  // branch around a load

  QK_DEVICE Columns(int column, int d) {
    QK_UNROLL for (int p = 0; p < 2; ++p) {
      there[p] = column + 8 * p < d;
      from[p] = there[p] ? column + 8 * p : d - 8;
    }
  }
};

/// They as they lie in memory.
template <Io kIo>
struct RawColumns {
  using Run = RunOf<kIo, 8>;
  using Memory = typename Run::Memory;
  typename Run::Raw runs[2];

  QK_DEVICE void load(const Memory* row, const Columns& columns) {
    QK_UNROLL for (int p = 0; p < 2; ++p)
      runs[p] = Run::load_raw(row + columns.from[p], true, 8);
  }

  QK_DEVICE void widen(f32 (&values)[kColumns]) const {
    QK_UNROLL for (int p = 0; p < 2; ++p) {
      f32 run[8];
      Run::widen(run, runs[p]);
      QK_UNROLL for (int e = 0; e < 8; ++e)
        values[8 * p + e] = run[e];
    }
  }
};

QK_DEVICE void load_columns(f32 (&values)[kColumns], const f32* row, const Columns& columns) {
  RawColumns<Io::kF32> raw;
  raw.load(row, columns);
  raw.widen(values);
}

/// Which token and columns a lane has: `lanes`, a power of two, take a row.
struct Place {
  int token, column;
  bool exists;

  QK_DEVICE Place(int lanes, int tokens, int padded) {
    const int shift = (lanes > 1) + (lanes > 2) + (lanes > 4) + (lanes > 8);
    const int thread = thread_index();
    token = (block_x() * QK_THREADS + thread) >> shift;
    column = (thread & (lanes - 1)) * kColumns;
    exists = token < tokens && column < padded;
    // Lanes that have none take part in sums over others.
    token = token < tokens ? token : tokens - 1;
  }
};

enum class Rotary { kNone = QK_NONE, kPairs = QK_PAIRS, kHalves = QK_HALVES };

/// A lane's token and columns, of any head.
template <Io kIo, Rotary kRotary>
struct TokenColumns {
  using Memory = typename IoType<kIo>::Memory;
  using Values = f32[kColumns];
  const Heads& heads;
  const Columns columns;
  int lanes;
  const Memory* x;  // of the stream's first picture
  i64 picture;      // elements from one to the next
  const f32* norms;
  bool any_norm;
  Values weight, cosine, sine;

  QK_DEVICE TokenColumns(const Heads& all, const Place& place, int count)
      : heads(all), columns(place.column, all.d), lanes(count) {
    const bool behind = place.token >= all.first.tokens;
    const Stream& first = all.first;
    const Stream& second = all.second;
    const int token = behind ? place.token - first.tokens : place.token;
    const int pitch = behind ? second.pitch : first.pitch;
    x = static_cast<const Memory*>(behind ? second.x : first.x) +
        (static_cast<i64>(token) * pitch + (behind ? second.column : first.column));
    picture = static_cast<i64>(behind ? second.tokens : first.tokens) * pitch;
    norms = behind ? second.weight : first.weight;
    any_norm = first.weight != nullptr || second.weight != nullptr;
    if (norms != nullptr) load_columns(weight, norms, columns);
    if constexpr (kRotary != Rotary::kNone) {
      const i64 at = static_cast<i64>(place.token) * all.d;
      load_columns(cosine, all.cos + at, columns);
      load_columns(sine, all.sin + at, columns);
    }
  }

  QK_DEVICE const Memory* row_of(const HeadRow& row) const {
    return x + (row.picture * picture + row.head * heads.d);
  }

  /// 1 / the root of the mean square of the row's columns, in all its lanes.
  QK_DEVICE f32 inverse(const Values& values) const {
    Values sums;
    QK_UNROLL for (int e = 0; e < kColumns; ++e)
      sums[e] = columns.there[e / 8] ? values[e] * values[e] : 0.0f;
    QK_UNROLL for (int apart = kColumns / 2; apart > 0; apart /= 2) {
      QK_UNROLL for (int e = 0; e < apart; ++e)
        sums[e] = add_rounded(sums[e], sums[e + apart]);
    }
    f32 sum = sums[0];
    QK_UNROLL for (int mask = kMostLanes / 2; mask > 0; mask /= 2) {
      if (lanes > mask) sum = add_rounded(sum, bits_float(lane_xor(float_bits(sum), mask)));
    }
    return 1.0f / sqrt_rounded(add_rounded(sum / static_cast<f32>(heads.d), heads.eps));
  }

  /// x_c * r * weight_c of the columns half a head from the lane's, whose runs are whole, too.
  QK_DEVICE void load_partners(Values& values, const Memory* row, f32 r) const {
    const int half = heads.d / 2;
    QK_UNROLL for (int p = 0; p < 2; ++p) {
      const int at = columns.from[p] < half ? columns.from[p] + half : columns.from[p] - half;
      f32 run[8];
      RunOf<kIo, 8>::widen(run, RunOf<kIo, 8>::load_raw(row + at, true, 8));
      if (norms != nullptr) {
        using Numbers = RunOf<Io::kF32, 8>;
        f32 scale[8];
        Numbers::widen(scale, Numbers::load_raw(norms + at, true, 8));
        QK_UNROLL for (int e = 0; e < 8; ++e)
          run[e] = run[e] * r * scale[e];
      }
      QK_UNROLL for (int e = 0; e < 8; ++e)
        values[8 * p + e] = columns.from[p] < half ? -run[e] : run[e];
    }
  }

  QK_DEVICE void rotate(Values& values, const Memory* row, f32 r) const {
    Values other;
    if constexpr (kRotary == Rotary::kHalves) {
      load_partners(other, row, r);
    } else {
      QK_UNROLL for (int e = 0; e < kColumns; ++e)
        other[e] = e % 2 == 0 ? -values[e + 1] : values[e - 1];
    }
    QK_UNROLL for (int e = 0; e < kColumns; ++e)
      values[e] = add_rounded(values[e] * cosine[e], other[e] * sine[e]);
  }

  /// Values of a row of heads, of which `raw` and `factor` have been loaded.
  QK_DEVICE void finish(Values& values, const RawColumns<kIo>& raw, const HeadRow& row,
                        f32 factor) const {
    raw.widen(values);
    f32 r = 1.0f;
    if (any_norm) {
      r = inverse(values);
      if (norms != nullptr) {
        QK_UNROLL for (int e = 0; e < kColumns; ++e)
          values[e] = values[e] * r * weight[e];
      }
    }
    if constexpr (kRotary != Rotary::kNone) rotate(values, row_of(row), r);
    if (heads.mean != nullptr) {
      Values mean;
      load_columns(mean, heads.mean + row.numbers * heads.padded(), columns);
      QK_UNROLL for (int e = 0; e < kColumns; ++e)
        values[e] = add_rounded(values[e], -mean[e]);
    }
    QK_UNROLL for (int e = 0; e < kColumns; ++e)
      values[e] *= factor;
    if (heads.d % kColumns != 0 && !columns.there[1]) {
      QK_UNROLL for (int e = 8; e < kColumns; ++e)
        values[e] = 0.0f;
    }
  }
};

}  // namespace qk
