/* A product whose epilogue is a group: what comes before and behind its rows. */
#include "runtime.h"

enum { PRODUCT, PRODUCT_BLOCK, FINISH, GROUP_BLOCK, STATUS };

AF_EXPORT int32_t af_fused_product(void *arguments) {
    const af_word *a = arguments;
    af_word *group = a[GROUP_BLOCK].p;
    group[a[STATUS].i].i = 0;
    int32_t status = ((af_launch)a[PRODUCT].p)(a[PRODUCT_BLOCK].p);
    if (status) return status;
    if (a[FINISH].p) ((void (*)(void *))a[FINISH].p)(group);
    return group[a[STATUS].i].i != 0;
}
