// Convolutions with 3 or 5 taps by Toom and Cook's interpolation, as Winograd's F(6, 3) and F(4, 5): a part of kernels_body.h.
//
// A window of 8 frames d gives 9 - taps outputs. As polynomials in time, outputs, weights and window are determined by their values
// at the eight points 0, 1, -1, 2, -2, 1/2, -1/2 and infinity, where a convolution is a product at each point:
//
//   y = A' [(G w) . (B' d)],     and with the same three matrices     dw = G' [(A dy) . (B' d)],    dx = B [(A dy) . (G w)]
//
// so 8 products replace 20 (5 taps) or 18 (3 taps). "Values" means values at the points: [point, window, channel]. A and G evaluate
// polynomials at the points. The divisors of the interpolation are in G, so B' has short fractions. Rounding errors are two to four
// times larger than in plain sums, and in dw four to six times. Ten points would need 5/6 of the products for 5 taps, with eight
// times the rounding error.

constexpr int POINTS = 8;
constexpr long ROWS_AT_ONCE = 48;  // minimum number of windows in a product: fewer make low tiles, and dweight's sums are
                                   // read and written for each product

constexpr int NARROW = LANES > 8 ? 8 : LANES;  // inputs are a multiple of this: with 16 lanes, the last vector may be half full

// Returns whether the saved products outweigh the conversion to the points and back.
bool fits_points(const Convolution& shape) {
  return (shape.taps == 3 || shape.taps == 5) && shape.inputs % NARROW == 0 && shape.inputs >= 16 && shape.outputs >= 16 &&
         shape.convolved() >= POINTS && shape.pooled() > 0;
}

// Evaluates a polynomial at the points. Values at 1/2 and -1/2 are scaled by 2^(COUNT - 1), so that all factors are integers.
template <int COUNT>
INLINE void at_points(Floats values[POINTS], const Floats* coefficients) {
  Floats even[3] = {coefficients[0], coefficients[0], coefficients[0] * float(1 << (COUNT - 1))};
  Floats odd[3] = {coefficients[1], coefficients[1] * 2.0f, coefficients[1] * float(1 << (COUNT - 2))};
#pragma GCC unroll 6
  for (int j = 2; j < COUNT; ++j) {
    Floats* sums = j % 2 ? odd : even;
    sums[0] += coefficients[j];
    sums[1] += coefficients[j] * float(1 << j);
    sums[2] += coefficients[j] * float(1 << (COUNT - 1 - j));
  }
  values[0] = coefficients[0];
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) values[2 * i + 1] = even[i] + odd[i], values[2 * i + 2] = even[i] - odd[i];
  values[POINTS - 1] = coefficients[COUNT - 1];
}

// The transposed matrix of at_points.
template <int COUNT>
INLINE void from_points(Floats* coefficients, const Floats values[POINTS]) {
  Floats sums[2][3];
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) {
    sums[0][i] = values[2 * i + 1] + values[2 * i + 2];
    sums[1][i] = values[2 * i + 1] - values[2 * i + 2];
  }
#pragma GCC unroll 6
  for (int j = 0; j < COUNT; ++j) {
    const Floats* of = sums[j % 2];
    coefficients[j] = of[0] + of[1] * float(1 << j) + of[2] * float(1 << (COUNT - 1 - j));
  }
  coefficients[0] += values[0];
  coefficients[COUNT - 1] += values[POINTS - 1];
}

constexpr float FACTORS[POINTS] = {1, -2.0f / 9, -2.0f / 9, 1.0f / 360, 1.0f / 360, 1.0f / 180, 1.0f / 180, 1};  // of G

// Computes B' d of a window for a vector of channels, with point i at to + i * apart.
template <typename Elements>
INLINE void window_at_points(Elements part, float* to, long apart, const float* frames, long channels) {
  Floats d[POINTS];
#pragma GCC unroll 8
  for (int t = 0; t < POINTS; ++t) d[t] = part.load(frames + t * channels);
  const Floats even = d[2] - 4.25f * d[4] + d[6], odd = d[1] - 4.25f * d[3] + d[5];
  const Floats two_even = d[2] - 5.0f * d[4] + 4.0f * d[6], two_odd = d[1] - 5.0f * d[3] + 4.0f * d[5];
  const Floats half_even = 4.0f * d[2] - 5.0f * d[4] + d[6], half_odd = 4.0f * d[1] - 5.0f * d[3] + d[5];
  part.store(to, d[0] - d[6] + 5.25f * (d[4] - d[2]));
  part.store(to + apart, even + odd);
  part.store(to + 2 * apart, even - odd);
  part.store(to + 3 * apart, two_even + 2.0f * two_odd);
  part.store(to + 4 * apart, two_even - 2.0f * two_odd);
  part.store(to + 5 * apart, half_even + 0.5f * half_odd);
  part.store(to + 6 * apart, half_even - 0.5f * half_odd);
  part.store(to + 7 * apart, d[7] - d[1] + 5.25f * (d[3] - d[5]));
}

INLINE void frames_at_points(float* to, long apart, const float* frames, long channels) {
  for_vectors(channels, [&](long c, auto part) ALWAYS { window_at_points(part, to + c, apart, frames + c, channels); });
}

// Computes B z, the frames of a window, for a vector of channels. It adds to the first SHARED frames, because the previous window
// contributes to them, too.
template <int SHARED, typename Elements>
INLINE void add_window(Elements part, float* dx, const float* values, long apart, long channels) {
  Floats z[POINTS];
#pragma GCC unroll 8
  for (int i = 0; i < POINTS; ++i) z[i] = part.load(values + i * apart);
  const Floats even = z[1] + z[2], odd = z[1] - z[2], two_even = z[3] + z[4], two_odd = 2.0f * (z[3] - z[4]);
  const Floats half_even = z[5] + z[6], half_odd = 0.5f * (z[5] - z[6]);
  const Floats d[POINTS] = {z[0],
                            odd + two_odd + 4.0f * half_odd - z[7],
                            even + two_even + 4.0f * half_even - 5.25f * z[0],
                            5.25f * z[7] - 4.25f * odd - 5.0f * (two_odd + half_odd),
                            5.25f * z[0] - 4.25f * even - 5.0f * (two_even + half_even),
                            odd + 4.0f * two_odd + half_odd - 5.25f * z[7],
                            even + 4.0f * two_even + half_even - z[0],
                            z[7]};
#pragma GCC unroll 8
  for (int t = 0; t < POINTS; ++t, dx += channels) part.store(dx, t < SHARED ? part.load(dx) + d[t] : d[t]);
}

template <int SHARED>
INLINE void add_frames(float* dx, const float* values, long apart, long channels) {
  for_vectors(channels, [&](long c, auto part) ALWAYS { add_window<SHARED>(part, dx + c, values + c, apart, channels); });
}

// Computes A' m + bias, the outputs of windows.
template <int EACH>
void outputs_of(long windows, float* y, const float* values, long apart, const float* bias, long channels) {
  for (; windows > 0; --windows, y += (EACH - 1) * channels) {
    for (long c = 0; c < channels; c += LANES, y += LANES, values += LANES) {
      Floats m[POINTS], outputs[EACH];
#pragma GCC unroll 8
      for (int i = 0; i < POINTS; ++i) m[i] = load(values + i * apart);
      from_points<EACH>(outputs, m);
#pragma GCC unroll 6
      for (int t = 0; t < EACH; ++t) store(y + t * channels, outputs[t] + load(bias + c));
    }
  }
}

// Computes A dy of windows.
template <int EACH>
void outputs_at_points(long windows, float* to, long apart, const float* dy, long channels) {
  for (; windows > 0; --windows, dy += (EACH - 1) * channels) {
    for (long c = 0; c < channels; c += LANES, dy += LANES, to += LANES) {
      Floats values[POINTS], outputs[EACH];
#pragma GCC unroll 6
      for (int t = 0; t < EACH; ++t) outputs[t] = load(dy + t * channels);
      at_points<EACH>(values, outputs);
#pragma GCC unroll 8
      for (int i = 0; i < POINTS; ++i) store(to + i * apart, values[i]);
    }
  }
}

// Computes G w, the weights at all points, as right factors [depth, columns]. Columns are inputs if TRANSPOSED, else outputs.
template <int TAPS, bool TRANSPOSED>
void pack_at_points(Panels panels[POINTS], const Convolution& shape, const float* weight) {
  const long inputs = shape.inputs, width = rounded_up(shape.outputs);
  const long depth = TRANSPOSED ? width : inputs, columns = TRANSPOSED ? inputs : width, size = packed_size(depth, columns);
  float* to = scratch(0, POINTS * size);
  for (int i = 0; i < POINTS; ++i) panels[i] = {to + i * size, depth * PANEL, PANEL};
  if (columns % PANEL) clear(to, POINTS * size);
  float* taps = scratch(1, inputs * TAPS * width);
  pack(taps, weight, inputs * TAPS, shape.outputs, 1, inputs * TAPS);
  float block[POINTS * LANES * LANES] = {};  // [point, input, output]
  for (long o = 0; o < width; o += LANES) {
    const float* from = taps + o / PANEL * inputs * TAPS * PANEL + o % PANEL;
    for (long c = 0; c < inputs; ++c, from += TAPS * PANEL) {
      Floats w[TAPS], values[POINTS];
#pragma GCC unroll 5
      for (int k = 0; k < TAPS; ++k) w[k] = load(from + k * PANEL);
      at_points<TAPS>(values, w);
      float* place = TRANSPOSED ? block + c % LANES * LANES : to + (o / PANEL * depth + c) * PANEL + o % PANEL;
#pragma GCC unroll 8
      for (int i = 0; i < POINTS; ++i) store(place + i * (TRANSPOSED ? LANES * LANES : size), FACTORS[i] * values[i]);
      if (!TRANSPOSED || ((c + 1) % LANES && c + 1 < inputs)) continue;
      const long first = c / LANES * LANES;
      for (int i = 0; i < POINTS; ++i)
        transpose(to + i * size + (first / PANEL * depth + o) * PANEL + first % PANEL, PANEL, block + i * LANES * LANES, LANES);
    }
  }
}

// Computes G' v, dweight from its values at the points, [point, input, output] with outputs padded to "width".
template <int TAPS>
void weight_of(const Convolution& shape, float* dweight, const float* values, long width) {
  const long depth = shape.inputs * TAPS;
  float* rows = scratch(0, depth * LANES);
  for (long o = 0; o < shape.outputs; o += LANES, values += LANES, dweight += LANES * depth) {
    for (long c = 0; c < shape.inputs; ++c) {
      Floats v[POINTS], w[TAPS];
#pragma GCC unroll 8
      for (int i = 0; i < POINTS; ++i) v[i] = FACTORS[i] * load(values + (i * shape.inputs + c) * width);
      from_points<TAPS>(w, v);
#pragma GCC unroll 5
      for (int k = 0; k < TAPS; ++k) store(rows + (c * TAPS + k) * LANES, w[k]);
    }
    turn(dweight, depth, rows, LANES, depth, least(LANES, shape.outputs - o));
  }
}

// Sizes of an item's work, and the number of items at once. A window's result does not depend on the other windows.
template <int TAPS>
struct Windows {
  static constexpr int EACH = POINTS + 1 - TAPS;  // outputs of a window
  long count, rows, items;                        // windows; their outputs; items at once

  explicit Windows(const Convolution& shape) {
    const long outputs = shape.pool ? shape.pooled() * shape.pool : shape.convolved();
    count = (outputs + EACH - 1) / EACH;
    rows = count * EACH;
    items = least(shape.batch, count < ROWS_AT_ONCE ? (ROWS_AT_ONCE + count - 1) / count : 1);
  }

  // Stride between the points' values. It is not a power of two, because all points would then share few sets of the cache.
  long apart(long channels) const { return items * count * channels + PANEL; }
};

// Returns whether the window starting at frame "first" has valid frames only.
INLINE bool lies_within(long first, long counting) { return first >= 0 && first + POINTS <= counting; }

// Returns the window in place, or a copy in "line" with zeros for missing frames.
INLINE const float* window_of(const float* x, long first, long counting, long channels, float* line) {
  if (lies_within(first, counting)) return x + first * channels;
  for (long t = 0; t < POINTS; ++t) {
    if (first + t >= 0 && first + t < counting)
      copy(line + t * channels, x + (first + t) * channels, channels);
    else
      clear(line + t * channels, channels);
  }
  return line;
}

// Computes B' d of all windows of an item.
template <int TAPS>
void item_at_points(float* to, long apart, const Convolution& shape, const Windows<TAPS>& windows, const float* x, long counting,
                    float* line) {
  long first = -shape.padding;
  for (long w = 0; w < windows.count; ++w, first += Windows<TAPS>::EACH, to += shape.inputs)
    frames_at_points(to, apart, window_of(x, first, counting, shape.inputs, line), shape.inputs);
}

// Inverse of item_at_points for gradients: sums the windows' contributions to an item's dx.
template <int TAPS>
void item_from_points(float* dx, const float* values, long apart, const Convolution& shape, const Windows<TAPS>& windows,
                      long counting, float* line) {
  constexpr int SHARED = TAPS - 1;  // overlap of adjacent windows in frames
  const long inputs = shape.inputs;
  long first = -shape.padding;
  clear(dx, least(SHARED, shape.frames) * inputs);  // the first window adds to it
  for (long w = 0; w < windows.count; ++w, first += Windows<TAPS>::EACH, values += inputs) {
    if (lies_within(first, counting)) {
      add_frames<SHARED>(dx + first * inputs, values, apart, inputs);
      continue;
    }
    window_of(dx, first, counting, inputs, line);
    add_frames<SHARED>(line, values, apart, inputs);
    for (long t = 0; t < POINTS; ++t)
      if (first + t >= 0 && first + t < counting) copy(dx + (first + t) * inputs, line + t * inputs, inputs);
  }
  const long reached = least(first + SHARED, counting);
  clear(dx + reached * inputs, (shape.frames - reached) * inputs);
}

template <int TAPS>
void convolve_at_points(const Convolution& shape, const float* x, const float* weight, const float* bias, const int64_t* lengths,
                        float* y, uint8_t* codes) {
  const Windows<TAPS> windows(shape);
  const long inputs = shape.inputs, width = rounded_up(shape.outputs);
  const long in_apart = windows.apart(inputs), out_apart = windows.apart(width);
  Panels panels[POINTS];
  pack_at_points<TAPS, false>(panels, shape, weight);
  float* frames = scratch(1, POINTS * in_apart);
  float* products = scratch(2, POINTS * out_apart);
  float* convolved = scratch(3, windows.rows * width);
  float* line = scratch(4, POINTS * inputs);
  float* wide_bias = scratch(5, width);
  clear(wide_bias, width);
  copy(wide_bias, bias, shape.outputs);
  for (long first = 0; first < shape.batch; first += windows.items) {
    const long items = least(windows.items, shape.batch - first);
    for (long item = 0; item < items; ++item, x += shape.frames * inputs)
      item_at_points(frames + item * windows.count * inputs, in_apart, shape, windows, x,
                     counting(lengths, first + item, shape.frames), line);
    for (int i = 0; i < POINTS; ++i)
      multiply<false>(items * windows.count, width, inputs, frames + i * in_apart, inputs, panels[i], products + i * out_apart,
                      width, Start::ZERO);
    for (long item = 0; item < items; ++item) {
      outputs_of<Windows<TAPS>::EACH>(windows.count, convolved, products + item * windows.count * width, out_apart, wide_bias,
                                      width);
      pool_item(shape, convolved, width, y, codes);
      y += shape.pooled() * shape.outputs;
      if (shape.pool) codes += shape.pooled() * shape.outputs;
    }
  }
}

template <int TAPS>
void convolve_backward_at_points(const Convolution& shape, const float* dy, const uint8_t* codes, const float* x,
                                 const float* weight, const int64_t* lengths, float* dx, float* dweight, float* dbias) {
  const Windows<TAPS> windows(shape);
  const long inputs = shape.inputs, width = rounded_up(shape.outputs), products_size = inputs * width;
  const long in_apart = windows.apart(inputs), out_apart = windows.apart(width);
  Panels panels[POINTS];
  if (dx) pack_at_points<TAPS, true>(panels, shape, weight);
  float* frames = scratch(1, POINTS * in_apart);     // of x, and then of dx
  float* outputs = scratch(2, POINTS * out_apart);   // of dy
  float* spread = scratch(3, windows.rows * width);  // dy before pooling
  float* line = scratch(4, POINTS * inputs);
  float* sums = scratch(5, POINTS * products_size + width);  // of dweight, and dbias
  float* bias_sums = sums + POINTS * products_size;
  clear(sums, POINTS * products_size + width);
  clear(spread, windows.rows * width);
  for (long first = 0; first < shape.batch; first += windows.items) {
    const long items = least(windows.items, shape.batch - first);
    for (long item = 0; item < items; ++item, x += shape.frames * inputs) {
      unpool_item(shape, dy, codes, width, spread, bias_sums);
      dy += shape.pooled() * shape.outputs;
      if (shape.pool) codes += shape.pooled() * shape.outputs;
      outputs_at_points<Windows<TAPS>::EACH>(windows.count, outputs + item * windows.count * width, out_apart, spread, width);
      item_at_points(frames + item * windows.count * inputs, in_apart, shape, windows, x,
                     counting(lengths, first + item, shape.frames), line);
    }
    for (int i = 0; i < POINTS; ++i)
      multiply<true>(inputs, width, items * windows.count, frames + i * in_apart, inputs, {outputs + i * out_apart, PANEL, width},
                     sums + i * products_size, width, Start::SUM);
    if (!dx) continue;
    for (int i = 0; i < POINTS; ++i)
      multiply<false>(items * windows.count, inputs, shape.outputs, outputs + i * out_apart, width, panels[i],
                      frames + i * in_apart, inputs, Start::ZERO);
    for (long item = 0; item < items; ++item, dx += shape.frames * inputs)
      item_from_points(dx, frames + item * windows.count * inputs, in_apart, shape, windows,
                       counting(lengths, first + item, shape.frames), line);
  }
  weight_of<TAPS>(shape, dweight, sums, width);
  copy(dbias, bias_sums, shape.outputs);
}
