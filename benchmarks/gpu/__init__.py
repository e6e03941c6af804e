"""`python -m benchmarks.gpu`: kernels, steps, transfers and the whole service on one CUDA device."""
