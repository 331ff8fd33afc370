/* Transposes elements of the type NAME_TYPE, in tiles of NAME_SIDE by NAME_SIDE. */
typedef struct { af_word w[29]; } NAME_arguments;
typedef NAME_TYPE NAME_element;

/* Target, source; extent of the rows and their steps in target and source, the same of the columns;
 * tiles down and across; the number of outer axes, and their extents and steps. Rows are neighbours
 * in the source and columns in the target. A block moves one tile. */
AF_KERNEL NAME(AF_ARGUMENTS(NAME) arguments) {
    AF_SHARED(NAME_element, tile, NAME_SIDE * (NAME_SIDE + 1));
    const af_word *a = arguments.w;
    const af_word *extents = a + 11, *to = a + 17, *from = a + 23;
    int64_t rest = AF_BLOCK;
    const int64_t column = rest % a[9].i * NAME_SIDE;
    rest /= a[9].i;
    const int64_t row = rest % a[8].i * NAME_SIDE;
    rest /= a[8].i;
    char *target = (char *)a[0].p + row * a[3].i + column * a[6].i;
    const char *source = (const char *)a[1].p + row * a[4].i + column * a[7].i;
    for (int64_t axis = a[10].i - 1; axis >= 0; axis--) {
        target += rest % extents[axis].i * to[axis].i;
        source += rest % extents[axis].i * from[axis].i;
        rest /= extents[axis].i;
    }
    const int64_t rows = af_min(NAME_SIDE, a[2].i - row);
    const int64_t columns = af_min(NAME_SIDE, a[5].i - column);
    for (int32_t k = AF_THREAD; k < NAME_SIDE * NAME_SIDE; k += AF_NUM_THREADS) {
        const int32_t r = k % NAME_SIDE, c = k / NAME_SIDE;
        if (r < rows && c < columns)
            tile[r * (NAME_SIDE + 1) + c] =
                *(const NAME_element *)(source + r * a[4].i + c * a[7].i);
    }
    AF_BARRIER();
    for (int32_t k = AF_THREAD; k < NAME_SIDE * NAME_SIDE; k += AF_NUM_THREADS) {
        const int32_t r = k / NAME_SIDE, c = k % NAME_SIDE;
        if (r < rows && c < columns)
            *(NAME_element *)(target + r * a[3].i + c * a[6].i) = tile[r * (NAME_SIDE + 1) + c];
    }
}
