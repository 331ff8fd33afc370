/* Rows of tensors to and from panels in scratch, for whoever computes with tiles.h.
 *
 * The element type of a tensor is seen here only: `half` says that it is bfloat16. A panel has
 * floats or, with `pairs`, words of two bfloat16 that follow each other along the axis of a
 * product's sums: a left panel [m, k] has k / 2 words in a row, a right one [k, n] has k / 2 rows.
 */
#ifndef AF_PACKING_H
#define AF_PACKING_H
#include "runtime.h"
#include "af_math.h"
#include "tiles.h"

typedef uint16_t __attribute__((may_alias)) af_half; /* scratch holds now these, now floats */

/* `count` elements, then zeros up to `width`. */
static inline void af_load_row(float *to, const char *from, int64_t count, int64_t width,
                               int half) {
    const af_half *halves = (const af_half *)from;
    const float *whole = (const float *)from;
    if (half) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) to[i] = af_from_bf16(halves[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) to[i] = whole[i];
    }
    for (int64_t i = count; i < width; i++) to[i] = 0.0f;
}

static inline void af_store_row(char *to, const float *from, int64_t count, int half,
                                float factor) {
    af_half *halves = (af_half *)to;
    float *whole = (float *)to;
    if (half) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) halves[i] = af_to_bf16(factor * from[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) whole[i] = factor * from[i];
    }
}

static inline void af_store_rows(char *to, int64_t step, const float *from, int64_t width,
                                 int64_t rows, int64_t count, int half, float factor) {
    for (int64_t r = 0; r < rows; r++)
        af_store_row(to + r * step, from + r * width, count, half, factor);
}

/* The words that `count` elements take along the axis of sums. */
static inline int64_t af_words(int64_t count, int pairs) { return pairs ? (count + 1) / 2 : count; }

/* `rows` by `count` elements of a tensor, as floats; rows of the panel lie `width` apart. */
static inline void af_load_rows(float *to, int64_t width, const char *from, int64_t step,
                                int64_t rows, int64_t count, int half) {
    for (int64_t r = 0; r < rows; r++)
        af_load_row(to + r * width, from + r * step, count, width, half);
}

static inline void af_load_left(float *to, int64_t width, const char *from, int64_t step,
                                int64_t rows, int64_t count, int half, int pairs) {
    if (!pairs) {
        af_load_rows(to, width, from, step, rows, count, half);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        char *row = (char *)(to + r * width);
        memcpy(row, from + r * step, count * 2);
        memset(row + count * 2, 0, width * 4 - count * 2);
    }
}

/* Two rows of bfloat16 in words: the first in the low halves. A second row of NULL is zeros. */
static inline void af_interleave(float *to, const af_half *first, const af_half *second,
                                 int64_t count) {
    uint32_t __attribute__((may_alias)) *words = (void *)to;
    if (second) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) words[i] = first[i] | (uint32_t)second[i] << 16;
    } else {
        for (int64_t i = 0; i < count; i++) words[i] = first[i];
    }
}

static inline void af_load_right(float *to, int64_t width, const char *from, int64_t step,
                                 int64_t rows, int64_t count, int half, int pairs) {
    if (!pairs) {
        af_load_rows(to, width, from, step, rows, count, half);
        return;
    }
    for (int64_t r = 0; r < rows; r += 2) {
        float *row = to + r / 2 * width;
        const char *second = r + 1 < rows ? from + (r + 1) * step : NULL;
        af_interleave(row, (const af_half *)(from + r * step), (const af_half *)second, count);
        for (int64_t i = count; i < width; i++) row[i] = 0.0f;
    }
}

/* to[j][i] = from[i][j]: `rows` by `count` words, in rows that lie `lda` apart, to rows that lie
 * `ldt` apart, where columns from `rows` up to `width` become zero. */
static inline void af_transpose(float *to, int64_t ldt, int64_t width, const float *from,
                                int64_t lda, int64_t rows, int64_t count) {
    typedef int32_t four __attribute__((vector_size(16), aligned(4), may_alias));
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
        const float *f = from + i * lda;
        int64_t j = 0;
        for (; j + 4 <= count; j += 4) {
            four a = *(const four *)(f + j), b = *(const four *)(f + lda + j);
            four c = *(const four *)(f + 2 * lda + j), d = *(const four *)(f + 3 * lda + j);
            four ab = __builtin_shuffle(a, b, (four){0, 4, 1, 5});
            four cd = __builtin_shuffle(c, d, (four){0, 4, 1, 5});
            four AB = __builtin_shuffle(a, b, (four){2, 6, 3, 7});
            four CD = __builtin_shuffle(c, d, (four){2, 6, 3, 7});
            float *t = to + j * ldt + i;
            *(four *)t = __builtin_shuffle(ab, cd, (four){0, 1, 4, 5});
            *(four *)(t + ldt) = __builtin_shuffle(ab, cd, (four){2, 3, 6, 7});
            *(four *)(t + 2 * ldt) = __builtin_shuffle(AB, CD, (four){0, 1, 4, 5});
            *(four *)(t + 3 * ldt) = __builtin_shuffle(AB, CD, (four){2, 3, 6, 7});
        }
        for (; j < count; j++)
            for (int64_t r = 0; r < 4; r++) memcpy(to + j * ldt + i + r, f + r * lda + j, 4);
    }
    for (; i < rows; i++)
        for (int64_t j = 0; j < count; j++) memcpy(to + j * ldt + i, from + i * lda + j, 4);
    for (int64_t j = 0; j < count; j++)
        for (int64_t k = rows; k < width; k++) to[j * ldt + k] = 0.0f;
}

#endif
