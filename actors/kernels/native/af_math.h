/* Functions of one float that vectorise inside `#pragma omp simd` loops, and the conversions that C
 * has not. The largest errors, in units of the last place of the float32 result, over every float32:
 *
 *   af_expf 1.1    af_logf 1.0    af_tanhf 2.6    af_erff 2.5
 *
 * (checked against float64 by tests/actors/kernels/native/test_af_math.py). NaN, infinities,
 * overflow, gradual underflow and the sign of zero come out as in IEEE arithmetic: nothing is
 * clamped that shows. The polynomials are our own minimax fits. doubles go to the C library.
 *
 * Nothing is contracted by the compiler (see FLAGS in runtime.py), so that what one op computes is
 * rounded before another reads it. A polynomial is inside one op, and says its own af_fmaf.
 */
#ifndef AF_MATH_H
#define AF_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint32_t __attribute__((may_alias)) af_bits32;

#define AF_INLINE static inline __attribute__((always_inline, unused))

/* a * b + c, rounded once where the processor can: the C library's own fmaf is slow elsewhere. */
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
AF_INLINE float af_fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
AF_INLINE float af_fmaf(float a, float b, float c) { return a * b + c; }
#endif

AF_INLINE float af_float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

AF_INLINE uint32_t af_bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer, which then stands in
 * the low bits: no conversion, and NaN stays harmless. */
#define AF_ROUNDER 12582912.0f
#define AF_REDUCE(x, k, r)                                                  \
    const float af_t = af_fmaf(x, 1.44269504f, AF_ROUNDER);                 \
    const int32_t k = (int32_t)(af_bits_of(af_t) - af_bits_of(AF_ROUNDER)); \
    const float af_n = af_t - AF_ROUNDER;                                   \
    const float r = af_fmaf(-af_n, 0x1.7f7d1cp-20f, af_fmaf(-af_n, 0x1.62e4p-1f, x))

AF_INLINE float af_power_of_2(int32_t k) { return af_float_of(((uint32_t)k + 127u) << 23); }

/* A quotient that a GPU takes from its table. */
AF_INLINE float af_reciprocalf(float x) { return 1.0f / x; }

AF_INLINE float af_expf(float x) {
    AF_REDUCE(x, k, r);
    float p = 0x1.6a23ccp-10f;
    p = af_fmaf(p, r, 0x1.123a20p-7f);
    p = af_fmaf(p, r, 0x1.5558f2p-5f);
    p = af_fmaf(p, r, 0x1.555492p-3f);
    p = af_fmaf(p, r, 0x1.fffffcp-2f);
    p = af_fmaf(p, r * r, r) + 1.0f;
    /* 2^k in two factors, each of which is a normal number. */
    const int32_t half = k >> 1;
    p = p * af_power_of_2(half) * af_power_of_2((int32_t)((uint32_t)k - (uint32_t)half));
    p = x < -104.0f ? 0.0f : p;      /* below 2^-150, which rounds to 0; k means nothing there */
    return x > 89.0f ? INFINITY : p; /* above the largest float */
}

AF_INLINE float af_logf(float x) {
    const int is_small = x < 0x1p-126f;
    const float y = is_small ? x * 0x1p23f : x;
    /* y = m 2^e with m in [sqrt(1/2), sqrt(2)) */
    const int32_t i = (int32_t)(af_bits_of(y) - 0x3f3504f3u);
    const float e = (float)((i >> 23) - (is_small ? 23 : 0));
    const float f = af_float_of(((uint32_t)i & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    float p = -0x1.38b4ccp-4f;
    p = af_fmaf(p, f, 0x1.055b46p-3f);
    p = af_fmaf(p, f, -0x1.0d8552p-3f);
    p = af_fmaf(p, f, 0x1.22da22p-3f);
    p = af_fmaf(p, f, -0x1.547244p-3f);
    p = af_fmaf(p, f, 0x1.99a008p-3f);
    p = af_fmaf(p, f, -0x1.000228p-2f);
    p = af_fmaf(p, f, 0x1.555554p-2f);
    const float square = f * f;
    const float low = af_fmaf(-0.5f, square, e * 0x1.7f7d1cp-20f);
    float result = af_fmaf(e, 0x1.62e4p-1f, af_fmaf(p * f, square, low) + f);
    result = x < INFINITY ? result : x; /* NaN too */
    result = x == 0.0f ? -INFINITY : result;
    return x < 0.0f ? NAN : result;
}

/* With m = e^(2|x|) - 1, taken so that nothing cancels: tanh |x| = m / (m + 2). */
AF_INLINE float af_tanhf(float x) {
    const float a = fabsf(x), b = a + a;
    AF_REDUCE(b, k, r);
    float p = 0x1.6bebfap-10f;
    p = af_fmaf(p, r, 0x1.1227b0p-7f);
    p = af_fmaf(p, r, 0x1.555674p-5f);
    p = af_fmaf(p, r, 0x1.5554b0p-3f);
    p = af_fmaf(p, r, 0x1.fffffep-2f);
    p = af_fmaf(p, r * r, r);
    const float scale = af_power_of_2(k);
    const float m = af_fmaf(scale, p, scale - 1.0f);
    return copysignf(a > 9.5f ? 1.0f : m / (m + 2.0f), x); /* from 9.5 on 1 to the last bit */
}

/* Near 0 a polynomial in x^2; farther out 1 - e^(-g(|x|)), where g = -log(erfc) is smooth. */
AF_INLINE float af_erff(float x) {
    const float a = fabsf(x), z = x * x;
    float near = -0x1.3a8aa4p-11f;
    near = af_fmaf(near, z, 0x1.475758p-8f);
    near = af_fmaf(near, z, -0x1.b68ff4p-6f);
    near = af_fmaf(near, z, 0x1.ce1abap-4f);
    near = af_fmaf(near, z, -0x1.8126e8p-2f);
    near = af_fmaf(near, z, 0x1.20dd74p+0f);
    near = near * x;
    const float t = a > 4.0f ? 4.0f : a;
    float g = -0x1.9ae98ep-13f;
    g = af_fmaf(g, t, 0x1.8ee1bep-9f);
    g = af_fmaf(g, t, -0x1.6c2a9cp-6f);
    g = af_fmaf(g, t, 0x1.a9b440p-4f);
    g = af_fmaf(g, t, 0x1.463cbep-1f);
    g = af_fmaf(g, t, 0x1.20af5ap+0f);
    g = af_fmaf(g, t, 0x1.9a57aap-13f);
    const float far = copysignf(1.0f - af_expf(-g), x);
    return a < 0.92f ? near : far;
}

AF_INLINE float af_from_bf16(uint16_t x) { return af_float_of((uint32_t)x << 16); }

/* To the nearest, ties to even; NaN stays NaN. */
AF_INLINE uint16_t af_to_bf16(float x) {
    const uint32_t bits = af_bits_of(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(x != x ? (bits >> 16) | 0x40u : rounded);
}

/* float16 by bits, as not every compiler has the type. The product with 2^112 makes normal numbers
 * of those that are not, too; so does the sum with 1/2, whose last place is that of the smallest. */
AF_INLINE float af_from_f16(uint16_t x) {
    const uint32_t magnitude = (uint32_t)(x & 0x7fffu) << 13, sign = (uint32_t)(x & 0x8000u) << 16;
    const uint32_t finite = af_bits_of(af_float_of(magnitude) * 0x1p112f);
    return af_float_of(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}
AF_INLINE uint16_t af_to_f16(float x) {
    const uint32_t bits = af_bits_of(x), magnitude = bits & 0x7fffffffu;
    const uint32_t small = af_bits_of(af_float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u; /* from 65520 on */
    const uint32_t rounded = magnitude < 0x38800000u ? small : normal;
    return (uint16_t)((bits >> 16 & 0x8000u) | (magnitude >= 0x477ff000u ? large : rounded));
}

/* Remainders with the sign of the divisor; of integers by 0: 0. */
AF_INLINE int64_t af_mod_int(int64_t a, int64_t b) {
    if (b == 0 || b == -1) return 0;
    const int64_t m = a % b;
    return m != 0 && (m < 0) != (b < 0) ? m + b : m;
}

AF_INLINE uint64_t af_mod_uint(uint64_t a, uint64_t b) { return b == 0 ? 0 : a % b; }
/* Quotients rounded down; by 0: 0. By -1 they wrap around, as numpy's do. */
AF_INLINE int64_t af_floordiv_int(int64_t a, int64_t b) {
    if (b == 0) return 0;
    if (b == -1) return (int64_t)(0 - (uint64_t)a);
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
AF_INLINE uint64_t af_floordiv_uint(uint64_t a, uint64_t b) { return b == 0 ? 0 : a / b; }

AF_INLINE double af_mod_double(double a, double b) {
    const double m = fmod(a, b);
    if (m == 0.0) return copysign(0.0, b);
    return (m < 0.0) != (b < 0.0) ? m + b : m;
}

AF_INLINE float af_mod_float(float a, float b) {
    const float m = fmodf(a, b);
    if (m == 0.0f) return copysignf(0.0f, b);
    return (m < 0.0f) != (b < 0.0f) ? m + b : m;
}

/* gcc's vectoriser takes a power of 0.5 for the root: of -inf and of -0.0 they are not the same. */
AF_INLINE double af_pow(double x, double n) {
    return n == 0.5 && (x == 0.0 || x == -INFINITY) ? fabs(x) : pow(x, n);
}

AF_INLINE float af_powf(float x, float n) {
    return n == 0.5f && (x == 0.0f || x == -INFINITY) ? fabsf(x) : powf(x, n);
}

/* Philox4x64-10 (Salmon et al. 2011). Writes the four words of counters (first, 0, step, 0) up to
 * (first + count - 1, 0, step, 0); four counters at a time, which hides the multiplier's latency. */
AF_INLINE void af_philox(uint64_t *words, uint64_t first, int64_t count, uint64_t step,
                         uint64_t key0, uint64_t key1) {
    for (int64_t i = 0; i < count; i += 4) {
        uint64_t c0[4], c1[4], c2[4], c3[4], k0 = key0, k1 = key1;
#pragma GCC unroll 4
        for (int l = 0; l < 4; l++)
            c0[l] = first + (uint64_t)(i + l), c1[l] = 0, c2[l] = step, c3[l] = 0;
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
#pragma GCC unroll 4
            for (int l = 0; l < 4; l++) {
                const unsigned __int128 a = (unsigned __int128)0xD2E7470EE14C6C93u * c0[l];
                const unsigned __int128 b = (unsigned __int128)0xCA5A826395121157u * c2[l];
                c0[l] = (uint64_t)(b >> 64) ^ c1[l] ^ k0;
                c2[l] = (uint64_t)(a >> 64) ^ c3[l] ^ k1;
                c1[l] = (uint64_t)b;
                c3[l] = (uint64_t)a;
            }
            k0 += 0x9E3779B97F4A7C15u;
            k1 += 0xBB67AE8584CAA73Bu;
        }
#pragma GCC unroll 4
        for (int l = 0; l < 4; l++) {
            uint64_t *out = words + 4 * (i + l);
            out[0] = c0[l], out[1] = c1[l], out[2] = c2[l], out[3] = c3[l];
        }
    }
}

#endif
