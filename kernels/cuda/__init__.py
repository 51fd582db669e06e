"""What kernels in CUDA C++ share: machine code from NVRTC, launches, memory that launches leave as they found it."""
