// Norms of rows that end in codes: what layer_norm_codes and sum_norm_codes share. The source
// defines QK_SUM: 1 where rows are sums, which are written, too.
#pragma once

#include "vector_io.h"

namespace {

constexpr int kRun = 8;
constexpr int kWaves = QK_THREADS / qk::kWave;
constexpr qk::Io kIo = qk::Io(QK_IO);
constexpr qk::Format kFormat = qk::Format(QK_X_FORMAT);
using Run = qk::RunOf<kIo, kRun>;
using Raw = typename Run::Raw;
using Memory = typename Run::Memory;
using Input = qk::Input<QK_SMOOTH != 0>;
using Values = float[kRun];
// Runs that a lane keeps: all of its own, in rows of at most 6144 values.
constexpr int kHeld = 3;
// Blocks that share a multiprocessor: with these a lane has its registers, and spills none.
constexpr int kBlocks = QK_SUM || kFormat == qk::Format::kInt8 ? 3 : 4;
constexpr int kLdsBytes = 2 * kWaves * 4;
static_assert(kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");

/// Operands between norm and codes: known at once, so that no run asks for them.
enum class Between { kAffine, kModulated, kAny };

QK_DEVICE float sum_of_run(const Values& values) {
  Values sums;
  QK_UNROLL for (int e = 0; e < kRun; ++e)
    sums[e] = values[e];
  QK_UNROLL for (int apart = kRun / 2; apart > 0; apart /= 2) {
    QK_UNROLL for (int e = 0; e < apart; ++e)
      sums[e] = qk::add_rounded(sums[e], sums[e + apart]);
  }
  return sums[0];
}

/// The lane's place: 16, 32, ... 256 lanes share a row.
struct RowPosition {
  int lanes, lane, wave;
  int row;    // of the block
  int first;  // the block's first row
  int steps;  // runs of a lane; lanes without a last one do nothing in it

  QK_DEVICE RowPosition(int n, int k) : lanes(n) {
    const int bits = 4 + (n > 16) + (n > 32) + (n > 64) + (n > 128);
    wave = qk::wave_index();
    lane = qk::thread_index() & (n - 1);
    row = qk::thread_index() >> bits;
    first = qk::block_x() * (QK_THREADS >> bits);
    steps = (k + n * kRun - 1) >> (bits + 3);
  }

  /// Over the lanes of the row: those of a wave as a tree, waves in order.
  QK_DEVICE float sum(float own, qk::u8* lds) const {
    const auto add_lane = [&](int mask) {
      own = qk::add_rounded(own, qk::bits_float(qk::lane_xor(qk::float_bits(own), mask)));
    };
    if (lanes > 16) add_lane(16);
    QK_UNROLL for (int mask = 8; mask > 0; mask /= 2)
      add_lane(mask);
    if (lanes <= qk::kWave) return own;
    if (lane % qk::kWave == 0) qk::store(lds + wave * 4, own);
    qk::block_sync();
    const int waves = lanes / qk::kWave, from = row * waves;
    float all = qk::load<float>(lds + from * 4);
    QK_NO_UNROLL for (int other = 1; other < waves; ++other)
      all = qk::add_rounded(all, qk::load<float>(lds + (from + other) * 4));
    return all;
  }
};

/// What a launch reads and writes; see layer_norm_codes.hip and sum_norm_codes.hip.
struct Operands {
  const void *x, *weight, *bias, *modulation_scale, *modulation_shift;
  const float *smooth, *scale;
  qk::u8* q;
#if QK_SUM
  const void *added, *gate;
  void* sum;
#endif
};

QK_DEVICE const Memory* moved(const void* from, qk::i64 by) {
  return from == nullptr ? nullptr : static_cast<const Memory*>(from) + by;
}

QK_DEVICE Raw read(const Memory* from, int at) { return Run::load_raw(from + at, true, kRun); }

/// A lane's part of a row of x, or with QK_SUM of x + gate * added.
struct Row {
  int start;  // the row's first value, from the block's
  int column, step, steps, k;
  bool exists;  // lanes without a row do the last one's, and write nothing
  // From the block's first value on, for all columns, and for the row's picture.
  const Memory *x, *weight, *bias, *modulation_scale, *modulation_shift;
  qk::u8* q;
#if QK_SUM
  const Memory *added, *gate;
  Memory* total;
#endif
  // Values, then their distances from the mean.
  Values held[kHeld];

  QK_DEVICE Row(const Operands& of, const RowPosition& place, int m, int columns, int rows)
      : column(place.lane * kRun), step(place.lanes * kRun), steps(place.steps), k(columns) {
    const int index = place.first + place.row;
    exists = index < m;
    const int mine = exists ? index : m - 1;
    start = (mine - place.first) * k;
    const qk::i64 block = static_cast<qk::i64>(place.first) * k;
    x = moved(of.x, block);
    q = of.q + block;
    weight = moved(of.weight, 0);
    bias = moved(of.bias, 0);
    qk::i64 picture = 0;
    if (is_of_pictures(of)) picture = static_cast<qk::i64>(mine / rows) * k;
    modulation_scale = moved(of.modulation_scale, picture);
    modulation_shift = moved(of.modulation_shift, picture);
#if QK_SUM
    added = moved(of.added, block);
    gate = moved(of.gate, picture);
    total = static_cast<Memory*>(of.sum) + block;
#endif
    load_held();
  }
  static QK_DEVICE bool is_of_pictures(const Operands& of) {
    bool any = of.modulation_scale != nullptr || of.modulation_shift != nullptr;
#if QK_SUM
    any = any || of.gate != nullptr;
#endif
    return any;
  }

  QK_DEVICE void load_held() {
    Raw raw[kHeld];
    QK_UNROLL for (int i = 0; i < kHeld; ++i) {
      // Lanes without a run read a first one.
      if (i < steps) raw[i] = load(at(i) < k ? at(i) : 0);
    }
    QK_UNROLL for (int i = 0; i < kHeld; ++i) {
      if (i >= steps) continue;
      Run::widen(held[i], raw[i]);
      if (at(i) < k) keep(raw[i], at(i));
    }
  }
  QK_DEVICE int at(int i) const { return column + i * step; }
  QK_DEVICE Raw load(int at) const {
    const Raw raw = read(x, start + at);
#if QK_SUM
    Raw more = read(added, start + at);
    if (gate != nullptr) more = Run::multiply(read(gate, at), more);
    return Run::add(raw, more);
#else
    return raw;
#endif
  }
  /// Writes a run of the sum.
  QK_DEVICE void keep(const Raw& raw, int at) const {
#if QK_SUM
    if (exists) Run::store_raw(total + (start + at), raw);
#endif
  }

  /// Calls each(raw, column) for the runs that are not held, in order.
  template <class Each>
  QK_DEVICE void for_rest(const Each& each) const {
    QK_NO_UNROLL for (int next = at(kHeld); next < k; next += step) {
      // Else clang counts pointers up, one for each operand, by additions with a carry.
      const int from = static_cast<int>(qk::optimization_barrier(static_cast<qk::u32>(next)));
      each(load(from), from);
    }
  }

  /// The sum of the lane's values.
  QK_DEVICE float sum() const {
    float all = 0.0f;
    QK_UNROLL for (int i = 0; i < kHeld; ++i) {
      if (i >= steps) continue;
      const float run = sum_of_run(held[i]);
      all = qk::add_rounded(all, at(i) < k ? run : 0.0f);
    }
    for_rest([&](const Raw& raw, int) {
      Values values;
      Run::widen(values, raw);
      all = qk::add_rounded(all, sum_of_run(values));
    });
    return all;
  }

  /// Leaves distances from the mean, and returns the sum of their squares.
  QK_DEVICE float center(float mean) {
    float all = 0.0f;
    QK_UNROLL for (int i = 0; i < kHeld; ++i) {
      if (i >= steps) continue;
      const float squares = squares_of(held[i], mean);
      all = qk::add_rounded(all, at(i) < k ? squares : 0.0f);
    }
    for_rest([&](const Raw& raw, int) {
      Values values;
      Run::widen(values, raw);
      all = qk::add_rounded(all, squares_of(values, mean));
    });
    return all;
  }
  static QK_DEVICE float squares_of(Values& values, float mean) {
    float sums[4];
    QK_UNROLL for (int e = 0; e < kRun; ++e) {
      values[e] -= mean;
      sums[e % 4] =
          e < 4 ? values[e] * values[e] : qk::multiply_add(values[e], values[e], sums[e % 4]);
    }
    return qk::add_rounded(qk::add_rounded(sums[0], sums[2]), qk::add_rounded(sums[1], sums[3]));
  }

  template <Between kBetween>
  static QK_DEVICE bool has(const Memory* operand, Between one) {
    return kBetween == Between::kAny ? operand != nullptr : kBetween == one;
  }

  /// From distances to what is quantized: the norm, and each step of its modulation, rounded to io.
  template <Between kBetween>
  QK_DEVICE void norm(Values& y, float inverse, int at) const {
    const bool weighted = has<kBetween>(weight, Between::kAffine);
    const bool biased = has<kBetween>(bias, Between::kAffine);
    Values factors, more = {};
    if (weighted) Run::widen(factors, read(weight, at));
    if (biased) Run::widen(more, read(bias, at));
    QK_UNROLL for (int e = 0; e < kRun; ++e) {
      y[e] *= inverse;
      if (weighted) {
        y[e] = qk::multiply_add(y[e], factors[e], more[e]);
      } else if (biased) {
        y[e] = qk::add_rounded(y[e], more[e]);
      }
    }
    Raw raw = Run::narrow(y);
    if (has<kBetween>(modulation_scale, Between::kModulated)) {
      Values ones;
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        ones[e] = 1.0f;
      raw = Run::multiply(raw, Run::add(Run::narrow(ones), read(modulation_scale, at)));
    }
    if (has<kBetween>(modulation_shift, Between::kModulated))
      raw = Run::add(raw, read(modulation_shift, at));
    Run::widen(y, raw);
  }

  template <Between kBetween>
  QK_DEVICE void write(float mean, float inverse, const Input& input,
                       const qk::Reciprocal<kFormat>& reciprocal) {
    const auto encode = [&](Values& values, int at) {
      norm<kBetween>(values, inverse, at);
      input.apply(values, at, true, kRun);
      qk::write_codes(q + (start + at), reciprocal.encode(values), true, kRun);
    };
    QK_UNROLL for (int i = 0; i < kHeld; ++i) {
      if (i < steps && at(i) < k) encode(held[i], at(i));
    }
    for_rest([&](const Raw& raw, int at) {
      keep(raw, at);
      Values values;
      Run::widen(values, raw);
      QK_UNROLL for (int e = 0; e < kRun; ++e)
        values[e] -= mean;
      encode(values, at);
    });
  }
};

/// Writes the codes of the block's rows, which `n` lanes share each.
QK_DEVICE void write_norms(const Operands& operands, qk::u8* lds, int m, int n, int k, int rows,
                           int centred, int eps) {
  const RowPosition place(n, k);
  qk::start();
  Row row(operands, place, m, k, rows);
  const qk::Reciprocal<kFormat> reciprocal(operands.scale[0]);
  const float columns = static_cast<float>(k);
  const float mean = centred != 0 ? place.sum(row.sum(), lds) / columns : 0.0f;
  const float variance = place.sum(row.center(mean), lds + kWaves * 4) / columns;
  const float inverse =
      1.0f / qk::sqrt_rounded(qk::add_rounded(variance, qk::bits_float(static_cast<qk::u32>(eps))));
  if (!row.exists) return;
  const Input input{operands.smooth};
  const bool affine = operands.weight != nullptr && operands.bias != nullptr;
  const bool modulated =
      operands.modulation_scale != nullptr && operands.modulation_shift != nullptr;
  if (affine && operands.modulation_scale == nullptr && operands.modulation_shift == nullptr) {
    row.write<Between::kAffine>(mean, inverse, input, reciprocal);
  } else if (modulated && operands.weight == nullptr && operands.bias == nullptr) {
    row.write<Between::kModulated>(mean, inverse, input, reciprocal);
  } else {
    row.write<Between::kAny>(mean, inverse, input, reciprocal);
  }
}

}  // namespace
