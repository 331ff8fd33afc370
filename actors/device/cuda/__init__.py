"""CUDA: driver, memory, streams and graphs, cuBLASLt, cuDNN."""
