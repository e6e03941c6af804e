"""The CPU: C++ kernels from `kernels/native`, built at first use and called through ctypes."""
