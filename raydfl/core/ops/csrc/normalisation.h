// What follows a convolution over images, included by kernels_body.h: group normalisation, ReLU and maximum pooling in one pass over
// its result, and back. Channels come last: what is done to one position is done to all of its channels at once.

// One item's sums over its positions: each row's in float32, and those of all rows in float64.
struct ChannelSums {
  long channels;
  float *line, *other;
  double *first, *second;

  explicit ChannelSums(long channels) : channels(channels) {
    float* memory = scratch(4, 6 * channels);
    first = reinterpret_cast<double*>(memory), second = first + channels;
    line = memory + 4 * channels, other = line + channels;
  }
  void begin() {
    for (long c = 0; c < channels; ++c) first[c] = second[c] = 0.0;
  }
  void begin_line() { clear(line, 2 * channels); }
  void end_line() {
    for (long c = 0; c < channels; ++c) first[c] += line[c], second[c] += other[c];
  }
};

// Mean and reciprocal standard deviation of each group, over the rows that count. Sums are of differences from the first row's
// mean, so that squares are small where numbers are far from 0.
void moments_of(const Normalisation& s, const float* x, long rows, float* means, float* scales) {
  ChannelSums sums(s.channels);
  const long each = s.channels / s.groups, row = s.columns * s.channels, positions = rows * s.columns;
  float* origin = scratch(5, s.channels);
  clear(origin, s.channels);
  for (long p = 0; p < (rows ? s.columns : 0); ++p) add(origin, x + p * s.channels, s.channels);
  for (long c = 0; c < s.channels; ++c) origin[c] /= static_cast<float>(s.columns);
  sums.begin();
  for (long r = 0; r < rows; ++r) {
    sums.begin_line();
    for (const float *from = x + r * row, *end = from + row; from < end; from += s.channels)
#pragma GCC ivdep
      for (long c = 0; c < s.channels; ++c) {
        const float value = from[c] - origin[c];
        sums.line[c] += value;
        sums.other[c] += value * value;
      }
    sums.end_line();
  }
  const double count = positions ? static_cast<double>(positions) : 1.0;
  for (long g = 0; g < s.groups; ++g) {
    double mean = 0.0, square = 0.0;
    for (long c = g * each; c < (g + 1) * each; ++c) mean += origin[c] + sums.first[c] / count;
    mean /= static_cast<double>(each);
    for (long c = g * each; c < (g + 1) * each; ++c) {
      const double off = sums.first[c] / count, apart = origin[c] + off - mean;
      square += sums.second[c] / count - off * off + apart * apart;
    }
    const double variance = square / static_cast<double>(each);
    means[g] = static_cast<float>(mean);
    scales[g] = static_cast<float>(1.0 / __builtin_sqrt((variance < 0.0 ? 0.0 : variance) + s.epsilon));
  }
}

// What each channel is multiplied with, and what is added then.
void line_of(const Normalisation& s, const float* means, const float* scales, const float* weight, const float* bias, float* scale,
             float* shift) {
  const long each = s.groups ? s.channels / s.groups : 1;
#pragma GCC ivdep
  for (long c = 0; c < s.channels; ++c) {
    scale[c] = s.groups ? scales[c / each] * weight[c] : 1.0f;
    shift[c] = s.groups ? bias[c] - means[c / each] * scale[c] : 0.0f;
  }
}

void normalise(const Normalisation& s, const float* x, const float* weight, const float* bias, const int64_t* lengths, float* y,
               long width, uint8_t* codes, float* means, float* scales) {
  const long row = s.columns * s.channels, out_rows = s.out_rows(), out_columns = s.out_columns();
  for (long item = 0; item < s.batch; ++item, x += s.rows * row) {
    const long rows = counting(lengths, item, s.rows);
    if (s.groups) moments_of(s, x, rows, means + item * s.means, scales + item * s.means);
    float *scale = scratch(4, 2 * s.channels), *shift = scale + s.channels;
    line_of(s, means + item * s.means, scales + item * s.means, weight, bias, scale, shift);
    if (!s.pool) {
      for (long p = 0; p < rows * s.columns; ++p, y += width)
#pragma GCC ivdep
        for (long c = 0; c < s.channels; ++c) {
          const float value = x[p * s.channels + c] * scale[c] + shift[c];
          y[c] = s.relu && value <= 0.0f ? 0.0f : value;  // a NaN stays one
        }
      for (long p = rows * s.columns; p < s.rows * s.columns; ++p, y += width) clear(y, s.channels);
      continue;
    }
    int32_t* code = reinterpret_cast<int32_t*>(scratch(5, s.channels));
    for (long r = 0; r < out_rows; ++r)
      for (long c = 0; c < out_columns; ++c, y += width, codes += width) {
        clear(y, s.channels);
#pragma GCC ivdep
        for (long k = 0; k < s.channels; ++k) code[k] = NOWHERE;
        for (int32_t i = 0; i < s.pool && r * s.pool + i < rows; ++i)
          for (int32_t j = 0; j < s.pool && c * s.pool + j < s.columns; ++j) {
            const float* from = x + ((r * s.pool + i) * s.columns + c * s.pool + j) * s.channels;
            const int32_t here = i * static_cast<int32_t>(s.pool) + j;
#pragma GCC ivdep
            for (long k = 0; k < s.channels; ++k) {
              const float value = from[k] * scale[k] + shift[k];
              const bool better = value > y[k] || value != value;  // a NaN is kept: whoever trains must see it
              y[k] = better ? value : y[k];
              code[k] = better ? here : code[k];
            }
          }
#pragma GCC ivdep
        for (long k = 0; k < s.channels; ++k) codes[k] = static_cast<uint8_t>(code[k]);
      }
  }
}

// One row of the gradient before pooling, from all of an item's after it.
void unpool_row(const Normalisation& s, long r, const float* dy, long width, const uint8_t* codes, float* to) {
  const long pooled = r / s.pool, columns = s.out_columns();
  if (pooled >= s.out_rows()) return clear(to, s.columns * s.channels);  // no pool saw it
  for (long column = 0; column < s.columns; ++column, to += s.channels) {
    const long c = column / s.pool, place = (pooled * columns + c) * width;
    if (c >= columns) return clear(to, (s.columns - column) * s.channels);
    const uint8_t here = static_cast<uint8_t>(r % s.pool * s.pool + column % s.pool);
#pragma GCC ivdep
    for (long k = 0; k < s.channels; ++k) to[k] = codes[place + k] == here ? dy[place + k] : 0.0f;
  }
}

// One row of the gradient before ReLU.
void gradient_row(const Normalisation& s, const float* dy, long width, const float* x, const float* scale, const float* shift,
                  float* to) {
  for (long p = 0; p < s.columns; ++p, dy += width, x += s.channels, to += s.channels) {
    if (s.relu)
#pragma GCC ivdep
      for (long k = 0; k < s.channels; ++k) to[k] = x[k] * scale[k] + shift[k] <= 0.0f ? 0.0f : dy[k];
    else
      copy(to, dy, s.channels);
  }
}

// dx first becomes the gradient of what was normalised, which its sums are made of, and then that of x.
void normalise_backward(const Normalisation& s, const float* dy, long width, const uint8_t* codes, const float* x,
                        const float* weight, const float* bias, const int64_t* lengths, const float* means, const float* scales,
                        float* dx, float* dweight, float* dbias) {
  const long row = s.columns * s.channels, out_rows = s.out_rows(), out_columns = s.out_columns();
  const long each = s.groups ? s.channels / s.groups : 1;
  clear(dweight, s.groups ? s.channels : 0);
  clear(dbias, s.groups ? s.channels : 0);
  for (long item = 0; item < s.batch; ++item, x += s.rows * row, dx += s.rows * row) {
    const long rows = counting(lengths, item, s.rows);
    float *scale = scratch(5, 5 * s.channels), *shift = scale + s.channels, *mean = shift + s.channels;
    float *by_x = mean + s.channels, *constant = by_x + s.channels;
    line_of(s, means + item * s.means, scales + item * s.means, weight, bias, scale, shift);
    for (long c = 0; c < s.channels; ++c) mean[c] = s.groups ? means[item * s.means + c / each] : 0.0f;
    ChannelSums sums(s.channels);
    sums.begin();
    for (long r = 0; r < s.rows; ++r) {
      float* to = dx + r * row;
      const float* from = x + r * row;
      if (s.pool)
        unpool_row(s, r, dy, width, codes, to);
      else if (r < rows)
        gradient_row(s, dy + r * s.columns * width, width, from, scale, shift, to);
      else
        clear(to, row);
      if (!s.groups || r >= rows) continue;
      sums.begin_line();
      for (long p = 0; p < row; p += s.channels)
#pragma GCC ivdep
        for (long k = 0; k < s.channels; ++k) {
          sums.line[k] += to[p + k];
          sums.other[k] += to[p + k] * (from[p + k] - mean[k]);
        }
      sums.end_line();
    }
    dy += out_rows * out_columns * width;
    if (s.pool) codes += out_rows * out_columns * width;
    if (!s.groups) continue;
    const double count = static_cast<double>(rows * s.columns * each);
    for (long g = 0; g < s.groups; ++g) {
      const double spread = scales[item * s.means + g];
      double sum = 0.0, product = 0.0;
      for (long k = g * each; k < (g + 1) * each; ++k) {
        sum += weight[k] * sums.first[k];
        product += weight[k] * sums.second[k];
        dbias[k] += static_cast<float>(sums.first[k]);
        dweight[k] += static_cast<float>(spread * sums.second[k]);
      }
      for (long k = g * each; k < (g + 1) * each; ++k) {
        by_x[k] = static_cast<float>(count > 0 ? -spread * spread * spread * product / count : 0.0);
        constant[k] = static_cast<float>(count > 0 ? -spread * sum / count : 0.0) - mean[k] * by_x[k];
      }
    }
    for (long p = 0; p < rows * s.columns; ++p) {
      float* to = dx + p * s.channels;
      const float* from = x + p * s.channels;
#pragma GCC ivdep
      for (long k = 0; k < s.channels; ++k) to[k] = to[k] * scale[k] + (from[k] * by_x[k] + constant[k]);
    }
  }
}
