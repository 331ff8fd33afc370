/* Rows of a table by integer id, and ids as keys that `sort.cuh` sorts.
 *
 * Threads do not meet in here. No id is an address before it was compared with the rows of the
 * table.
 */
#define NAME_MAX_OUTER 6

/* Places of a strided tensor in row-major order. */
typedef struct {
    int64_t num, extents[NAME_MAX_OUTER], steps[NAME_MAX_OUTER];
} NAME_places;

AF_FUNCTION int64_t NAME_offset(const NAME_places *p, int64_t place) {
    int64_t offset = 0;
    for (int64_t axis = p->num - 1; axis > 0; axis--) {
        offset += place % p->extents[axis] * p->steps[axis];
        place /= p->extents[axis];
    }
    return offset + place * p->steps[0];
}

typedef struct {
    const char *at;
    int64_t type, num; /* twice the logarithm of an integer's size, and 1 for unsigned */
    NAME_places places;
} NAME_ids;

/* What no int64 holds comes out negative, and is no row either. */
AF_FUNCTION int64_t NAME_id(const NAME_ids *ids, int64_t place) {
    const char *at = ids->at + NAME_offset(&ids->places, place);
    switch (ids->type) {
    case 0: return *(const int8_t *)at;
    case 1: return *(const uint8_t *)at;
    case 2: return *(const int16_t *)at;
    case 3: return *(const uint16_t *)at;
    case 4: return *(const int32_t *)at;
    case 5: return *(const uint32_t *)at;
    default: return *(const int64_t *)at;
    }
}

/* A row is `num_units` units of bytes; a team of neighbouring threads copies it. */
typedef struct {
    NAME_ids ids;
    const char *table;
    char *out;
    void *status;
    int64_t num_rows, row_step, table_step; /* bytes from row to row, and from unit to unit */
    NAME_places rows;                       /* of the output */
    int64_t out_step, num_units, unit, team_bits;
} NAME_gather_arguments;

#define NAME_COPY(T)                                                                              \
    for (int64_t u = member; u < a->num_units; u += team) {                               \
        T value = {0};                                                                       \
        if (is_row) value = *(const T *)AF_ALIGNED(source + u * a->table_step, sizeof(T));   \
        *(T *)AF_ALIGNED(target + u * a->out_step, sizeof(T)) = value;                       \
    }                                                                                        \
    break;

AF_KERNEL NAME_gather(AF_ARGUMENTS(NAME_gather) arguments) {
    const NAME_gather_arguments *a = &arguments;
    const int64_t first = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    const int64_t team = (int64_t)1 << a->team_bits;
    const int64_t place = first >> a->team_bits, member = first & (team - 1);
    if (place >= a->ids.num) return;
    const int64_t id = NAME_id(&a->ids, place);
    const int is_row = (uint64_t)id < (uint64_t)a->num_rows;
    if (!is_row && member == 0) af_report(a->status, place, id);
    const char *source = a->table + (is_row ? id * a->row_step : 0);
    char *target = a->out + NAME_offset(&a->rows, place);
    switch (a->unit) {
    case 16: NAME_COPY(af_16_bytes)
    case 8: NAME_COPY(uint64_t)
    case 4: NAME_COPY(uint32_t)
    case 2: NAME_COPY(uint16_t)
    default: NAME_COPY(uint8_t)
    }
}

/* The largest place of each id: whoever comes when, the same is left. */
typedef struct {
    NAME_ids ids;
    int32_t *out;
    void *status;
    int64_t num_rows;
} NAME_last_arguments;

AF_KERNEL NAME_last(AF_ARGUMENTS(NAME_last) arguments) {
    const NAME_last_arguments *a = &arguments;
    const int64_t place = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (place >= a->ids.num) return;
    const int64_t id = NAME_id(&a->ids, place);
    if ((uint64_t)id >= (uint64_t)a->num_rows) {
        af_report(a->status, place, id);
        return;
    }
    int32_t known = *(volatile int32_t *)(a->out + id);
    while (known < place) {
        const int32_t found = AF_ATOMIC_CAS_I32(a->out + id, known, (int32_t)place);
        if (found == known) return;
        known = found;
    }
}

/* Rows into a table, in units of bytes, a unit a thread: of equal ids the one that `last` names. */
typedef struct {
    NAME_ids ids;
    const int32_t *last;
    const char *rows;
    char *out;
    int64_t num_rows, num_units, unit;
    NAME_places places; /* of the units of rows */
} NAME_put_arguments;

AF_KERNEL NAME_put(AF_ARGUMENTS(NAME_put) arguments) {
    const NAME_put_arguments *a = &arguments;
    const int64_t first = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (first >= a->ids.num * a->num_units) return;
    const int64_t place = first / a->num_units, unit = first % a->num_units;
    const int64_t id = NAME_id(&a->ids, place);
    if ((uint64_t)id >= (uint64_t)a->num_rows || a->last[id] != place) return;
    const char *source = a->rows + NAME_offset(&a->places, first);
    char *target = a->out + (id * a->num_units + unit) * a->unit;
    switch (a->unit) {
    case 16: *(af_16_bytes *)AF_ALIGNED(target, 16) = *(const af_16_bytes *)AF_ALIGNED(source, 16); break;
    case 8: *(uint64_t *)AF_ALIGNED(target, 8) = *(const uint64_t *)AF_ALIGNED(source, 8); break;
    case 4: *(uint32_t *)AF_ALIGNED(target, 4) = *(const uint32_t *)AF_ALIGNED(source, 4); break;
    case 2: *(uint16_t *)AF_ALIGNED(target, 2) = *(const uint16_t *)AF_ALIGNED(source, 2); break;
    default: *target = *source;
    }
}

/* Ids as keys to sort by. What is no row comes last, as the row after the last. */
typedef struct {
    NAME_ids ids;
    uint32_t *keys;
    void *status;
    int64_t num_rows;
} NAME_keys_arguments;

AF_KERNEL NAME_keys(AF_ARGUMENTS(NAME_keys) arguments) {
    const NAME_keys_arguments *a = &arguments;
    const int64_t place = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (place >= a->ids.num) return;
    const int64_t id = NAME_id(&a->ids, place);
    const int is_row = (uint64_t)id < (uint64_t)a->num_rows;
    if (!is_row) af_report(a->status, place, id);
    a->keys[place] = (uint32_t)(is_row ? id : a->num_rows);
}
