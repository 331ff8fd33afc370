/* A stable sort of 32-bit keys and where they were: 8 bits after 8 bits, the lowest first.
 *
 * Keys are cut into tiles, one per block. Each of its warps has a part of them, in order: a key's
 * rank is how many of its digit the warp had before, which the first of equal ones counts. So
 * nothing is counted by atomics, and equal keys stay as they came. Source: least significant digit
 * radix sort (Knuth, The Art of Computer Programming 3, 5.2.5; on GPUs Satish, Harris & Garland
 * 2009); equal digits of a warp by one vote (Ashkiani, Davidson, Meyer & Owens 2016).
 */
#define NAME_DIGITS 256 /* and threads of a block */
#define NAME_WARPS 8
#define NAME_GROUP 16  /* digits that are added up before others need their sum */
#define NAME_ROUNDS 4  /* keys of a thread in a tile */
#define NAME_MOST 8    /* in the only tile */
#define NAME_AT_ONCE 8 /* counts that are on their way before the first is added */

typedef struct {
    const uint32_t *keys, *positions; /* no positions: each key is where it was */
    uint32_t *sorted_keys, *sorted_positions;
    uint32_t *counts; /* [num_tiles, NAME_DIGITS]: of each digit; then of it in the tiles before */
    uint32_t *bases;  /* [NAME_DIGITS]: keys of lower digits */
    int64_t num, num_tiles, shift, num_shifts;
} NAME_arguments;
typedef NAME_arguments NAME_count_arguments, NAME_scan_arguments, NAME_scatter_arguments,
    NAME_tile_arguments;

/* The place in a tile of the key that this thread has in a round, of so many. */
AF_FUNCTION int32_t NAME_place(int32_t round, int32_t num_rounds) {
    return (AF_THREAD / 32 * num_rounds + round) * 32 + AF_THREAD % 32;
}

/* Gives each key of a tile its number among those of its digit in its warp, and leaves in `counts`
 * [NAME_WARPS, NAME_DIGITS] how many each warp has. Ends with a barrier. */
AF_FUNCTION void NAME_rank(
    uint32_t *ranks, uint32_t *counts, const uint32_t *keys, int32_t num, int64_t shift,
    int32_t num_rounds
) {
    const uint32_t before_me = (1u << AF_THREAD % 32) - 1;
    for (int32_t i = AF_THREAD; i < NAME_WARPS * NAME_DIGITS; i += NAME_DIGITS) counts[i] = 0;
    AF_BARRIER();
    uint32_t *counts_of_warp = counts + AF_THREAD / 32 * NAME_DIGITS;
    AF_UNROLL
    for (int32_t round = 0; round < num_rounds; round++) {
        const _Bool is_there = NAME_place(round, num_rounds) < num;
        const uint32_t digit = (keys[round] >> shift) & 255u;
        const uint32_t equal = AF_EQUAL_IN_WARP(is_there ? digit : NAME_DIGITS);
        const uint32_t before = is_there ? counts_of_warp[digit] : 0;
        ranks[round] = before + (uint32_t)AF_COUNT_BITS(equal & before_me);
        AF_WARP_BARRIER();
        const _Bool is_first = is_there && !(equal & before_me);
        if (is_first) counts_of_warp[digit] = before + (uint32_t)AF_COUNT_BITS(equal);
        AF_WARP_BARRIER();
    }
    AF_BARRIER();
}

/* Turns the counts of this thread's digit into those of the warps before each, with `first` added,
 * and returns their sum. */
AF_FUNCTION uint32_t NAME_by_warp(uint32_t *counts, uint32_t first) {
    uint32_t total = first;
    AF_UNROLL
    for (int32_t warp = 0; warp < NAME_WARPS; warp++) {
        uint32_t *count = counts + warp * NAME_DIGITS + AF_THREAD;
        const uint32_t own = *count;
        *count = total;
        total += own;
    }
    return total - first;
}

/* How many keys have lower digits than one. All threads come by; it begins with a barrier. */
AF_FUNCTION uint32_t NAME_lower(const uint32_t *totals, uint32_t *groups, int32_t digit) {
    AF_BARRIER();
    if (AF_THREAD < NAME_DIGITS / NAME_GROUP) {
        uint32_t sum = 0;
        for (int32_t i = 0; i < NAME_GROUP; i++) sum += totals[AF_THREAD * NAME_GROUP + i];
        groups[AF_THREAD] = sum;
    }
    AF_BARRIER();
    const int32_t group = digit / NAME_GROUP;
    uint32_t sum = 0;
    for (int32_t i = 0; i < group; i++) sum += groups[i];
    for (int32_t i = group * NAME_GROUP; i < digit; i++) sum += totals[i];
    return sum;
}

/* One block per tile. */
AF_KERNEL NAME_count(AF_ARGUMENTS(NAME_count) arguments) {
    AF_SHARED(uint32_t, counts, NAME_WARPS * NAME_DIGITS);
    const NAME_arguments *a = &arguments;
    const int64_t first = AF_BLOCK * NAME_ROUNDS * NAME_DIGITS;
    const int32_t num = (int32_t)af_min(NAME_ROUNDS * NAME_DIGITS, a->num - first);
    uint32_t keys[NAME_ROUNDS], ranks[NAME_ROUNDS];
    AF_UNROLL
    for (int32_t k = 0; k < NAME_ROUNDS; k++) {
        const int32_t place = NAME_place(k, NAME_ROUNDS);
        keys[k] = place < num ? a->keys[first + place] : 0;
    }
    NAME_rank(ranks, counts, keys, num, a->shift, NAME_ROUNDS);
    a->counts[AF_BLOCK * NAME_DIGITS + AF_THREAD] = NAME_by_warp(counts, 0);
}

/* One block: NAME_DIGITS threads for each segment of the tiles. */
AF_KERNEL NAME_scan(AF_ARGUMENTS(NAME_scan) arguments) {
    AF_SHARED(uint32_t, sums, 4 * NAME_DIGITS);
    AF_SHARED(uint32_t, totals, NAME_DIGITS);
    AF_SHARED(uint32_t, groups, NAME_DIGITS / NAME_GROUP);
    const NAME_arguments *a = &arguments;
    const int32_t digit = AF_THREAD % NAME_DIGITS, segment = AF_THREAD / NAME_DIGITS;
    const int32_t num_segments = AF_NUM_THREADS / NAME_DIGITS;
    const int64_t per = (a->num_tiles + num_segments - 1) / num_segments;
    const int64_t begin = segment * per, end = af_min(begin + per, a->num_tiles);
    uint32_t *counts = a->counts + digit;
    uint32_t sum = 0;
    for (int64_t tile = begin; tile < end; tile++) sum += counts[tile * NAME_DIGITS];
    sums[AF_THREAD] = sum;
    AF_BARRIER();
    uint32_t before = 0, total = 0;
    for (int32_t other = 0; other < num_segments; other++) {
        if (other < segment) before += sums[other * NAME_DIGITS + digit];
        total += sums[other * NAME_DIGITS + digit];
    }
    for (int64_t tile = begin; tile < end; tile += NAME_AT_ONCE) {
        uint32_t own[NAME_AT_ONCE];
        for (int64_t i = 0; i < NAME_AT_ONCE; i++)
            own[i] = tile + i < end ? counts[(tile + i) * NAME_DIGITS] : 0;
        for (int64_t i = 0; i < NAME_AT_ONCE; i++) {
            if (tile + i < end) counts[(tile + i) * NAME_DIGITS] = before;
            before += own[i];
        }
    }
    if (segment == 0) totals[digit] = total;
    const uint32_t base = NAME_lower(totals, groups, digit);
    if (segment == 0) a->bases[digit] = base;
}

/* One block per tile. */
AF_KERNEL NAME_scatter(AF_ARGUMENTS(NAME_scatter) arguments) {
    AF_SHARED(uint32_t, counts, NAME_WARPS * NAME_DIGITS);
    const NAME_arguments *a = &arguments;
    const int64_t first = AF_BLOCK * NAME_ROUNDS * NAME_DIGITS;
    const int32_t num = (int32_t)af_min(NAME_ROUNDS * NAME_DIGITS, a->num - first);
    const uint32_t before = a->counts[AF_BLOCK * NAME_DIGITS + AF_THREAD] + a->bases[AF_THREAD];
    uint32_t keys[NAME_ROUNDS], positions[NAME_ROUNDS], ranks[NAME_ROUNDS];
    AF_UNROLL
    for (int32_t k = 0; k < NAME_ROUNDS; k++) {
        const int32_t place = NAME_place(k, NAME_ROUNDS);
        const int64_t from = first + af_min(place, num - 1);
        keys[k] = a->keys[from];
        positions[k] = a->positions ? a->positions[from] : (uint32_t)from;
    }
    NAME_rank(ranks, counts, keys, num, a->shift, NAME_ROUNDS);
    NAME_by_warp(counts, before);
    AF_BARRIER();
    const uint32_t *counts_of_warp = counts + AF_THREAD / 32 * NAME_DIGITS;
    AF_UNROLL
    for (int32_t k = 0; k < NAME_ROUNDS; k++) {
        if (NAME_place(k, NAME_ROUNDS) >= num) continue;
        const uint32_t to = counts_of_warp[(keys[k] >> a->shift) & 255u] + ranks[k];
        a->sorted_keys[to] = keys[k];
        a->sorted_positions[to] = positions[k];
    }
}

/* All digits of what the only tile holds, by one block of NAME_DIGITS threads. */
AF_KERNEL NAME_tile(AF_ARGUMENTS(NAME_tile) arguments) {
    AF_SHARED(uint32_t, counts, NAME_WARPS * NAME_DIGITS);
    AF_SHARED(uint32_t, all_keys, NAME_MOST * NAME_DIGITS);
    AF_SHARED(uint32_t, all_positions, NAME_MOST * NAME_DIGITS);
    AF_SHARED(uint32_t, totals, NAME_DIGITS);
    AF_SHARED(uint32_t, groups, NAME_DIGITS / NAME_GROUP);
    const NAME_arguments *a = &arguments;
    const int32_t num = (int32_t)a->num;
    const uint32_t *counts_of_warp = counts + AF_THREAD / 32 * NAME_DIGITS;
    uint32_t keys[NAME_MOST], positions[NAME_MOST], ranks[NAME_MOST];
    AF_UNROLL
    for (int32_t k = 0; k < NAME_MOST; k++) {
        positions[k] = (uint32_t)NAME_place(k, NAME_MOST);
        keys[k] = a->keys[af_min(positions[k], num - 1)];
    }
    AF_ROLLED
    for (int32_t step = 0; step < a->num_shifts; step++) {
        NAME_rank(ranks, counts, keys, num, 8 * step, NAME_MOST);
        totals[AF_THREAD] = NAME_by_warp(counts, 0);
        const uint32_t base = NAME_lower(totals, groups, AF_THREAD);
        AF_UNROLL
        for (int32_t warp = 0; warp < NAME_WARPS; warp++)
            counts[warp * NAME_DIGITS + AF_THREAD] += base;
        AF_BARRIER();
        AF_UNROLL
        for (int32_t k = 0; k < NAME_MOST; k++) {
            if (NAME_place(k, NAME_MOST) >= num) continue;
            const uint32_t to = counts_of_warp[(keys[k] >> 8 * step) & 255u] + ranks[k];
            all_keys[to] = keys[k];
            all_positions[to] = positions[k];
        }
        AF_BARRIER();
        AF_UNROLL
        for (int32_t k = 0; k < NAME_MOST; k++) {
            const int32_t place = (int32_t)af_min(NAME_place(k, NAME_MOST), num - 1);
            keys[k] = all_keys[place];
            positions[k] = all_positions[place];
        }
    }
    AF_UNROLL
    for (int32_t k = 0; k < NAME_MOST; k++) {
        const int32_t place = NAME_place(k, NAME_MOST);
        if (place >= num) continue;
        a->sorted_keys[place] = keys[k];
        a->sorted_positions[place] = positions[k];
    }
}
