// Matrix policy of RDNA2, whose lanes multiply int8 codes by dot4: layout_gfx10.h.
#pragma once

#include "layout_gfx10.h"

namespace qk {

/// Eight sums of a lane in a 16x16 block: [row][column].
struct SumsGfx10 {
  int v[LayoutGfx10::kRows * LayoutGfx10::kColumns];
  QK_DEVICE int& operator[](int e) { return v[e]; }
  QK_DEVICE const int& operator[](int e) const { return v[e]; }
};
QK_DEVICE void finish(SumsGfx10& sums) {
  QK_UNROLL for (int& sum : sums.v)
    finish(sum);
}

template <class Layout, Format kW, Format kX>
struct MmaGfx10 : Layout {
  static_assert(kW == Format::kInt8 && kX == Format::kInt8, "dot4 multiplies int8 alone");
  using Sum = int;
  using Acc = SumsGfx10;

  template <int kBlocksN, int kBlocksM>
  static QK_DEVICE void multiply(Acc (&acc)[kBlocksN][kBlocksM],
                                 const typename Layout::A (&a)[kBlocksN],
                                 const typename Layout::B (&b)[kBlocksM]) {
    QK_UNROLL for (int word = 0; word < Layout::kChunk / 4; ++word) {
      QK_UNROLL for (int i = 0; i < kBlocksN; ++i) {
        QK_UNROLL for (int j = 0; j < kBlocksM; ++j)
          multiply_word(acc[i][j], a[i], b[j], word);
      }
    }
  }

 private:
  static QK_DEVICE void multiply_word(Acc& acc, const typename Layout::A& a,
                                      const typename Layout::B& b, int word) {
    QK_UNROLL for (int row = 0; row < Layout::kRows; ++row) {
      QK_UNROLL for (int column = 0; column < Layout::kColumns; ++column) {
        int& sum = acc[Layout::kColumns * row + column];
        sum = dot4(a.rows[row].v[word], b.tokens[column].v[word], sum);
      }
    }
  }
};

template <Format kW, Format kX>
using DenseMma = MmaGfx10<LayoutGfx10, kW, kX>;
template <Format kW, Format kX>
using SparseMma = MmaGfx10<SparseLayoutGfx10, kW, kX>;

}  // namespace qk
