"""Triton kernels for CUDA devices; on CPU tensors they run in Triton's interpreter (TRITON_INTERPRET=1)."""
