// The kernels for CPUs with AVX-512: vectors of 16 floats.

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

#define RAYDFL_KERNELS avx512_kernels
#define RAYDFL_NAME "avx512"
#define RAYDFL_LANES 16
#include "kernels_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
