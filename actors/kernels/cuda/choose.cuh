/* Copies elements of the type NAME_TYPE where a bool has a value, and nothing where it has not. */
typedef struct { af_word w[5]; } NAME_arguments;
typedef NAME_TYPE NAME_element;

/* Target, source, elements, where the bool is, the value. */
AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    const af_word *a = arguments.w;
    NAME_element *target = (NAME_element *)a[0].p;
    const NAME_element *source = (const NAME_element *)a[1].p;
    const int64_t count = *(const uint8_t *)a[3].p == a[4].i ? a[2].i : 0;
    const int64_t step = AF_NUM_BLOCKS * AF_NUM_THREADS;
    for (int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD; i < count; i += step)
        target[i] = source[i];
}
