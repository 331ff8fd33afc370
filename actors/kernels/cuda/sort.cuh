/* A stable sort of 32-bit keys and where they were: 8 bits after 8 bits, the lowest first.
 *
 * Keys are cut into tiles, one per block; each of its 256 threads has one digit of the 256, counts
 * it in the tile and gives each of its keys a place, in order. So nothing is counted by
 * atomics, and equal keys stay as they came. Source: least significant digit radix sort (Knuth, The
 * Art of Computer Programming 3, 5.2.5; on GPUs Satish, Harris & Garland 2009).
 */
#define NAME_DIGITS 256
#define NAME_TILE 1024 /* keys of a tile */
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

/* The digits of a tile, four to a word. */
AF_FUNCTION void NAME_load(uint32_t *digits, const uint32_t *keys, int64_t num, int64_t shift) {
    for (int64_t word = AF_THREAD; word < NAME_TILE / 4; word += AF_NUM_THREADS) {
        uint32_t four = 0;
        for (int64_t i = 0; i < 4; i++) {
            if (4 * word + i < num) four |= ((keys[4 * word + i] >> shift) & 255u) << (8 * i);
        }
        digits[word] = four;
    }
}

/* How many of a tile's keys have a digit; if `ranks`, those get the numbers from `next` on. */
AF_FUNCTION uint32_t NAME_rank(
    const uint32_t *digits, int64_t num, uint32_t digit, uint32_t *ranks, uint32_t next
) {
    for (int64_t word = 0; 4 * word < num; word++) {
        const uint32_t four = digits[word];
        for (int64_t i = 0; i < 4; i++) {
            if (((four >> (8 * i)) & 255u) == digit && 4 * word + i < num) {
                if (ranks) ranks[4 * word + i] = next;
                next++;
            }
        }
    }
    return next;
}

/* One block per tile. */
AF_KERNEL NAME_count(AF_ARGUMENTS(NAME_count) arguments) {
    AF_SHARED(uint32_t, digits, NAME_TILE / 4);
    const NAME_arguments *a = &arguments;
    const int64_t first = AF_BLOCK * NAME_TILE, num = af_min(NAME_TILE, a->num - first);
    NAME_load(digits, a->keys + first, num, a->shift);
    AF_BARRIER();
    uint32_t *counts = a->counts + AF_BLOCK * NAME_DIGITS;
    counts[AF_THREAD] = NAME_rank(digits, num, (uint32_t)AF_THREAD, 0, 0);
}

/* One block: NAME_DIGITS threads for each segment of the tiles. */
AF_KERNEL NAME_scan(AF_ARGUMENTS(NAME_scan) arguments) {
    AF_SHARED(uint32_t, sums, 4 * NAME_DIGITS);
    AF_SHARED(uint32_t, totals, NAME_DIGITS);
    const NAME_arguments *a = &arguments;
    const int64_t digit = AF_THREAD % NAME_DIGITS, segment = AF_THREAD / NAME_DIGITS;
    const int64_t num_segments = AF_NUM_THREADS / NAME_DIGITS;
    const int64_t per = (a->num_tiles + num_segments - 1) / num_segments;
    const int64_t begin = segment * per, end = af_min(begin + per, a->num_tiles);
    uint32_t *counts = a->counts + digit;
    uint32_t sum = 0;
    for (int64_t tile = begin; tile < end; tile++) sum += counts[tile * NAME_DIGITS];
    sums[AF_THREAD] = sum;
    AF_BARRIER();
    uint32_t before = 0, total = 0;
    for (int64_t other = 0; other < num_segments; other++) {
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
    AF_BARRIER();
    if (segment != 0) return;
    uint32_t base = 0;
    for (int64_t lower = 0; lower < digit; lower++) base += totals[lower];
    a->bases[digit] = base;
}

/* One block per tile. */
AF_KERNEL NAME_scatter(AF_ARGUMENTS(NAME_scatter) arguments) {
    AF_SHARED(uint32_t, digits, NAME_TILE / 4);
    AF_SHARED(uint32_t, ranks, NAME_TILE);
    const NAME_arguments *a = &arguments;
    const int64_t first = AF_BLOCK * NAME_TILE, num = af_min(NAME_TILE, a->num - first);
    NAME_load(digits, a->keys + first, num, a->shift);
    AF_BARRIER();
    const uint32_t before = a->counts[AF_BLOCK * NAME_DIGITS + AF_THREAD] + a->bases[AF_THREAD];
    NAME_rank(digits, num, (uint32_t)AF_THREAD, ranks, before);
    AF_BARRIER();
    for (int64_t i = AF_THREAD; i < num; i += AF_NUM_THREADS) {
        const uint32_t place = ranks[i];
        a->sorted_keys[place] = a->keys[first + i];
        a->sorted_positions[place] =
            a->positions ? a->positions[first + i] : (uint32_t)(first + i);
    }
}

/* All digits of what one tile holds, by one block of NAME_DIGITS threads. */
AF_KERNEL NAME_tile(AF_ARGUMENTS(NAME_tile) arguments) {
    AF_SHARED(uint32_t, digits, NAME_TILE / 4);
    AF_SHARED(uint32_t, ranks, NAME_TILE);
    AF_SHARED(uint32_t, keys, NAME_TILE);
    AF_SHARED(uint32_t, positions, NAME_TILE);
    AF_SHARED(uint32_t, totals, NAME_DIGITS);
    const NAME_arguments *a = &arguments;
    for (int64_t i = AF_THREAD; i < a->num; i += NAME_DIGITS) {
        keys[i] = a->keys[i];
        positions[i] = (uint32_t)i;
    }
    for (int64_t step = 0; step < a->num_shifts; step++) {
        AF_BARRIER();
        NAME_load(digits, keys, a->num, 8 * step);
        AF_BARRIER();
        totals[AF_THREAD] = NAME_rank(digits, a->num, (uint32_t)AF_THREAD, 0, 0);
        AF_BARRIER();
        uint32_t base = 0;
        for (int64_t lower = 0; lower < AF_THREAD; lower++) base += totals[lower];
        NAME_rank(digits, a->num, (uint32_t)AF_THREAD, ranks, base);
        uint32_t own_keys[NAME_TILE / NAME_DIGITS], own_positions[NAME_TILE / NAME_DIGITS];
        for (int64_t k = 0; k < NAME_TILE / NAME_DIGITS; k++) {
            const int64_t i = k * NAME_DIGITS + AF_THREAD;
            own_keys[k] = i < a->num ? keys[i] : 0;
            own_positions[k] = i < a->num ? positions[i] : 0;
        }
        AF_BARRIER();
        for (int64_t k = 0; k < NAME_TILE / NAME_DIGITS; k++) {
            const int64_t i = k * NAME_DIGITS + AF_THREAD;
            if (i < a->num) {
                keys[ranks[i]] = own_keys[k];
                positions[ranks[i]] = own_positions[k];
            }
        }
    }
    AF_BARRIER();
    for (int64_t i = AF_THREAD; i < a->num; i += NAME_DIGITS) {
        a->sorted_keys[i] = keys[i];
        a->sorted_positions[i] = positions[i];
    }
}
