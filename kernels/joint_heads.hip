// y[p, b, t, h, c] = io(value[b * heads + h, t, c]) of queries (p 0) and keys (p 1), as heads.h
//                    defines it without mean and factor
// y[2, b, t, h, c] = v of the stream and token, where there are values
//
// first_q, first_k, first_v     io [B, T1, first_pitch]: heads from the columns c_fq, c_fk, c_fv on
// second_q, second_k, second_v  io [B, T2, second_pitch] or null: tokens behind the first
// *_weight  io [d] or null                 cos, sin  f32 [m, d], m = T1 + T2
// y         io [2 or 3, B, m, heads, d], B = n / heads; 3 where there are values
//
// d, columns and pitches are multiples of 8, with a rotation of halves d of 16; base pointers
// 16-byte aligned. cos and sin are read with QK_ROTARY alone. eps are the bits of a float32; k is
// the least power of two with 8 k >= d: the lanes of a row.
//
// Launch: 256 threads, grid (ceil(m * k / 256), ceil(n / 2), 1). A lane has 8 columns of a token,
// in four rows, two at a time of heads, whose queries and keys share the rotation.
#include "heads.h"

constexpr qk::Io kIo = qk::Io(QK_IO);
constexpr qk::Rotary kRotary = qk::Rotary(QK_ROTARY);
constexpr int kRows = 2;
static_assert(QK_LDS_BYTES == 0, "launch.json states the LDS");
using Run = qk::RunOf<kIo, qk::kRun>;
using Memory = Run::Memory;
using Side = qk::Side<kIo, kIo, 1>;

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const void* first_q, const void* first_k, const void* first_v, const void* second_q,
          const void* second_k, const void* second_v, const void* first_q_weight,
          const void* first_k_weight, const void* second_q_weight, const void* second_k_weight,
          const float* cos, const float* sin, void* y, int m, int n, int k, int first_tokens,
          int first_pitch, int second_pitch, int c_fq, int c_fk, int c_fv, int c_sq, int c_sk,
          int c_sv, int heads, int d, int eps) {
  qk::start();
  const qk::Heads all{cos, sin, heads, d, heads, qk::bits_float(static_cast<qk::u32>(eps))};
  const qk::LanePosition<1> place(k, m, d, qk::block_x());
  const qk::HeadColumns<1> columns(place.column, d);
  const int token = place.token, second_tokens = m - first_tokens;
  const auto side = [&](const void* first, const void* first_weight, int first_column,
                        const void* second, const void* second_weight, int second_column) {
    return Side(all, {first, first_weight, first_tokens, first_pitch, first_column},
                {second, second_weight, second_tokens, second_pitch, second_column}, columns,
                token);
  };
  const Side sides[2] = {side(first_q, first_q_weight, c_fq, second_q, second_q_weight, c_sq),
                         side(first_k, first_k_weight, c_fk, second_k, second_k_weight, c_sk)};
  const qk::Turn<kRotary, 1> turn(all, token, columns);
  const int start = qk::block_y() * kRows;
  qk::RawColumns<kIo, 1> raw[2][kRows];
  qk::HeadRow row(all, start);
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    QK_UNROLL for (int p = 0; p < 2; ++p)
      raw[p][i].load(sides[p].row_of(row), columns);
    row.advance(all, n);
  }
  const qk::i64 part = static_cast<qk::i64>(n) * m * d;
  const auto place_of = [&](const qk::HeadRow& of) {
    const qk::i64 at = static_cast<qk::i64>(of.picture) * m + token;
    return static_cast<Memory*>(y) + (at * heads + of.head) * d + place.column;
  };
  row = qk::HeadRow(all, start);
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    QK_UNROLL for (int p = 0; p < 2; ++p) {
      float values[1][qk::kRun], roots[1];
      raw[p][i].widen(values[0]);
      if (sides[p].any_norm) qk::inverse_roots<1>(roots, values, all, columns, k);
      sides[p].finish(values[0], roots[0], row, turn);
      if (place.exists && start + i < n)
        Run::store_raw(place_of(row) + p * part, Run::narrow(values[0]));
    }
    row.advance(all, n);
  }
  // A stream without tokens may have no address.
  if (first_v == nullptr && second_v == nullptr) return;
  const Side copied = side(first_v, nullptr, c_fv, second_v, nullptr, c_sv);
  row = qk::HeadRow(all, start);
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    raw[0][i].load(copied.row_of(row), columns);
    row.advance(all, n);
  }
  row = qk::HeadRow(all, start);
  QK_UNROLL for (int i = 0; i < kRows; ++i) {
    if (place.exists && start + i < n) Run::store_raw(place_of(row) + 2 * part, raw[0][i].runs[0]);
    row.advance(all, n);
  }
}

QK_HOST_ENTRY(QK_THREADS, 0)
