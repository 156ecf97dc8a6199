// Codes of queries, keys and values of one stream or two, in one launch: of queries and keys as
// head_codes.hip makes them, of values as value_codes.hip does.
//
// first_q, first_k, first_v     io [B, T1, first_pitch]: heads from the columns c_fq, c_fk, c_fv on
// second_q, second_k, second_v  io [B, T2, second_pitch] or null: tokens behind the first
// *_weight  io [d] or null                 cos, sin  f32 [m, d], m = T1 + T2
// k_mean, v_mean    f32 [scales, D] or null: row n of heads has n % scales
// q_factor, k_factor  f32 [scales]         v_scale   f32 [scales, D]
// q_codes, k_codes  [n, m, D], n = B * heads, D = d up to a multiple of 16
// v_codes           [n, D, ceil(m / 16) * 16]
//
// d, columns and pitches are multiples of 8, with a rotation of halves d of 16; base pointers
// 16-byte aligned. cos and sin are read with QK_ROTARY alone. eps are the bits of a float32; k is
// the least power of two with 8 k >= D: the lanes of a row.
//
// Launch: 256 threads, ceil(m * k / 256) * ceil(n / 4) + ceil(m / 64) * ceil(n * k / 32) blocks:
// those of queries and keys, then those of values. A lane of the former has 8 columns of a token,
// in four rows of heads, one at a time, whose queries and keys share the rotation.
#include "values.h"

constexpr qk::Io kIo = qk::Io(QK_IO);
constexpr qk::Rotary kRotary = qk::Rotary(QK_ROTARY);
constexpr int kRows = 4;
static_assert(QK_LDS_BYTES == 0, "launch.json states the LDS");

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* first_q, const void* first_k, const void* first_v, const void* second_q,
          const void* second_k, const void* second_v, const void* first_q_weight,
          const void* first_k_weight, const void* second_q_weight, const void* second_k_weight,
          const float* cos, const float* sin, const float* k_mean, const float* q_factor,
          const float* k_factor, const float* v_mean, const float* v_scale, qk::u8* q_codes,
          qk::u8* k_codes, qk::u8* v_codes, int m, int n, int k, int first_tokens, int first_pitch,
          int second_pitch, int c_fq, int c_fk, int c_fv, int c_sq, int c_sk, int c_sv, int heads,
          int d, int scales, int eps) {
  qk::start();
  const qk::Heads all{cos, sin, heads, d, scales, qk::bits_float(static_cast<qk::u32>(eps))};
  const int across = (m * k + QK_THREADS - 1) / QK_THREADS;
  const int made = across * ((n + kRows - 1) / kRows), block = qk::block_x();
  const int second_tokens = m - first_tokens;
  if (block >= made) {
    const int tokens = (m + 63) / 64;
    const qk::Stream before{first_v, nullptr, first_tokens, first_pitch, c_fv};
    const qk::Stream behind{second_v == nullptr ? first_v : second_v, nullptr, second_tokens,
                            second_pitch, c_sv};
    const qk::Values<kIo, qk::Pv::kE4M3FN> values{before, behind, v_mean, v_scale,
                                                  heads,  d,      scales, all.padded()};
    values.transpose(v_codes, m, n, (block - made) % tokens, (block - made) / tokens);
    return;
  }
  const int width = all.padded();
  const qk::LanePosition<1> place(k, m, width, block % across);
  const qk::HeadColumns<1> columns(place.column, d);
  const int token = place.token;
  using Side = qk::Side<kIo, kIo, 1>;
  const Side sides[2] = {
      Side(all, {first_q, first_q_weight, first_tokens, first_pitch, c_fq},
           {second_q, second_q_weight, second_tokens, second_pitch, c_sq}, columns, token),
      Side(all, {first_k, first_k_weight, first_tokens, first_pitch, c_fk},
           {second_k, second_k_weight, second_tokens, second_pitch, c_sk}, columns, token)};
  const bool normed = sides[0].any_norm || sides[1].any_norm;
  const qk::Turn<kRotary, 1> turn(all, token, columns);
  const int start = block / across * kRows;
  qk::HeadRow row(all, start);
  QK_NO_UNROLL for (int i = 0; i < kRows; ++i) {
    float values[2][qk::kRun], roots[2];
    QK_UNROLL for (int p = 0; p < 2; ++p)
      qk::load_columns<kIo, 1>(values[p], sides[p].row_of(row), columns);
    const float factors[2] = {q_factor[row.numbers], k_factor[row.numbers]};
    if (normed) qk::inverse_roots<1>(roots, values, all, columns, k);
    const bool there = place.exists && start + i < n;
    const qk::i64 at = (static_cast<qk::i64>(row.row) * m + token) * width + place.column;
    QK_UNROLL for (int p = 0; p < 2; ++p) {
      sides[p].finish(values[p], roots[p], row, turn);
      const bool shifted = p == 1 && k_mean != nullptr;
      qk::centre_and_scale<1>(values[p], shifted ? k_mean + row.numbers * width : nullptr, columns,
                              factors[p]);
      const auto codes = qk::encode_there(values[p], columns.there[0]);
      if (there) qk::store((p == 0 ? q_codes : k_codes) + at, codes);
    }
    row.advance(all, n);
  }
}

QK_HOST_ENTRY(QK_THREADS, 0)
