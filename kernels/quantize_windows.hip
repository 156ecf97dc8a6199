// scale[m] = max_j |row m, j| / max, 1 where that is zero; q[m, j] = code(row m, j / scale[m])
//
// Row m is the window of output pixel (v, u) of picture b, m = (b OH + v) OW + u: column (r, s, c)
// is x[b, v sy + r dy - top, u sx + s dx - left, c] * smooth[c], or 0 outside of the picture.
//
// x       io [B, H, W, C], channels last         smooth  f32 [C]; read with QK_SMOOTH alone
// scale   f32 [M], written                       q       codes [M, K], K = kh kw C
// C a multiple of 8, K below 2^20, base pointers 16-byte aligned. Numbers are rounded as
// quantize_token rounds them: the same bits as of unfolded windows. A NaN in a window makes its
// scale NaN and with it all its codes.
//
// Launch: 256 threads, grid (ceil(M / 8), 1, 1). A wave has a row: lane l the columns at
// step * 256 + 8 * l, which never have two pixels. What does not fit in registers is read a second
// time; neighbours in a block share most of their pixels, so that caches give them.
#include "norm_slab.h"

namespace {

constexpr int kThreads = QK_THREADS;
constexpr int kRows = kThreads / qk::kWave;
constexpr int kRun = 8;
constexpr int kStep = qk::kWave * kRun;
constexpr qk::Format kFormat = qk::Format(QK_X_FORMAT);
static_assert(kRows == 8, "launch.json divides M by this number");
static_assert(QK_LDS_BYTES == 0, "launch.json states the LDS");

using Run = qk::RunOf<qk::Io(QK_IO), kRun>;
using Input = qk::Input<QK_SMOOTH != 0>;
// Runs that a lane keeps: 20 registers, which windows of 3x3 pixels of 128 channels fill.
constexpr int kHeld = 80 / static_cast<int>(sizeof(Run::Raw));

struct Picture {
  const typename Run::Memory* x;
  int height, width, channels, out_height, out_width, taps_wide;
  int stride_y, stride_x, dilation_y, dilation_x, top, left;
};

/// The window of one output pixel.
struct Window {
  const Picture& picture;
  Input input;
  int batch, first_y, first_x;

  QK_DEVICE Window(const Picture& given, const Input& factors, int m)
      : picture(given), input(factors) {
    const int line = m / picture.out_width;
    batch = line / picture.out_height;
    first_y = (line - batch * picture.out_height) * picture.stride_y - picture.top;
    first_x = (m - line * picture.out_width) * picture.stride_x - picture.left;
  }

  QK_DEVICE int channel(int column) const {
    return column - qk::quotient(column, picture.channels) * picture.channels;
  }
  QK_DEVICE Run::Raw load_raw(int column) const {
    const int tap = qk::quotient(column, picture.channels);
    const int r = qk::quotient(tap, picture.taps_wide), s = tap - r * picture.taps_wide;
    const int y = first_y + r * picture.dilation_y, x = first_x + s * picture.dilation_x;
    const bool inside = y >= 0 && y < picture.height && x >= 0 && x < picture.width;
    const qk::i64 pixel = (static_cast<qk::i64>(batch) * picture.height + y) * picture.width + x;
    const qk::i64 at = pixel * picture.channels + (column - tap * picture.channels);
    return Run::load_raw(picture.x + (inside ? at : 0), inside, 0);
  }
  QK_DEVICE void widen(float (&values)[kRun], const Run::Raw& raw, int column) const {
    Run::widen(values, raw);
    if constexpr (!Input::kPlain) input.apply(values, channel(column), true, kRun);
  }
  /// Largest magnitude, as bits.
  QK_DEVICE qk::u32 amax_bits(const Run::Raw& raw, int column) const {
    if constexpr (Input::kPlain) return Run::amax_bits(raw);
    float values[kRun];
    widen(values, raw, column);
    return qk::amax_bits_of(values);
  }
  QK_DEVICE void write(qk::u8* q, const Run::Raw& raw, int column,
                       const qk::Divisor<kFormat>& divisor) const {
    float values[kRun];
    widen(values, raw, column);
    qk::write_codes(q + column, divisor.encode(values), true, kRun);
  }
  /// False: the codes are not certain, and have to be written again.
  QK_DEVICE bool write_fast(qk::u8* q, const Run::Raw& raw, int column,
                            const qk::FastDivisor<kFormat>& divisor) const {
    float values[kRun];
    widen(values, raw, column);
    qk::Codes<kRun> codes;
    const bool certain = divisor.encode(codes, values);
    qk::write_codes(q + column, codes, true, kRun);
    return certain;
  }
};

QK_DEVICE qk::u32 larger(qk::u32 a, qk::u32 b) { return a > b ? a : b; }

QK_DEVICE void quantize(const Window& window, float& scale_of_row, qk::u8* codes, int k) {
  const int start = qk::thread_index() % qk::kWave * kRun;
  typename Run::Raw held[kHeld];
  qk::u32 amax = 0;
  QK_UNROLL for (int step = 0; step < kHeld; ++step) {
    if (start + step * kStep < k) held[step] = window.load_raw(start + step * kStep);
  }
  QK_UNROLL for (int step = 0; step < kHeld; ++step) {
    if (start + step * kStep < k)
      amax = larger(amax, window.amax_bits(held[step], start + step * kStep));
  }
  QK_NO_UNROLL for (int column = start + kHeld * kStep; column < k; column += kStep) {
    amax = larger(amax, window.amax_bits(window.load_raw(column), column));
  }
  amax = qk::wave_max(amax);
  // Zero also when amax is so small that the quotient underflows: zeros would become NaN.
  const float quotient = qk::bits_float(amax) / qk::Codec<kFormat>::kMax;
  const float scale = quotient == 0.0f ? 1.0f : quotient;
  if (start == 0) scale_of_row = scale;
  const qk::FastDivisor<kFormat> fast(scale);
  qk::u32 again = 0;  // bit by step
  QK_UNROLL for (int step = 0; step < kHeld; ++step) {
    const int column = start + step * kStep;
    if (column < k && !window.write_fast(codes, held[step], column, fast)) again |= 1u << step;
  }
  const qk::Divisor<kFormat> divisor(scale);
  QK_NO_UNROLL for (int column = start; again != 0; column += kStep, again >>= 1) {
    if (again & 1) window.write(codes, window.load_raw(column), column, divisor);
  }
  QK_NO_UNROLL for (int column = start + kHeld * kStep; column < k; column += kStep) {
    const auto raw = window.load_raw(column);
    if (!window.write_fast(codes, raw, column, fast)) window.write(codes, raw, column, divisor);
  }
}

}  // namespace

// As quantize_token's: windows are read from caches, and more waves hide more of their latency.
QK_KERNEL_SHARING(kThreads, Input::kPlain ? 3 : 2, 16)
QK_SYMBOL(const void* x, const float* smooth, float* scale, qk::u8* q, int m, int k, int height,
          int width, int channels, int out_height, int out_width, int taps_wide, int stride_y,
          int stride_x, int dilation_y, int dilation_x, int top, int left) {
  qk::start();
  const Picture picture{static_cast<const typename Run::Memory*>(x),
                        height,
                        width,
                        channels,
                        out_height,
                        out_width,
                        taps_wide,
                        stride_y,
                        stride_x,
                        dilation_y,
                        dilation_x,
                        top,
                        left};
  const int row = qk::block_x() * kRows + qk::wave_index();
  if (row >= m) return;
  const Window window(picture, Input{smooth}, row);
  quantize(window, scale[row], q + static_cast<qk::i64>(row) * k, k);
}

QK_HOST_ENTRY(kThreads, 0)
