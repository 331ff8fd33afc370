"""Which nodes become one kernel: clusters, chunked regions, joined updates, cheap recomputation."""
