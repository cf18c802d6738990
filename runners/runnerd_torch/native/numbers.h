// Half-precision numbers as bits, and their conversions to and from float.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

inline float bits_to_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
inline float to_float(Float16 x) {
    // Moving the bits leaves the exponent 112 too low; multiplying repairs it for subnormal numbers as well.
    uint32_t bits = float_to_bits(bits_to_float((x.bits & 0x7fffu) << 13) * 0x1p112f);
    bits |= (x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN
    return bits_to_float(bits | (x.bits & 0x8000u) << 16);
}

inline void from_float(float x, float* to) { *to = x; }
inline void from_float(float x, BFloat16* to) {
    const uint32_t bits = float_to_bits(x);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline void from_float(float x, Float16* to) {
    const uint32_t sign = float_to_bits(x) >> 16 & 0x8000u;
    uint32_t bits = float_to_bits(x) & 0x7fffffffu;
    if (bits > 0x7f800000u) bits = 0x7e00u;
    else if (bits >= 0x477ff000u) bits = 0x7c00u;  // from 65520 on, rounding reaches infinity
    else if (bits < 0x38800000u) bits = float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000u;  // subnormal
    else bits = (bits + 0xfffu + (bits >> 13 & 1u) - (112u << 23)) >> 13;
    to->bits = uint16_t(bits | sign);
}

template <typename T>
inline void convert(const T* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}
#if defined(__F16C__)
inline void convert(const Float16* from, float* to, int64_t n) {  // n is a multiple of 8
    for (int64_t i = 0; i < n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
}
#endif

// Rounds n floats.
template <typename T>
inline void narrow(const float* from, T* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) from_float(from[i], to + i);
}
inline void narrow(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
#if defined(__AVX512BF16__)
inline void narrow(const float* from, BFloat16* to, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
    for (; i < n; ++i) from_float(from[i], to + i);
}
#endif

}  // namespace
