// A product behind which an activation stands, as codes, on Hopper: the formula of activated.h.
//
// A lane holds two neighbouring tokens of outputs g and g + 8 of 16. Their codes turn in shared
// memory, two at a time (stmatrix), and leave it 16 bytes at a time. The prefix is
// quantized by the warps of the copying warpgroup that copy nothing, while the others multiply.
#pragma once

#include "activated.h"
#include "token_scales_sm90.h"
#include "view_sm90.h"

namespace qk {

template <class Tile, Format kY, Io kIo, bool kPerToken, bool kPerChannel, int kAct, bool kChanges>
struct HopperActivatedEpilogue {
  using Args = ActivatedArgs;
  using View = MatrixView<Tile>;
  using Type = IoType<kIo>;
  using Memory = typename Type::Memory;
  static constexpr bool kHasPrefix = true;
  static constexpr int kVectors = Tile::kOutputs / 16;  // of 16 codes, in a warpgroup's row

  Args args;
  const TensorMap& map;  // not read: codes leave by plain stores
  u8* staged;            // the warpgroup's own, kM rows of kOutputs codes
  f32* scales;           // likewise: of kM tokens, then factors and biases of its outputs
  int thread;            // of the warpgroup
  int barrier;           // the warpgroup's
  View view;

  /// The thread's share of what the warpgroup multiplies and adds, loaded before the K loop hides
  /// the wait.
  struct Factors {
    f32 weight, bias;
    TokenScales<Tile, kPerToken> tokens;
  };

  /// What else is to be done, by `count` threads, of which this is number `index`.
  static QK_DEVICE void write_prefix(const Args& args, int index, int count) {
    if (args.prefix_columns > 0) quantize_prefix<kY, kIo>(args, 0, args.m, index, count);
  }

  QK_DEVICE Factors load_factors(Position at) const {
    const int output = at.n + thread;
    Factors factors{};
    if (thread < Tile::kOutputs && output < args.n) {
      factors.weight = args.w_scale[kPerChannel ? output : 0];
      if (args.bias != nullptr)
        factors.bias = Type::widen(static_cast<const Memory*>(args.bias)[output]);
    }
    factors.tokens.load(args.x_scale, at.m, args.m, thread);
    return factors;
  }

  template <class Sum>
  QK_DEVICE void run(const Sum (&sums)[Tile::kBlocks][Tile::kM / 2], const Factors& factors,
                     Position at) const {
    factors.tokens.share(scales, thread);
    if (thread < Tile::kOutputs) {
      scales[Tile::kM + thread] = factors.weight;
      scales[Tile::kM + Tile::kOutputs + thread] = factors.bias;
    }
    // The last tile's codes have been read by all who get here.
    group_sync(barrier, 128);
    const Quantizer quantizer(args.scale[0]);
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      const Lane mine = factors_of(block, at);
      QK_UNROLL for (int first = 0; first < Tile::kM; first += kTogether) {
        if constexpr (Tile::kM % kTogether == 0) {
          stage_tokens<kTogether / 8>(sums[block], mine, quantizer, first);
        } else if (first + kTogether <= Tile::kM) {
          stage_tokens<kTogether / 8>(sums[block], mine, quantizer, first);
        } else {
          stage_tokens<2>(sums[block], mine, quantizer, first);
        }
      }
    }
    group_sync(barrier, 128);
    write(at);
  }

  QK_DEVICE void finish() const {}

 private:
  // Tokens that turn at once, and eights of them whose codes are made at once, as registers allow.
  static constexpr bool kLarge = Tile::kBlocks * Tile::kM > 256;
  static constexpr int kTogether = kLarge || Tile::kConsumers > 2 ? 16 : 32,
                       kAtOnce = kLarge ? 1 : kTogether / 8;

  /// What a lane's outputs of a block are multiplied with, what is added, and what is done to the
  /// activation: two halves of 16 rows.
  struct Lane {
    f32 weight[2], bias[2], smooth[2];
    u32 target;  // where the lane's row of its first turned tokens goes

    QK_DEVICE f32 changed(f32 value, int half) const {
      return kChanges ? value * smooth[half] : value;
    }
  };

  QK_DEVICE Lane factors_of(int block, Position at) const {
    Lane mine = {};
    mine.target = shared_address(staged + staged_offset(thread % 32, 4 * block + thread / 32));
    QK_UNROLL for (int half = 0; half < 2; ++half) {
      const int row = 64 * block + thread / 32 * 16 + thread % 32 / 4 + 8 * half;
      mine.weight[half] = scales[Tile::kM + row];
      mine.bias[half] = scales[Tile::kM + Tile::kOutputs + row];
      if constexpr (!kChanges) continue;
      const bool inside = at.n + row < args.n;
      const int column = args.prefix_columns + at.n + row;
      mine.smooth[half] = inside && args.smooth != nullptr ? args.smooth[column] : 1.0f;
    }
    return mine;
  }

  struct Quantizer {
    FastDivisor<kY> fast;
    f32 scale, reciprocal;
    QK_DEVICE explicit Quantizer(f32 value)
        : fast(value), scale(value), reciprocal(Divisor<kY>(value).reciprocal) {}

    /// The whole warp takes the slow way where one lane has to.
    template <int kCount>
    QK_DEVICE void encode(u32* words, const f32 (&values)[kCount]) const {
      Codes<kCount> codes;
      const bool certain = fast.encode(codes, values);
      if (!__all_sync(0xffffffffu, certain)) codes = Divisor<kY>(scale, reciprocal).encode(values);
      QK_UNROLL for (int i = 0; i < kCount / 4; ++i)
        words[i] = codes.words[i];
    }
  };

  /// Offset of 16 codes: vectors of a row are swizzled, so that the rows that are touched together
  /// lie in other banks. Sixteen rows on they lie alike.
  static QK_DEVICE int staged_offset(int row, int vector) {
    return 16 * (kVectors * row + (vector ^ row * kVectors / 8 % kVectors));
  }

  /// Two values as they are once they have been written in io.
  static QK_DEVICE void round_both(f32 (&values)[2]) {
    if constexpr (kIo != Io::kF32) {
      const u32 pair = Type::round_pair(values[0], values[1]);
      values[0] = Type::widen(static_cast<Memory>(pair));
      values[1] = Type::widen(static_cast<Memory>(pair >> 16));
    }
  }

  /// Codes of eight tokens kEights times. Of 16 rows a lane has g and g + 8 of its quad: their
  /// codes leave as one value of 16 bits, in which order `write` finds them.
  template <int kEights, class Sum>
  QK_DEVICE void stage_tokens(const Sum (&sums)[Tile::kM / 2], const Lane& mine,
                              const Quantizer& quantizer, int first) const {
    const int lane = thread % 32;
    constexpr int kStep = kAtOnce < kEights ? kAtOnce : kEights;
    u32 words[kEights];
    QK_UNROLL for (int eight = 0; eight < kEights; eight += kStep) {
      f32 values[4 * kStep];  // of neighbouring tokens, two rows each
      QK_UNROLL for (int i = 0; i < 2 * kStep; ++i) {
        const int from = first + 8 * (eight + i / 2);
        const f32 token = scales[from + 2 * (lane % 4) + i % 2];
        f32 rows[2];
        QK_UNROLL for (int half = 0; half < 2; ++half) {
          const f32 sum = static_cast<f32>(sums[from / 2 + 2 * half + i % 2]);
          rows[half] = add_rounded(sum * token * mine.weight[half], mine.bias[half]);
        }
        round_both(rows);
        QK_UNROLL for (int half = 0; half < 2; ++half)
          rows[half] = activate<kAct>(rows[half]);
        round_both(rows);
        QK_UNROLL for (int half = 0; half < 2; ++half)
          values[2 * i + half] = mine.changed(rows[half], half);
      }
      quantizer.encode(words + eight, values);
    }
    store_transposed(mine.target + 16 * kVectors * first, words);
  }

  QK_DEVICE void write(Position at) const {
    const bool whole = args.n % 16 == 0;
    QK_UNROLL for (int i = 0; i < Tile::kM * kVectors; i += 128) {
      const int row = (i + thread) / kVectors, vector = (i + thread) % kVectors;
      const int token = at.m + row, column = at.n + 16 * vector;
      if (row >= Tile::kM || token >= args.m || column >= args.n) continue;
      const Vec16 mixed = load<Vec16>(staged + staged_offset(row, vector));
      Vec16 codes;
      QK_UNROLL for (int j = 0; j < 2; ++j) {
        codes.v[j] = __byte_perm(mixed.v[2 * j], mixed.v[2 * j + 1], 0x6420);
        codes.v[2 + j] = __byte_perm(mixed.v[2 * j], mixed.v[2 * j + 1], 0x7531);
      }
      u8* const target =
          args.q + (static_cast<i64>(token) * args.pitch() + args.prefix_columns + column);
      if (whole) {
        store(target, codes);
      } else {
        QK_UNROLL for (int e = 0; e < 16; ++e) {
          if (column + e < args.n) target[e] = static_cast<u8>(codes.v[e / 4] >> 8 * (e % 4));
        }
      }
    }
  }
};

}  // namespace qk
