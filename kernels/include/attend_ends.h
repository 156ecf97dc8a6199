// What leaves attention: heads in the io type or, with QK_Y_FORMAT, codes of what these would be,
// as quantize_static.hip makes them.
#pragma once

#include "vector_io.h"

// Parameters and arguments that codes alone have.
#ifdef QK_Y_FORMAT
#  define QK_IF_CODES(...) __VA_ARGS__
#else
#  define QK_IF_CODES(...)
#endif

namespace qk {

/// What sums of a head are multiplied by, and where they go.
struct Ends {
  const f32* scale;
  const f32* mean;  // or null
  void* y;
  int queries, heads, row, d;
#ifdef QK_Y_FORMAT
  const f32* smooth;  // [heads, d] or null
  const f32* y_scale;
#endif

  /// The head of a query, as the calling block's row has it.
  template <class Memory>
  QK_DEVICE Memory* at(int query) const {
    const i64 token = static_cast<i64>(row / heads) * queries + query;
    return static_cast<Memory*>(y) + (token * heads + row % heads) * d;
  }
};

#ifdef QK_Y_FORMAT
/// What values of a head go through on their way to codes.
template <Io kIo>
struct CodedEnd {
  static constexpr Format kFormat = Format(QK_Y_FORMAT);
  Divisor<kFormat> divisor;
  FastDivisor<kFormat> fast;
  const f32* smooth;  // of the head's columns, or null
  int d;

  /// scale: ends.y_scale's number.
  QK_DEVICE CodedEnd(const Ends& ends, f32 scale) : divisor(scale), fast(scale), d(ends.d) {
    const int first = ends.row % ends.heads * d;
    smooth = ends.smooth == nullptr ? nullptr : ends.smooth + first;
  }

  /// Makes of neighbouring values what is divided by the scale. The numbers of columns behind the
  /// head are of no account: their codes are not stored.
  template <int kCount>
  QK_DEVICE void change(f32* values, int column) const {
    struct alignas(kCount * 4 < 16 ? kCount * 4 : 16) Numbers {
      f32 v[kCount];
    };
    const int at = column < d ? column : 0;
    QK_UNROLL for (int e = 0; e < kCount; ++e)
      values[e] = rounded<kIo>(values[e]);
    if (smooth != nullptr) {
      const auto numbers = load<Numbers>(smooth + at);
      QK_UNROLL for (int e = 0; e < kCount; ++e)
        values[e] *= numbers.v[e];
    }
  }

  template <int kCount>
  QK_DEVICE Codes<kCount> encode(const f32 (&values)[kCount]) const {
#  ifdef QK_ENCODES_PAIRS
    // int8's is not certain of a NaN.
    if constexpr (kFormat == Format::kE4M3FN) {
      Codes<kCount> codes;
      if (__builtin_expect(divisor.usual && fast.encode(codes, values), 1)) return codes;
    }
#  endif
    return divisor.encode(values);
  }
};

/// Four neighbouring codes of a lane that has two neighbouring ones of each of two blocks of eight
/// columns: lanes beside each other give each other one of these. Called by all lanes.
QK_DEVICE u32 four_of_a_block(const Codes<4>& codes, int lane) {
  const u32 own = codes.words[0], other = lane_xor(own, 1);
  return lane % 2 == 0 ? (own & 0xffffu) | other << 16 : (own & 0xffff0000u) | other >> 16;
}
/// The first one's column from the first block's.
QK_DEVICE int column_of_four(int lane) { return 8 * (lane % 2) + 4 * (lane % 4 / 2); }
#endif

}  // namespace qk
