// What the operators call: one client's forward or backward pass, in float32, for each instruction set.
//
// A table of functions is compiled once for any CPU and once for CPUs with AVX2 and FMA; kernels() picks when it runs
// (the former if the environment has RAYDFL_PORTABLE). All
// pointers are to contiguous memory. "lengths" may be null: all frames count. A pass writes every element of what it returns.

#pragma once

#include <cstdint>

namespace raydfl {

struct Convolution {
  long batch, frames, inputs, outputs, taps, padding;
  long pool;  // 0: the convolution alone; 1 or more: ReLU and the maximum of so many frames follow

  long convolved() const { return frames + 2 * padding - taps + 1; }
  long pooled() const { return pool ? convolved() / pool : convolved(); }
};

// Images, channels last, that are convolved in two dimensions, with so many rows and columns of zeros around them.
struct Convolution2d {
  long batch, rows, columns, inputs, outputs, kernel_rows, kernel_columns, row_stride, column_stride;
  long top, left, bottom, right;

  long out_rows() const { return (rows + top + bottom - kernel_rows) / row_stride + 1; }
  long out_columns() const { return (columns + left + right - kernel_columns) / column_stride + 1; }
};

// What follows: normalisation over groups of channels (0: none), ReLU or not, the maximum of each pool x pool (0: none; ReLU too).
struct Normalisation {
  long batch, rows, columns, channels, groups;
  long means;  // groups of one item and the next are so far apart in what is kept of them
  float epsilon;
  bool relu;
  long pool;
  bool ceil;  // a pool that is not whole counts

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
  long panel;  // hidden units are padded to a multiple of this in what a GRU saves for its backward pass

  // x [batch, frames, inputs], weight [outputs, inputs, taps], bias [outputs] -> y [batch, pooled, outputs] and, with pooling,
  // codes [batch, pooled, outputs]: which frame of the pool the maximum is, NOWHERE where ReLU is 0.
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
  // x [batch, rows, columns, channels] -> y, whose positions are "width" apart, codes likewise with pooling, and each item's means
  // and reciprocal standard deviations. Of each item the first "length" rows count; the others become 0.
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
  // x [batch, frames, channels] -> y [batch, channels], the mean over the frames that count; 0 where none does.
  void (*average)(long batch, long frames, long channels, const float* x, const int64_t* lengths, float* y);
  void (*average_backward)(long batch, long frames, long channels, const float* dy, const int64_t* lengths, float* dx);
  // x and y [rows, columns]: what dropout.py's formula keeps of x, times scale.
  void (*drop)(long rows, long columns, uint32_t first_key, uint32_t second_key, uint32_t threshold, float scale,
               const float* x, float* y);
  // x [count] becomes e^(factor x), which must lie within 4e-38 and 2e37.
  void (*exponentiate)(long count, float factor, float* x);
  // x [count] becomes factor times the logarithm of x, or of "least" where x is smaller; least is 1.2e-38 or more.
  void (*take_logarithm)(long count, float least, float factor, float* x);
};

constexpr uint8_t NOWHERE = 255;

// Memory of this thread for intermediate results; grows, 64-byte aligned. Good until the next call with the same index.
float* scratch(int index, long floats);

const Kernels& kernels();
extern const Kernels portable_kernels;
#if defined(__x86_64__) && defined(__GNUC__)
extern const Kernels avx2_kernels;
#endif

}  // namespace raydfl
