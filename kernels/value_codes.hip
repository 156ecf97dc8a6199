// v[n, c, t] = e4m3fn(clamp((x[n, t, c] - mean[n % scales, c]) * (1 / scale[n % scales, c]),
//                           -448, 448)), or float16 of the same between -65504 and 65504 (QK_PV 1)
//
// first   io [B, T1, pitch]: heads from `first_column` on, row n = picture * heads + head
// second  io [B, T2, pitch] or null: tokens behind the first
// mean    f32 [scales, D] or null        scale  f32 [scales, D]
// v       [n, D, ceil(m / 16) * 16], m = T1 + T2, n = B * heads, D = d up to a multiple of
//         16; zero from column d on and from token m on
//
// d, columns and pitches are multiples of 8; base pointers 16-byte aligned; k is D. float32, every
// operation rounded by itself; 1 / scale is the largest finite number where it would be infinite.
// NaN stays one.
//
// Launch: 256 threads, grid (ceil(m / 64), ceil(n * k / 256), 1). A lane has 8 columns of 8 tokens:
// what it has of a column is one 8-byte store (float16: 16), so nothing goes through LDS. Eight
// lanes next to each other store 64 tokens of a column; those 8 apart load the columns of a token
// that lie side by side.
#include "heads.h"

constexpr qk::Io kIo = qk::Io(QK_IO);
constexpr int kRun = qk::kRun, kTokens = 8, kNeighbours = 8;
constexpr qk::Pv kPv = qk::Pv(QK_PV);
constexpr int kBytes = kPv == qk::Pv::kF16 ? 2 : 1, kWords = kBytes;  // of a value; of four
using Run = qk::RunOf<kIo, kRun>;
using Numbers = qk::RunOf<qk::Io::kF32, kRun>;
static_assert(QK_THREADS / kNeighbours * kRun == 256, "launch.json divides n * k by this number");
static_assert(kTokens * kNeighbours == 64, "launch.json divides m by this number");
static_assert(QK_LDS_BYTES == 0, "launch.json states the LDS");

/// What a lane stores of a column.
struct alignas(kTokens* kBytes) Piece {
  qk::u32 v[kTokens / 4 * kWords];
};

/// At most the largest finite number.
QK_DEVICE float inverse(float scale) {
  const float largest = qk::bits_float(0x7f7fffffu), quotient = 1.0f / scale;
  return quotient > largest ? largest : quotient;
}

/// float16, the largest finite number where it would be infinite.
QK_DEVICE qk::u32 saturated_half(float value) {
  const qk::u32 half = qk::float_to_half(value);
  return half - ((half & 0x7fffu) == 0x7c00u ? 1u : 0u);
}

/// Four tokens of a column.
QK_DEVICE void encode(qk::u32 (&words)[kWords], float a, float b, float c, float d) {
  if constexpr (kPv == qk::Pv::kF16) {
    words[0] = saturated_half(a) | saturated_half(b) << 16;
    words[1] = saturated_half(c) | saturated_half(d) << 16;
  } else {
    words[0] = qk::encode_four_e4m3fn(a, b, c, d);
  }
}

/// Where the columns of a row of heads lie in a stream, token by token.
struct Rows {
  const Run::Memory* x;  // of the lane's first token, which may lie before the stream
  qk::i64 pitch;

  QK_DEVICE Rows(const qk::Stream& stream, int picture, int offset, int token)
      : x(static_cast<const Run::Memory*>(stream.x)), pitch(stream.pitch) {
    x += (static_cast<qk::i64>(picture) * stream.tokens + token) * pitch + stream.column + offset;
  }
};

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* first, const void* second, const float* mean, const float* scale, qk::u8* v,
          int m, int n, int k, int first_tokens, int first_pitch, int first_column,
          int second_pitch, int second_column, int heads, int d, int scales) {
  const int runs = k / kRun, thread = qk::thread_index();
  const int slot = qk::block_y() * (QK_THREADS / kNeighbours) + thread / kNeighbours;
  const int row = slot / runs, column = slot % runs * kRun;
  const int token = (qk::block_x() * kNeighbours + thread % kNeighbours) * kTokens;
  const int pitch = (m + 15) / 16 * 16;
  if (row >= n || token >= pitch) return;
  const int picture = row / heads, offset = row % heads * d + column;
  const Rows before({first, nullptr, first_tokens, first_pitch, first_column}, picture, offset,
                    token);
  const Rows behind(
      {second == nullptr ? first : second, nullptr, m - first_tokens, second_pitch, second_column},
      picture, offset, token - first_tokens);
  typename Run::Raw raw[kTokens];
  QK_UNROLL for (int i = 0; i < kTokens; ++i) {
    raw[i] = {};
    const bool second_one = token + i >= first_tokens;
    const auto* const x = second_one ? behind.x + i * behind.pitch : before.x + i * before.pitch;
    if (column < d && token + i < m) raw[i] = Run::load_raw(x, true, kRun);
  }
  const int numbers = row % scales * k + column;
  float means[kRun] = {}, factors[kRun];
  if (mean != nullptr) Numbers::widen(means, Numbers::load_raw(mean + numbers, true, kRun));
  Numbers::widen(factors, Numbers::load_raw(scale + numbers, true, kRun));
  QK_UNROLL for (int c = 0; c < kRun; ++c)
    factors[c] = inverse(factors[c]);
  Piece pieces[kRun];
  QK_UNROLL for (int w = 0; w < kTokens / 4; ++w) {
    float values[4][kRun];
    QK_UNROLL for (int i = 0; i < 4; ++i) {
      Run::widen(values[i], raw[4 * w + i]);
      const bool there = column < d && token + 4 * w + i < m;
      QK_UNROLL for (int c = 0; c < kRun; ++c) {
        const float value = qk::add_rounded(values[i][c], -means[c]) * factors[c];
        values[i][c] = there ? value : 0.0f;
      }
    }
    QK_UNROLL for (int c = 0; c < kRun; ++c) {
      qk::u32 words[kWords];
      encode(words, values[0][c], values[1][c], values[2][c], values[3][c]);
      QK_UNROLL for (int i = 0; i < kWords; ++i)
        pieces[c].v[kWords * w + i] = words[i];
    }
  }
  qk::u8* const to = v + ((static_cast<qk::i64>(row) * k + column) * pitch + token) * kBytes;
  QK_UNROLL for (int c = 0; c < kRun; ++c)
    qk::store(to + static_cast<qk::i64>(c) * pitch * kBytes, pieces[c]);
}

QK_HOST_ENTRY(QK_THREADS, 0)
