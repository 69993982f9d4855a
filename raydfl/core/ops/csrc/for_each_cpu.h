// Attribute of a function to compile it for any CPU and for CPUs with AVX2, if the compiler supports it. Neither variant has fused
// multiply-adds, so the bits are equal.

#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define RAYDFL_FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define RAYDFL_FOR_EACH_CPU
#endif
