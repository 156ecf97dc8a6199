// Values of heads as codes, transposed: what value_codes.hip defines.
//
// A lane has 8 columns of 8 tokens: what it has of a column is one 8-byte store (float16: 16), so
// nothing goes through LDS. Eight lanes next to each other store 64 tokens of a column; those 8
// apart load the columns of a token that lie side by side.
#pragma once

#include "heads.h"

namespace qk {

constexpr int kValueTokens = 8, kNeighbours = 8;
static_assert(QK_THREADS / kNeighbours * kRun == 256, "launch.json divides columns by this number");
static_assert(kValueTokens * kNeighbours == 64, "launch.json divides m by this number");

/// At most the largest finite number.
QK_DEVICE f32 inverse(f32 scale) {
  const f32 largest = bits_float(0x7f7fffffu), quotient = 1.0f / scale;
  return quotient > largest ? largest : quotient;
}

/// float16, the largest finite number where it would be infinite.
QK_DEVICE u32 saturated_half(f32 value) {
  const u32 half = float_to_half(value);
  return half - ((half & 0x7fffu) == 0x7c00u ? 1u : 0u);
}

template <Io kIo, Pv kPv>
struct Values {
  static constexpr int kBytes = kPv == Pv::kF16 ? 2 : 1, kWords = kBytes;  // of a value; of four
  using Run = RunOf<kIo, kRun>;
  using Memory = typename Run::Memory;
  using Numbers = RunOf<Io::kF32, kRun>;

  /// What a lane stores of a column.
  struct alignas(kValueTokens* kBytes) Piece {
    u32 v[kValueTokens / 4 * kWords];
  };

  const Stream& first;
  const Stream& second;
  const f32* mean;   // f32 [scales, padded] or null
  const f32* scale;  // f32 [scales, padded]
  int heads, d, scales, padded;

  /// Of the lane's first token, which may lie before the stream.
  QK_DEVICE const Memory* at(const Stream& stream, int row, int column, int token) const {
    const i64 tokens = static_cast<i64>(row / heads) * stream.tokens + token;
    return static_cast<const Memory*>(stream.x) +
           (tokens * stream.pitch + stream.column + row % heads * d + column);
  }

  /// Four tokens of a column.
  static QK_DEVICE void encode(u32* words, f32 a, f32 b, f32 c, f32 e) {
    if constexpr (kPv == Pv::kF16) {
      words[0] = saturated_half(a) | saturated_half(b) << 16;
      words[1] = saturated_half(c) | saturated_half(e) << 16;
    } else {
      words[0] = encode_four_e4m3fn(a, b, c, e);
    }
  }

  /// What block (x, y) has of n rows of m tokens.
  QK_DEVICE void transpose(u8* v, int m, int n, int x, int y) const {
    const int runs = padded / kRun, thread = thread_index();
    const int slot = y * (QK_THREADS / kNeighbours) + thread / kNeighbours;
    const int row = slot / runs, column = slot % runs * kRun;
    const int token = (x * kNeighbours + thread % kNeighbours) * kValueTokens;
    const int pitch = (m + 15) / 16 * 16;
    if (row >= n || token >= pitch) return;
    const Memory* const before = at(first, row, column, token);
    const Memory* const behind = at(second, row, column, token - first.tokens);
    typename Run::Raw raw[kValueTokens];
    QK_UNROLL for (int i = 0; i < kValueTokens; ++i) {
      raw[i] = {};
      const bool further = token + i >= first.tokens;
      const i64 pitch_of = further ? second.pitch : first.pitch;
      const Memory* const from = (further ? behind : before) + i * pitch_of;
      if (column < d && token + i < m) raw[i] = Run::load_raw(from, true, kRun);
    }
    const int numbers = row % scales * padded + column;
    f32 means[kRun] = {}, factors[kRun];
    if (mean != nullptr) Numbers::widen(means, Numbers::load_raw(mean + numbers, true, kRun));
    Numbers::widen(factors, Numbers::load_raw(scale + numbers, true, kRun));
    QK_UNROLL for (int c = 0; c < kRun; ++c)
      factors[c] = inverse(factors[c]);
    Piece pieces[kRun];
    QK_UNROLL for (int w = 0; w < kValueTokens / 4; ++w) {
      f32 values[4][kRun];
      QK_UNROLL for (int i = 0; i < 4; ++i) {
        Run::widen(values[i], raw[4 * w + i]);
        const bool there = column < d && token + 4 * w + i < m;
        QK_UNROLL for (int c = 0; c < kRun; ++c) {
          const f32 value = add_rounded(values[i][c], -means[c]) * factors[c];
          values[i][c] = there ? value : 0.0f;
        }
      }
      QK_UNROLL for (int c = 0; c < kRun; ++c)
        encode(pieces[c].v + kWords * w, values[0][c], values[1][c], values[2][c], values[3][c]);
    }
    u8* const to = v + ((static_cast<i64>(row) * padded + column) * pitch + token) * kBytes;
    QK_UNROLL for (int c = 0; c < kRun; ++c)
      store(to + static_cast<i64>(c) * pitch * kBytes, pieces[c]);
  }
};

}  // namespace qk
