/* What is called of oneDNN; cffi's parser made onednn_calls.py of it. */

typedef void *H;
typedef const void *CH;
typedef struct { int major, minor, patch; const char *hash; unsigned cpu, gpu; } version_t;
const version_t *dnnl_version(void);
int dnnl_get_effective_cpu_isa(void);
int dnnl_engine_create(H *, int, size_t);
int dnnl_stream_create(H *, H, unsigned);
int dnnl_memory_desc_create_with_strides(H *, int, const int64_t *, int, const int64_t *);
int dnnl_memory_desc_create_with_tag(H *, int, const int64_t *, int, int);
int dnnl_memory_desc_create_submemory(H *, CH, const int64_t *, const int64_t *);
int dnnl_memory_desc_equal(CH, CH);
int dnnl_memory_desc_destroy(H);
size_t dnnl_memory_desc_get_size(CH);
int dnnl_memory_create(H *, CH, H, void *);
int dnnl_memory_destroy(H);
int dnnl_primitive_attr_create(H *);
int dnnl_primitive_attr_set_scratchpad_mode(H, int);
int dnnl_primitive_attr_set_post_ops(H, CH);
int dnnl_primitive_attr_destroy(H);
int dnnl_post_ops_create(H *);
int dnnl_post_ops_append_sum(H, float, int32_t, int);
int dnnl_post_ops_destroy(H);
int dnnl_matmul_primitive_desc_create(H *, H, CH, CH, CH, CH, CH);
int dnnl_convolution_forward_primitive_desc_create(H *, H, int, int, CH, CH, CH, CH,
    const int64_t *, const int64_t *, const int64_t *, const int64_t *, CH);
int dnnl_convolution_backward_data_primitive_desc_create(H *, H, int, CH, CH, CH,
    const int64_t *, const int64_t *, const int64_t *, const int64_t *, CH, CH);
int dnnl_convolution_backward_weights_primitive_desc_create(H *, H, int, CH, CH, CH, CH,
    const int64_t *, const int64_t *, const int64_t *, const int64_t *, CH, CH);
int dnnl_reorder_primitive_desc_create(H *, CH, H, CH, H, CH);
CH dnnl_primitive_desc_query_md(CH, int, int);
int dnnl_primitive_desc_query(CH, int, int, void *);
int dnnl_primitive_desc_destroy(H);
int dnnl_primitive_create(H *, CH);
int dnnl_primitive_execute(CH, H, int, const void *);
int omp_get_max_threads(void);
void omp_set_num_threads(int);
