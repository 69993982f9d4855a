// 2-d convolution, included by kernels_body.h. Channels come last, so a row of the kernel covers contiguous elements ("run": taps
// of the row times inputs). A window has "runs" of them at the stride "apart". Products read windows in place; only padded images
// are copied, item by item.

struct Window {
  long runs, run, apart;
  long size() const { return runs * run; }
};

// Positions of a result ("to") and their windows ("from"), with strides of items, rows and columns.
struct Grid {
  long items, rows, columns;
  const float* from;
  long from_item, from_row, from_column;
  float* to;
  long to_item, to_row, to_column;

  // Merges rows into a single row, and items, if their strides allow it.
  void merge() {
    if (from_row == columns * from_column && to_row == columns * to_column) columns *= rows, rows = 1;
    if (rows == 1 && from_item == columns * from_column && to_item == columns * to_column) columns *= items, items = 1;
  }
};

// Stores HALVES vectors, or their first "columns" elements if the result has fewer.
template <int HALVES>
INLINE void store_some(float* to, const Floats* sums, long columns) {
  if (columns >= HALVES * LANES) {
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) store(to + h * LANES, sums[h]);
  } else {
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) Part(within_vector(columns - h * LANES)).store(to + h * LANES, sums[h]);
  }
}

constexpr long AT_ONCE = 192;  // positions to compute with a panel before the next panel

// Tile with rows at arbitrary addresses: to[r] = bias + sum over k of window r [k] * b[k], for HALVES times LANES columns.
template <int ROWS, int HALVES>
INLINE void window_tile(Window window, const float* const* from, const float* b, float* const* to, long column, long columns,
                        const float* bias) {
  Floats sums[ROWS][HALVES];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) sums[r][h] = bias ? load(bias + h * LANES) : Floats{};
  const float* a[ROWS];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) a[r] = from[r];
  for (long i = 0; i < window.runs; ++i) {
#pragma GCC unroll 2
    for (long k = 0; k < window.run; ++k, b += PANEL) {
      Floats right[HALVES];
#pragma GCC unroll 2
      for (int h = 0; h < HALVES; ++h) right[h] = load(b + h * LANES);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) {
        const Floats factor = all(a[r][k]);
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; ++h) sums[r][h] += factor * right[h];
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) a[r] += window.apart;
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) store_some<HALVES>(to[r] + column, sums[r], columns);
}

template <int HALVES>
void window_tiles(long count, Window window, const float* const* from, const float* b, float* const* to, long column, long columns,
                  const float* bias) {
  const long tiles = (count + TILE - 1) / TILE, height = count / tiles, higher = count % tiles;
  for (long index = 0; index < tiles; ++index) {
    const long rows = height + (index < higher);
    switch (rows) {
      case 6: window_tile<6, HALVES>(window, from, b, to, column, columns, bias); break;
      case 5: window_tile<5, HALVES>(window, from, b, to, column, columns, bias); break;
      case 4: window_tile<4, HALVES>(window, from, b, to, column, columns, bias); break;
      case 3: window_tile<3, HALVES>(window, from, b, to, column, columns, bias); break;
      case 2: window_tile<2, HALVES>(window, from, b, to, column, columns, bias); break;
      default: window_tile<1, HALVES>(window, from, b, to, column, columns, bias);
    }
    from += rows, to += rows;
  }
}

// Multiplies all windows by the matrix in "packed" (panels of [window.size(), PANEL]) with "outputs" columns.
void correlate(const Grid& positions, Window window, const float* packed, long outputs, const float* bias) {
  Grid grid = positions;
  grid.merge();
  const float* from[AT_ONCE];
  float* to[AT_ONCE];
  const long all = grid.items * grid.rows * grid.columns;
  for (long done = 0, item = 0, row = 0, column = 0; done < all;) {
    const long count = least(AT_ONCE, all - done);
    for (long p = 0; p < count; ++p) {
      from[p] = grid.from + item * grid.from_item + row * grid.from_row + column * grid.from_column;
      to[p] = grid.to + item * grid.to_item + row * grid.to_row + column * grid.to_column;
      if (++column == grid.columns) {
        column = 0;
        if (++row == grid.rows) row = 0, ++item;
      }
    }
    for (long o = 0; o < outputs; o += PANEL) {
      const float* b = packed + o * window.size();
      if (outputs - o > LANES)
        window_tiles<2>(count, window, from, b, to, o, outputs - o, bias ? bias + o : nullptr);
      else
        window_tiles<1>(count, window, from, b, to, o, outputs - o, bias ? bias + o : nullptr);
    }
    done += count;
  }
}

constexpr int TALL = 8;  // rows of a product in a tile with a single vector of columns

// Tile of adjacent positions. "offsets" are the elements of a window, relative to its start.
template <int ROWS, int HALVES>
INLINE void row_tile(const float* from, long from_column, const long* offsets, long depth, const float* b, float* to,
                     long to_column, long columns, const float* bias) {
  Floats sums[ROWS][HALVES];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) sums[r][h] = bias ? load(bias + h * LANES) : Floats{};
  for (long k = 0; k < depth; ++k, b += PANEL) {
    Floats right[HALVES];
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) right[h] = load(b + h * LANES);
    const float* a = from + offsets[k];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Floats factor = all(a[r * from_column]);
#pragma GCC unroll 2
      for (int h = 0; h < HALVES; ++h) sums[r][h] += factor * right[h];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r, to += to_column) store_some<HALVES>(to, sums[r], columns);
}

template <int HALVES>
void row_tiles(long count, const float* from, long from_column, const long* offsets, long depth, const float* b, float* to,
               long to_column, long columns, const float* bias) {
  constexpr long most = HALVES == 1 ? TALL : TILE;
  const long tiles = (count + most - 1) / most, height = count / tiles, higher = count % tiles;
  for (long index = 0; index < tiles; ++index) {
    const long rows = height + (index < higher);
    switch (rows) {
      case 8: row_tile<HALVES == 1 ? 8 : 1, HALVES>(from, from_column, offsets, depth, b, to, to_column, columns, bias); break;
      case 7: row_tile<HALVES == 1 ? 7 : 1, HALVES>(from, from_column, offsets, depth, b, to, to_column, columns, bias); break;
      case 6: row_tile<6, HALVES>(from, from_column, offsets, depth, b, to, to_column, columns, bias); break;
      case 5: row_tile<5, HALVES>(from, from_column, offsets, depth, b, to, to_column, columns, bias); break;
      case 4: row_tile<4, HALVES>(from, from_column, offsets, depth, b, to, to_column, columns, bias); break;
      case 3: row_tile<3, HALVES>(from, from_column, offsets, depth, b, to, to_column, columns, bias); break;
      case 2: row_tile<2, HALVES>(from, from_column, offsets, depth, b, to, to_column, columns, bias); break;
      default: row_tile<1, HALVES>(from, from_column, offsets, depth, b, to, to_column, columns, bias);
    }
    from += rows * from_column, to += rows * to_column;
  }
}

// Returns the offsets of a window's elements from its start.
const long* offsets_of(Window window) {
  long* offsets = reinterpret_cast<long*>(scratch(3, window.size() * sizeof(long) / sizeof(float)));
  for (long i = 0, n = 0; i < window.runs; ++i)
    for (long k = 0; k < window.run; ++k) offsets[n++] = i * window.apart + k;
  return offsets;
}

// Variant of correlate that proceeds row by row, for windows with short runs and results with few columns.
void correlate_rows(const Grid& grid, Window window, const float* packed, long outputs, const float* bias) {
  const long* offsets = offsets_of(window);
  const long depth = window.size();
  for (long item = 0; item < grid.items; ++item)
    for (long row = 0; row < grid.rows; ++row) {
      const float* from = grid.from + item * grid.from_item + row * grid.from_row;
      float* to = grid.to + item * grid.to_item + row * grid.to_row;
      for (long o = 0; o < outputs; o += PANEL)
        (outputs - o > LANES ? row_tiles<2> : row_tiles<1>)(grid.columns, from, grid.from_column, offsets, depth,
                                                            packed + o * depth, to + o, grid.to_column, outputs - o,
                                                            bias ? bias + o : nullptr);
    }
}

// Adjacent positions: starts of their windows ("from") and gradients ("to").
struct Line {
  const float *from, *to;
  long count;
};

// sums[r, j] = (if "begin") or += the sum over positions of window [r] * gradient [j], for ROWS elements of the window at
// "offsets", and HALVES times LANES outputs. The gradients b of all positions are contiguous.
template <int ROWS, int HALVES>
INLINE void gradient_tile(const Line* lines, long count, const long* offsets, long from_column, const float* b, float* to,
                          bool begin) {
  Floats sums[ROWS][HALVES];
  long places[ROWS];
#pragma GCC unroll 9
  for (int r = 0; r < ROWS; ++r) places[r] = offsets[r];
#pragma GCC unroll 9
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) sums[r][h] = Floats{};
  for (long line = 0; line < count; ++line) {
    const float* a = lines[line].from;
#pragma GCC unroll 2
    for (long p = lines[line].count; p > 0; --p, a += from_column, b += PANEL) {
      Floats right[HALVES];
#pragma GCC unroll 2
      for (int h = 0; h < HALVES; ++h) right[h] = load(b + h * LANES);
#pragma GCC unroll 9
      for (int r = 0; r < ROWS; ++r) {
        const Floats factor = all(a[places[r]]);
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; ++h) sums[r][h] += factor * right[h];
      }
    }
  }
#pragma GCC unroll 9
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) {
      float* place = to + r * PANEL + h * LANES;  // partial sums are more precise than a long sum
      store(place, begin ? sums[r][h] : load(place) + sums[r][h]);
    }
}

// Packs the elements of windows for gradient_tiles: for each tile of elements, all positions in turn.
void pack_windows(const Line* lines, long count, const long* offsets, long depth, long from_column, float* packed) {
  const long tiles = (depth + TILE - 1) / TILE, height = depth / tiles, higher = depth % tiles;
  for (long index = 0; index < tiles; ++index) {
    const long rows = height + (index < higher);
    const bool whole = rows == TILE && offsets[rows - 1] == offsets[0] + rows - 1;
    for (long line = 0; line < count; ++line) {
      const float* from = lines[line].from;
      for (long p = lines[line].count; p > 0; --p, from += from_column, packed += rows)
        if (whole)
          copy(packed, from + offsets[0], TILE);
        else
          for (long r = 0; r < rows; ++r) packed[r] = from[offsets[r]];
    }
    offsets += rows;
  }
}

constexpr long SIDE_BY_SIDE[TILE] = {0, 1, 2, 3, 4, 5};

// Windows are read through the lines, or from "packed" with the given number of positions if it is not null.
template <int HALVES>
void gradient_tiles(const Line* lines, long count, const long* offsets, long depth, long from_column, const float* packed,
                    long positions, const float* b, float* to, bool begin) {
  const long most = HALVES == 1 && !packed ? TALL + 1 : TILE;
  const long tiles = (depth + most - 1) / most, height = depth / tiles, higher = depth % tiles;
  for (long index = 0; index < tiles; ++index) {
    const long rows = height + (index < higher);
    const Line line{packed, nullptr, positions};
    if (packed) lines = &line, count = 1, from_column = rows;
    const long* places = packed ? SIDE_BY_SIDE : offsets;
    switch (rows) {
      case 9: gradient_tile<HALVES == 1 ? 9 : 1, HALVES>(lines, count, places, from_column, b, to, begin); break;
      case 8: gradient_tile<HALVES == 1 ? 8 : 1, HALVES>(lines, count, places, from_column, b, to, begin); break;
      case 7: gradient_tile<HALVES == 1 ? 7 : 1, HALVES>(lines, count, places, from_column, b, to, begin); break;
      case 6: gradient_tile<6, HALVES>(lines, count, places, from_column, b, to, begin); break;
      case 5: gradient_tile<5, HALVES>(lines, count, places, from_column, b, to, begin); break;
      case 4: gradient_tile<4, HALVES>(lines, count, places, from_column, b, to, begin); break;
      case 3: gradient_tile<3, HALVES>(lines, count, places, from_column, b, to, begin); break;
      case 2: gradient_tile<2, HALVES>(lines, count, places, from_column, b, to, begin); break;
      default: gradient_tile<1, HALVES>(lines, count, places, from_column, b, to, begin);
    }
    offsets += rows, to += rows * PANEL;
    if (packed) packed += rows * positions;
  }
}

// Packs the gradients of HALVES vectors of outputs by position, with 0 for outputs that the last vector lacks, and adds their sum to
// bias_sums.
template <int HALVES, typename Elements>
void pack_gradients(const Line* lines, long count, long to_column, long output, Elements last, float* packed, float* bias_sums) {
  constexpr long rest = (HALVES - 1) * LANES;
  Floats sums[2] = {};
  for (long line = 0; line < count; ++line) {
    const float* from = lines[line].to + output;
    for (long p = lines[line].count; p > 0; --p, from += to_column, packed += PANEL) {
      if (HALVES == 2) {
        store(packed, load(from));
        sums[0] += load(from);
      }
      const Floats gradient = last.load(from + rest);
      store(packed + rest, gradient);
      sums[1] += gradient;
    }
  }
  if (HALVES == 2) store(bias_sums, load(bias_sums) + sums[0]);
  store(bias_sums + rest, load(bias_sums + rest) + sums[1]);
}

// Windows are packed for their gradient if the stride between positions is at least FAR and outputs are at least MANY, PACKED
// elements at a time. Each panel of outputs reads the windows again, and with a large stride they compete for few sets of the
// caches. With fewer panels, packing takes longer than it saves.
constexpr long FAR = 64, MANY = 128, PACKED = 16 * TILE;

// Panels [window.size(), PANEL] of sums = (if "begin") or += the transposed windows times the gradients at grid.to. Adds the
// gradients to bias_sums.
void correlate_backward(Grid grid, Window window, long outputs, float* sums, bool begin, float* bias_sums) {
  grid.merge();
  Line lines[AT_ONCE];
  const long* offsets = offsets_of(window);
  const long rows = grid.items * grid.rows, depth = window.size();
  const bool far = grid.from_column >= FAR && outputs >= MANY;
  const long block = far ? PACKED : depth;
  float *packed = scratch(4, AT_ONCE * rounded_up(outputs)), *windows = far ? scratch(0, AT_ONCE * block) : nullptr;
  for (long row = 0, column = 0; row < rows; begin = false) {
    long count = 0, positions = 0;
    while (row < rows && positions < AT_ONCE) {
      const long item = row / grid.rows, r = row % grid.rows, length = least(AT_ONCE - positions, grid.columns - column);
      lines[count++] = {grid.from + item * grid.from_item + r * grid.from_row + column * grid.from_column,
                        grid.to + item * grid.to_item + r * grid.to_row + column * grid.to_column, length};
      positions += length, column += length;
      if (column == grid.columns) column = 0, ++row;
    }
    for (long o = 0; o < outputs; o += PANEL) {
      float *to = packed + o * positions, *bias = bias_sums + o;
      const long left = outputs - o;
      if (left >= PANEL)
        pack_gradients<2>(lines, count, grid.to_column, o, Whole{}, to, bias);
      else if (left > LANES)
        pack_gradients<2>(lines, count, grid.to_column, o, Part(left - LANES), to, bias);
      else
        pack_gradients<1>(lines, count, grid.to_column, o, Part(left), to, bias);
    }
    for (long first = 0; first < depth; first += block) {
      const long size = least(block, depth - first);
      if (far) pack_windows(lines, count, offsets + first, size, grid.from_column, windows);
      for (long o = 0; o < outputs; o += PANEL)
        (outputs - o > LANES ? gradient_tiles<2> : gradient_tiles<1>)(
            lines, count, offsets + first, size, grid.from_column, windows, positions, packed + o * positions,
            sums + o * depth + first * PANEL, begin);
    }
  }
}

// Copies an image [rows, columns, channels] with zeros around it.
void surround(float* to, const float* from, long rows, long columns, long channels, long top, long left, long bottom, long right) {
  const long row = (left + columns + right) * channels;
  const long line = columns * channels;
  clear(to, top * row + left * channels);
  to += top * row + left * channels;
  for (long r = 1; r < rows; ++r, to += row, from += line) {
    copy(to, from, line);
    for (long i = line; i < row; ++i) to[i] = 0.0f;  // on the right, and on the left of the next row
  }
  copy(to, from, line);
  clear(to + line, right * channels + bottom * row);
}

// Layout of a convolution's windows in memory, for several items at a time.
struct Source {
  const Convolution2d& s;
  bool copied;
  long rows, columns;     // including padding
  Window window;

  explicit Source(const Convolution2d& shape)
      : s(shape),
        copied(s.top || s.left || s.bottom || s.right),
        rows(s.rows + s.top + s.bottom),
        columns(s.columns + s.left + s.right),
        window{s.kernel_rows, s.kernel_columns * s.inputs, columns * s.inputs} {}

  long item() const { return rows * columns * s.inputs; }
  long at_once() const {
    const long positions = s.out_rows() * s.out_columns();
    return least(s.batch, positions < AT_ONCE ? (AT_ONCE + positions - 1) / positions : 1);
  }

  // Returns a grid over "items" items, starting with "first". The caller sets "to".
  Grid grid(const float* x, long first, long items) const {
    x += first * s.rows * s.columns * s.inputs;
    if (copied) {
      float* padded = scratch(2, at_once() * item());
      for (long i = 0; i < items; ++i, x += s.rows * s.columns * s.inputs)
        surround(padded + i * item(), x, s.rows, s.columns, s.inputs, s.top, s.left, s.bottom, s.right);
      x = padded;
    }
    return {items,
            s.out_rows(),
            s.out_columns(),
            x,
            item(),
            s.row_stride * columns * s.inputs,
            s.column_stride * s.inputs,
            nullptr,
            s.out_rows() * s.out_columns() * s.outputs,
            s.out_columns() * s.outputs,
            s.outputs};
  }
};

// Packs weight [outputs, inputs, kernel_rows, kernel_columns] into panels: rows (kernel row, kernel column, input), columns
// outputs.
void pack_outputs(const Convolution2d& s, const float* weight, float* packed) {
  const long taps = s.kernel_rows * s.kernel_columns, depth = taps * s.inputs;
  for (long first = 0; first < s.outputs; first += PANEL, packed += depth * PANEL) {
    const long width = least(s.outputs - first, PANEL);
    if (width < PANEL) clear(packed, depth * PANEL);
    for (long c = 0; c < s.inputs; ++c)
      for (long k = 0; k < taps; ++k)
        for (long o = 0; o < width; ++o)
          packed[(k * s.inputs + c) * PANEL + o] = weight[((first + o) * s.inputs + c) * taps + k];
  }
}

// Inverse of pack_outputs. Taps are contiguous in the weight, so rows of some inputs are reordered and then transposed.
void unpack_outputs(const Convolution2d& s, const float* packed, float* weight) {
  const long taps = s.kernel_rows * s.kernel_columns, depth = taps * s.inputs;
  float* rows = scratch(0, LANES * taps * PANEL);
  for (long first = 0; first < s.outputs; first += PANEL, packed += depth * PANEL)
    for (long c = 0; c < s.inputs; c += LANES) {
      const long inputs = least(s.inputs - c, LANES), count = inputs * taps, width = least(s.outputs - first, PANEL);
      for (long k = 0; k < taps; ++k)
        for (long n = 0; n < inputs; ++n) copy(rows + (n * taps + k) * PANEL, packed + (k * s.inputs + c + n) * PANEL, PANEL);
      float* to = weight + first * depth + c * taps;
      const long whole = count / LANES * LANES, blocks = width / LANES * LANES;
      for (long o = 0; o < blocks; o += LANES)
        for (long i = 0; i < whole; i += LANES) transpose(to + o * depth + i, depth, rows + i * PANEL + o, PANEL);
      for (long o = 0; o < width; ++o)
        for (long i = o < blocks ? whole : 0; i < count; ++i) to[o * depth + i] = rows[i * PANEL + o];
    }
}

// The kernel's taps at a phase of the stride, from last to first: position = tap - stride * n.
struct Phase {
  long first, taps, before;  // the last tap; the number of taps; zeros before the first position

  Phase(long phase, long kernel, long stride, long padding) {
    const long least_tap = (phase + padding) % stride;
    taps = least_tap < kernel ? (kernel - least_tap + stride - 1) / stride : 0;
    first = least_tap + stride * (taps - 1);
    before = taps - 1 - (phase + padding - least_tap) / stride;
  }
};

// Packs panels with rows (kernel row, kernel column, output), taps from last to first of a phase, and columns inputs.
void pack_inputs(const Convolution2d& s, Phase r, Phase c, const float* weight, float* packed) {
  const long taps = s.kernel_rows * s.kernel_columns, depth = r.taps * c.taps * s.outputs;
  for (long first = 0; first < s.inputs; first += PANEL, packed += depth * PANEL) {
    const long width = least(s.inputs - first, PANEL);
    if (width < PANEL) clear(packed, depth * PANEL);
    float* row = packed;
    for (long i = 0; i < r.taps; ++i)
      for (long j = 0; j < c.taps; ++j) {
        const float* tap = weight + (r.first - i * s.row_stride) * s.kernel_columns + c.first - j * s.column_stride + first * taps;
        for (long o = 0; o < s.outputs; ++o, row += PANEL)
          for (long n = 0; n < width; ++n) row[n] = tap[(o * s.inputs + n) * taps];
      }
  }
}

void convolve_2d(const Convolution2d& s, const float* x, const float* weight, const float* bias, float* y) {
  const Source source(s);
  float* packed = scratch(0, source.window.size() * rounded_up(s.outputs));
  pack_outputs(s, weight, packed);
  float* wide_bias = nullptr;
  if (bias) {
    wide_bias = scratch(4, rounded_up(s.outputs));
    clear(wide_bias, rounded_up(s.outputs));
    copy(wide_bias, bias, s.outputs);
  }
  for (long first = 0, step = source.at_once(); first < s.batch; first += step) {
    Grid grid = source.grid(x, first, least(step, s.batch - first));
    grid.to = y + first * grid.to_item;
    const bool by_rows = source.window.run < TILE || s.outputs <= LANES;
    (by_rows ? correlate_rows : correlate)(grid, source.window, packed, s.outputs, wide_bias);
  }
}

void gradient_of_inputs(const Convolution2d& s, const float* dy, const float* weight, float* dx) {
  const long out_rows = s.out_rows(), out_columns = s.out_columns();
  long top = 0, left = 0, bottom = 0, right = 0;  // padding of dy for all phases
  bool hole = false;                              // whether some positions are outside all windows
  for (long i = 0; i < s.row_stride; ++i) {
    const Phase r(i, s.kernel_rows, s.row_stride, s.top);
    const long last = (s.rows - 1 - i) / s.row_stride - r.before + r.taps - 1;
    top = r.before > top ? r.before : top;
    bottom = last - out_rows + 1 > bottom ? last - out_rows + 1 : bottom;
    hole |= !r.taps;
  }
  for (long j = 0; j < s.column_stride; ++j) {
    const Phase c(j, s.kernel_columns, s.column_stride, s.left);
    const long last = (s.columns - 1 - j) / s.column_stride - c.before + c.taps - 1;
    left = c.before > left ? c.before : left;
    right = last - out_columns + 1 > right ? last - out_columns + 1 : right;
    hole |= !c.taps;
  }
  const long item_in = s.rows * s.columns * s.inputs, item_out = out_rows * out_columns * s.outputs;
  if (hole) clear(dx, s.batch * item_in);
  const bool copied = top || left || bottom || right;
  const long row = (left + out_columns + right) * s.outputs, item = (top + out_rows + bottom) * row;
  const long positions = s.rows * s.columns, step = least(s.batch, positions < AT_ONCE ? (AT_ONCE + positions - 1) / positions : 1);
  float* packed = scratch(0, s.kernel_rows * s.kernel_columns * s.outputs * rounded_up(s.inputs));
  float* padded = copied ? scratch(2, step * item) : nullptr;
  const long panel = s.outputs * rounded_up(s.inputs);
  float* next = packed;
  for (long i = 0; i < s.row_stride; ++i)
    for (long j = 0; j < s.column_stride; ++j) {
      const Phase r(i, s.kernel_rows, s.row_stride, s.top), c(j, s.kernel_columns, s.column_stride, s.left);
      if (r.taps && c.taps) pack_inputs(s, r, c, weight, next);
      next += r.taps * c.taps * panel;
    }
  for (long start = 0; start < s.batch; start += step) {
    const long items = least(step, s.batch - start);
    const float* from = dy + start * item_out;
    if (copied) {
      for (long n = 0; n < items; ++n)
        surround(padded + n * item, from + n * item_out, out_rows, out_columns, s.outputs, top, left, bottom, right);
      from = padded;
    }
    next = packed;
    for (long i = 0; i < s.row_stride; ++i)
      for (long j = 0; j < s.column_stride; ++j) {
        const Phase r(i, s.kernel_rows, s.row_stride, s.top), c(j, s.kernel_columns, s.column_stride, s.left);
        if (!r.taps || !c.taps || i >= s.rows || j >= s.columns) {
          next += r.taps * c.taps * panel;
          continue;
        }
        const Grid grid{items,
                        (s.rows - 1 - i) / s.row_stride + 1,
                        (s.columns - 1 - j) / s.column_stride + 1,
                        from + (top - r.before) * row + (left - c.before) * s.outputs,
                        copied ? item : item_out,
                        row,
                        s.outputs,
                        dx + start * item_in + (i * s.columns + j) * s.inputs,
                        item_in,
                        s.row_stride * s.columns * s.inputs,
                        s.column_stride * s.inputs};
        const Window window{r.taps, c.taps * s.outputs, row};
        (s.inputs <= LANES ? correlate_rows : correlate)(grid, window, next, s.inputs, nullptr);
        next += r.taps * c.taps * panel;
      }
  }
}

void convolve_2d_backward(const Convolution2d& s, const float* dy, const float* x, const float* weight, float* dx, float* dweight,
                          float* dbias) {
  const Source source(s);
  const long width = rounded_up(s.outputs), depth = source.window.size();
  float *sums = scratch(1, depth * width), *bias_sums = scratch(5, width);
  if (!s.batch) clear(sums, depth * width);
  clear(bias_sums, width);
  for (long first = 0, step = source.at_once(); first < s.batch; first += step) {
    Grid grid = source.grid(x, first, least(step, s.batch - first));
    grid.to = const_cast<float*>(dy) + first * grid.to_item;  // read only
    correlate_backward(grid, source.window, s.outputs, sums, first == 0, bias_sums);
  }
  unpack_outputs(s, sums, dweight);
  copy(dbias, bias_sums, s.outputs);
  if (dx) gradient_of_inputs(s, dy, weight, dx);
}
