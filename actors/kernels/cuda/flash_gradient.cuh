/* The gradient of attention, behind flash.cuh in one text: dq, then dk and dv. */

/* dq, and what `keys` needs of each query: [heads, rows filled up to whole blocks]. */
typedef struct {
    NAME_heads heads;
    NAME_tensor dy, q, k, v, y, lse, tail, dq, mask;
    NAME_sums *sums;
    NAME_extents e;
} NAME_queries_arguments;

AF_KERNEL_UP_TO(NAME_THREADS) NAME_queries(AF_ARGUMENTS(NAME_queries) arguments) {
    AF_SHARED_OF_LAUNCH(uint16_t, shared, (2 * NAME_ROWS + 4 * NAME_COLUMNS) * NAME_ROW + NAME_SUMS);
    AF_SHARED(int32_t, firsts, 1);
    const NAME_queries_arguments *a = &arguments;
    NAME_BEGIN(a)
    const int32_t first = (num_blocks - 1 - block) * NAME_ROWS;
    const int32_t end = NAME_CAUSAL ? (int32_t)af_min(columns, first + NAME_ROWS + shift) : columns;
    const int32_t num_tiles = (end + NAME_COLUMNS - 1) / NAME_COLUMNS;
    const char *k = NAME_matrix(&a->k, &a->heads, head), *v = NAME_matrix(&a->v, &a->heads, head);
    uint16_t *slopes = shared + NAME_ROWS * NAME_ROW, *stages = slopes + NAME_ROWS * NAME_ROW;
    /* y lies where the second tile will; it is twice as many rows at most. */
    uint16_t *results = stages + 2 * NAME_COLUMNS * NAME_ROW;
    NAME_sums *own_sums = (NAME_sums *)(stages + 4 * NAME_COLUMNS * NAME_ROW);

    NAME_fetch_rows(shared, &a->q, &a->heads, head, first, rows, width);
    NAME_fetch_rows(slopes, &a->dy, &a->heads, head, first, rows, out);
    NAME_fetch_rows(results, &a->y, &a->heads, head, first, rows, out);
    NAME_fetch_pair(stages, 0, k, &a->k, v, &a->v, &a->e, columns);
    if (AF_THREAD == 0) firsts[0] = INT32_MAX;
    AF_COPIED();
    AF_BARRIER();
    const int32_t diagonal = first + shift + 2 - NAME_COLUMNS;
    if (NAME_CAUSAL && diagonal <= 0) NAME_clean(stages, 0, firsts, 1);
    if (NAME_ROWS == NAME_THREADS || AF_THREAD < NAME_ROWS) {
        const int32_t row = first + AF_THREAD;
        NAME_sums sums = {INFINITY, 0, 0, 0};
        AF_ROLLED
        for (int32_t i = 0; i < NAME_CHUNKS; i++) {
            uint32_t left[4], right[4];
            af_get(left, slopes + AF_THREAD * NAME_ROW + 8 * i, 16);
            af_get(right, results + AF_THREAD * NAME_ROW + 8 * i, 16);
            AF_UNROLL
            for (int32_t j = 0; j < 8; j++) {
                const uint16_t dy = (uint16_t)(left[j / 2] >> 16 * (j % 2));
                const uint16_t y = (uint16_t)(right[j / 2] >> 16 * (j % 2));
                sums.delta = fmaf(NAME_FROM(dy), NAME_FROM(y), sums.delta);
            }
        }
        if (row < rows) {
            const char *logs = NAME_matrix(&a->lse, &a->heads, head);
            const char *tails = NAME_matrix(&a->tail, &a->heads, head);
            sums.lse = *(const float *)(logs + row * a->lse.row_step);
            sums.tail = *(const float *)(tails + row * a->tail.row_step) * NAME_LOG2_E;
        }
        own_sums[AF_THREAD] = sums;
        a->sums[(int64_t)head * num_blocks * NAME_ROWS + row] = sums;
    }
    uint32_t q[NAME_TILES][NAME_STEPS][4], dy[NAME_TILES][NAME_STEPS][4];
    NAME_left(q, shared + warp_first * NAME_ROW);
    NAME_left(dy, slopes + warp_first * NAME_ROW);
    AF_BARRIER();
    NAME_sums sums[NAME_TILES][2];
    float dq[NAME_TILES][2 * NAME_STEPS][4], scales[NAME_TILES][2];
    NAME_clear(&dq[0][0][0], NAME_TILES * NAME_STEPS * 8);
    AF_UNROLL
    for (int32_t i = 0; i < 2 * NAME_TILES; i++) {
        sums[i / 2][i % 2] = own_sums[warp_first + 8 * i + g];
        scales[i / 2][i % 2] = af_float_of_bits((uint32_t)a->e.scale);
    }

    AF_ROLLED
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const uint16_t *keys = stages + (tile & 1) * 2 * NAME_COLUMNS * NAME_ROW;
        const uint16_t *values = keys + NAME_COLUMNS * NAME_ROW;
        if (tile + 1 < num_tiles)
            NAME_fetch_pair(stages, tile + 1, k, &a->k, v, &a->v, &a->e, columns);
        const int32_t hidden = first + warp_first + shift + 1;
        AF_ROLLED
        for (int32_t part = group * NAME_KEYS; part < NAME_COLUMNS; part += NAME_GROUPS * NAME_KEYS) {
            const int32_t column = tile * NAME_COLUMNS + part;
            if (column >= columns || (NAME_CAUSAL && column >= hidden + NAME_WARP_ROWS - 1)) break;
            float s[NAME_TILES][NAME_KEYS / 16][2][4], ds[NAME_TILES][NAME_KEYS / 16][2][4];
            NAME_clear(&s[0][0][0][0], NAME_TILES * NAME_KEYS / 2);
            NAME_clear(&ds[0][0][0][0], NAME_TILES * NAME_KEYS / 2);
            AF_UNROLL
            for (int32_t n = 0; n < NAME_KEYS / 16; n++) {
                const int32_t place = (part + 16 * n) * NAME_ROW;
                NAME_scores(&s[0][n], q, keys + place, NAME_KEYS / 16);
                NAME_scores(&ds[0][n], dy, values + place, NAME_KEYS / 16);
            }
            NAME_scale(
                &s[0][0][0][0], NAME_KEYS, scale, mask, a->mask.row_step, a->e.mask_step,
                first + warp_first, rows, column, columns
            );
            AF_UNROLL
            for (int32_t i = 0; i < NAME_TILES * NAME_KEYS / 2; i++) {
                const int32_t m = i / (NAME_KEYS / 2), n = i / 4 % (NAME_KEYS / 8);
                const NAME_sums own = sums[m][i / 2 % 2];
                float *x = &ds[m][n / 2][n % 2][i % 4];
                const float score = fmaf(s[m][n / 2][n % 2][i % 4], factor, -own.lse);
                const float p = af_power_of_2(fmaf(score, NAME_LOG2_E, -own.tail));
                *x = (p == 1 ? 0 : p) * (*x - own.delta); /* see the op */
            }
            if (column + NAME_KEYS > columns || (NAME_CAUSAL && column + NAME_KEYS > hidden))
                NAME_hide(&ds[0][0][0][0], NAME_KEYS, columns - column, hidden - column, 0);
            AF_UNROLL
            for (int32_t n = 0; n < NAME_KEYS / 16; n++) {
                uint32_t x[NAME_TILES][4];
                AF_UNROLL
                for (int32_t m = 0; m < NAME_TILES; m++) NAME_narrowed(x[m], ds[m][n]);
                NAME_add(dq, x, keys + (part + 16 * n) * NAME_ROW);
            }
        }
        AF_COPIED();
        if (NAME_CAUSAL && tile + 1 < num_tiles && (tile + 1) * NAME_COLUMNS >= diagonal)
            NAME_clean(
                stages + 2 * (~tile & 1) * NAME_COLUMNS * NAME_ROW, (tile + 1) * NAME_COLUMNS,
                firsts, 1
            );
        AF_BARRIER();
    }
    AF_UNROLL
    for (int32_t i = 0; i < 2 * NAME_TILES && NAME_CAUSAL; i++)
        if (firsts[0] <= first + warp_first + 8 * i + g + shift) scales[i / 2][i % 2] = NAN;
    if (NAME_GROUPS > 1)
        NAME_add_groups(&dq[0][0][0], NAME_TILES * NAME_STEPS * 8, (float *)stages, group);
    if (group == 0) NAME_put(shared + warp_first * NAME_ROW, dq, scales);
    AF_BARRIER();
    NAME_store(&a->dq, &a->heads, head, shared, first, rows, width);
}

/* dk and dv, behind `queries`. */
typedef struct {
    NAME_heads heads;
    NAME_tensor dy, q, k, v, dk, dv, mask;
    const NAME_sums *sums;
    int64_t sums_of_head;
    NAME_extents e;
} NAME_keys_arguments;

AF_KERNEL_UP_TO(NAME_THREADS) NAME_keys(AF_ARGUMENTS(NAME_keys) arguments) {
    AF_SHARED_OF_LAUNCH(uint16_t, shared, (2 * NAME_ROWS + 4 * NAME_COLUMNS) * NAME_ROW + NAME_SUMS);
    const NAME_keys_arguments *a = &arguments;
    NAME_BEGIN(a)
    const int32_t first = block * NAME_ROWS;
    const int32_t begin = NAME_CAUSAL ? (int32_t)af_max(0, first - shift) / NAME_COLUMNS : 0;
    const int32_t num_tiles = (rows + NAME_COLUMNS - 1) / NAME_COLUMNS;
    uint16_t *values = shared + NAME_ROWS * NAME_ROW, *stages = values + NAME_ROWS * NAME_ROW;
    NAME_sums *all_sums = (NAME_sums *)(stages + 4 * NAME_COLUMNS * NAME_ROW);

    NAME_fetch_rows(shared, &a->k, &a->heads, head, first, columns, width);
    NAME_fetch_rows(values, &a->v, &a->heads, head, first, columns, out);
    const char *q = NAME_matrix(&a->q, &a->heads, head), *dy = NAME_matrix(&a->dy, &a->heads, head);
    const NAME_sums *sums = a->sums + head * a->sums_of_head;
    NAME_fetch_pair(stages, begin, q, &a->q, dy, &a->dy, &a->e, rows);
    NAME_fetch_sums(all_sums, begin, sums);
    AF_COPIED();
    AF_BARRIER();
    uint32_t k[NAME_TILES][NAME_STEPS][4];
    NAME_left(k, shared + warp_first * NAME_ROW);
    float dk[NAME_TILES][2 * NAME_STEPS][4], dv[NAME_TILES][2 * NAME_STEPS][4];
    NAME_clear(&dk[0][0][0], NAME_TILES * NAME_STEPS * 8);
    NAME_clear(&dv[0][0][0], NAME_TILES * NAME_STEPS * 8);

    AF_ROLLED
    for (int32_t tile = begin; tile < num_tiles; tile++) {
        if (tile + 1 < num_tiles) {
            NAME_fetch_pair(stages, tile + 1, q, &a->q, dy, &a->dy, &a->e, rows);
            NAME_fetch_sums(all_sums, tile + 1, sums);
        }
        const uint16_t *queries = stages + (tile & 1) * 2 * NAME_COLUMNS * NAME_ROW;
        const uint16_t *slopes = queries + NAME_COLUMNS * NAME_ROW;
        const NAME_sums *tile_sums = all_sums + (tile & 1) * NAME_COLUMNS;
        AF_ROLLED
        for (int32_t part = group * NAME_QUERIES; part < NAME_COLUMNS;
             part += NAME_GROUPS * NAME_QUERIES) {
            /* The first of these queries, and the first key that it does not see. */
            const int32_t row = tile * NAME_COLUMNS + part, hidden = row + shift + 1;
            if (row >= rows) break;
            if (NAME_CAUSAL && hidden + NAME_QUERIES - 1 <= first + warp_first) continue;
            float ds[NAME_TILES][NAME_QUERIES / 16][2][4];
            NAME_clear(&ds[0][0][0][0], NAME_TILES * NAME_QUERIES / 2);
            NAME_scores_of_rows(
                &ds[0][0], values + warp_first * NAME_ROW, slopes + part * NAME_ROW,
                NAME_QUERIES / 16
            );
            AF_UNROLL
            for (int32_t c = 0; c < NAME_QUERIES / 16; c++) {
                const int32_t own = part + 16 * c;
                float s[NAME_TILES][1][2][4];
                NAME_clear(&s[0][0][0][0], NAME_TILES * 8);
                NAME_scores(&s[0][0], k, queries + own * NAME_ROW, 1);
                NAME_scale(
                    &s[0][0][0][0], 16, scale, mask, a->e.mask_step, a->mask.row_step,
                    first + warp_first, columns, row + 16 * c, rows
                );
                AF_UNROLL
                for (int32_t n = 0; n < 2; n++) {
                    uint32_t words[2][4];
                    af_get(words[0], tile_sums + own + 8 * n + 2 * t, 16);
                    af_get(words[1], tile_sums + own + 8 * n + 2 * t + 1, 16);
                    AF_UNROLL
                    for (int32_t i = 0; i < NAME_TILES * 4; i++) {
                        const float lse = af_float_of_bits(words[i % 2][0]);
                        const float tail = af_float_of_bits(words[i % 2][1]);
                        const float delta = af_float_of_bits(words[i % 2][2]);
                        float *p = &s[i / 4][0][n][i % 4], *x = &ds[i / 4][c][n][i % 4];
                        *p = af_power_of_2(fmaf(fmaf(*p, factor, -lse), NAME_LOG2_E, -tail));
                        *x = (*p == 1 ? 0 : *p) * (*x - delta);
                    }
                }
                /* A key that is infinite meets the zeros behind the last query, too. */
                if (row + 16 * c + 16 > rows ||
                    (NAME_CAUSAL && hidden + 16 * c < first + warp_first + NAME_WARP_ROWS)) {
                    AF_UNROLL
                    for (int32_t i = 0; i < NAME_TILES * 8; i++) {
                        const int32_t m = i / 8, n = i / 4 % 2, query = 16 * c + 8 * n + 2 * t + i % 2;
                        const int32_t at = first + warp_first + 16 * m + g + 8 * (i / 2 % 2);
                        if (row + query >= rows || (NAME_CAUSAL && at >= hidden + query))
                            s[m][0][n][i % 4] = ds[m][c][n][i % 4] = 0;
                    }
                }
                uint32_t x[NAME_TILES][4];
                AF_UNROLL
                for (int32_t m = 0; m < NAME_TILES; m++) NAME_narrowed(x[m], s[m][0]);
                NAME_add(dv, x, slopes + own * NAME_ROW);
                AF_UNROLL
                for (int32_t m = 0; m < NAME_TILES; m++) NAME_narrowed(x[m], ds[m][c]);
                NAME_add(dk, x, queries + own * NAME_ROW);
            }
        }
        AF_COPIED();
        AF_BARRIER();
    }
    float ones[NAME_TILES][2], scales[NAME_TILES][2];
    AF_UNROLL
    for (int32_t i = 0; i < 2 * NAME_TILES; i++)
        ones[i / 2][i % 2] = 1, scales[i / 2][i % 2] = af_float_of_bits((uint32_t)a->e.scale);
    if (NAME_GROUPS > 1) {
        NAME_add_groups(&dk[0][0][0], NAME_TILES * NAME_STEPS * 8, (float *)stages, group);
        AF_BARRIER();
        NAME_add_groups(&dv[0][0][0], NAME_TILES * NAME_STEPS * 8, (float *)stages, group);
    }
    if (group == 0) {
        NAME_put(shared + warp_first * NAME_ROW, dk, scales);
        NAME_put(values + warp_first * NAME_ROW, dv, ones);
    }
    AF_BARRIER();
    NAME_store(&a->dk, &a->heads, head, shared, first, columns, width);
    NAME_store(&a->dv, &a->heads, head, values, first, columns, out);
}
