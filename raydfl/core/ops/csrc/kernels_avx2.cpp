// The kernels for CPUs with AVX2 and FMA: vectors of 8 floats.

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define RAYDFL_KERNELS avx2_kernels
#define RAYDFL_NAME "avx2"
#define RAYDFL_LANES 8
#include "kernels_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
