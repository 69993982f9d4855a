// Kernels: the forward or backward pass of one client in float32, for each instruction set.
//
// The table of functions is compiled for any CPU, for CPUs with AVX2 and FMA, and for CPUs with AVX-512. kernels() selects a table
// at run time, at most the one that RAYDFL_KERNELS names in the environment ("portable", "avx2"). All pointers are to contiguous
// memory. If "lengths" is null, all frames are valid. A pass writes every element of its results.

#pragma once

#include <cstdint>

namespace raydfl {

struct Convolution {
  long batch, frames, inputs, outputs, taps, padding;
  long pool;  // 0: convolution alone; otherwise ReLU and the maximum of this number of frames follow

  long convolved() const { return frames + 2 * padding - taps + 1; }
  long pooled() const { return pool ? convolved() / pool : convolved(); }
};

// 2-d convolution of images with channels last, padded with rows and columns of zeros.
struct Convolution2d {
  long batch, rows, columns, inputs, outputs, kernel_rows, kernel_columns, row_stride, column_stride;
  long top, left, bottom, right;

  long out_rows() const { return (rows + top + bottom - kernel_rows) / row_stride + 1; }
  long out_columns() const { return (columns + left + right - kernel_columns) / column_stride + 1; }
};

// Normalisation over groups of channels (0: none), then optional ReLU, then the maximum of pool x pool windows (0: none; requires
// ReLU).
struct Normalisation {
  long batch, rows, columns, channels, groups;
  long means;  // stride between items in the saved means and scales
  float epsilon;
  bool relu;
  long pool;
  bool ceil;  // whether to keep incomplete windows at the ends

  long pooled(long size) const { return pool ? (size + (ceil ? pool - 1 : 0)) / pool : size; }
  long out_rows() const { return pooled(rows); }
  long out_columns() const { return pooled(columns); }
};

struct Recurrence {
  long batch, frames, inputs, hidden;
  int directions;
};

struct Direction {
  const float *input_weight, *hidden_weight, *input_bias, *hidden_bias;
};

struct DirectionGradient {
  float *input_weight, *hidden_weight, *input_bias, *hidden_bias;
};

struct Kernels {
  const char* name;
  long panel;  // hidden units are padded to a multiple of this in a GRU's saved gates

  // x [batch, frames, inputs], weight [outputs, inputs, taps], bias [outputs] -> y [batch, pooled, outputs] and, with pooling,
  // codes [batch, pooled, outputs]: index of the maximum in its pool, or NOWHERE if ReLU is 0.
  void (*convolve)(const Convolution&, const float* x, const float* weight, const float* bias, const int64_t* lengths,
                   float* y, uint8_t* codes);
  // dy as y -> dx (unless null), dweight, dbias.
  void (*convolve_backward)(const Convolution&, const float* dy, const uint8_t* codes, const float* x, const float* weight,
                            const int64_t* lengths, float* dx, float* dweight, float* dbias);
  // x [batch, rows, columns, inputs], weight [outputs, inputs, kernel rows, kernel columns], bias [outputs] or null -> y.
  void (*convolve_2d)(const Convolution2d&, const float* x, const float* weight, const float* bias, float* y);
  // dy as y -> dx (unless null), dweight, dbias.
  void (*convolve_2d_backward)(const Convolution2d&, const float* dy, const float* x, const float* weight, float* dx,
                               float* dweight, float* dbias);
  // x [batch, rows, columns, channels] -> y and (with pooling) codes, with the stride "width" between positions, and each item's
  // means and reciprocal standard deviations. Rows beyond an item's length are padding, and become 0.
  void (*normalise)(const Normalisation&, const float* x, const float* weight, const float* bias, const int64_t* lengths, float* y,
                    long width, uint8_t* codes, float* means, float* scales);
  // dy as y -> dx, and with groups dweight and dbias.
  void (*normalise_backward)(const Normalisation&, const float* dy, long width, const uint8_t* codes, const float* x,
                             const float* weight, const float* bias, const int64_t* lengths, const float* means,
                             const float* scales, float* dx, float* dweight, float* dbias);
  // x [batch, frames, inputs] -> y [batch, frames, directions * hidden] and gates [directions, frames, batch, 4, padded].
  void (*recur)(const Recurrence&, const float* x, const Direction* directions, const int64_t* lengths, float* y, float* gates);
  void (*recur_backward)(const Recurrence&, const float* dy, const float* y, const float* gates, const float* x,
                         const Direction* directions, const int64_t* lengths, float* dx, DirectionGradient* gradients);
  // x [batch, frames, channels] -> y [batch, channels]: the mean over the valid frames, 0 without valid frames.
  void (*average)(long batch, long frames, long channels, const float* x, const int64_t* lengths, float* y);
  void (*average_backward)(long batch, long frames, long channels, const float* dy, const int64_t* lengths, float* dx);
  // x, y [rows, columns]: y is x times scale, or 0 for elements that dropout.py's formula drops.
  void (*drop)(long rows, long columns, uint32_t first_key, uint32_t second_key, uint32_t threshold, float scale,
               const float* x, float* y);
  // Replaces x [count] by e^(factor x). Results must be from 4e-38 to 2e37.
  void (*exponentiate)(long count, float factor, float* x);
  // Replaces x [count] by factor times the logarithm of x, clamped to "least", which must be at least 1.2e-38.
  void (*take_logarithm)(long count, float least, float factor, float* x);
};

constexpr uint8_t NOWHERE = 255;

// Thread-local memory for intermediate results, 64-byte aligned. Valid until the next call with the same index.
float* scratch(int index, long floats);

const Kernels& kernels();
extern const Kernels portable_kernels;
#if defined(__x86_64__) && defined(__GNUC__)
extern const Kernels avx2_kernels, avx512_kernels;
#endif

}  // namespace raydfl
