"""Native code built or loaded: C runtime, launches, oneDNN, OpenBLAS, which of them is fastest."""
