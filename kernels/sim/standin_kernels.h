// The kernels that the stand-in driver can run, from whatever is linked with it.
#pragma once
#include <cstddef>

struct StandinKernel {
    size_t parameter_bytes;  // of the one struct that it takes
    void (*run)(const void *parameters, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                unsigned threads, size_t shared_bytes);
};

// The kernel of that name, null if there is none. A stand-in without kernels lacks the function.
extern "C" __attribute__((weak)) const StandinKernel *standin_kernel(const char *name);
