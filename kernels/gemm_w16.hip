// y[m, n] = (sum_k x[m, k] * w[n, k]) * w_scale[n] + bias[n], x of 16 bit and w packed
//
// x       io [M, K], K contiguous
// w       codes [N, K], or u8 [N, K/2]: 16 bytes hold 32 codes, byte i those of k = i (low nibble)
//         and i + 16, each plus 8
// w_group int4: i8 [N, K/32], -15 to 15: the weight is (code - 8) * w_group; else null
// w_scale f32 [1] or [N]; q4_0 and q8_0: f16 [N, K/32], of any sign, zero and subnormal too
// bias    io [N] or null                            y       io [M, N]
// M, N any size >= 1; K a multiple of 32; base pointers 16-byte aligned. channels: 1 where w_scale
// has one number per row of w, else 0. Codes are exact in io; f32 accumulation, scales and bias in
// f32, one rounding to io (nearest even).
//
// Launch: 256 threads, grid (ceil(N / 32), ceil(M / 64), 1). A block has 16 tokens (of M <= 16) or
// 64, and 32 outputs; its eight waves share K: weight_only.h.
#include "mma.h"
#include "weight_only.h"

constexpr int kTokenBlocks = QK_TOKENS == QK_M16 ? 1 : 4;
constexpr qk::Io kIo = qk::Io(QK_IO);
using Mma = qk::HalfMma<kIo>;
using Loop = qk::WeightOnlyLoop<kTokenBlocks, QK_THREADS, Mma, QK_W_FORMAT, kIo>;
// A multiprocessor of 64 K registers holds so many blocks that memory always has something to do.
constexpr int kBlocks = kTokenBlocks == 1 && !Loop::Codes::kGroupScales ? 3 : 1;
// Of a SIMD. 64 tokens and q8_0 leave registers for no more: with 1024 a lane, RDNA3's compiler
// spills some when it tries.
constexpr int kWaves = kTokenBlocks > 1 && QK_W_FORMAT == QK_Q8_0 ? 4 : 16;

static_assert(Loop::kLdsBytes == QK_LDS_BYTES, "launch.json states the LDS");

struct Ends {
  const qk::f32* scale;
  const void* bias;
  void* y;
  int m, n, channels;
};

QK_DEVICE void write(const Ends& ends, const typename Loop::Accumulators& acc, int m0, int n0) {
  using Type = qk::IoType<kIo>;
  using Memory = typename Type::Memory;
  const int lane = qk::thread_index() % qk::kWave;
  QK_UNROLL for (int i = 0; i < Loop::kBlocksN; ++i) {
    QK_UNROLL for (int q = 0; q < Mma::kRows; ++q) {
      const int row = n0 + 16 * i + Mma::row(q, lane);
      if (row >= ends.n) continue;
      const qk::f32 scale = Loop::Codes::kGroupScales ? 1.0f : ends.scale[row * ends.channels];
      qk::f32 bias = 0.0f;
      if (ends.bias != nullptr) bias = Type::widen(static_cast<const Memory*>(ends.bias)[row]);
      QK_UNROLL for (int e = 0; e < 8 * Loop::kBlocksM; ++e) {
        const int token = m0 + e / 8 * 16 + Mma::token_of(e % 8, lane);
        if (Mma::row_of(e % 8) != q || token >= ends.m) continue;
        const qk::f32 value = qk::add_rounded(acc[i][e / 8][e % 8] * scale, bias);
        static_cast<Memory*>(ends.y)[static_cast<qk::i64>(token) * ends.n + row] =
            Type::round(value);
      }
    }
  }
}

QK_KERNEL_SHARING(QK_THREADS, kBlocks, kWaves)
QK_SYMBOL(const qk::u8* x, const qk::u8* w, const qk::u8* w_group, const void* w_scale,
          const void* bias, void* y, int m, int n, int k, int channels) {
  QK_SHARED(lds, Loop::kLdsBytes);
  qk::start();
  const int m0 = qk::block_y() * 16 * kTokenBlocks, n0 = qk::block_x() * 16 * Loop::kBlocksN;
  const qk::u8* const meta =
      Loop::Codes::kGroupScales ? static_cast<const qk::u8*>(w_scale) : w_group;
  typename Loop::Accumulators acc = {};
  Loop loop;
  if (!loop.run(acc, {x, w, meta, m, n, k}, lds, m0, n0)) return;
  write({static_cast<const qk::f32*>(w_scale), bias, y, m, n, channels}, acc, m0, n0);
}

QK_HOST_ENTRY(QK_THREADS, Loop::kLdsBytes)
