// Sixteen consecutive values at a time: io -> f32 -> fp8, the unit in which the quantize kernels work.
#pragma once

#include "fp8.h"

namespace qk {

constexpr int kRun = 16;  // values: one 16-byte store of codes

template <Io kIo>
struct RunOf {
  using Type = IoType<kIo>;
  using Memory = typename Type::Memory;
  static constexpr int kPerLoad = sizeof(Vec16) / sizeof(Memory);

  /// `aligned`: x is a multiple of 16 bytes and all values exist; else `count` of them are read one by one.
  static QK_DEVICE void read(f32 (&values)[kRun], const Memory* x, bool aligned, int count) {
    if (aligned) {
      struct alignas(16) Piece {
        Memory v[kPerLoad];
      };
      QK_UNROLL for (int p = 0; p < kRun / kPerLoad; ++p) {
        const Piece piece = load<Piece>(x + p * kPerLoad);
        QK_UNROLL for (int e = 0; e < kPerLoad; ++e)
          values[p * kPerLoad + e] = Type::widen(piece.v[e]);
      }
    } else {
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        values[e] = e < count ? Type::widen(x[e]) : 0.0f;
    }
  }
};

/// The codes of values / scale: a true division, as torch's, because a reciprocal would move ties.
template <Format kFormat>
QK_DEVICE void write_codes(u8* q, const f32 (&values)[kRun], f32 scale, bool aligned, int count) {
  struct alignas(16) Codes {
    u8 v[kRun];
  };
  Codes codes;
  QK_UNROLL for (int e = 0; e < kRun; ++e)
    codes.v[e] = encode_fp8<kFormat>(values[e] / scale);
  if (aligned) {
    store(q, codes);
  } else {
    QK_UNROLL for (int e = 0; e < kRun; ++e) {
      if (e < count) q[e] = codes.v[e];
    }
  }
}

}  // namespace qk
