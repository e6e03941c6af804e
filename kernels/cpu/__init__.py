"""The CPU: C++ kernels of `kernels/native`, called through ctypes; a wheel's for this CPU, or compiled at first use."""
