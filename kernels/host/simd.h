// One vector type for the multiply loops: 16 floats with AVX-512, 8 with AVX2, 4 elsewhere.
// A fused multiply-add rounds like a product and a sum here: products of two fp8 (or f16-widened
// fp8) are exact in f32.
#pragma once

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#  include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#  include <arm_neon.h>
#endif

namespace qk {
namespace host {

#if defined(__AVX512F__)

struct Vector {
  static constexpr int kLanes = 16, kColumns = 4;  // 4 tokens x kColumns vectors stay in registers
  __m512 v;
};
inline Vector load_vector(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_vector(float* p, Vector a) { _mm512_storeu_ps(p, a.v); }
inline Vector multiply_add(float x, Vector w, Vector sum) {
  return {_mm512_fmadd_ps(_mm512_set1_ps(x), w.v, sum.v)};
}
/// From and to runs of eight floats; `runs(i)` is the address of run i.
template <class Runs>
inline Vector load_runs(const Runs& runs, int first) {
  const __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(runs(first)));
  return {_mm512_castpd_ps(_mm512_insertf64x4(
      _mm512_castps_pd(low), _mm256_castps_pd(_mm256_loadu_ps(runs(first + 1))), 1))};
}
template <class Runs>
inline void store_runs(const Runs& runs, int first, Vector a) {
  _mm256_storeu_ps(runs(first), _mm512_castps512_ps256(a.v));
  _mm256_storeu_ps(runs(first + 1),
                   _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
}

#else

#  if defined(__AVX2__) && defined(__FMA__)
struct Vector {
  static constexpr int kLanes = 8, kColumns = 2;
  __m256 v;
};
inline Vector load_vector(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store_vector(float* p, Vector a) { _mm256_storeu_ps(p, a.v); }
inline Vector multiply_add(float x, Vector w, Vector sum) {
  return {_mm256_fmadd_ps(_mm256_set1_ps(x), w.v, sum.v)};
}
#  elif defined(__ARM_NEON) && defined(__aarch64__)
struct Vector {
  static constexpr int kLanes = 4, kColumns = 4;
  float32x4_t v;
};
inline Vector load_vector(const float* p) { return {vld1q_f32(p)}; }
inline void store_vector(float* p, Vector a) { vst1q_f32(p, a.v); }
inline Vector multiply_add(float x, Vector w, Vector sum) { return {vfmaq_n_f32(sum.v, w.v, x)}; }
#  else
struct Vector {
  static constexpr int kLanes = 4, kColumns = 2;
  float v __attribute__((vector_size(16)));
};
inline Vector load_vector(const float* p) {
  Vector a;
  __builtin_memcpy(&a.v, p, sizeof a.v);
  return a;
}
inline void store_vector(float* p, Vector a) { __builtin_memcpy(p, &a.v, sizeof a.v); }
inline Vector multiply_add(float x, Vector w, Vector sum) { return {x * w.v + sum.v}; }
#  endif

template <class Runs>
inline Vector load_runs(const Runs& runs, int first) {
  return load_vector(runs(first));
}
template <class Runs>
inline void store_runs(const Runs& runs, int first, Vector a) {
  store_vector(runs(first), a);
}

#endif

/// Transposes 16 rows of kRun elements: out[e * pitch] gets element e of every row, side by side.
template <int kBytes, int kRun>
inline void transpose_rows(const unsigned char* const (&rows)[16], unsigned char* out, int pitch) {
#if defined(__AVX512VBMI__)
  if constexpr (kBytes == 1 && kRun == 8) {
    const auto run = [&rows](int row) {
      long long bytes;
      __builtin_memcpy(&bytes, rows[row], sizeof bytes);
      return bytes;
    };
    const __m512i low =
        _mm512_set_epi64(run(7), run(6), run(5), run(4), run(3), run(2), run(1), run(0));
    const __m512i high =
        _mm512_set_epi64(run(15), run(14), run(13), run(12), run(11), run(10), run(9), run(8));
    // Byte r of the index: element 0 of row r; rows 8..15 come from the second source, 64 bytes on.
    const __m128i first =
        _mm_set_epi8(120, 112, 104, 96, 88, 80, 72, 64, 56, 48, 40, 32, 24, 16, 8, 0);
    const __m512i step =
        _mm512_set_epi64(0x0303030303030303, 0x0303030303030303, 0x0202020202020202,
                         0x0202020202020202, 0x0101010101010101, 0x0101010101010101, 0, 0);
    const __m512i index = _mm512_add_epi8(_mm512_maskz_broadcast_i32x4(0xffff, first), step);
    for (int half = 0; half < 2; ++half) {
      const __m512i picked = _mm512_permutex2var_epi8(
          low, _mm512_add_epi8(index, _mm512_set1_epi8(static_cast<char>(4 * half))), high);
      unsigned char* const target = out + 4 * half * pitch;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_extracti32x4_epi32(picked, 0));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + pitch),
                       _mm512_extracti32x4_epi32(picked, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + 2 * pitch),
                       _mm512_extracti32x4_epi32(picked, 2));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + 3 * pitch),
                       _mm512_extracti32x4_epi32(picked, 3));
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
