// kernels/linear/skinny/skinny.cuh on a CPU, for `ctypes`.
#include "emulated.h"
#include "skinny.cuh"

extern "C" const char* emulate(const Given* a, int groups, int bytes, int late, int backwards) {
    const int together = CLUSTER || late ? SPLITS : 1;  // blocks that are no cluster may run one by one as well
    return launch(run, *a, groups * SPLITS, together, THREADS, bytes, late, backwards);
}
