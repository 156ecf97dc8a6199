// Where the boxes of a Hopper kernel lie: the K steps of its operands, and the chunks of its
// result.
//
// A view gives the tensor map of rows of weights and the first coordinates of a box of tokens
// (Tile::kM rows of 128 codes), of weights (Tile::kN rows) and of outputs (Tile::kChunk tokens),
// the metadata of row n of the weights, or of the last of `rows` behind it, and the bytes of it
// that belong to a K step.
#pragma once

#include "tile_sm90.h"

namespace qk {

/// Bytes of a row of metadata: those of a K step from `begin` (16 positions of sparse weights, four
/// factors of int4 ones), as far as they lie before `end`, which is in the row.
struct ByteRange {
  int begin, end;
  bool whole;  // all of them or none, aligned to their number
};

QK_DEVICE const u8* metadata_row(const u8* all, int n, int bytes) {
  return all + static_cast<i64>(n) * bytes;
}

/// The K step, of `count`, under which something else is brought: not before the first operands, as
/// all wait for those.
QK_DEVICE int overlapped_step(int count) { return count > 2 ? 2 : 0; }

/// Matrices, as they are: K steps follow one another.
template <class Tile>
struct MatrixView {
  static constexpr int kBytes = Tile::kStepK / Tile::kPerMeta;

  QK_DEVICE int depth(int k) const { return k; }
  QK_DEVICE const TensorMap& map_of(const TensorMap& w, int) const { return w; }
  QK_DEVICE Coordinates<2> tokens(int step, int m) const { return {{step * Tile::kStepK, m}}; }
  QK_DEVICE Coordinates<2> weights(int step, int n) const { return {{step * Tile::kWeightRow, n}}; }
  QK_DEVICE Coordinates<2> outputs(int m, int within, int n) const { return {{n, m + within}}; }
  QK_DEVICE ByteRange metadata(int step, int k) const {
    return {kBytes * step, k / Tile::kPerMeta, k / Tile::kPerMeta % kBytes == 0};
  }
  QK_DEVICE const u8* metadata_of(const u8* all, int n, int rows, int k) const {
    return metadata_row(all, n < rows ? n : rows - 1, k / Tile::kPerMeta);
  }
};

/// Pictures with channels last, seen by a convolution: the token operand is read where it lies,
/// once for each tap.
///
/// A tile's tokens are output pixels, kM / wide rows of wide = 2^wide_bits, row by row; token tile
/// t is column t % across and row t / across % down of picture t / (across down). Rows of weights
/// are (tap, channel), and K steps walk the taps, each in ceil(channels / 128): a step never has
/// two taps. What the boxes reach outside the picture and behind the last channel is zeros, which
/// is what padding is. The products of those zeros are computed (320 channels are 2.5 steps): a
/// branch around half of a step's instructions cost the accurate dense kernels 1 to 15 %, at every
/// shape.
template <class Tile>
struct PictureView {
  static_assert(Tile::kTeam == 1, "hopper/conv.py has no launches for teams");
  static constexpr int kBytes = Tile::kStepK / Tile::kPerMeta;

  int channels, taps, taps_wide;
  int wide_bits, across, down;
  int stride_x, stride_y, dilation_x, dilation_y, left, top;

  QK_DEVICE int steps() const { return (channels - 1) / Tile::kStepK + 1; }
  QK_DEVICE int depth(int) const { return taps * steps() * Tile::kStepK; }
  QK_DEVICE const TensorMap& map_of(const TensorMap& w, int) const { return w; }
  QK_DEVICE Coordinates<4> tokens(int step, int m) const {
    const int tap = step / steps(), first = step % steps() * Tile::kStepK;
    const Pixel pixel = pixel_of(m, 0);
    return {{first, pixel.x * stride_x + tap % taps_wide * dilation_x - left,
             pixel.y * stride_y + tap / taps_wide * dilation_y - top, pixel.picture}};
  }
  QK_DEVICE Coordinates<3> weights(int step, int n) const {
    return {{step % steps() * Tile::kWeightRow, step / steps(), n}};
  }
  QK_DEVICE Coordinates<4> outputs(int m, int within, int n) const {
    const Pixel pixel = pixel_of(m, within);
    return {{n, pixel.x, pixel.y, pixel.picture}};
  }
  QK_DEVICE ByteRange metadata(int step, int) const {
    // Behind the last tap, where codes are zeros, that one again.
    const int last = step / steps(), tap = last < taps ? last : taps - 1,
              row = channels / Tile::kPerMeta;
    return {tap * row + step % steps() * kBytes, tap * row + row, row % kBytes == 0};
  }
  QK_DEVICE const u8* metadata_of(const u8* all, int n, int rows, int k) const {
    return metadata_row(all, n < rows ? n : rows - 1, k / Tile::kPerMeta);
  }

 private:
  struct Pixel {
    int x, y, picture;
  };

  /// Token `within` of the tile that starts with token m.
  QK_DEVICE Pixel pixel_of(int m, int within) const {
    const int tile = m / Tile::kM, row = tile / across, wide = 1 << wide_bits;
    return {tile % across * wide + (within & (wide - 1)),
            row % down * (Tile::kM >> wide_bits) + (within >> wide_bits), row / down};
  }
};

}  // namespace qk
