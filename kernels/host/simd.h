// One vector type for the multiply loops: 16 floats with AVX-512, 8 with AVX2, 4 elsewhere.
// A fused multiply-add rounds like a product and a sum here: products of two fp8 (or f16-widened fp8) are exact in f32.
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
  return {_mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(low),
                                              _mm256_castps_pd(_mm256_loadu_ps(runs(first + 1))), 1))};
}
template <class Runs>
inline void store_runs(const Runs& runs, int first, Vector a) {
  _mm256_storeu_ps(runs(first), _mm512_castps512_ps256(a.v));
  _mm256_storeu_ps(runs(first + 1), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
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

}  // namespace host
}  // namespace qk
