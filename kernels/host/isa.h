// Where each matrix instruction finds its operands, written from the vendors' descriptions and
// independent of the layouts in include/: element -> (lane, byte of the lane's operand registers).
// A layout that disagrees with its instruction gives wrong numbers on the host as it would on the
// card.
//
// kMirrored: lanes 16..31 must hold the same A and B as lanes 0..15.
// A is rows x k, B is k x columns, D is rows x columns. Elements: 1 byte (fp8, int8) or 2
// bytes (f16).
#pragma once

namespace qk {
namespace host {

struct Location {
  int lane;
  int at;  // byte offset in the operand's registers; for D the accumulator's index
};

/// v_wmma_f32_16x16x16_fp8_fp8 and its bf8 forms, v_wmma_i32_16x16x16_iu8.
struct IsaGfx12 {
  static constexpr bool kSparse = false;
  static constexpr bool kMirrored = false;
  static constexpr int kColumns = 16, kDepth = 16, kBytes = 1;
  static constexpr int kRegsA = 2, kRegsB = 2, kRegsD = 8;
  static constexpr Location a(int row, int k) { return {16 * (k / 8) + row, k % 8}; }
  static constexpr Location b(int column, int k) { return {16 * (k / 8) + column, k % 8}; }
  static constexpr Location d(int row, int column) { return {16 * (row / 8) + column, row % 8}; }
};

/// v_wmma_f32_16x16x16_f16 and _bf16.
struct IsaHalfGfx12 : IsaGfx12 {
  static constexpr int kBytes = 2;
  static constexpr int kRegsA = 4, kRegsB = 4;
  static constexpr Location a(int row, int k) { return {16 * (k / 8) + row, k % 8 * 2}; }
  static constexpr Location b(int column, int k) { return {16 * (k / 8) + column, k % 8 * 2}; }
};

/// v_swmmac_f32_16x16x32_fp8_fp8 and its bf8 forms. a() counts kept elements; index() places a
/// group's nibble: bit offset in the 16 bits that OPSEL picks.
struct SparseIsaGfx12 {
  static constexpr bool kSparse = true;
  static constexpr bool kMirrored = false;
  static constexpr int kColumns = 16, kDepth = 32, kBytes = 1;
  static constexpr int kRegsA = 2, kRegsB = 4, kRegsD = 8;
  static constexpr int kIndexBits = 16;  // consumed per instruction
  static constexpr Location a(int row, int kept) { return {16 * (kept / 8) + row, kept % 8}; }
  static constexpr Location b(int column, int k) { return {16 * (k / 16) + column, k % 16}; }
  static constexpr Location d(int row, int column) { return {16 * (row / 8) + column, row % 8}; }
  static constexpr Location index(int row, int group) {
    return {16 * (group / 4) + row, 4 * (group % 4)};
  }
};

/// v_wmma_f32_16x16x16_f16: both halves of the wave hold the same rows; rows of D alternate between
/// the halves.
struct IsaGfx11 {
  static constexpr bool kSparse = false;
  static constexpr bool kMirrored = true;
  static constexpr int kColumns = 16, kDepth = 16, kBytes = 2;
  static constexpr int kRegsA = 8, kRegsB = 8, kRegsD = 8;
  static constexpr Location a(int row, int k) { return {row, 2 * k}; }
  static constexpr Location b(int column, int k) { return {column, 2 * k}; }
  static constexpr Location d(int row, int column) { return {16 * (row % 2) + column, row / 2}; }
};

/// v_wmma_i32_16x16x16_iu8: the same with a byte for each element.
struct IsaIu8Gfx11 : IsaGfx11 {
  static constexpr int kBytes = 1;
  static constexpr int kRegsA = 4, kRegsB = 4;
  static constexpr Location a(int row, int k) { return {row, k}; }
  static constexpr Location b(int column, int k) { return {column, k}; }
};

/// mma.sync.m16n8k32 on 8-bit numbers.
struct IsaSm89 {
  static constexpr bool kSparse = false;
  static constexpr bool kMirrored = false;
  static constexpr int kColumns = 8, kDepth = 32, kBytes = 1;
  static constexpr int kRegsA = 4, kRegsB = 2, kRegsD = 4;
  static constexpr Location a(int row, int k) {
    return {4 * (row % 8) + k % 16 / 4, 4 * (row / 8) + 8 * (k / 16) + k % 4};
  }
  static constexpr Location b(int column, int k) {
    return {4 * column + k % 16 / 4, 4 * (k / 16) + k % 4};
  }
  static constexpr Location d(int row, int column) {
    return {4 * (row % 8) + column / 2, 2 * (row / 8) + column % 2};
  }
};

/// mma.sync.m16n8k16 on f16 and bf16.
struct IsaHalfSm89 : IsaSm89 {
  static constexpr int kDepth = 16, kBytes = 2;
  static constexpr Location a(int row, int k) {
    return {4 * (row % 8) + k % 8 / 2, 4 * (row / 8) + 8 * (k / 8) + k % 2 * 2};
  }
  static constexpr Location b(int column, int k) {
    return {4 * column + k % 8 / 2, 4 * (k / 8) + k % 2 * 2};
  }
};

/// mma.sp.sync.m16n8k64 on 8-bit numbers, sparsity selector 0.
struct SparseIsaSm89 {
  static constexpr bool kSparse = true;
  static constexpr bool kMirrored = false;
  static constexpr int kColumns = 8, kDepth = 64, kBytes = 1;
  static constexpr int kRegsA = 4, kRegsB = 4, kRegsD = 4;
  static constexpr int kIndexBits = 32;
  static constexpr Location a(int row, int kept) { return IsaSm89::a(row, kept); }
  static constexpr Location b(int column, int k) {
    return {4 * column + k % 16 / 4, 4 * (k / 16) + k % 4};
  }
  static constexpr Location d(int row, int column) { return IsaSm89::d(row, column); }
  static constexpr Location index(int row, int group) {
    return {4 * (row % 8) + row / 8 + 2 * (group / 8), 4 * (group % 8)};
  }
};

}  // namespace host
}  // namespace qk
