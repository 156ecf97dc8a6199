// One vector type for the multiply loops: 16 floats with AVX-512, 8 with AVX2, 4 elsewhere.
// A fused multiply-add rounds like a product and a sum here: products of two fp8 (or f16-widened
// fp8) are exact in f32.
#pragma once

#if defined(__ARM_NEON) && defined(__aarch64__)
#  include <arm_neon.h>
#endif

namespace qk {
namespace host {

// The compilers' own vectors: <immintrin.h> takes longer to read than a kernel takes to compile.
struct Vector {
#if defined(__AVX512F__)
  static constexpr int kLanes = 16, kColumns = 4;  // 4 tokens x kColumns vectors stay in registers
#elif defined(__AVX2__) && defined(__FMA__)
  static constexpr int kLanes = 8, kColumns = 2;
#elif defined(__ARM_NEON) && defined(__aarch64__)
  static constexpr int kLanes = 4, kColumns = 4;
#else
  static constexpr int kLanes = 4, kColumns = 2;
#endif
  float v __attribute__((vector_size(4 * kLanes)));
};
typedef float Half __attribute__((vector_size(32)));
inline Vector load_vector(const float* p) {
  Vector a;
  __builtin_memcpy(&a.v, p, sizeof a.v);
  return a;
}
inline void store_vector(float* p, Vector a) { __builtin_memcpy(p, &a.v, sizeof a.v); }
inline Vector multiply_add(float x, Vector w, Vector sum) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  return {vfmaq_n_f32(sum.v, w.v, x)};
#elif defined(__clang__) && __has_builtin(__builtin_elementwise_fma)
  return {__builtin_elementwise_fma(x - Vector{}.v, w.v, sum.v)};
#elif defined(__AVX512F__) && !defined(__clang__)
  return {__builtin_ia32_vfmaddps512_mask(x - Vector{}.v, w.v, sum.v, -1, 4)};
#elif defined(__FMA__) && defined(__AVX2__) && !defined(__clang__)
  return {__builtin_ia32_vfmaddps256(x - Vector{}.v, w.v, sum.v)};
#else
  return {x * w.v + sum.v};
#endif
}

/// From and to runs of eight floats; `runs(i)` is the address of run i.
template <class Runs>
inline Vector load_runs(const Runs& runs, int first) {
#if defined(__AVX512F__) && __has_builtin(__builtin_shufflevector)
  Half low, high;  // in registers: a whole load waits for two stores of halves
  __builtin_memcpy(&low, runs(first), sizeof low);
  __builtin_memcpy(&high, runs(first + 1), sizeof high);
  return {__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
#else
  Vector a;
  constexpr int kRun = Vector::kLanes < 8 ? Vector::kLanes : 8;
  for (int lane = 0; lane < Vector::kLanes; lane += kRun)
    __builtin_memcpy(reinterpret_cast<char*>(&a) + 4 * lane, runs(first + lane / kRun), 4 * kRun);
  return a;
#endif
}
template <class Runs>
inline void store_runs(const Runs& runs, int first, Vector a) {
#if defined(__AVX512F__) && __has_builtin(__builtin_shufflevector)
  const Half low = __builtin_shufflevector(a.v, a.v, 0, 1, 2, 3, 4, 5, 6, 7);
  const Half high = __builtin_shufflevector(a.v, a.v, 8, 9, 10, 11, 12, 13, 14, 15);
  __builtin_memcpy(runs(first), &low, sizeof low);
  __builtin_memcpy(runs(first + 1), &high, sizeof high);
#else
  constexpr int kRun = Vector::kLanes < 8 ? Vector::kLanes : 8;
  for (int lane = 0; lane < Vector::kLanes; lane += kRun)
    __builtin_memcpy(runs(first + lane / kRun), reinterpret_cast<char*>(&a) + 4 * lane, 4 * kRun);
#endif
}

/// Transposes 16 rows of kRun elements: out[e * pitch] gets element e of every row, side by side.
template <int kBytes, int kRun>
inline void transpose_rows(const unsigned char* const (&rows)[16], unsigned char* out, int pitch) {
#if defined(__AVX512VBMI__) && __has_builtin(__builtin_shufflevector)
  if constexpr (kBytes == 1 && kRun == 8) {
    typedef unsigned char Bytes __attribute__((vector_size(64)));
    Bytes low, high;
    for (int row = 0; row < 8; ++row) {
      __builtin_memcpy(reinterpret_cast<char*>(&low) + 8 * row, rows[row], 8);
      __builtin_memcpy(reinterpret_cast<char*>(&high) + 8 * row, rows[row + 8], 8);
    }
#  define QK_ROWS(e)                                                                          \
    e, e + 8, e + 16, e + 24, e + 32, e + 40, e + 48, e + 56, e + 64, e + 72, e + 80, e + 88, \
        e + 96, e + 104, e + 112, e + 120
    const Bytes first =
        __builtin_shufflevector(low, high, QK_ROWS(0), QK_ROWS(1), QK_ROWS(2), QK_ROWS(3));
    const Bytes last =
        __builtin_shufflevector(low, high, QK_ROWS(4), QK_ROWS(5), QK_ROWS(6), QK_ROWS(7));
#  undef QK_ROWS
    for (int e = 0; e < 4; ++e) {
      __builtin_memcpy(out + e * pitch, reinterpret_cast<const char*>(&first) + 16 * e, 16);
      __builtin_memcpy(out + (e + 4) * pitch, reinterpret_cast<const char*>(&last) + 16 * e, 16);
    }
    return;
  }
#endif
  for (int row = 0; row < 16; ++row) {
    unsigned char run[kBytes * kRun];
    __builtin_memcpy(run, rows[row], sizeof run);
    for (int e = 0; e < kRun; ++e)
      __builtin_memcpy(out + e * pitch + row * kBytes, run + e * kBytes, kBytes);
  }
}

}  // namespace host
}  // namespace qk
