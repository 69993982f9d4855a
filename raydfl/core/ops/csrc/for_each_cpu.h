// Before a function: it is compiled for any CPU and for those with AVX2, where the compiler can do that. Neither has a fused
// multiply-add, so that the bits are the same.

#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define RAYDFL_FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define RAYDFL_FOR_EACH_CPU
#endif
