/* Products of small matrices that lie in cache, for kernels that go over blocks of a larger one.
 *
 * c [m, n] = a [m, k] b [k, n], or added to c. Rows of b and c are contiguous, and n is a multiple
 * of VW: whoever packs fills up with zeros. Elements of a and b are words of 32 bits: floats or, in
 * the functions for pairs, two bfloat16 that follow each other along k; c is always float.
 *
 * A tile of MR rows by up to NR vectors of c stays in registers while k runs; a is read element by
 * element. Sums run over k in order, in pieces of DEPTH, so that the part of b that a panel needs
 * stays in the first-level cache.
 *
 * Measured on one core of Zen 4, roof 116 GFLOP/s: 111 to 115 GFLOP/s from [32, 64] [64, 256] on.
 * With MR of 4 it is 93, with 7 the same as with 6.
 */
#ifndef AF_TILES_H
#define AF_TILES_H
#include "runtime.h"

#ifndef __has_builtin
#define __has_builtin(x) 0
#endif

/* The header of all intrinsics takes a compiler 0.2 s to read, which is more than it then takes for
 * gemm.c: what it defines the two that we need by is called at once. */
#if __has_builtin(__builtin_ia32_vfmaddps256) && __has_builtin(__builtin_ia32_vfmaddps512_mask)
#define HAS_BUILTINS 1
#elif defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

#if defined(__AVX512F__)
#define VW 16
#define MR 6
#define NR 4
#elif defined(__AVX__)
#define VW 8
#define MR 4
#define NR 2
#else
#define VW 4
#define MR 4
#define NR 4
#endif
#define DEPTH 64 /* words of k */

typedef float af_vec __attribute__((vector_size(VW * 4), aligned(4), may_alias));

#define AF_TILED static inline __attribute__((always_inline))

static inline int64_t af_round_up(int64_t n) { return (n + VW - 1) / VW * VW; }

/* sum + a * b, float by float, rounded once where the processor can. */
AF_TILED af_vec af_add_products(af_vec sum, af_vec a, af_vec b) {
#if defined(__AVX512F__) && defined(HAS_BUILTINS)
    return __builtin_ia32_vfmaddps512_mask(a, b, sum, (unsigned short)-1, 4); /* any rounding */
#elif defined(__AVX512F__)
    return (af_vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__) && defined(__AVX__) && defined(HAS_BUILTINS)
    return __builtin_ia32_vfmaddps256(a, b, sum);
#elif defined(__FMA__) && defined(__AVX__)
    return (af_vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (af_vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

/* x in every place: x - 0 is x, its sign too, and no instruction. */
AF_TILED af_vec af_splat(float x) { return x - (af_vec){0}; }

AF_TILED af_vec af_add_scaled(af_vec sum, float a, af_vec b) {
    return af_add_products(sum, af_splat(a), b);
}

/* The same word by word. */
AF_TILED af_vec af_add_product(af_vec sum, float a, af_vec b, const int pairs) {
#if HAS_PAIRS
    if (pairs) {
        /* Not its builtin, whose types are others with each compiler. */
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(af_splat(a)), "v"(b));
        return sum;
    }
#else
    (void)pairs;
#endif
    return af_add_scaled(sum, a, b);
}

AF_TILED void af_tile(float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_step,
                       const float *b, int64_t ldb, int64_t k, int add,
                       const int m, const int n, const int pairs) {
    af_vec sums[MR][NR];
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++)
            sums[i][j] = add ? *(const af_vec *)(c + i * ldc + j * VW) : (af_vec){0};
    /* No counter: its register is needed for the rows of a. */
    for (const float *end = b + k * ldb; b != end; a += a_step, b += ldb) {
        af_vec row[NR];
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) row[j] = *(const af_vec *)(b + j * VW);
#pragma GCC unroll 8
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) 
                sums[i][j] = af_add_product(sums[i][j], a[i * a_row], row[j], pairs);
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) *(af_vec *)(c + i * ldc + j * VW) = sums[i][j];
}

/* One panel of n vectors of columns, all m rows. */
AF_TILED void af_panel(float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_step,
                        const float *b, int64_t ldb, int64_t m, int64_t k, int add, const int n,
                        const int pairs) {
    int64_t i = 0;
    for (; i + MR <= m; i += MR)
        af_tile(c + i * ldc, ldc, a + i * a_row, a_row, a_step, b, ldb, k, add, MR, n, pairs);
    for (; i + 2 <= m; i += 2)
        af_tile(c + i * ldc, ldc, a + i * a_row, a_row, a_step, b, ldb, k, add, 2, n, pairs);
    if (i < m) af_tile(c + i * ldc, ldc, a + i * a_row, a_row, a_step, b, ldb, k, add, 1, n, pairs);
}

AF_TILED void af_product(float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_step,
                          const float *b, int64_t ldb, int64_t m, int64_t n, int64_t k, int add,
                          const int pairs) {
    for (int64_t p = 0; p < k || (p == 0 && !add); p += DEPTH, add = 1) {
        const float *a_p = a + p * a_step, *b_p = b + p * ldb;
        int64_t depth = af_min(DEPTH, k - p), j = 0;
        for (; j + NR * VW <= n; j += NR * VW)
            af_panel(c + j, ldc, a_p, a_row, a_step, b_p + j, ldb, m, depth, add, NR, pairs);
#if NR > 2
        if (j + 2 * VW <= n) {
            af_panel(c + j, ldc, a_p, a_row, a_step, b_p + j, ldb, m, depth, add, 2, pairs);
            j += 2 * VW;
        }
#endif
        for (; j < n; j += VW)
            af_panel(c + j, ldc, a_p, a_row, a_step, b_p + j, ldb, m, depth, add, 1, pairs);
    }
}

/* a is stored as [m, k] or transposed: its rows lie a_row apart, and elements of a row a_step. */
#define AF_PRODUCT(NAME, PAIRS)                                                                 \
    static __attribute__((noinline, unused)) void NAME(                                         \
        float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_step, const float *b,   \
        int64_t ldb, int64_t m, int64_t n, int64_t k, int add) {                                \
        af_product(c, ldc, a, a_row, a_step, b, ldb, m, n, k, add, PAIRS);                      \
    }

AF_PRODUCT(af_multiply, 0)
#if HAS_PAIRS
AF_PRODUCT(af_multiply_pairs, 1)
#endif

#endif
