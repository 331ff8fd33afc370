/* The largest elements of windows, where they lie there, and the gradient. NAME_ROW is the type of
 * an element, NAME_REAL that of numbers, NAME_FROM makes one of an element and NAME_TO an element
 * of one; NAME_TAP is the type of places in a window. A thread makes the results of NAME_WIDE
 * channels, which are neighbours in memory where there are several; nothing is added up by place.
 * Axes: images, channels, and three of space, outermost first.
 *
 * Places within an image are numbers of 32 bits: a division of 64 is a hundred instructions, and
 * there are some for each result.
 */
typedef struct {
    char *x, *y;          /* elements, windows */
    char *taps;           /* of each window */
    int64_t num, none;    /* threads, elements of a window */
    int64_t is_last;      /* whether channels of results are neighbours, not their last axis */
    int64_t groups;       /* of NAME_WIDE channels */
    int64_t extents[3], counts[3];
    int64_t kernel[3], strides[3], dilation[3], low[3];
    int64_t x_steps[5], y_steps[5], tap_steps[5];
} NAME_arguments;
typedef NAME_arguments NAME_max_arguments, NAME_pick_arguments, NAME_grad_arguments;

/* What a thread moves at once. */
typedef union {
    NAME_ROW each[NAME_WIDE];
    uint32_t words[(NAME_WIDE * sizeof(NAME_ROW) + 3) / 4];
} NAME_elements;
typedef union {
    NAME_TAP each[NAME_WIDE];
    uint32_t words[(NAME_WIDE * sizeof(NAME_TAP) + 3) / 4];
} NAME_numbers;

#if NAME_WIDE == 1
#define NAME_GET(type, x, place) (x).each[0] = *(const type *)(place)
#define NAME_PUT(type, place, x) *(type *)(place) = (x).each[0]
#else
#define NAME_GET(type, x, place) af_get((x).words, place, NAME_WIDE * sizeof(type))
#define NAME_PUT(type, place, x) af_put(place, (x).words, NAME_WIDE * sizeof(type))
#endif

/* Where the first result of thread i is along all axes: neighbours in memory are neighbours in a
 * warp. */
AF_FUNCTION void NAME_place(int32_t *at, int64_t i, const NAME_arguments *a, const int64_t *ends) {
    const uint32_t groups = (uint32_t)a->groups;
    const int64_t each = a->groups * ends[0] * ends[1] * ends[2];
    const int is_short = a->num <= (int64_t)UINT32_MAX;
    at[0] = is_short ? (int32_t)((uint32_t)i / (uint32_t)each) : (int32_t)(i / each);
    uint32_t rest = (uint32_t)(i - at[0] * each);
    if (a->is_last) at[1] = (int32_t)(rest % groups) * NAME_WIDE, rest /= groups;
    AF_UNROLL
    for (int32_t axis = 2; axis >= 0; axis--) {
        const uint32_t end = (uint32_t)ends[axis];
        at[axis + 2] = end == 1 ? 0 : (int32_t)(rest % end);
        rest = end == 1 ? rest : rest / end;
    }
    if (!a->is_last) at[1] = (int32_t)rest * NAME_WIDE;
}

AF_FUNCTION int64_t NAME_offset(const int32_t *at, const int64_t *steps) {
    int64_t offset = 0;
    AF_UNROLL
    for (int32_t axis = 0; axis < 5; axis++) offset += at[axis] * steps[axis];
    return offset;
}

/* Move to an element of a window; whether it lies inside. */
AF_FUNCTION int NAME_inside(
    int32_t *at, const int32_t *window, const int32_t *tap, const NAME_arguments *a
) {
    int is_inside = 1;
    AF_UNROLL
    for (int32_t axis = 0; axis < 3; axis++) {
        const int32_t far = tap[axis] * (int32_t)a->dilation[axis] - (int32_t)a->low[axis];
        at[axis + 2] = window[axis + 2] * (int32_t)a->strides[axis] + far;
        is_inside &= at[axis + 2] >= 0 && at[axis + 2] < (int32_t)a->extents[axis];
    }
    return is_inside;
}

#define NAME_EACH_TAP(a, tap, number)                                                             \
    for (tap[0] = 0; tap[0] < (a)->kernel[0]; tap[0]++)                                           \
        for (tap[1] = 0; tap[1] < (a)->kernel[1]; tap[1]++)                                       \
            for (tap[2] = 0; tap[2] < (a)->kernel[2]; tap[2]++, number++)

AF_KERNEL NAME_max(AF_ARGUMENTS(NAME_max) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (i >= a->num) return;
    int32_t window[5], at[5], tap[3], number = 0, best_taps[NAME_WIDE];
    NAME_place(window, i, a, a->counts);
    at[0] = window[0], at[1] = window[1];
    NAME_REAL best[NAME_WIDE];
    AF_UNROLL
    for (int32_t k = 0; k < NAME_WIDE; k++) best[k] = -INFINITY, best_taps[k] = (int32_t)a->none;
    NAME_EACH_TAP(a, tap, number) {
        if (!NAME_inside(at, window, tap, a)) continue;
        NAME_elements row = {{0}};
        NAME_GET(NAME_ROW, row, a->x + NAME_offset(at, a->x_steps));
        AF_UNROLL
        for (int32_t k = 0; k < NAME_WIDE; k++) {
            const NAME_REAL x = NAME_FROM(row.each[k]);
            if (x > best[k] || x != x || best_taps[k] == (int32_t)a->none)
                best[k] = x, best_taps[k] = number;
        }
    }
    NAME_elements row = {{0}};
    NAME_numbers numbers = {{0}};
    AF_UNROLL
    for (int32_t k = 0; k < NAME_WIDE; k++) {
        row.each[k] = NAME_TO(best[k]);
        numbers.each[k] = (NAME_TAP)best_taps[k];
    }
    NAME_PUT(NAME_ROW, a->y + NAME_offset(window, a->y_steps), row);
    NAME_PUT(NAME_TAP, a->taps + NAME_offset(window, a->tap_steps), numbers);
}

AF_KERNEL NAME_pick(AF_ARGUMENTS(NAME_pick) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (i >= a->num) return;
    int32_t window[5], at[5], tap[3];
    NAME_place(window, i, a, a->counts);
    at[0] = window[0];
    NAME_numbers numbers;
    NAME_GET(NAME_TAP, numbers, a->taps + NAME_offset(window, a->tap_steps));
    NAME_elements row = {{0}};
    AF_UNROLL
    for (int32_t k = 0; k < NAME_WIDE; k++) {
        int32_t number = (int32_t)numbers.each[k];
        const int is_tap = number >= 0 && number < (int32_t)a->none;
        for (int32_t axis = 2; axis >= 0; axis--) {
            tap[axis] = number % (int32_t)a->kernel[axis];
            number /= (int32_t)a->kernel[axis];
        }
        row.each[k] = (NAME_ROW)0;
        at[1] = window[1] + k;
        if (is_tap && NAME_inside(at, window, tap, a))
            row.each[k] = *(const NAME_ROW *)(a->x + NAME_offset(at, a->x_steps));
    }
    NAME_PUT(NAME_ROW, a->y + NAME_offset(window, a->y_steps), row);
}

/* The windows that have a place as one of their elements, along an axis: those of taps `first`,
 * `first + step`, ..., of which the first is `window`, and each next one the window before. Where
 * the elements of windows lie apart every tap is looked at. */
typedef struct {
    int32_t begin, first, step, window;
} NAME_taps;

AF_FUNCTION NAME_taps NAME_taps_of(int32_t at, int32_t axis, const NAME_arguments *a) {
    const int32_t stride = (int32_t)a->strides[axis];
    NAME_taps taps = {at + (int32_t)a->low[axis], 0, 1, 0};
    if (a->dilation[axis] == 1) {
        /* Rounded down: before the first window there is none. */
        const int32_t down = taps.begin < 0 ? stride - 1 : 0;
        taps.window = stride == 1 ? taps.begin : (taps.begin - down) / stride;
        taps.first = taps.begin - taps.window * stride;
        taps.step = stride;
    }
    return taps;
}

/* The window of a tap, or -1 for none. */
AF_FUNCTION int32_t NAME_window_of(
    const NAME_taps *taps, int32_t tap, int32_t window, int32_t axis, const NAME_arguments *a
) {
    if (a->dilation[axis] != 1) {
        const int32_t begin = taps->begin - tap * (int32_t)a->dilation[axis];
        const int32_t stride = (int32_t)a->strides[axis];
        window = begin >= 0 && begin % stride == 0 ? begin / stride : -1;
    }
    return window < (int32_t)a->counts[axis] ? window : -1;
}

AF_KERNEL NAME_grad(AF_ARGUMENTS(NAME_grad) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (i >= a->num) return;
    int32_t window[5], at[5];
    NAME_place(at, i, a, a->extents);
    window[0] = at[0], window[1] = at[1];
    const NAME_taps x = NAME_taps_of(at[2], 0, a), y = NAME_taps_of(at[3], 1, a);
    const NAME_taps z = NAME_taps_of(at[4], 2, a);
    NAME_REAL totals[NAME_WIDE];
    AF_UNROLL
    for (int32_t k = 0; k < NAME_WIDE; k++) totals[k] = 0;
    for (int32_t p = x.first, u = x.window; p < (int32_t)a->kernel[0]; p += x.step, u--) {
        window[2] = NAME_window_of(&x, p, u, 0, a);
        if (window[2] < 0) continue;
        for (int32_t q = y.first, v = y.window; q < (int32_t)a->kernel[1]; q += y.step, v--) {
            window[3] = NAME_window_of(&y, q, v, 1, a);
            if (window[3] < 0) continue;
            for (int32_t r = z.first, w = z.window; r < (int32_t)a->kernel[2]; r += z.step, w--) {
                window[4] = NAME_window_of(&z, r, w, 2, a);
                if (window[4] < 0) continue;
                const int32_t number = (p * (int32_t)a->kernel[1] + q) * (int32_t)a->kernel[2] + r;
                NAME_numbers numbers;
                NAME_GET(NAME_TAP, numbers, a->taps + NAME_offset(window, a->tap_steps));
                if (NAME_WIDE == 1 && (int32_t)numbers.each[0] != number) continue;
                NAME_elements row = {{0}};
                NAME_GET(NAME_ROW, row, a->y + NAME_offset(window, a->y_steps));
                AF_UNROLL
                for (int32_t k = 0; k < NAME_WIDE; k++)
                    if ((int32_t)numbers.each[k] == number) totals[k] += NAME_FROM(row.each[k]);
            }
        }
    }
    NAME_elements row = {{0}};
    AF_UNROLL
    for (int32_t k = 0; k < NAME_WIDE; k++) row.each[k] = NAME_TO(totals[k]);
    NAME_PUT(NAME_ROW, a->x + NAME_offset(at, a->x_steps), row);
}
