// The axis of weights: how those of a variant lie in memory, as QK_WEIGHTS says, and the operand
// that stands behind them.
//
//   dense   w codes [N, K]
//   sparse  w codes [N, K/2]: the kept two of every four along K
//           w_meta u8 [N, K/8]: a nibble per group of four, low nibble first; bits 1:0 and 3:2 are
//           the kept positions, ascending and distinct, whatever the codes
//   int4    w u8 [N, K/2]: 16 bytes hold 32 codes, byte i those of k = i (low nibble) and i + 16
//           w_group i8 [N, K/32], -15 to 15: the weight is (code - 8) * w_group, an int8
//
// K is a multiple of 16 with dense weights, of 32 with others. A source declares w and
// QK_META_PARAMETER(w), and passes w and QK_META(w) on.
#pragma once

#include "config.h"

#define QK_WEIGHTS_DENSE 0
#define QK_WEIGHTS_SPARSE 1
#define QK_WEIGHTS_INT4 2

#if QK_WEIGHTS == QK_WEIGHTS_DENSE
#  define QK_META(w) nullptr
#  define QK_META_PARAMETER(w)
#else
#  if QK_WEIGHTS == QK_WEIGHTS_SPARSE
#    define QK_META(w) w##_meta
#  else
#    define QK_META(w) w##_group
#  endif
#  define QK_META_PARAMETER(w) const qk::u8 *QK_META(w),
#endif

// The format of what is multiplied: int4 weights have become int8.
#if QK_WEIGHTS == QK_WEIGHTS_INT4
#  define QK_W_CODES QK_INT8
#else
#  define QK_W_CODES QK_W_FORMAT
#endif

namespace qk {

enum class WeightKind {
  kDense = QK_WEIGHTS_DENSE,
  kSparse = QK_WEIGHTS_SPARSE,
  kInt4 = QK_WEIGHTS_INT4
};

}  // namespace qk
