// Projections that end in e4m3fn codes of attention's heads, on Hopper: the formula and the places
// of codes_epilogue.h.
//
//   kRows     [picture * heads + head, token, D]: queries, keys
//   kColumns  [picture * heads + head, D, pitch]: values
//   kHeads    three weights of one input: queries and keys in rows, values in columns. A tile has
//             rows of one of them.
//
// A lane holds two neighbouring tokens of outputs g and g + 8 of 16. Codes turn in shared memory,
// two at a time (stmatrix), and leave it 16 bytes at a time.
#pragma once

#include "codec.h"
#include "token_scales_sm90.h"
#include "view_sm90.h"

namespace qk {

enum class Ends { kRows, kColumns, kHeads };

template <bool kFirst, class A, class B>
struct ChoiceOf {
  using Type = A;
};
template <class A, class B>
struct ChoiceOf<false, A, B> {
  using Type = B;
};
template <bool kFirst, class A, class B>
using Choice = typename ChoiceOf<kFirst, A, B>::Type;

template <int kParts>
struct HeadsArgs {
  const f32* x_scale;  // [1] or [M]
  const f32* w_scale;  // [kParts, each]
  const f32* bias;     // [kParts, each] or null
  u8* codes[kParts];
  int m, n;  // n: outputs of all parts, each part up to whole tiles
  int each;  // outputs of a part, a multiple of d
  int tokens, d;

  QK_DEVICE int part_rows() const { return n / kParts; }
  QK_DEVICE int padded() const { return (d + 15) / 16 * 16; }
  QK_DEVICE int pitch() const { return (tokens + 15) / 16 * 16; }
};

/// Rows of three weights, one after the other, each with metadata of its own.
template <class Tile>
struct HeadsView : MatrixView<Tile> {
  const TensorMap* keys;
  const TensorMap* values;
  int rows;                           // of a part, up to whole tiles
  const u8 *keys_meta, *values_meta;  // null with dense weights
  int each;                           // rows of a part

  QK_DEVICE const TensorMap& map_of(const TensorMap& queries, int n) const {
    return n < rows ? queries : n < 2 * rows ? *keys : *values;
  }
  QK_DEVICE Coordinates<2> weights(int step, int n) const {
    return MatrixView<Tile>::weights(step, n < rows ? n : n < 2 * rows ? n - rows : n - 2 * rows);
  }
  QK_DEVICE const u8* metadata_of(const u8* queries, int n, int, int k) const {
    const u8* all = queries;
    if (n >= rows) n -= rows, all = keys_meta;
    if (n >= rows) n -= rows, all = values_meta;
    return MatrixView<Tile>::metadata_of(all, n, each, k);
  }
};

template <class Tile, Ends kEnds, bool kPerToken>
struct HopperCodesEpilogue {
  static constexpr int kParts = kEnds == Ends::kHeads ? 3 : 1;
  using Args = HeadsArgs<kParts>;
  using View = Choice<kEnds == Ends::kHeads, HeadsView<Tile>, MatrixView<Tile>>;
  static constexpr bool kHasPrefix = false;
  static constexpr int kVectors = Tile::kOutputs / 16;  // of 16 codes, in a warpgroup's row

  Args args;
  const TensorMap& map;  // not read: codes leave by plain stores
  u8* staged;            // the warpgroup's own
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

  QK_DEVICE Factors load_factors(Position at) const {
    const PartOutput place(args, at.n);
    const int output = place.output + thread;
    Factors factors{};
    if (thread < Tile::kOutputs && output < args.each) {
      const i64 row = static_cast<i64>(place.part) * args.each + output;
      factors.weight = args.w_scale[row];
      if (args.bias != nullptr) factors.bias = args.bias[row];
    }
    factors.tokens.load(args.x_scale, at.m, args.m, thread);
    return factors;
  }

  template <class Sum>
  QK_DEVICE void run(const Sum (&sums)[Tile::kBlocks][Tile::kM / 2], const Factors& factors,
                     Position at) const {
    // The last tile's codes have been read by all who get to the barrier.
    factors.tokens.share(scales, thread);
    if (thread < Tile::kOutputs) {
      scales[Tile::kM + thread] = factors.weight;
      scales[Tile::kM + Tile::kOutputs + thread] = factors.bias;
    }
    group_sync(barrier, 128);
    const PartOutput place(args, at.n);
    if (in_columns(place.part)) {
      stage<true>(sums);
      group_sync(barrier, 128);
      write_columns(at.m, place);
    } else {
      stage<false>(sums);
      group_sync(barrier, 128);
      write_rows(at.m, place);
    }
  }

  QK_DEVICE void finish() const {}

 private:
  static constexpr int kColumnPitch = Tile::kM + 16;  // bytes of an output: rows in other banks

  /// A part, and the warpgroup's first output of it.
  struct PartOutput {
    int part = 0, output;

    QK_DEVICE PartOutput(const Args& args, int n) : output(n) {
      if constexpr (kParts > 1) {
        const int rows = args.part_rows();
        part = n < rows ? 0 : n < 2 * rows ? 1 : 2;
        output = n - part * rows;
      }
    }
  };

  static QK_DEVICE bool in_columns(int part) {
    return kEnds == Ends::kColumns || (kEnds == Ends::kHeads && part == 2);
  }

  QK_DEVICE u8* codes_of(int part) const {
    if constexpr (kParts == 1) return args.codes[0];
    else return part == 0 ? args.codes[0] : part == 1 ? args.codes[1] : args.codes[2];
  }

  /// Offset of 16 codes of a token: vectors of a row are swizzled, so that the rows that are
  /// touched together lie in other banks.
  static QK_DEVICE int row_offset(int row, int vector) {
    const int turned = kVectors == 4 ? row / 2 % 4 : row % 8;
    return 16 * (kVectors * row + (vector ^ turned));
  }

  /// Codes of all tokens: of one output four of 16 in `kByOutput`, else of two outputs of two
  /// tokens, in one register.
  template <bool kByOutput, class Sum>
  QK_DEVICE void stage(const Sum (&sums)[Tile::kBlocks][Tile::kM / 2]) const {
    const int lane = thread % 32, warp = thread / 32;
    f32 weight[Tile::kBlocks][2], bias[Tile::kBlocks][2];
    QK_UNROLL for (int i = 0; i < 2 * Tile::kBlocks; ++i) {
      const int output = 64 * (i / 2) + 16 * warp + lane / 4 + 8 * (i % 2);
      weight[i / 2][i % 2] = scales[Tile::kM + output];
      bias[i / 2][i % 2] = scales[Tile::kM + Tile::kOutputs + output];
    }
    QK_UNROLL for (int first = 0; first < Tile::kM; first += 32) {
      f32 token[8];
      QK_UNROLL for (int i = 0; i < 8; ++i)
        token[i] =
            kPerToken || i == 0 ? scales[first + 8 * (i / 2) + 2 * (lane % 4) + i % 2] : token[0];
      QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
        u32 words[4];
        QK_UNROLL for (int i = 0; i < 8; ++i) {
          // A pair of codes of eight tokens: of neighbouring ones, or of both outputs.
          const int eight = kByOutput ? 2 * (i / 2 % 2) + i % 2 : i / 2;
          f32 pair[2];
          QK_UNROLL for (int j = 0; j < 2; ++j) {
            const int half = kByOutput ? i / 4 : j, next = kByOutput ? j : i % 2;
            const f32 sum = static_cast<f32>(sums[block][first / 2 + 4 * eight + 2 * half + next]);
            pair[j] =
                add_rounded(sum * token[2 * eight + next] * weight[block][half], bias[block][half]);
          }
          const u32 codes = encode_pair_e4m3fn(pair[0], pair[1]);
          words[i / 2] = i % 2 == 0 ? codes : words[i / 2] | codes << 16;
        }
        if constexpr (kByOutput) {
          const int output = 64 * block + 16 * warp + 8 * (lane / 16) + lane % 8;
          const int at = output * kColumnPitch + first + 16 * (lane / 8 % 2);
          store_matrices(shared_address(staged + at), words);
        } else {
          const int at = row_offset(first + lane, 4 * block + warp);
          store_transposed(shared_address(staged + at), words);
        }
      }
    }
  }

  /// A token: its picture, and its place there.
  struct Token {
    int picture, at;

    QK_DEVICE Token(const Args& args, int index)
        : picture(index / args.tokens), at(index % args.tokens) {}
  };

  /// True where the tile's tokens are all there, and of one picture.
  QK_DEVICE bool is_whole(int m, const Token& first) const {
    return m + Tile::kM <= args.m && first.at + Tile::kM <= args.tokens;
  }

  QK_DEVICE Vec16 row_codes(int row, int vector) const {
    const Vec16 mixed = load<Vec16>(staged + row_offset(row, vector));
    Vec16 sorted;
    QK_UNROLL for (int j = 0; j < 2; ++j) {
      sorted.v[j] = __byte_perm(mixed.v[2 * j], mixed.v[2 * j + 1], 0x6420);
      sorted.v[2 + j] = __byte_perm(mixed.v[2 * j], mixed.v[2 * j + 1], 0x7531);
    }
    return sorted;
  }

  QK_DEVICE void write_rows(int m, const PartOutput& place) const {
    constexpr int kStep = 128 / kVectors;
    const int vector = thread % kVectors, output = place.output + 16 * vector;
    if (output >= args.each) return;
    u8* const codes = codes_of(place.part);
    const Token first(args, m);
    const int last = args.m - m < Tile::kM ? args.m - m : Tile::kM;
    const Run low(args, output), high(args, output + 8);
    if (is_whole(m, first)) {
      const int own = thread / kVectors;
      const i64 behind = static_cast<i64>(own) * args.padded();
      u8 *target = low.at(args, codes, first) + behind,
         *other = high.at(args, codes, first) + behind;
      const bool together = args.d % 16 == 0, more = output + 8 < args.each;
      QK_UNROLL for (int row = 0; row < Tile::kM; row += kStep) {
        const Vec16 sorted = row_codes(row + own, vector);
        if (together) {
          store(target, sorted);
        } else {
          low.write(args, target, sorted.v[0], sorted.v[1]);
          if (more) high.write(args, other, sorted.v[2], sorted.v[3]);
        }
        target += kStep * args.padded();
        other += kStep * args.padded();
      }
      return;
    }
    QK_NO_UNROLL for (int row = thread / kVectors; row < last; row += kStep) {
      const Token token(args, m + row);
      const Vec16 sorted = row_codes(row, vector);
      low.write(args, low.at(args, codes, token), sorted.v[0], sorted.v[1]);
      if (output + 8 < args.each)
        high.write(args, high.at(args, codes, token), sorted.v[2], sorted.v[3]);
    }
  }

  /// Eight outputs, which one head has.
  struct Run {
    int head, column;

    QK_DEVICE Run(const Args& args, int output) : head(output / args.d), column(output % args.d) {}

    QK_DEVICE u8* at(const Args& args, u8* codes, const Token& token) const {
      const i64 row = static_cast<i64>(token.picture) * (args.each / args.d) + head;
      return codes + (row * args.tokens + token.at) * args.padded() + column;
    }

    /// The codes, and zeros where the head ends behind them.
    QK_DEVICE void write(const Args& args, u8* target, u32 low, u32 high) const {
      if (column + 8 == args.d && args.d % 16 != 0) {
        store(target, Vec16{{low, high, 0, 0}});
      } else {
        store(target, static_cast<u64>(high) << 32 | low);
      }
    }
  };

  QK_DEVICE Vec16 column_codes(int row, int behind) const {
    const Vec16 mixed = load<Vec16>(staged + row * kColumnPitch + behind);
    Vec16 sorted;
    QK_UNROLL for (int j = 0; j < 2; ++j) {
      sorted.v[j] = __byte_perm(mixed.v[2 * j], mixed.v[2 * j + 1], 0x5410);
      sorted.v[2 + j] = __byte_perm(mixed.v[2 * j], mixed.v[2 * j + 1], 0x7632);
    }
    return sorted;
  }

  QK_DEVICE void write_columns(int m, const PartOutput& place) const {
    constexpr int kAcross = Tile::kM / 16, kItems = Tile::kOutputs * kAcross;
    u8* const codes = codes_of(place.part);
    const Token first(args, m);
    const int left = args.each - place.output;
    if (args.tokens % 16 == 0 && is_whole(m, first)) {
      // Heads that are no multiple of 16 have rows of zeros behind them.
      const int between = args.padded() - args.d, heads = args.each / args.d;
      u8* const picture =
          codes + static_cast<i64>(first.picture) * heads * args.padded() * args.tokens + first.at;
      QK_UNROLL for (int i = 0; i < kItems; i += 128) {
        const int row = (i + thread) / kAcross, behind = (i + thread) % kAcross * 16;
        if ((kItems % 128 != 0 && row >= Tile::kOutputs) || row >= left) break;
        const int output = place.output + row;
        const int before = between == 0 ? 0 : output / args.d;
        u8* const target =
            picture + static_cast<i64>(output + before * between) * args.tokens + behind;
        store(target, column_codes(row, behind));
        if (between != 0 && output + 1 == (before + 1) * args.d) {
          QK_NO_UNROLL for (int i = 1; i <= between; ++i)
            store(target + static_cast<i64>(i) * args.tokens, Vec16{});
        }
      }
      return;
    }
    QK_NO_UNROLL for (int i = thread; i < kItems; i += 128) {
      const int row = i / kAcross, behind = i % kAcross * 16;
      if (row >= left) break;
      if (m + behind >= args.m) continue;
      const Channel channel(args, codes, place.output + row);
      const Vec16 sorted = column_codes(row, behind);
      if (args.tokens % 16 == 0) {
        channel.write(args, Token(args, m + behind), sorted);
      } else if (args.tokens % 4 == 0) {
        channel.template write_pieces<4>(args, m + behind, sorted);
      } else {
        channel.template write_pieces<1>(args, m + behind, sorted);
      }
    }
  }

  /// A column of a head.
  struct Channel {
    u8* codes;
    int head, column, heads;
    int below;  // rows behind the head's last one, which are zeros, below this one

    QK_DEVICE Channel(const Args& args, u8* all, int output)
        : codes(all), head(output / args.d), column(output % args.d), heads(args.each / args.d) {
      below = column + 1 == args.d ? args.padded() - args.d : 0;
    }

    template <class Codes>
    QK_DEVICE void write(const Args& args, const Token& token, const Codes& values) const {
      const i64 row = (static_cast<i64>(token.picture) * heads + head) * args.padded() + column;
      u8* const target = codes + row * args.pitch() + token.at;
      store(target, values);
      QK_NO_UNROLL for (int i = 1; i <= below; ++i)
        store(target + static_cast<i64>(i) * args.pitch(), Codes{});
    }

    /// Sixteen tokens from `index` on kCount at a time, each piece in a picture of its own perhaps,
    /// and zeros behind a picture's last one. By shifts: an array indexed in a rolled loop is one
    /// in memory.
    template <int kCount>
    QK_DEVICE void write_pieces(const Args& args, int index, const Vec16& values) const {
      using Piece = Choice<kCount == 4, u32, u8>;
      Vec16 left = values;
      QK_NO_UNROLL for (int i = 0; i < 16 && index + i < args.m; i += kCount) {
        Token token(args, index + i);
        write(args, token, static_cast<Piece>(left.v[0]));
        const int end = token.at + kCount == args.tokens ? args.pitch() : 0;
        QK_NO_UNROLL while ((token.at += kCount) < end)
          write(args, token, Piece{});
        QK_UNROLL for (int j = 0; j < 4; ++j) {
          const u32 next = j < 3 ? left.v[j + 1] : 0;
          left.v[j] = kCount == 4 ? next : __funnelshift_r(left.v[j], next, 8);
        }
      }
    }
  };
};

}  // namespace qk
