// Convolutions with 3 or 5 taps by Toom and Cook's interpolation, as Winograd's F(4, 3) and F(2, 5): a part of kernels_body.h.
//
// A window of 6 frames d gives 7 - taps outputs. As polynomials in time, outputs, weights and window are known by their values at
// the six points 0, 1, -1, 2, -2 and infinity, where a convolution is a product for each point:
//
//   y = A' [(G w) . (B' d)],     and with the same three matrices     dw = G' [(A dy) . (B' d)],    dx = B [(A dy) . (G w)]
//
// so that 6 products take the place of 10 (5 taps) or 12 (3 taps). "Values" are those at the points: [point, window, channel].
// Rounding is about twice that of the plain sums.

constexpr int POINTS = 6;

// Whether the products saved are worth the way to the points and back.
bool fits_points(const Convolution& shape) {
  return (shape.taps == 3 || shape.taps == 5) && shape.inputs % LANES == 0 && shape.inputs >= 16 && shape.outputs >= 16 &&
         shape.convolved() >= POINTS;
}

// B' d of one window for all channels; point i at to + i * apart.
INLINE void frames_at_points(float* to, long apart, const float* d, long channels) {
  for (long c = 0; c < channels; c += LANES, d += LANES, to += LANES) {
    const Floats d0 = load(d), d1 = load(d + channels), d2 = load(d + 2 * channels), d3 = load(d + 3 * channels),
                 d4 = load(d + 4 * channels), d5 = load(d + 5 * channels);
    const Floats even = d4 - 4.0f * d2, odd = d3 - 4.0f * d1, near = d4 - d2, far = 2.0f * (d3 - d1);
    store(to, 4.0f * d0 - 5.0f * d2 + d4);
    store(to + apart, even + odd);
    store(to + 2 * apart, even - odd);
    store(to + 3 * apart, near + far);
    store(to + 4 * apart, near - far);
    store(to + 5 * apart, 4.0f * d1 - 5.0f * d3 + d5);
  }
}

// B z: what the values of one window are of its frames, added to dx.
INLINE void add_frames(float* dx, const float* values, long apart, long channels) {
  for (long c = 0; c < channels; c += LANES, dx += LANES, values += LANES) {
    const Floats z0 = load(values), z1 = load(values + apart), z2 = load(values + 2 * apart), z3 = load(values + 3 * apart),
                 z4 = load(values + 4 * apart), z5 = load(values + 5 * apart);
    const Floats sum = z1 + z2, difference = z1 - z2, far_sum = z3 + z4, far_difference = 2.0f * (z3 - z4);
    store(dx, load(dx) + 4.0f * z0);
    store(dx + channels, load(dx + channels) + 4.0f * (z5 - difference) - far_difference);
    store(dx + 2 * channels, load(dx + 2 * channels) - 5.0f * z0 - 4.0f * sum - far_sum);
    store(dx + 3 * channels, load(dx + 3 * channels) + difference + far_difference - 5.0f * z5);
    store(dx + 4 * channels, load(dx + 4 * channels) + z0 + sum + far_sum);
    store(dx + 5 * channels, load(dx + 5 * channels) + z5);
  }
}

// A' m + bias: the outputs of one window.
template <int TAPS>
INLINE void outputs_of(float* y, const float* values, long apart, const float* bias, long channels) {
  for (long c = 0; c < channels; c += LANES, y += LANES, values += LANES, bias += LANES) {
    const Floats m1 = load(values + apart), m2 = load(values + 2 * apart), m3 = load(values + 3 * apart),
                 m4 = load(values + 4 * apart), m5 = load(values + 5 * apart), b = load(bias);
    const Floats sum = m1 + m2, difference = m1 - m2, far_sum = m3 + m4, far_difference = m3 - m4;
    store(y, load(values) + sum + far_sum + b);
    if (TAPS == 5) {
      store(y + channels, difference + 2.0f * far_difference + m5 + b);
    } else {
      store(y + channels, difference + 2.0f * far_difference + b);
      store(y + 2 * channels, sum + 4.0f * far_sum + b);
      store(y + 3 * channels, difference + 8.0f * far_difference + m5 + b);
    }
  }
}

// A dy of one window.
template <int TAPS>
INLINE void outputs_at_points(float* to, long apart, const float* dy, long channels) {
  for (long c = 0; c < channels; c += LANES, dy += LANES, to += LANES) {
    const Floats y0 = load(dy), y1 = load(dy + channels);
    Floats even = y0, odd = y1, far_even = y0, far_odd = 2.0f * y1, last = y1;
    if (TAPS == 3) {
      const Floats y2 = load(dy + 2 * channels), y3 = load(dy + 3 * channels);
      even += y2, odd += y3, far_even += 4.0f * y2, far_odd += 8.0f * y3, last = y3;
    }
    store(to, y0);
    store(to + apart, even + odd);
    store(to + 2 * apart, even - odd);
    store(to + 3 * apart, far_even + far_odd);
    store(to + 4 * apart, far_even - far_odd);
    store(to + 5 * apart, last);
  }
}

// G w of one pair of channels.
template <int TAPS>
INLINE void weight_at_points(float to[POINTS], const float* w) {
  float even = w[0] + w[2], odd = w[1], far_even = w[0] + 4.0f * w[2], far_odd = 2.0f * w[1];
  if (TAPS == 5) even += w[4], odd += w[3], far_even += 16.0f * w[4], far_odd += 8.0f * w[3];
  to[0] = 0.25f * w[0];
  to[1] = (even + odd) * (-1.0f / 6);
  to[2] = (even - odd) * (-1.0f / 6);
  to[3] = (far_even + far_odd) * (1.0f / 24);
  to[4] = (far_even - far_odd) * (1.0f / 24);
  to[5] = w[TAPS - 1];
}

// G' v of one pair of channels; point i at values[i * apart].
template <int TAPS>
INLINE void weight_of(float* w, const float* values, long apart) {
  const float one = values[apart] * (-1.0f / 6), minus_one = values[2 * apart] * (-1.0f / 6);
  const float two = values[3 * apart] * (1.0f / 24), minus_two = values[4 * apart] * (1.0f / 24);
  const float sum = one + minus_one, difference = one - minus_one, far_sum = two + minus_two, far_difference = two - minus_two;
  w[0] = 0.25f * values[0] + sum + far_sum;
  w[1] = difference + 2.0f * far_difference;
  w[2] = sum + 4.0f * far_sum;
  if (TAPS == 5) {
    w[3] = difference + 8.0f * far_difference;
    w[4] = sum + 16.0f * far_sum;
  }
  w[TAPS - 1] += values[5 * apart];
}

// The weights at all points as right factors [depth, columns] of products: with inputs as columns if TRANSPOSED, else outputs.
template <int TAPS, bool TRANSPOSED>
void pack_at_points(float* to, Panels panels[POINTS], const Convolution& shape, const float* weight) {
  const long depth = TRANSPOSED ? shape.outputs : shape.inputs, columns = TRANSPOSED ? shape.inputs : shape.outputs;
  const long size = packed_size(depth, columns);
  for (int i = 0; i < POINTS; ++i) panels[i] = {to + i * size, depth * PANEL, PANEL};
  if (columns % PANEL) clear(to, POINTS * size);
  for (long o = 0; o < shape.outputs; ++o) {
    for (long c = 0; c < shape.inputs; ++c, weight += TAPS) {
      float values[POINTS];
      weight_at_points<TAPS>(values, weight);
      const long k = TRANSPOSED ? o : c, column = TRANSPOSED ? c : o;
      float* place = to + (column / PANEL * depth + k) * PANEL + column % PANEL;
      for (int i = 0; i < POINTS; ++i) place[i * size] = values[i];
    }
  }
}

// Sizes of one item's work.
template <int TAPS>
struct Windows {
  static constexpr long EACH = POINTS + 1 - TAPS;  // outputs of a window
  long count, rows, frames;                        // windows; their outputs; frames that they and the padding reach over

  explicit Windows(const Convolution& shape) {
    const long outputs = shape.pool ? shape.pooled() * shape.pool : shape.convolved();
    count = (outputs + EACH - 1) / EACH;
    rows = count * EACH;
    const long all = shape.frames + 2 * shape.padding, reached = rows + TAPS - 1;
    frames = all > reached ? all : reached;
  }
};

template <int TAPS>
void convolve_at_points(const Convolution& shape, const float* x, const float* weight, const float* bias, const int64_t* lengths,
                        float* y, uint8_t* codes) {
  const Windows<TAPS> windows(shape);
  const long inputs = shape.inputs, width = rounded_up(shape.outputs), given = (shape.frames + 2 * shape.padding) * inputs;
  Panels panels[POINTS];
  pack_at_points<TAPS, false>(scratch(0, POINTS * packed_size(inputs, shape.outputs)), panels, shape, weight);
  float* frames = scratch(1, POINTS * windows.count * inputs);
  float* products = scratch(2, POINTS * windows.count * width);
  float* convolved = scratch(3, windows.rows * width);
  float* padded = scratch(4, windows.frames * inputs);
  float* wide_bias = scratch(5, width);
  clear(wide_bias, width);
  copy(wide_bias, bias, shape.outputs);
  clear(padded + given, windows.frames * inputs - given);
  for (long item = 0; item < shape.batch; ++item) {
    pad(padded, x + item * shape.frames * inputs, shape, counting(lengths, item, shape.frames));
    for (long w = 0; w < windows.count; ++w)
      frames_at_points(frames + w * inputs, windows.count * inputs, padded + w * windows.EACH * inputs, inputs);
    for (int i = 0; i < POINTS; ++i)
      multiply<false>(windows.count, width, inputs, frames + i * windows.count * inputs, inputs, panels[i],
                      products + i * windows.count * width, width, Start::ZERO);
    for (long w = 0; w < windows.count; ++w)
      outputs_of<TAPS>(convolved + w * windows.EACH * width, products + w * width, windows.count * width, wide_bias, width);
    pool_item(shape, convolved, width, y, codes);
    y += shape.pooled() * shape.outputs;
    if (shape.pool) codes += shape.pooled() * shape.outputs;
  }
}

template <int TAPS>
void convolve_backward_at_points(const Convolution& shape, const float* dy, const uint8_t* codes, const float* x,
                                 const float* weight, const int64_t* lengths, float* dx, float* dweight, float* dbias) {
  const Windows<TAPS> windows(shape);
  const long inputs = shape.inputs, width = rounded_up(shape.outputs), given = (shape.frames + 2 * shape.padding) * inputs;
  const long products_size = inputs * width;
  Panels panels[POINTS];
  if (dx) pack_at_points<TAPS, true>(scratch(0, POINTS * packed_size(shape.outputs, inputs)), panels, shape, weight);
  float* frames = scratch(1, POINTS * windows.count * inputs);   // of x, and then of dx
  float* outputs = scratch(2, POINTS * windows.count * width);   // of dy
  float* spread = scratch(3, windows.rows * width);              // dy before pooling
  float* padded = scratch(4, windows.frames * inputs);           // x, and then dx
  float* sums = scratch(5, POINTS * products_size + width);      // of dweight, and dbias
  float* bias_sums = sums + POINTS * products_size;
  clear(sums, POINTS * products_size + width);
  clear(spread, windows.rows * width);
  for (long item = 0; item < shape.batch; ++item) {
    const long count = counting(lengths, item, shape.frames);
    pad(padded, x + item * shape.frames * inputs, shape, count);
    clear(padded + given, windows.frames * inputs - given);
    unpool_item(shape, dy, codes, width, spread, bias_sums);
    dy += shape.pooled() * shape.outputs;
    if (shape.pool) codes += shape.pooled() * shape.outputs;
    for (long w = 0; w < windows.count; ++w) {
      frames_at_points(frames + w * inputs, windows.count * inputs, padded + w * windows.EACH * inputs, inputs);
      outputs_at_points<TAPS>(outputs + w * width, windows.count * width, spread + w * windows.EACH * width, width);
    }
    for (int i = 0; i < POINTS; ++i)
      multiply<true>(inputs, width, windows.count, frames + i * windows.count * inputs, inputs,
                     {outputs + i * windows.count * width, PANEL, width}, sums + i * products_size, width, Start::SUM);
    if (!dx) continue;
    for (int i = 0; i < POINTS; ++i)
      multiply<false>(windows.count, inputs, shape.outputs, outputs + i * windows.count * width, width, panels[i],
                      frames + i * windows.count * inputs, inputs, Start::ZERO);
    clear(padded, windows.frames * inputs);
    for (long w = 0; w < windows.count; ++w)
      add_frames(padded + w * windows.EACH * inputs, frames + w * inputs, windows.count * inputs, inputs);
    copy(dx, padded + shape.padding * inputs, count * inputs);
    clear(dx + count * inputs, (shape.frames - count) * inputs);
    dx += shape.frames * inputs;
  }
  for (long o = 0; o < shape.outputs; ++o)
    for (long c = 0; c < inputs; ++c, dweight += TAPS) weight_of<TAPS>(dweight, sums + c * width + o, products_size);
  copy(dbias, bias_sums, shape.outputs);
}
