"""CUDA without a GPU: kernels run as fibers on the CPU, from their C++ and from the PTX that NVRTC makes of it."""
