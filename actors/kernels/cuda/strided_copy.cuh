/* Copies elements one by one, of the type NAME_TYPE. */
typedef struct { af_word w[37]; } NAME_arguments;
typedef NAME_TYPE NAME_element;

/* Target, source or 0 for the value that follows, elements, axes; of each axis, outermost first:
 * its extent, 2^64 / extent + 1, its steps in bytes in target and source. */
AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    const af_word *a = arguments.w;
    char *target = (char *)a[0].p;
    const char *source = a[1].p ? (const char *)a[1].p : (const char *)&a[2];
    const uint32_t count = (uint32_t)a[3].i;
    const int32_t outermost = (int32_t)a[4].i - 1;
    const af_word *extents = a + 5, *reciprocals = a + 13, *to = a + 21, *from = a + 29;
    const int64_t step = AF_NUM_BLOCKS * AF_NUM_THREADS;
    for (int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD; i < count; i += step) {
        uint32_t rest = (uint32_t)i;
        int64_t into = 0, out_of = 0;
        for (int32_t axis = outermost; axis > 0; axis--) {
            const uint64_t reciprocal = (uint64_t)reciprocals[axis].i;
            const uint32_t next = (uint32_t)af_mul_high((uint64_t)rest, reciprocal);
            const int64_t index = rest - next * (uint32_t)extents[axis].i;
            into += index * to[axis].i;
            out_of += index * from[axis].i;
            rest = next;
        }
        into += rest * to[0].i;
        out_of += rest * from[0].i;
        const char *at = source + out_of;
        *(NAME_element *)AF_ALIGNED(target + into, sizeof(NAME_element)) =
            *(const NAME_element *)AF_ALIGNED(at, sizeof(NAME_element));
    }
}
