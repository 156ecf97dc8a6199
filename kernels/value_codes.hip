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
// Launch: 256 threads, grid (ceil(m / 64), ceil(n * k / 512), 1). A lane has 8 columns of 16
// tokens: what it has of a column is one 16-byte store (float16: two), so nothing goes through LDS.
// Four lanes next to each other store 64 tokens of a column; those 4 apart load the columns of a
// token that lie side by side.
#include "heads.h"

constexpr qk::Io kIo = qk::Io(QK_IO);
constexpr int kRun = 8, kTokens = 16, kNeighbours = 4;
constexpr qk::Pv kPv = qk::Pv(QK_PV);
constexpr int kBytes = kPv == qk::Pv::kF16 ? 2 : 1, kWords = kBytes;  // of a value; of four
using Run = qk::RunOf<kIo, kRun>;
using Numbers = qk::RunOf<qk::Io::kF32, kRun>;
static_assert(QK_THREADS / kNeighbours * kRun == 512, "launch.json divides n * k by this number");
static_assert(QK_LDS_BYTES == 0, "launch.json states the LDS");

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

/// A row of heads in two streams.
struct Row {
  qk::Stream first, second;
  int picture, offset;  // of its columns from the streams' first

  QK_DEVICE const Run::Memory* at(int token) const {
    const bool behind = token >= first.tokens;
    const qk::i64 pitch = behind ? second.pitch : first.pitch;
    const qk::i64 tokens = behind ? second.tokens : first.tokens;
    const int inside = behind ? token - first.tokens : token;
    return static_cast<const Run::Memory*>(behind ? second.x : first.x) +
           ((picture * tokens + inside) * pitch + (behind ? second.column : first.column) + offset);
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
  if (row >= n || token >= m) return;
  const Row from{{first, nullptr, first_tokens, first_pitch, first_column},
                 {second, nullptr, m - first_tokens, second_pitch, second_column},
                 row / heads,
                 row % heads * d + column};
  typename Run::Raw raw[kTokens];
  QK_UNROLL for (int i = 0; i < kTokens; ++i) {
    raw[i] = {};
    if (column < d && token + i < m) raw[i] = Run::load_raw(from.at(token + i), true, kRun);
  }
  const int numbers = row % scales * k + column;
  float means[kRun] = {}, factors[kRun];
  if (mean != nullptr) Numbers::widen(means, Numbers::load_raw(mean + numbers, true, kRun));
  Numbers::widen(factors, Numbers::load_raw(scale + numbers, true, kRun));
  QK_UNROLL for (int c = 0; c < kRun; ++c)
    factors[c] = inverse(factors[c]);
  qk::u32 words[kRun][kTokens / 4][kWords];
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
    QK_UNROLL for (int c = 0; c < kRun; ++c)
      encode(words[c][w], values[0][c], values[1][c], values[2][c], values[3][c]);
  }
  const int pitch = (m + kTokens - 1) / kTokens * kTokens;
  qk::u8* const to = v + ((static_cast<qk::i64>(row) * k + column) * pitch + token) * kBytes;
  QK_UNROLL for (int c = 0; c < kRun; ++c) {
    QK_UNROLL for (int part = 0; part < kBytes; ++part) {
      qk::Vec16 stored;
      QK_UNROLL for (int w = 0; w < 4; ++w)
        stored.v[w] = words[c][(4 * part + w) / kWords][(4 * part + w) % kWords];
      qk::store(to + static_cast<qk::i64>(c) * pitch * kBytes + 16 * part, stored);
    }
  }
}

QK_HOST_ENTRY(QK_THREADS, 0)
