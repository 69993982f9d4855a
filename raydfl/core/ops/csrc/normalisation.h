// Group normalisation, ReLU and max pooling of images in a single pass, and their gradients; included by kernels_body.h. Channels
// come last, so that all channels of a position are vectorised.

// Sums over an item's positions: float32 within a row, float64 over rows.
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
  // Adds up a row: x - origin and its squares, or, with a gradient, the gradient and its products with x - origin.
  template <bool SQUARES>
  void take_line(const float* x, const float* origin, const float* gradient, long positions) {
    const long pairs = channels / PANEL * PANEL;
    for (long c = 0; c < pairs; c += PANEL) take<SQUARES, 2>(x, origin, gradient, positions, c, Whole{});
    for_vectors(channels - pairs, [&](long c, auto part) ALWAYS { take<SQUARES, 1>(x, origin, gradient, positions, pairs + c, part); });
  }
  template <bool SQUARES, int HALVES, typename Elements>
  INLINE void take(const float* x, const float* origin, const float* gradient, long positions, long c, Elements part) {
    Floats sums[HALVES], products[HALVES], from[HALVES];
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) sums[h] = products[h] = Floats{}, from[h] = part.load(origin + c + h * LANES);
    for (long p = c; p < positions * channels; p += channels)
#pragma GCC unroll 2
      for (int h = 0; h < HALVES; ++h) {
        const Floats apart = part.load(x + p + h * LANES) - from[h];
        const Floats value = SQUARES ? apart : part.load(gradient + p + h * LANES);
        sums[h] += value;
        products[h] += value * apart;
      }
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) part.store(line + c + h * LANES, sums[h]), part.store(other + c + h * LANES, products[h]);
  }
  void end_line() {
    for (long c = 0; c < channels; ++c) first[c] += line[c], second[c] += other[c];
  }
};

// Computes the mean and reciprocal standard deviation of each group over the valid rows. Sums use differences from the first row's
// mean, so that squares stay small for values far from 0.
void moments_of(const Normalisation& s, const float* x, long rows, float* means, float* scales) {
  ChannelSums sums(s.channels);
  const long each = s.channels / s.groups, row = s.columns * s.channels, positions = rows * s.columns;
  float* origin = scratch(5, s.channels);
  clear(origin, s.channels);
  for (long p = 0; p < (rows ? s.columns : 0); ++p) add(origin, x + p * s.channels, s.channels);
  for (long c = 0; c < s.channels; ++c) origin[c] /= static_cast<float>(s.columns);
  sums.begin();
  for (long r = 0; r < rows; ++r) {
    sums.take_line<true>(x + r * row, origin, nullptr, s.columns);
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

// Computes the scale and shift of each channel.
void line_of(const Normalisation& s, const float* means, const float* scales, const float* weight, const float* bias, float* scale,
             float* shift) {
  const long each = s.groups ? s.channels / s.groups : 1;
#pragma GCC ivdep
  for (long c = 0; c < s.channels; ++c) {
    scale[c] = s.groups ? scales[c / each] * weight[c] : 1.0f;
    shift[c] = s.groups ? bias[c] - means[c / each] * scale[c] : 0.0f;
  }
}

// Computes the maximum of ReLU, and its index, over "high" x "wide" positions of a pool for LANES channels.
template <typename Elements>
INLINE void maximum(Elements part, const float* from, long row, long channels, long high, long wide, long pool, Floats scale,
                    Floats shift, Floats* y, Integers* codes) {
  Floats best{};
  Integers code = Integers{} + NOWHERE;
#pragma GCC unroll 2
  for (long i = 0; i < high; ++i)
#pragma GCC unroll 2
    for (long j = 0; j < wide; ++j) {
      const Floats value = part.load(from + i * row + j * channels) * scale + shift;
      const Integers better = (value > best) | (value != value);  // propagate NaN, so that divergence shows
      best = better ? value : best;
      code = better ? Integers{} + static_cast<int32_t>(i * pool + j) : code;
    }
  *y = best, *codes = code;
}

// Computes a row of pools with "high" valid rows.
void pool_row(const Normalisation& s, const float* x, long high, const float* scale, const float* shift, float* y, long width,
              uint8_t* codes) {
  const long row = s.columns * s.channels;
  for (long left = s.columns; left > (s.ceil ? 0 : s.pool - 1); left -= s.pool) {
    const long wide = least(s.pool, left);
    for_vectors(s.channels, [&](long k, auto part) ALWAYS {
      Floats best;
      Integers code;
      if (s.pool == 2 && high == 2 && wide == 2)
        maximum(part, x + k, row, s.channels, 2, 2, 2, part.load(scale + k), part.load(shift + k), &best, &code);
      else
        maximum(part, x + k, row, s.channels, high, wide, s.pool, part.load(scale + k), part.load(shift + k), &best, &code);
      part.store(y + k, best);
      part.store_codes(codes + k, narrowed(code));
    });
    x += s.pool * s.channels, y += width, codes += width;
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
        for_vectors(s.channels, [&](long c, auto part) ALWAYS {
          const Floats value = part.load(x + p * s.channels + c) * part.load(scale + c) + part.load(shift + c);
          part.store(y + c, s.relu ? (value <= Floats{} ? Floats{} : value) : value);  // propagates NaN
        });
      for (long p = rows * s.columns; p < s.rows * s.columns; ++p, y += width) clear(y, s.channels);
      continue;
    }
    for (long r = 0; r < out_rows; ++r, y += out_columns * width, codes += out_columns * width) {
      const long high = rows - r * s.pool;
      pool_row(s, x + r * s.pool * row, high < 0 ? 0 : least(high, s.pool), scale, shift, y, width, codes);
    }
  }
}

// Computes the gradient before pooling for LANES channels of a pool's "high" x "wide" positions.
template <typename Elements>
INLINE void spread(Elements part, Floats dy, Integers code, float* to, long row, long channels, long high, long wide, long pool) {
#pragma GCC unroll 2
  for (long i = 0; i < high; ++i)
#pragma GCC unroll 2
    for (long j = 0; j < wide; ++j)
      part.store(to + i * row + j * channels,
                 reinterpret_cast<Floats>(reinterpret_cast<Integers>(dy) & (code == static_cast<int32_t>(i * pool + j))));
}

// Computes "high" rows of the gradient before pooling from their row of pools.
void unpool_row(const Normalisation& s, const float* dy, long width, const uint8_t* codes, long high, float* to) {
  const long row = s.columns * s.channels;
  long left = s.columns;
  for (; left > (s.ceil ? 0 : s.pool - 1); left -= s.pool) {
    const long wide = least(s.pool, left);
    for_vectors(s.channels, [&](long k, auto part) ALWAYS {
      const Integers code = part.load_codes(codes + k);
      if (s.pool == 2 && high == 2 && wide == 2)
        spread(part, part.load(dy + k), code, to + k, row, s.channels, 2, 2, 2);
      else
        spread(part, part.load(dy + k), code, to + k, row, s.channels, high, wide, s.pool);
    });
    to += wide * s.channels, dy += width, codes += width;
  }
  for (long i = 0; i < high && left > 0; ++i) clear(to + i * row, left * s.channels);  // outside all pools
}

// Computes a row of the gradient before ReLU.
void gradient_row(const Normalisation& s, const float* dy, long width, const float* x, const float* scale, const float* shift,
                  float* to) {
  for (long p = 0; p < s.columns; ++p, dy += width, x += s.channels, to += s.channels) {
    if (s.relu)
      for_vectors(s.channels, [&](long k, auto part) ALWAYS {
        const Floats value = part.load(x + k) * part.load(scale + k) + part.load(shift + k);
        part.store(to + k, value <= Floats{} ? Floats{} : part.load(dy + k));
      });
    else
      copy(to, dy, s.channels);
  }
}

// dx first holds the gradient of the normalised values, for its sums, and then the gradient of x.
void normalise_backward(const Normalisation& s, const float* dy, long width, const uint8_t* codes, const float* x,
                        const float* weight, const float* bias, const int64_t* lengths, const float* means, const float* scales,
                        float* dx, float* dweight, float* dbias) {
  const long row = s.columns * s.channels, out_rows = s.out_rows(), out_columns = s.out_columns();
  const long each = s.groups ? s.channels / s.groups : 1, line = out_columns * width;
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
      if (s.pool && r >= out_rows * s.pool)
        clear(to, row);  // outside all pools
      else if (s.pool && r % s.pool == 0)
        unpool_row(s, dy + r / s.pool * line, width, codes + r / s.pool * line, least(s.pool, s.rows - r), to);
      else if (s.pool)
        ;  // done with the previous row
      else if (r < rows)
        gradient_row(s, dy + r * s.columns * width, width, from, scale, shift, to);
      else
        clear(to, row);
      if (!s.groups || r >= rows) continue;
      sums.take_line<false>(from, mean, to, s.columns);
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
      for_vectors(s.channels, [&](long k, auto part) ALWAYS {
        const Floats rest = part.load(from + k) * part.load(by_x + k) + part.load(constant + k);
        part.store(to + k, part.load(to + k) * part.load(scale + k) + rest);
      });
    }
  }
}
