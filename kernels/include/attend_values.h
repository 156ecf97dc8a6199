// clang-format off
// Probabilities and values of attention in registers, and O^T = V^T P^T: 32 keys of a tile at a time.
//
//   lane (h = lane / 16, r = lane % 16) has of chunk c, query r and row r of a block of 16 of V^T
//   e4m3fn   keys 32c + 16h .. + 15: a fragment of two instructions
//   float16  step s < 2: keys 32c + 16h + 8s .. + 7: what D of the scores' block 2c + s gave it is
//            slots 8h .. 8h + 7 of an instruction's B
// clang-format on
#pragma once

#include "mma.h"
#include "softmax.h"

namespace qk {

template <Pv>
struct ValuesOf;

template <>
struct ValuesOf<Pv::kE4M3FN> {
  using Mma = DenseMma<Format::kE4M3FN, Format::kE4M3FN>;
  using Acc = typename Mma::Acc;
  using Values = typename Mma::A;
  using Probabilities = typename Mma::B;
  static constexpr int kBytes = 1;  // of a value

  static QK_DEVICE Values load_row(const u8* row, int chunk, int lane) {
    return Mma::load_row(row, chunk, lane);
  }
  /// Four keys from `scores` on: word w of a lane's four.
  static QK_DEVICE void encode(Probabilities& p, int w, const f32* scores) {
    p.v[w] = encode_four(approx_exp2(scores[0]), approx_exp2(scores[1]), approx_exp2(scores[2]),
                         approx_exp2(scores[3]));
  }
  static QK_DEVICE f32 add(const Probabilities& p, int w, f32 sum) {
    return add_codes(p.v[w], sum);
  }
  template <int kBlocks>
  static QK_DEVICE void multiply(Acc (&out)[1][kBlocks], const Values& values,
                                 const Probabilities (&p)[kBlocks]) {
    const Values rows[1] = {values};
    Mma::multiply(out, rows, p);
  }
};

template <>
struct ValuesOf<Pv::kF16> {
  using Mma = HalfMma<Io::kF16>;
  using Acc = typename Mma::Acc;
  struct Values {
    Vec16 steps[2];
  };
  struct Probabilities {
    typename Mma::Weights steps[2];
  };
  static constexpr int kBytes = 2;

  static QK_DEVICE Values load_row(const u8* row, int chunk, int lane) {
    const u8* const run = row + 64 * chunk + 32 * (lane / 16);
    return {{load<Vec16>(run), load<Vec16>(run + 16)}};
  }
  static QK_DEVICE void encode(Probabilities& p, int w, const f32* scores) {
    QK_UNROLL for (int i = 0; i < 2; ++i)
      p.steps[w / 2].v[2 * (w % 2) + i] =
          cut_pair(approx_exp2(scores[2 * i]), approx_exp2(scores[2 * i + 1]));
  }
  static QK_DEVICE f32 add(const Probabilities& p, int w, f32 sum) {
    QK_UNROLL for (int i = 0; i < 2; ++i)
      sum = add_pair(p.steps[w / 2].v[2 * (w % 2) + i], sum);
    return sum;
  }
  template <int kBlocks>
  static QK_DEVICE void multiply(Acc (&out)[1][kBlocks], const Values& values,
                                 const Probabilities (&p)[kBlocks]) {
    QK_UNROLL for (int s = 0; s < 2; ++s) {
      const auto rows = __builtin_bit_cast(typename Mma::Tokens, values.steps[s]);
      QK_UNROLL for (int j = 0; j < kBlocks; ++j)
        out[0][j] = Mma::multiply(p[j].steps[s], rows, out[0][j]);
    }
  }
};

}  // namespace qk
