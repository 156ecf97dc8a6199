// y[b, i, h, :] = sum_j p[j] (v[j, :] + v_mean) / sum_j p[j],   p[j] = 2^(q[i, :] . k[j, :])
// on Hopper (sm_90a): operands, formula, codes with QK_Y_FORMAT and what may be NaN are those of
// attention.hip.
//
// q_map   with QK_MAPS (keys a multiple of 16), tensor map of q as [N M, QK_HEAD * 16 columns]: box
//         64 rows
// k_map   of k as [N keys / 16, 2, 4, 2, QK_HEAD * 16 columns], whose dimensions change places: box
//         QK_KEYS rows in the order of a tile
// v_map   of v as [N D, pitch]: box D rows. Boxes are one panel wide (attend_sm90.h), swizzled
// alike
//
// Launch: 128 (QK_GROUPS + 1) threads, grid of at most one block per multiprocessor,
// QK_SHARED_BYTES of dynamic shared memory. A block takes 64 QK_GROUPS queries of a head at a time.
// Warpgroups have 64 each and share the tiles of QK_KEYS keys that the last one fetches:
// attend_sm90.h, which has the lanes. quantkit/device/hopper/hopper_attention.py has these numbers.
#include "attend_ends.h"
#include "attend_sm90.h"

constexpr qk::Io kIo = qk::Io(QK_IO);
constexpr int kHead = 16 * QK_HEAD;
using Loop = qk::HopperAttention<kHead, QK_GROUPS, QK_KEYS, qk::Format(QK_X_FORMAT), QK_MAPS == 1>;
static_assert(Loop::kSharedBytes == QK_SHARED_BYTES,
              "hopper/attention.py counts the shared memory");

struct alignas(8) TwoFloats {
  qk::f32 v[2];
};

/// Writes the 16 queries of a warp: two neighbouring columns of two of them a lane, or codes of
/// four.
QK_DEVICE void write(const qk::Ends& ends, const Loop& loop, int first) {
  // All at once: each would wait for memory by itself behind a condition.
  TwoFloats scale[kHead / 8], mean[kHead / 8];
  QK_UNROLL for (int j = 0; j < kHead / 8; ++j) {
    const int column = 8 * j + 2 * (loop.lane % 4);
    scale[j] = qk::load<TwoFloats>(ends.scale + column);
    mean[j] = ends.mean == nullptr ? TwoFloats{} : qk::load<TwoFloats>(ends.mean + column);
  }
#ifdef QK_Y_FORMAT
  // Read anew for each piece of work: kept meanwhile, what follows from it makes registers spill.
  qk::f32 y_scale = ends.y_scale[0];
  int lane = loop.lane;
  asm volatile("" : "+f"(y_scale), "+r"(lane));
  const qk::CodedEnd<kIo> ending(ends, y_scale);
#else
  using Type = qk::IoType<kIo>;
  using Memory = typename Type::Memory;
  struct alignas(2 * sizeof(Memory)) Pair {
    Memory v[2];
  };
#endif
  QK_UNROLL for (int r = 0; r < 2; ++r) {
    const int query = first + loop.lane / 4 + 8 * r;
    const qk::f32 inverse = qk::approx_reciprocal(loop.out[Loop::kOut - 4 + 2 * r]);
    const auto value = [&](int j, int e) {
      const qk::f32 product = loop.out[4 * j + 2 * r + e] * inverse * scale[j].v[e];
      return qk::add_rounded(product, mean[j].v[e]);
    };
#ifdef QK_Y_FORMAT
    auto* const y = ends.at<qk::u8>(query) + qk::column_of_four(lane);
    QK_UNROLL for (int j = 0; j < kHead / 8; j += 2) {
      qk::f32 values[4] = {value(j, 0), value(j, 1), value(j + 1, 0), value(j + 1, 1)};
      QK_UNROLL for (int i = 0; i < 2; ++i)
        ending.template change<2>(values + 2 * i, 8 * (j + i) + 2 * (lane % 4));
      const qk::u32 four = qk::four_of_a_block(ending.encode(values), lane);
      const bool exists = 8 * j + qk::column_of_four(lane) < ends.d;
      if (query < ends.queries && exists) qk::store(y + 8 * j, four);
    }
#else
    auto* const y = ends.at<Memory>(query);
    QK_UNROLL for (int j = 0; j < kHead / 8; ++j) {
      const Pair pair{{Type::round(value(j, 0)), Type::round(value(j, 1))}};
      if (query < ends.queries && 8 * j < ends.d) qk::store(y + 8 * j + 2 * (loop.lane % 4), pair);
    }
#endif
  }
}

#if QK_MAPS
#  define QK_MAP_ARGUMENTS                                                                      \
    , const __grid_constant__ qk::TensorMap q_map, const __grid_constant__ qk::TensorMap k_map, \
        const __grid_constant__ qk::TensorMap v_map
#  define QK_MAP_NAMES &q_map, &k_map, &v_map
#else
#  define QK_MAP_ARGUMENTS
#  define QK_MAP_NAMES nullptr, nullptr, nullptr
#endif

extern "C" __global__ void __launch_bounds__(Loop::kThreads, 1)
    QK_SYMBOL(const qk::u8* q, const qk::u8* k, const qk::u8* v, const float* q_scale,
              const float* k_scale, const float* v_scale, const float* v_mean,
              QK_IF_CODES(const float* smooth, const float* y_scale, ) void* y, int m, int n,
              int keys, int pitch, int heads, int d, int scales QK_MAP_ARGUMENTS) {
  extern __shared__ __align__(1024) qk::u8 shared[];
  const qk::HopperHeads all{q, k, v, q_scale, k_scale, n, m, keys, pitch, QK_MAP_NAMES};
  Loop loop{all, qk::shared_address(shared), qk::thread_index() % qk::kWave,
            (keys + QK_KEYS - 1) / QK_KEYS};
  loop.init(shared);
  qk::start();
  if (qk::wave_index() / 4 == QK_GROUPS) {
    qk::registers_shrink<Loop::kCopying>();
    loop.produce();
  } else {
    qk::registers_grow<Loop::kMultiplying>();
    const int pieces = loop.pieces(), group = qk::wave_index() / 4;
    qk::u32 tile = 0, piece = 0;
    QK_NO_UNROLL for (int work = qk::block_x(); work < pieces * n; work += gridDim.x, ++piece) {
      const int row = work / pieces;
      const int first = work % pieces * Loop::kQueries + 16 * qk::wave_index();
      loop.load_query_scales(row, first);
      loop.consume(loop.queries_at(piece) + group * Loop::QueryTile::kTotal, tile, piece);
      tile += loop.tiles;
      const int scale = row % scales * kHead;
      write({v_scale + scale, v_mean == nullptr ? nullptr : v_mean + scale, y, m, heads, row,
             d QK_IF_CODES(, smooth, y_scale)},
            loop, first);
    }
  }
}
