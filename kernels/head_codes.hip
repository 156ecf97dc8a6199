// q[n, t, c] = e4m3fn(clamp(value[n, t, c], -448, 448)), value as heads.h defines it
//
// first   io [B, T1, pitch]: heads from `first_column` on     first_weight  f32 [d] or null
// second  io [B, T2, pitch] or null: tokens behind the first  second_weight f32 [d] or null
// cos     f32 [m, d], m = T1 + T2                             sin           f32 [m, d]
// mean    f32 [scales, D] or null: row n has n % scales       factor        f32 [scales]
// q       codes [n, m, D], n = B * heads, D = d up to a multiple of 16
//
// d, columns and pitches are multiples of 8, with a rotation of halves d of 16; base pointers
// 16-byte aligned. cos and sin are read with QK_ROTARY alone. NaN becomes the NaN code. eps are the
// bits of a float32; k is the least power of two with 16 k >= d: the lanes of a row.
//
// Launch: 256 threads, grid (ceil(m * k / 128), ceil(n / 2), 1). A lane has 8 columns of a token,
// in four rows, two at a time of heads, which share the rotation and the norm's weight.
#include "heads.h"

constexpr qk::Io kIo = qk::Io(QK_IO);
constexpr qk::Rotary kRotary = qk::Rotary(QK_ROTARY);
constexpr int kRows = 2;
static_assert(QK_LDS_BYTES == 0, "launch.json states the LDS");

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* first, const void* second, const float* first_weight,
          const float* second_weight, const float* cos, const float* sin, const float* mean,
          const float* factor, qk::u8* q, int m, int n, int k, int first_tokens, int first_pitch,
          int first_column, int second_pitch, int second_column, int heads, int d, int scales,
          int eps) {
  qk::start();
  const qk::Heads all{cos, sin, heads, d, scales, qk::bits_float(static_cast<qk::u32>(eps))};
  const int lanes = 2 * k, width = all.padded();
  const qk::LanePosition<1> place(lanes, m, width, qk::block_x());
  const qk::HeadColumns<1> columns(place.column, d);
  const qk::Side<kIo, qk::Io::kF32, 1> side(
      all, {first, first_weight, first_tokens, first_pitch, first_column},
      {second, second_weight, m - first_tokens, second_pitch, second_column}, columns, place.token);
  const qk::Turn<kRotary, 1> turn(all, place.token, columns);
  const int start = qk::block_y() * kRows;
  float values[kRows][qk::kRun], factors[kRows], roots[kRows];
  qk::HeadRow row(all, start);
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    qk::load_columns<kIo, 1>(values[i], side.row_of(row), columns);
    factors[i] = factor[row.numbers];
    row.advance(all, n);
  }
  if (side.any_norm) qk::inverse_roots<1>(roots, values, all, columns, lanes);
  row = qk::HeadRow(all, start);
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    side.finish(values[i], roots[i], row, turn);
    const float* const means = mean == nullptr ? nullptr : mean + row.numbers * width;
    qk::centre_and_scale<1>(values[i], means, columns, factors[i]);
    if (place.exists && start + i < n) {
      const qk::i64 at = static_cast<qk::i64>(row.row) * m + place.token;
      qk::store(q + at * width + place.column, qk::encode_there(values[i], columns.there[0]));
    }
    row.advance(all, n);
  }
}

QK_HOST_ENTRY(QK_THREADS, 0)
