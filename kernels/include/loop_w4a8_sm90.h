// The K loop of a warpgroup of the Hopper kernels over int4 weights: they cross memory, L2 and the
// ring as 4 bits, become int8 in registers, and are multiplied from there.
//
// 16 bytes hold 32 weights, byte i those of k = i (low nibble) and i + 16: bytes 4t .. 4t + 3 are
// what lane t of a quad needs of a row (mma_sm90.h), so that a word of shared memory is two
// registers of A and nothing is shuffled. A row's swizzled 64 bytes meet no bank twice.
#pragma once

#include "loop_sm90.h"

namespace qk {

template <class Tile, Format kW, Format kX, bool kPromote, class View>
struct HopperInt4Loop : HopperLoop<Tile, Format::kInt8, Format::kInt8, false, View> {
  using Base = HopperLoop<Tile, Format::kInt8, Format::kInt8, false, View>;
  using Base::begin, Base::count, Base::first_row, Base::k, Base::lane, Base::next_output,
      Base::nibbles, Base::output, Base::ring, Base::set, Base::view;
  using typename Base::Operation;
  using typename Base::Sums;
  // Matrix instructions of a block for which weights are decoded at once: where sums leave few
  // registers, one. Fewer fill the gaps between tiles better, too.
  static constexpr int kAtOnce = Tile::kBlocks * Base::kSums > 160 ? 1 : 2;
  static constexpr int kParts = Base::kSteps / kAtOnce;
  static constexpr int kPeriod = 4, kLap = 2 * kPeriod;

  /// Factors of kPeriod K steps of the lane's two rows in every block: a word is a step's four, and
  /// lane t of a quad has step t.
  struct Metadata {
    u32 words[Tile::kBlocks][2];
  };
  /// A part of a stage's weights as int8.
  struct Weights {
    u32 codes[Tile::kBlocks][kAtOnce][4];
  };

  /// Loads the factors of the tile's K steps `step` .. step + 3, past its end of the next tile's
  /// first ones. Behind the end of K, where tokens are zeros, any factor will do: one inside.
  QK_DEVICE void load_metadata(Metadata& meta, int step) const {
    const bool here = step < count;
    int first = here ? output : next_output;
    asm volatile("" : "+r"(first));  // or the addresses of all rows wait in registers
    const ByteRange range = view.metadata(begin + (here ? step : 0) + lane % 4, k);
    QK_UNROLL for (int i = 0; i < 2 * Tile::kBlocks; ++i) {
      const u8* const factors = this->row(first, i);
      u32& word = meta.words[i / 2][i % 2];
      if (range.whole) {
        word = load<u32>(factors + (range.begin < range.end ? range.begin : range.end - 4));
      } else {
        word = 0;
        QK_UNROLL for (int j = 0; j < 4; ++j) {
          const int at = range.begin + j < range.end ? range.begin + j : range.end - 1;
          word |= static_cast<u32>(factors[at]) << 8 * j;
        }
      }
    }
  }

  /// Decodes a part of the warpgroup's weights in a stage, step i of a period.
  QK_DEVICE void decode(Weights& weights, int stage, const Metadata& meta, int i, int part) const {
    const int thread = thread_index() % 128;
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      const int row = first_row + Tile::kBlockStep * block + thread / 32 * 16 + lane / 4;
      const u32 first = ring.weights(stage) + row * Tile::kWeightRow + lane / 8 * 16 + lane % 4 * 4;
      QK_UNROLL for (int half = 0; half < 2; ++half) {
        const u32 factors = __shfl_sync(0xffffffffu, meta.words[block][half], (lane & ~3) + i);
        QK_UNROLL for (int j = 0; j < kAtOnce; ++j) {
          const int s = kAtOnce * part + j;
          u32 word;
          load_shared(word, (first ^ s << 4) + 8 * half * Tile::kWeightRow);
          const u32 factor = signed_byte(factors, s);
          u32 offset = 0x80808080u - 8 * 0x01010101u * factor;
          asm("" : "+r"(offset));  // or it is distributed over the products, an addition to each
          u32(&codes)[4] = weights.codes[block][j];
          codes[half] = (word & 0x0f0f0f0fu) * factor + offset ^ 0x80808080u;
          codes[2 + half] = (word >> 4 & 0x0f0f0f0fu) * factor + offset ^ 0x80808080u;
        }
      }
    }
  }

  QK_DEVICE void multiply(Sums& sums, const Weights& weights, int stage, int part,
                          bool keep) const {
    const u64 x = operand_at<Tile::kStepK>(ring.tokens(stage)) + 2 * kAtOnce * part;
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block) {
      QK_UNROLL for (int j = 0; j < kAtOnce; ++j)
        Operation::held(sums[block], weights.codes[block][j], x + 2 * j, keep || j > 0);
    }
  }

  /// Adds up the tile's K steps, the next ones of `reader`: while one part's instructions run, the
  /// next one's weights are decoded. `first` is the factors of the first period, loaded, and then
  /// of the next tile's.
  template <class Overlapped>
  QK_DEVICE void run(Sums& sums, Reader<Tile>& reader, Metadata& first,
                     Overlapped overlapped) const {
    Metadata second;
    Weights weights[2];  // of even parts and of odd ones
    int stage = reader.take(ring, set), previous = 0;
    decode(weights[0], stage, first, 0, 0);
    QK_NO_UNROLL for (int lap = 0; lap < count; lap += kLap) {
      QK_UNROLL for (int i = 0; i < kLap; ++i) {
        const int step = lap + i;
        if (i > 0 && step >= count) break;
        Metadata &now = i < kPeriod ? first : second, &other = i < kPeriod ? second : first;
        QK_UNROLL for (int part = 0; part < kParts; ++part) {
          settle(weights[part % 2]);
          wgmma_fence();
          multiply(sums, weights[part % 2], stage, part, step > 0 || part > 0);
          wgmma_commit();
          if constexpr (Tile::kAdds) {
            if (part == 0 && step == overlapped_step(count)) overlapped();
          }
          wgmma_wait<1>();  // and the other weights are free
          if (part == 0 && step > 0) ring.release(previous, lane);
          if (part == 0 && i % kPeriod == 0) load_metadata(other, step + kPeriod);
          if (part + 1 < kParts) decode(weights[(part + 1) % 2], stage, now, i % kPeriod, part + 1);
        }
        previous = stage;
        if (step + 1 < count) {
          stage = reader.take(ring, set);
          decode(weights[0], stage, i % kPeriod + 1 < kPeriod ? now : other, (i + 1) % kPeriod, 0);
        }
      }
    }
    wgmma_wait<0>();
    ring.release(previous, lane);
    QK_UNROLL for (int block = 0; block < Tile::kBlocks; ++block)
      qk::settle(sums[block]);
    if ((count - 1) / kPeriod % 2 == 0) first = second;
  }

 private:
  /// Byte i of a word, its sign extended, in one instruction.
  static QK_DEVICE u32 signed_byte(u32 word, int i) {
    u32 value;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(value) : "r"(word), "r"(0x8880 + 0x1111 * i));
    return value;
  }

  /// Ready before the fence of the instructions that read them, or the assembler runs those one by
  /// one.
  static QK_DEVICE void settle(Weights& weights) {
    QK_UNROLL for (int i = 0; i < Tile::kBlocks * kAtOnce * 4; ++i)
      asm volatile("" : "+r"(weights.codes[i / (4 * kAtOnce)][i / 4 % kAtOnce][i % 4])::"memory");
  }
};

template <bool kInt4>
struct HopperLoopOf {
  template <class Tile, Format kW, Format kX, bool kPromote, class View>
  using Loop = HopperLoop<Tile, kW, kX, kPromote, View>;
};
template <>
struct HopperLoopOf<true> {
  template <class Tile, Format kW, Format kX, bool kPromote, class View>
  using Loop = HopperInt4Loop<Tile, kW, kX, kPromote, View>;
};

}  // namespace qk
