"""What kernels in CUDA C++ share: machine code from NVRTC, launches, and memory that launches leave as they found it."""
