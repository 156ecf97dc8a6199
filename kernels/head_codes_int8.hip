// scale[n, g] = max |value[n, t, c]| / 127 over t / group == g, 1 where that is zero
// q[n, t, c]  = int8(value[n, t, c] / scale[n, t / group]), value as heads.h defines it
//
// Operands as in head_codes.hip, and
// scale  f32 [n, ceil(m / group)], written; group is 1 or 16
// A true division, rounded to nearest even. NaN makes the scale of its group NaN, and its codes
// -128.
//
// Launch: 256 threads, grid (ceil(m * k / 256), ceil(n / 2), 1). A lane has 16 columns of a token,
// in two rows of heads. Tokens of a group are in one block, which compares their maxima in LDS.
#include "heads.h"

constexpr qk::Io kIo = qk::Io(QK_IO);
constexpr qk::Format kFormat = qk::Format::kInt8;
constexpr int kRows = 2, kGroup = 16, kRuns = 2, kColumns = kRuns * qk::kRun;
constexpr int kLdsBytes = kRows * QK_THREADS * 4;  // a maximum per row and token
static_assert(kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");

QK_DEVICE qk::u32 larger(qk::u32 a, qk::u32 b) { return a > b ? a : b; }

/// The largest of 16 tokens' maxima.
QK_DEVICE qk::u32 largest(const qk::u8* maxima) {
  qk::u32 best = 0;
  QK_UNROLL for (int i = 0; i < kGroup / 4; ++i) {
    const auto four = qk::load<qk::Vec16>(maxima + 16 * i);
    QK_UNROLL for (int e = 0; e < 4; ++e)
      best = larger(best, four.v[e]);
  }
  return best;
}

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* first, const void* second, const float* first_weight,
          const float* second_weight, const float* cos, const float* sin, const float* mean,
          const float* factor, qk::u8* q, float* scale, int m, int n, int k, int first_tokens,
          int first_pitch, int first_column, int second_pitch, int second_column, int heads, int d,
          int scales, int eps, int group) {
  QK_SHARED(lds, kLdsBytes);
  qk::start();
  const qk::Heads all{cos, sin, heads, d, scales, qk::bits_float(static_cast<qk::u32>(eps))};
  const int width = all.padded();
  const qk::LanePosition<kRuns> place(k, m, width, qk::block_x());
  const qk::HeadColumns<kRuns> columns(place.column, d);
  const qk::Side<kIo, qk::Io::kF32, kRuns> side(
      all, {first, first_weight, first_tokens, first_pitch, first_column},
      {second, second_weight, m - first_tokens, second_pitch, second_column}, columns, place.token);
  const qk::Turn<qk::Rotary(QK_ROTARY), kRuns> turn(all, place.token, columns);
  const int start = qk::block_y() * kRows;
  float values[kRows][kColumns], factors[kRows], roots[kRows];
  qk::HeadRow row(all, start);
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    qk::load_columns<kIo, kRuns>(values[i], side.row_of(row), columns);
    factors[i] = factor[row.numbers];
    row.advance(all, n);
  }
  if (side.any_norm) qk::inverse_roots<kRuns>(roots, values, all, columns, k);
  row = qk::HeadRow(all, start);
  qk::u32 amax[kRows];
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    side.finish(values[i], roots[i], row, turn);
    const float* const means = mean == nullptr ? nullptr : mean + row.numbers * width;
    qk::centre_and_scale<kRuns>(values[i], means, columns, factors[i]);
    QK_UNROLL for (int e = 0; e < kColumns; ++e)
      values[i][e] = columns.there[e / qk::kRun] ? values[i][e] : 0.0f;
    row.advance(all, n);
    amax[i] = place.exists ? qk::amax_bits_of(values[i]) : 0u;
    QK_UNROLL for (int mask = 1; mask < qk::kMostRuns / kRuns; mask *= 2) {
      if (k > mask) amax[i] = larger(amax[i], qk::lane_xor(amax[i], mask));
    }
  }
  if (group > 1) {
    const int slot = qk::thread_index() / k;
    QK_UNROLL for (int i = 0; i < kRows; ++i) {
      if (place.column == 0) qk::store(lds + (i * QK_THREADS + slot) * 4, amax[i]);
    }
    qk::block_sync();
    QK_UNROLL for (int i = 0; i < kRows; ++i)
      amax[i] = largest(lds + (i * QK_THREADS + slot / kGroup * kGroup) * 4);
  }
  if (!place.exists) return;
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    if (start + i >= n) continue;
    const float quotient = qk::bits_float(amax[i]) / qk::Codec<kFormat>::kMax;
    const float unit = quotient == 0.0f ? 1.0f : quotient;
    const int groups = (m + group - 1) / group;
    if (place.column == 0 && place.token % group == 0)
      scale[static_cast<qk::i64>(start + i) * groups + place.token / group] = unit;
    qk::Codes<kColumns> codes;
    if (!qk::FastDivisor<kFormat>(unit).encode(codes, values[i]))
      codes = qk::Divisor<kFormat>(unit).encode(values[i]);
    // Of a NaN group all quotients are NaN.
    if (!columns.there[1]) codes.words[2] = codes.words[3] = 0;
    const qk::i64 at = static_cast<qk::i64>(start + i) * m + place.token;
    qk::store(q + at * width + place.column, codes);
  }
}

QK_HOST_ENTRY(QK_THREADS, kLdsBytes)
