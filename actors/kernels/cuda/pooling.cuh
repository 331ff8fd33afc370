/* The largest elements of windows, where they lie there, and the gradient. NAME_ROW is the type of
 * an element, NAME_REAL that of numbers, NAME_FROM makes one of an element and NAME_TO an element of
 * one; NAME_TAP is the type of places in a window. A thread makes one result; nothing is added up
 * by place. Axes: images, channels, and three of space, outermost first.
 */
typedef struct {
    char *x, *y;       /* elements, windows */
    char *taps;        /* of each window */
    int64_t num, none; /* results, elements of a window */
    int64_t channels, extents[3], counts[3];
    int64_t kernel[3], strides[3], dilation[3], low[3];
    int64_t x_steps[5], y_steps[5], tap_steps[5];
} NAME_arguments;
typedef NAME_arguments NAME_max_arguments, NAME_pick_arguments, NAME_grad_arguments;

/* Where result i is along all axes. */
AF_FUNCTION void NAME_place(int64_t *at, int64_t i, const NAME_arguments *a, const int64_t *ends) {
    for (int32_t axis = 2; axis >= 0; axis--) {
        at[axis + 2] = i % ends[axis];
        i /= ends[axis];
    }
    at[1] = i % a->channels;
    at[0] = i / a->channels;
}

AF_FUNCTION int64_t NAME_offset(const int64_t *at, const int64_t *steps) {
    int64_t offset = 0;
    for (int32_t axis = 0; axis < 5; axis++) offset += at[axis] * steps[axis];
    return offset;
}

/* Move to an element of a window; whether it lies inside. */
AF_FUNCTION int NAME_inside(
    int64_t *at, const int64_t *window, const int64_t *tap, const NAME_arguments *a
) {
    int is_inside = 1;
    for (int32_t axis = 0; axis < 3; axis++) {
        const int64_t far = tap[axis] * a->dilation[axis] - a->low[axis];
        at[axis + 2] = window[axis + 2] * a->strides[axis] + far;
        is_inside &= at[axis + 2] >= 0 && at[axis + 2] < a->extents[axis];
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
    int64_t window[5], at[5], tap[3], number = 0, found = a->none;
    NAME_place(window, i, a, a->counts);
    at[0] = window[0], at[1] = window[1];
    NAME_REAL best = -INFINITY;
    NAME_EACH_TAP(a, tap, number) {
        if (!NAME_inside(at, window, tap, a)) continue;
        const NAME_REAL x = NAME_FROM(*(const NAME_ROW *)(a->x + NAME_offset(at, a->x_steps)));
        if (x > best || x != x || found == a->none) best = x, found = number;
    }
    *(NAME_ROW *)(a->y + NAME_offset(window, a->y_steps)) = NAME_TO(best);
    *(NAME_TAP *)(a->taps + NAME_offset(window, a->tap_steps)) = (NAME_TAP)found;
}

AF_KERNEL NAME_pick(AF_ARGUMENTS(NAME_pick) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (i >= a->num) return;
    int64_t window[5], at[5], tap[3];
    NAME_place(window, i, a, a->counts);
    at[0] = window[0], at[1] = window[1];
    int64_t number = *(const NAME_TAP *)(a->taps + NAME_offset(window, a->tap_steps));
    const int is_tap = number >= 0 && number < a->none;
    for (int32_t axis = 2; axis >= 0; axis--) {
        tap[axis] = number % a->kernel[axis];
        number /= a->kernel[axis];
    }
    NAME_ROW x = (NAME_ROW)0;
    if (is_tap && NAME_inside(at, window, tap, a))
        x = *(const NAME_ROW *)(a->x + NAME_offset(at, a->x_steps));
    *(NAME_ROW *)(a->y + NAME_offset(window, a->y_steps)) = x;
}

AF_KERNEL NAME_grad(AF_ARGUMENTS(NAME_grad) arguments) {
    const NAME_arguments *a = &arguments;
    const int64_t i = AF_BLOCK * AF_NUM_THREADS + AF_THREAD;
    if (i >= a->num) return;
    int64_t window[5], at[5], tap[3], number = 0;
    NAME_place(at, i, a, a->extents);
    window[0] = at[0], window[1] = at[1];
    NAME_REAL total = 0;
    NAME_EACH_TAP(a, tap, number) {
        int is_window = 1;
        for (int32_t axis = 0; axis < 3; axis++) {
            const int64_t begin = at[axis + 2] + a->low[axis] - tap[axis] * a->dilation[axis];
            window[axis + 2] = begin / a->strides[axis];
            is_window &= begin >= 0 && begin % a->strides[axis] == 0;
            is_window &= window[axis + 2] < a->counts[axis];
        }
        if (!is_window) continue;
        if (*(const NAME_TAP *)(a->taps + NAME_offset(window, a->tap_steps)) != number) continue;
        total += NAME_FROM(*(const NAME_ROW *)(a->y + NAME_offset(window, a->y_steps)));
    }
    *(NAME_ROW *)(a->x + NAME_offset(at, a->x_steps)) = NAME_TO(total);
}
