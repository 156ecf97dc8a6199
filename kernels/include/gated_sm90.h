// GEGLU on Hopper: from the sums of outputs and of their gates to codes for the next product.
//
// y = code(h gelu(g) / y_scale), h = sum * x_scale * w_scale + bias of row j of w and g of row N +
// j. A tile has kN / 2 columns of y: its first rows of w are theirs, its second half their gates;
// of a warpgroup's two blocks of 64 rows one is each. So a lane holds h and g of the same tokens
// and columns.
#pragma once

#include "codec.h"
#include "gelu.h"
#include "view_sm90.h"

namespace qk {

struct GatedArgs {
  const f32* x_scale;  // [1] or [M]
  const f32* w_scale;  // [1] or [2 N]
  const void* bias;    // io [2 N] or null
  const f32* y_scale;  // [1]
  void* y;             // u8 [M, N]
  int m, n;
};

/// w as two matrices of N rows: a box has rows of one and the gates of these.
template <class Tile>
struct GatedView : MatrixView<Tile> {
  QK_DEVICE Coordinates<3> weights(int step, int n) const {
    return {{step * Tile::kWeightRow, n, 0}};
  }
};

template <class Tile, Format kY, Io kIo, bool kPerToken, bool kPerChannel>
struct HopperGatedEpilogue {
  using Args = GatedArgs;
  using View = GatedView<Tile>;
  using Type = IoType<kIo>;
  using Memory = typename Type::Memory;
  static constexpr bool kHasPrefix = false;
  static constexpr int kTokenScales = (Tile::kM + 127) / 128;
  static constexpr int kVectors =
      Tile::kOwnColumns / 16;  // of 16 bytes, that a warpgroup has of a row of y

  Args args;
  const TensorMap& map;  // not read: codes leave by plain stores
  u8* staged;            // the warpgroup's own, kM rows of kOwnColumns codes
  f32* scales;  // likewise: of kM tokens, then factors and biases of 64 rows and their gates
  int thread;   // of the warpgroup
  int barrier;  // the warpgroup's
  View view;

  /// The thread's share of what the warpgroup multiplies and adds, loaded before the K loop hides
  /// the wait.
  struct Factors {
    f32 weight, bias, token[kTokenScales];
  };

  QK_DEVICE Factors load_factors(Position at) const {
    const bool gates = thread >= 64;
    const int column = at.n + thread % 64, row = column + (gates ? args.n : 0);
    // What h is divided by in the end it is multiplied with at once.
    const f32 unit = gates ? 1.0f : 1.0f / args.y_scale[0];
    Factors factors{};
    if (column < args.n) {
      factors.weight = unit * args.w_scale[kPerChannel ? row : 0];
      if (!kPerToken) factors.weight *= args.x_scale[0];
      if (args.bias != nullptr)
        factors.bias = unit * Type::widen(static_cast<const Memory*>(args.bias)[row]);
    }
    QK_UNROLL for (int i = 0; i < kTokenScales; ++i) {
      const int token = at.m + 128 * i + thread;
      factors.token[i] = kPerToken && token < args.m ? args.x_scale[token] : 0.0f;
    }
    return factors;
  }

  template <class Sum>
  QK_DEVICE void run(const Sum (&sums)[2][Tile::kM / 2], const Factors& factors,
                     Position at) const {
    // The last tile's codes have been read by all who get here.
    QK_UNROLL for (int i = 0; i < kTokenScales; ++i) {
      if (kPerToken && 128 * i + thread < Tile::kM) scales[128 * i + thread] = factors.token[i];
    }
    scales[Tile::kM + thread] = factors.weight;
    scales[Tile::kM + 128 + thread] = factors.bias;
    group_sync(barrier, 128);
    Lane mine;
    QK_UNROLL for (int i = 0; i < 4; ++i) {
      const int row = 64 * (i / 2) + thread / 32 * 16 + thread % 32 / 4 + 8 * (i % 2);
      mine.weight[i / 2][i % 2] = scales[Tile::kM + row];
      mine.bias[i / 2][i % 2] = scales[Tile::kM + 128 + row];
    }
    QK_UNROLL for (int first = 0; first < Tile::kM; first += 32)
      stage_tokens(sums, mine, first);
    group_sync(barrier, 128);
    write(at);
  }

  QK_DEVICE void finish() const {}

 private:
  /// Four codes, the first one lowest.
  static QK_DEVICE u32 encode_four(const f32 (&values)[4]) {
    if constexpr (kY == Format::kInt8) {
      u32 bytes[4];
      QK_UNROLL for (int i = 0; i < 4; ++i)
        bytes[i] = mirrored(values[i]);
      const u32 low = __byte_perm(bytes[0], bytes[1], 0x0040),
                high = __byte_perm(bytes[2], bytes[3], 0x0040);
      return __byte_perm(low, high, 0x5410) ^ 0x7f7f7f7fu;
    } else {
      u32 pairs[2];
      QK_UNROLL for (int i = 0; i < 2; ++i) {
        pairs[i] = kY == Format::kE4M3FN ? encode_pair_e4m3fn(values[2 * i], values[2 * i + 1])
                                         : encode_pair_e5m2(values[2 * i], values[2 * i + 1]);
      }
      return pairs[0] | pairs[1] << 16;
    }
  }

  /// 127 - code in the lowest byte: all of its bits are set for NaN alone, as in the NaN that comes
  /// out of arithmetic, so that 0x7f, exclusive, makes codec.h's codes of both. Asking each value
  /// whether it is one would take twice the instructions. Ties go to odd codes: gelu's own error is
  /// larger.
  static QK_DEVICE u32 mirrored(f32 value) {
    constexpr f32 kMax = Codec<Format::kInt8>::kMax;
    f32 inside;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(inside) : "f"(value), "f"(-kMax));
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(inside) : "f"(inside), "f"(kMax));
    return float_bits(Codec<Format::kInt8>::kMagic + kMax - inside);
  }

  /// What the sums of the lane's rows are multiplied with, and what is added: [gate][half of 16
  /// rows].
  struct Lane {
    f32 weight[2][2], bias[2][2];
  };

  /// Offset of 16 codes: vectors of a row are swizzled, so that the rows that are touched together
  /// lie in other banks.
  static QK_DEVICE int staged_offset(int row, int vector) {
    return 16 * (kVectors * row + (vector ^ row / 2 % kVectors));
  }

  /// Codes of 32 tokens. Of 16 rows a lane has g and g + 8 of its quad: their codes leave as one
  /// value of 16 bits, in which order `write` finds them.
  template <class Sum>
  QK_DEVICE void stage_tokens(const Sum (&sums)[2][Tile::kM / 2], const Lane& mine,
                              int first) const {
    const int lane = thread % 32;
    u32 words[4];
    QK_UNROLL for (int eight = 0; eight < 4; ++eight) {
      f32 values[4];  // of neighbouring tokens, two rows each
      QK_UNROLL for (int i = 0; i < 2; ++i) {
        const f32 token = kPerToken ? scales[first + 8 * eight + 2 * (lane % 4) + i] : 1.0f;
        QK_UNROLL for (int half = 0; half < 2; ++half) {
          const int sum = first / 2 + 4 * eight + 2 * half + i;
          const f32 h = multiply_add(static_cast<f32>(sums[0][sum]) * token, mine.weight[0][half],
                                     mine.bias[0][half]);
          const f32 g = multiply_add(static_cast<f32>(sums[1][sum]) * token, mine.weight[1][half],
                                     mine.bias[1][half]);
          values[2 * i + half] = times_gelu(h, g);
        }
      }
      words[eight] = encode_four(values);
    }
    store_transposed(shared_address(staged + staged_offset(first + lane, thread / 32)), words);
  }

  QK_DEVICE void write(Position at) const {
    QK_UNROLL for (int i = 0; i < Tile::kM * kVectors; i += 128) {
      const int row = (i + thread) / kVectors, vector = (i + thread) % kVectors;
      const int token = at.m + row, column = at.n + 16 * vector;
      if (token >= args.m || column >= args.n) continue;
      const Vec16 mixed = load<Vec16>(staged + staged_offset(row, vector));
      Vec16 codes;
      QK_UNROLL for (int j = 0; j < 2; ++j) {
        codes.v[j] = __byte_perm(mixed.v[2 * j], mixed.v[2 * j + 1], 0x6420);
        codes.v[2 + j] = __byte_perm(mixed.v[2 * j], mixed.v[2 * j + 1], 0x7531);
      }
      store(static_cast<u8*>(args.y) + (static_cast<i64>(token) * args.n + column), codes);
    }
  }
};

}  // namespace qk
