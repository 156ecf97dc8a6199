// Pictures with channels last as the token operand of a convolution: windows are read where they
// lie.
//
// Token m is output pixel (v, u) of picture b, m = (b OH + v) OW + u; its row of K is (r, s, c),
// and x[b, v sy + r dy - top, u sx + s dx - left, c] stands there, or zero outside of the picture.
// A vector of 16 channels never has two taps: channels are a multiple of 16, and at least 64, so
// that a step of kK meets at most kK / 64 ends of a tap.
#pragma once

#include "tile.h"

namespace qk {

struct Picture {
  int height, width, channels;
  int out_height, out_width;
  int taps_wide;  // of a window along W
  int stride_y, stride_x, dilation_y, dilation_x;
  int top, left;  // padding
};

constexpr int kLeastChannels = 64;

template <class Tile>
struct PictureTokens : TokenCopy<Tile> {
  using Base = TokenCopy<Tile>;
  using Base::kCount, Base::kRowStep, Base::column, Base::vectors;
  // Base::offsets: bytes from x to the first pixel of a row's window, which may lie before x.

  Picture picture;
  const u8* x;
  u32 inside[kCount];  // bit t: tap t of the row's window lies in the picture; 32 taps at most
  // Of the lane's vectors in the next step: byte in the window, channel, tap, and tap along W.
  u32 offset;
  int channel, tap, across;

  QK_DEVICE void set_offsets(const Operands& op, int m0, int thread) {
    x = op.x;
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      const int row = m0 + Base::row(thread) + i * kRowStep;
      // Rows beyond the last repeat it: what they give is never written.
      const int m = row < op.m ? row : op.m - 1;
      const int line = m / picture.out_width, batch = line / picture.out_height;
      const int first_y = line % picture.out_height * picture.stride_y - picture.top;
      const int first_x = m % picture.out_width * picture.stride_x - picture.left;
      this->offsets[i] = static_cast<u32>(
          ((batch * picture.height + first_y) * picture.width + first_x) * picture.channels);
      inside[i] = taps_inside(first_y, first_x, op.k / picture.channels);
    }
    offset = static_cast<u32>(column(thread));
    channel = column(thread);
    tap = across = 0;
    advance(0);
  }

  QK_DEVICE void advance(int count) {
    offset += static_cast<u32>(count);
    channel += count;
    QK_UNROLL for (int i = 0; i < Tile::kK / kLeastChannels; ++i) {
      const bool ends = channel >= picture.channels,
                 line_ends = ends && across + 1 == picture.taps_wide;
      channel -= ends ? picture.channels : 0;
      tap += ends ? 1 : 0;
      across = line_ends ? 0 : across + (ends ? 1 : 0);
      offset += ends ? static_cast<u32>((picture.dilation_x - 1) * picture.channels) : 0u;
      offset += line_ends ? static_cast<u32>((picture.dilation_y * picture.width -
                                              picture.taps_wide * picture.dilation_x) *
                                             picture.channels)
                          : 0u;
    }
  }

  QK_DEVICE void load_partial_step(const u8*, int bytes, int thread) {
    load_step_if(column(thread) < bytes);
  }
  QK_DEVICE void load_step(const u8*) { load_step_if(true); }

 private:
  QK_DEVICE void load_step_if(bool exists) {
    QK_UNROLL for (int i = 0; i < kCount; ++i) {
      vectors[i] = Vec16{};
      if (exists && (inside[i] >> tap & 1u))
        vectors[i] = load<Vec16>(x + (this->offsets[i] + offset));
    }
  }

  QK_DEVICE u32 taps_inside(int first_y, int first_x, int taps) const {
    u32 line = 0, all = 0;
    for (int s = 0, at = first_x; s < picture.taps_wide; ++s, at += picture.dilation_x) {
      line |= at >= 0 && at < picture.width ? 1u << s : 0u;
    }
    for (int first = 0, at = first_y; first < taps;
         first += picture.taps_wide, at += picture.dilation_y) {
      all |= at >= 0 && at < picture.height ? line << first : 0u;
    }
    return all;
  }
};

}  // namespace qk
