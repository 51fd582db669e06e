// Copies up to MOST tensors to where a CUDA graph reads them. Blocks (x, i) share the bytes of tensor i.

struct Copies {
    const char* sources[MOST];
    char* targets[MOST];
    long long bytes[MOST];
};

extern "C" __global__ void inlets(const __grid_constant__ Copies copies) {
    const char* const source = copies.sources[blockIdx.y];
    char* const target = copies.targets[blockIdx.y];
    const long long bytes = copies.bytes[blockIdx.y];
    const long long first = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    const long long step = gridDim.x * static_cast<long long>(blockDim.x);
    long long done = 0;
    if ((reinterpret_cast<unsigned long long>(source) | reinterpret_cast<unsigned long long>(target)) % 16 == 0) {
        const long long wide = bytes / 16;
        for (long long i = first; i < wide; i += step)
            reinterpret_cast<int4*>(target)[i] = reinterpret_cast<const int4*>(source)[i];
        done = wide * 16;
    }
    for (long long i = done + first; i < bytes; i += step) target[i] = source[i];
}
