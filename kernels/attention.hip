// y[b, i, h, :] = sum_j p[j] (v[j, :] + v_mean) / sum_j p[j],   p[j] = 2^(q[i, :] . k[j, :])
//
// of the row n = b * heads + h; p is e4m3fn of 2^(score - m + 8), or with QK_PV 1 float16, cut; its
// sum is that of what it became: softmax.h.
//
// q       codes [N, M, D], D = 16 * QK_HEAD      q_scale f32 [N, M], int8 codes alone
// k       codes [N, keys, D]                     k_scale f32 [N, ceil(keys / 16)], int8 codes alone
// v       e4m3fn or float16 (QK_PV 1) [N, D, pitch], transposed; columns from `keys` on are zero,
//         pitch a multiple of 16
// v_scale f32 [scales, D]: row n has n % scales  v_mean  f32 [scales, D] or null
// y       io [N / heads, M, heads, d], d <= D a multiple of 8; q, k, v are zero from column d on
//
// With QK_Y_FORMAT y is codes of (y rounded to io) * smooth / y_scale, as
// quantize_static.hip makes them:
//
// y_scale f32 [1], read                          smooth         f32 [heads, d] or null
//
// The product of FP8 codes is the score in powers of two (softmax scale and log2 e are in the
// codes' factors); that of int8 codes times q_scale and k_scale is. M, keys >= 1; base pointers
// 16-byte aligned. A NaN in a row of q makes its result NaN, one in a row of k that of the
// whole head, one in v that of its column. int8 scores from 2^27 on, where float32 is 16 apart, may
// give NaN on a card; the host's encoder saturates.
//
// Launch: 256 threads, grid (ceil(M / TILE_M), N, 1). A wave has 32 queries (of heads beyond 128:
// 16) and takes TILE_N keys at a time through LDS, which the eight waves share: attend.h, and
// attend_sm89.h for NVIDIA, which has other lanes.
#include "attend_ends.h"

#if defined(QK_NVIDIA) || (defined(QK_HOST) && QK_HOST && QK_HOST_LAYOUT == QK_SM89)
#  include "attend_sm89.h"
#else
#  include "attend.h"
#endif

constexpr qk::Io kIo = qk::Io(QK_IO);
constexpr int kValueBytes = qk::Pv(QK_PV) == qk::Pv::kF16 ? 2 : 1;
constexpr int kWaves = QK_THREADS / qk::kWave;
constexpr int kHead = 16 * QK_HEAD;
using Loop = qk::Attention<kHead, QK_TILE_M / (16 * kWaves), QK_TILE_N, QK_THREADS,
                           qk::Format(QK_X_FORMAT), qk::Pv(QK_PV)>;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");
static_assert(QK_TILE_M == Loop::kWaveQueries * kWaves, "launch.json divides M by this number");

struct alignas(Loop::kRun == 8 ? 16 : 8) Run {
  qk::f32 v[Loop::kRun];
};

#ifndef QK_Y_FORMAT
using Type = qk::IoType<kIo>;
using Memory = Type::Memory;

/// Rounds neighbouring columns of a query, and writes them at once.
QK_DEVICE void write_run(Memory* y, const qk::f32 (&values)[Loop::kRun]) {
  if constexpr (Loop::kRun == 8) {
    constexpr int kPerVector = sizeof(qk::Vec16) / sizeof(Memory);
    QK_UNROLL for (int e = 0; e < 8; e += kPerVector)
      qk::store(y + e, Type::round_vector(values + e));
  } else {
    struct alignas(2 * sizeof(Memory)) Pair {
      Memory v[2];
    };
    qk::store(y, Pair{{Type::round(values[0]), Type::round(values[1])}});
  }
}

#endif

/// The first query of the calling wave. Asked for twice, so that no register holds it meanwhile.
QK_DEVICE int first_query() {
  return qk::block_x() * QK_TILE_M + qk::wave_index() * Loop::kWaveQueries;
}

/// A run of a query, with the scale and the mean of its columns.
QK_DEVICE void finish_run(qk::f32* values, const qk::Ends& ends, const Loop& loop, int which,
                          int run, int column, qk::f32 inverse) {
  const auto scale = qk::load<Run>(ends.scale + column);
  QK_UNROLL for (int e = 0; e < Loop::kRun; ++e)
    values[e] = loop.value(which, run, e) * inverse * scale.v[e];
  if (ends.mean == nullptr) return;
  const auto mean = qk::load<Run>(ends.mean + column);
  QK_UNROLL for (int e = 0; e < Loop::kRun; ++e)
    values[e] = qk::add_rounded(values[e], mean.v[e]);
}

#ifdef QK_Y_FORMAT
/// Stores a lane's codes: eight of a run or, where runs are shorter, four of two runs.
template <int kCount>
QK_DEVICE void store_codes(qk::u8* y, const qk::Codes<kCount>& codes, int run, int lane,
                           bool exists, int d) {
  if constexpr (kCount == 8) {
    const int column = Loop::column(run, lane);
    if (exists && column < d) qk::store(y + column, codes);
  } else {
    const qk::u32 four = qk::four_of_a_block(codes, lane);
    const int column = 8 * run + qk::column_of_four(lane);
    if (exists && column < d) qk::store(y + column, four);
  }
}

QK_DEVICE void write(const qk::Ends& ends, const Loop& loop) {
  constexpr int kAtOnce = Loop::kRun == 8 ? 1 : 2;  // runs
  static_assert(Loop::kRuns % kAtOnce == 0, "a head is a whole number of pairs of short runs");
  const int first = first_query(), lane = Loop::lane();
  const qk::CodedEnd<kIo> ending(ends, ends.y_scale[0]);
  QK_UNROLL for (int which = 0; which < Loop::kLaneQueries; ++which) {
    const qk::f32 inverse = qk::approx_reciprocal(loop.total(which));
    const int query = first + Loop::query(which, lane);
    auto* const y = ends.at<qk::u8>(query);
    QK_UNROLL for (int run = 0; run < Loop::kRuns; run += kAtOnce) {
      qk::f32 values[kAtOnce * Loop::kRun];
      QK_UNROLL for (int i = 0; i < kAtOnce; ++i) {
        qk::f32* const part = values + i * Loop::kRun;
        const int column = Loop::column(run + i, lane);
        finish_run(part, ends, loop, which, run + i, column, inverse);
        ending.template change<Loop::kRun>(part, column);
      }
      store_codes(y, ending.encode(values), run, lane, query < ends.queries, ends.d);
    }
  }
}
#else
QK_DEVICE void write(const qk::Ends& ends, const Loop& loop) {
  const int first = first_query(), lane = Loop::lane();
  QK_UNROLL for (int which = 0; which < Loop::kLaneQueries; ++which) {
    const qk::f32 inverse = qk::approx_reciprocal(loop.total(which));
    const int query = first + Loop::query(which, lane);
    if (query >= ends.queries) continue;
    auto* const y = ends.at<Memory>(query);
    QK_UNROLL for (int run = 0; run < Loop::kRuns; ++run) {
      const int column = Loop::column(run, lane);
      if (column >= ends.d) continue;
      qk::f32 values[Loop::kRun];
      finish_run(values, ends, loop, which, run, column, inverse);
      write_run(y + column, values);
    }
  }
}
#endif

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const qk::u8* q, const qk::u8* k, const qk::u8* v, const float* q_scale,
          const float* k_scale, const float* v_scale, const float* v_mean,
          QK_IF_CODES(const float* smooth, const float* y_scale, ) void* y, int m, int n, int keys,
          int pitch, int heads, int d, int scales) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const int row = qk::block_y();
  const qk::i64 at = row, groups = (keys + 15) / 16;
  const qk::Head head{q + at * m * kHead,
                      k + at * keys * kHead,
                      v + at * kHead * pitch * kValueBytes,
                      q_scale + at * m,
                      k_scale + at * groups,
                      m,
                      keys,
                      pitch};
  Loop loop;
  loop.run(head, lds, first_query());
  const int scale = row % scales * kHead;
  write({v_scale + scale, v_mean == nullptr ? nullptr : v_mean + scale, y, m, heads, row,
         d QK_IF_CODES(, smooth, y_scale)},
        loop);
}

QK_HOST_ENTRY(QK_THREADS, Loop::kLdsBytes)
