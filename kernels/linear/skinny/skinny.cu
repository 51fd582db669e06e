// The kernel of `skinny.cuh`, for NVRTC and nvcc.
#include "instructions.cuh"
#include "skinny.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) skinny(const __grid_constant__ Given a) { run(a); }
