// Building blocks of the AVX512-BF16 kernel files. Everything is internal to the file that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,bmi2")
namespace sluice::cpu {
namespace {

constexpr int64_t kNr = 32;  // columns of a panel: two vectors of sums

inline __m512bh Pairs(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline __m512bh Broadcast(const uint16_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return (__m512bh)_mm512_set1_epi32(v);
}
inline __m512i ToBF16(__m512 lo, __m512 hi) { return (__m512i)_mm512_cvtne2ps_pbh(hi, lo); }
inline __mmask16 First(int64_t n) {
  return n >= 16 ? __mmask16(0xffff) : (n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1));
}
inline __mmask32 First32(int64_t n) { return n >= 32 ? __mmask32(0xffffffffu) : __mmask32((1u << n) - 1); }

// 16 e4m3 codes as f32 times 2^-120: the code's fields at f32's places. A NaN code gives 480 * 2^-120;
// writers mark NaN in the scale instead.
inline __m512 Decode16(__m128i codes) {
  const __m512i x = _mm512_slli_epi32(_mm512_cvtepi8_epi32(codes), 20);
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int32_t(0x87f00000u))));
}

// e^x for x in [-87, 0], 0 below; about 1 ulp.
inline __m512 ExpNegative(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);  // NaN stays
  const __m512 n =
      _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r);
  p = _mm512_add_ps(p, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(normal, p, n);
}

}  // namespace
}  // namespace sluice::cpu
#pragma GCC pop_options
