// Implementation of the kernels, compiled for each instruction set (see kernels.h). It includes no inline functions of the standard
// library, because the linker could use their copy for one instruction set in code for another.

#include "kernels.h"

namespace raydfl {
namespace {

constexpr int LANES = RAYDFL_LANES;
constexpr int PANEL = 2 * LANES;  // columns of a product in a tile
constexpr int TILE = 6;           // rows of a product in a tile: sums use 12 registers, of 16 or more

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Naturals __attribute__((vector_size(4 * LANES)));
typedef uint64_t LongNaturals __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t AllBytes __attribute__((vector_size(4 * LANES)));
typedef float LooseFloats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint8_t LooseBytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS

INLINE Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
INLINE void store(float* to, Floats values) { *reinterpret_cast<LooseFloats*>(to) = values; }
INLINE Floats all(float value) { return value - Floats{}; }
INLINE long rounded_up(long count) { return (count + PANEL - 1) / PANEL * PANEL; }
INLINE long within_vector(long count) { return count < 0 ? 0 : count < LANES ? count : LANES; }
INLINE long least(long one, long other) { return one < other ? one : other; }

#if defined(__clang__)
#define SHUFFLED(Mask, one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define SHUFFLED(Mask, one, other, ...) __builtin_shuffle(one, other, Mask{__VA_ARGS__})
#endif

// Interleaves the first halves of two vectors, and their second halves.
INLINE void interleave(Floats one, Floats other, Floats* first, Floats* second) {
#if RAYDFL_LANES == 16
  *first = SHUFFLED(Integers, one, other, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  *second = SHUFFLED(Integers, one, other, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif RAYDFL_LANES == 8
  *first = SHUFFLED(Integers, one, other, 0, 8, 1, 9, 2, 10, 3, 11);
  *second = SHUFFLED(Integers, one, other, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  *first = SHUFFLED(Integers, one, other, 0, 4, 1, 5);
  *second = SHUFFLED(Integers, one, other, 2, 6, 3, 7);
#endif
}

// Converts LANES integers from 0 to 255 to bytes.
INLINE Bytes narrowed(Integers numbers) {
#if RAYDFL_LANES == 16
  return __builtin_convertvector(numbers, Bytes);
#else
  const AllBytes bytes = reinterpret_cast<AllBytes>(numbers);
#if RAYDFL_LANES == 8
  const AllBytes lowest = SHUFFLED(AllBytes, bytes, bytes, 0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28,  //
                                   0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
#else
  const AllBytes lowest = SHUFFLED(AllBytes, bytes, bytes, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
#endif
  Bytes result;
  __builtin_memcpy(&result, &lowest, LANES);
  return result;
#endif
}

// Converts LANES bytes to integers.
INLINE Integers widened(const uint8_t* from) {
#if RAYDFL_LANES == 8  // the compiler would convert them one by one
  uint64_t bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  const AllBytes twice = reinterpret_cast<AllBytes>(LongNaturals{} + bytes);
  return reinterpret_cast<Integers>(SHUFFLED(AllBytes, twice, twice, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,  //
                                             20, 20, 20, 20, 21, 21, 21, 21, 22, 22, 22, 22, 23, 23, 23, 23)) & 255;
#else
  return __builtin_convertvector(Bytes(*reinterpret_cast<const LooseBytes*>(from)), Integers);
#endif
}

// A whole vector, or the first "count" elements of one: the others are not read (they become 0) and not written.
struct Whole {
  INLINE Floats load(const float* from) const { return raydfl::load(from); }
  INLINE void store(float* to, Floats values) const { raydfl::store(to, values); }
  INLINE Integers load_codes(const uint8_t* from) const { return widened(from); }
  INLINE void store_codes(uint8_t* to, Bytes codes) const { *reinterpret_cast<LooseBytes*>(to) = codes; }
};

struct Part {
#if RAYDFL_LANES == 16
  __mmask16 mask;
  INLINE explicit Part(long count) : mask(static_cast<__mmask16>((1u << count) - 1)) {}
  INLINE Floats load(const float* from) const { return reinterpret_cast<Floats>(_mm512_maskz_loadu_ps(mask, from)); }
  INLINE void store(float* to, Floats values) const { _mm512_mask_storeu_ps(to, mask, reinterpret_cast<__m512>(values)); }
  INLINE Integers load_codes(const uint8_t* from) const {
    return __builtin_convertvector(reinterpret_cast<Bytes>(_mm_maskz_loadu_epi8(mask, from)), Integers);
  }
  INLINE void store_codes(uint8_t* to, Bytes codes) const { _mm_mask_storeu_epi8(to, mask, reinterpret_cast<__m128i>(codes)); }
#else
  long count;
  INLINE explicit Part(long count) : count(count) {}
#if RAYDFL_LANES == 8
  INLINE __m256i mask() const {
    static const int32_t ones_then_zeros[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ones_then_zeros + LANES - count));
  }
  INLINE Floats load(const float* from) const { return reinterpret_cast<Floats>(_mm256_maskload_ps(from, mask())); }
  INLINE void store(float* to, Floats values) const { _mm256_maskstore_ps(to, mask(), reinterpret_cast<__m256>(values)); }
#else
  INLINE Floats load(const float* from) const {
    Floats values{};
    for (long i = 0; i < count; ++i) values[i] = from[i];
    return values;
  }
  INLINE void store(float* to, Floats values) const {
    for (long i = 0; i < count; ++i) to[i] = values[i];
  }
#endif
  INLINE Integers load_codes(const uint8_t* from) const {
    uint8_t codes[LANES] = {};
    for (long i = 0; i < count; ++i) codes[i] = from[i];
    return widened(codes);
  }
  INLINE void store_codes(uint8_t* to, Bytes codes) const {
    for (long i = 0; i < count; ++i) to[i] = codes[i];
  }
#endif
};

// Calls body(first element, Whole or Part) for the vectors of "count" elements.
template <typename Body>
INLINE void for_vectors(long count, const Body& body) {
  long first = 0;
  for (; first + LANES <= count; first += LANES) body(first, Whole{});
  if (first < count) body(first, Part(count - first));
}

INLINE void copy(float* to, const float* from, long count) { __builtin_memcpy(to, from, sizeof(float) * count); }
INLINE void clear(float* to, long count) { __builtin_memset(to, 0, sizeof(float) * count); }

INLINE void add(float* to, const float* from, long count) {
  for (long i = 0; i < count; ++i) to[i] += from[i];
}

// --- products -----------------------------------------------------------------------------------------------------------------

// Right factor of a product, in panels of PANEL columns: row k of panel p is at data + p * apart + k * row.
struct Panels {
  const float* data;
  long apart, row;
};

// Initial value of a product: 0, a bias for all rows, or the existing result.
enum class Start { ZERO, BIAS, SUM };

// Layout of a product's left factor: a(r, k) is a[r * lda + k] if LEFT is false, a[k * lda + r] if it is true. With IN_PANELS it
// has panels at the stride lda, a[k / PANEL * lda + r * PANEL + k % PANEL], and the depth is a multiple of PANEL.
constexpr int IN_PANELS = 2;

// Adds a step of a tile: ROWS factors at the stride "apart", times a row of the right factor.
template <int ROWS>
INLINE void add_products(Floats (&sums)[ROWS][2], const float* a, long apart, const float* b) {
  const Floats left = load(b), right = load(b + LANES);
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) {
    const Floats factor = all(a[r * apart]);
    sums[r][0] += factor * left;
    sums[r][1] += factor * right;
  }
}

// c[r, j] = start + sum over k of a(r, k) * b[k, j] for ROWS rows and one panel.
template <int ROWS, int LEFT>
INLINE void tile(long depth, const float* a, long lda, const float* b, long ldb, float* c, long ldc, long columns, Start start,
                 const float* bias) {
  Floats sums[ROWS][2];
  const bool whole = columns == PANEL;
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = Floats{};
  if (LEFT == IN_PANELS) {
    for (; depth > 0; depth -= PANEL, a += lda) {
#pragma GCC unroll 32
      for (int k = 0; k < PANEL; ++k, b += ldb) add_products(sums, a + k, PANEL, b);
    }
  } else {
#pragma GCC unroll 4
    for (long k = 0; k < depth; ++k, b += ldb, a += LEFT ? lda : 1) add_products(sums, a, LEFT ? 1 : lda, b);
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r, c += ldc) {
    const float* from = start == Start::SUM ? c : bias;
    if (whole) {
      if (start != Start::ZERO) {
        sums[r][0] += load(from);
        sums[r][1] += load(from + LANES);
      }
      store(c, sums[r][0]);
      store(c + LANES, sums[r][1]);
    } else {
#pragma GCC unroll 2
      for (long h = 0; h < 2; ++h) {  // a loop with a constant count, because sums are in registers
        const Part part(within_vector(columns - h * LANES));
        part.store(c + h * LANES, start == Start::ZERO ? sums[r][h] : sums[r][h] + part.load(from + h * LANES));
      }
    }
  }
}

template <int LEFT>
void tile_of(long rows, long depth, const float* a, long lda, const float* b, long ldb, float* c, long ldc, long columns,
             Start start, const float* bias) {
  switch (rows) {
    case 6: return tile<6, LEFT>(depth, a, lda, b, ldb, c, ldc, columns, start, bias);
    case 5: return tile<5, LEFT>(depth, a, lda, b, ldb, c, ldc, columns, start, bias);
    case 4: return tile<4, LEFT>(depth, a, lda, b, ldb, c, ldc, columns, start, bias);
    case 3: return tile<3, LEFT>(depth, a, lda, b, ldb, c, ldc, columns, start, bias);
    case 2: return tile<2, LEFT>(depth, a, lda, b, ldb, c, ldc, columns, start, bias);
    default: return tile<1, LEFT>(depth, a, lda, b, ldb, c, ldc, columns, start, bias);
  }
}

// c [rows, columns] = start + a b, with the stride ldc between rows of c.
template <int LEFT>
void multiply(long rows, long columns, long depth, const float* a, long lda, Panels b, float* c, long ldc, Start start,
              const float* bias = nullptr) {
  if (rows == 0) return;
  const long tiles = (rows + TILE - 1) / TILE, height = rows / tiles, higher = rows % tiles;
  const long apart = LEFT == IN_PANELS ? PANEL : LEFT ? 1 : lda;
  for (long panel = 0, column = 0; column < columns; ++panel, column += PANEL) {
    for (long index = 0, first = 0; index < tiles; ++index) {  // tiles of nearly equal height: a tile with a single row is slow
      const long count = height + (index < higher);
      tile_of<LEFT>(count, depth, a + first * apart, lda, b.data + panel * b.apart, b.row, c + first * ldc + column, ldc,
                    least(columns - column, PANEL), start, bias ? bias + column : bias);
      first += count;
    }
  }
}

// Transposes a square of LANES x LANES. "row" and "to_row" are the strides between rows.
INLINE void transpose(float* to, long to_row, const float* from, long row) {
  Floats now[LANES], next[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) now[i] = load(from + i * row);
#pragma GCC unroll 4
  for (int stage = 1; stage < LANES; stage *= 2) {  // log2(LANES) perfect shuffles transpose the square
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; ++i) interleave(now[i], now[i + LANES / 2], &next[2 * i], &next[2 * i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) now[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) store(to + i * to_row, now[i]);
}

// Transposes a matrix [rows, columns] with the stride "row" between rows.
void turn(float* to, long to_row, const float* from, long row, long rows, long columns) {
  const long whole = columns / LANES * LANES, blocks = rows / LANES * LANES;
  for (long j = 0; j < blocks; j += LANES)
    for (long k = 0; k < whole; k += LANES) transpose(to + k * to_row + j, to_row, from + j * row + k, row);
  for (long j = 0; j < rows; ++j)
    for (long k = j < blocks ? whole : 0; k < columns; ++k) to[k * to_row + j] = from[j * row + k];
}

// Packs a matrix [rows, columns] into panels at the stride "apart". Element (k, j) is at from[k * row + j * column], and either
// stride is 1. Missing columns are 0.
void pack_apart(float* to, long apart, const float* from, long rows, long columns, long row, long column) {
  for (long first = 0; first < columns; first += PANEL, to += apart) {
    const long width = least(columns - first, PANEL);
    if (width < PANEL) clear(to, rows * PANEL);
    if (column == 1) {
      for (long k = 0; k < rows; ++k)  // a constant count compiles to two moves, a variable one to a call
        width == PANEL ? copy(to + k * PANEL, from + k * row + first, PANEL) : copy(to + k * PANEL, from + k * row + first, width);
      continue;
    }
    turn(to, PANEL, from + first * column, column, width, rows);
  }
}

// Packs a matrix into contiguous panels.
Panels pack(float* to, const float* from, long rows, long columns, long row, long column) {
  pack_apart(to, rows * PANEL, from, rows, columns, row, column);
  return {to, rows * PANEL, PANEL};
}

INLINE long packed_size(long rows, long columns) { return rows * rounded_up(columns); }

// --- exponentials -------------------------------------------------------------------------------------------------------------

INLINE Floats within(Floats x, float low, float high) {  // propagates NaN
  x = x < all(low) ? all(low) : x;
  return x > all(high) ? all(high) : x;
}

// e^x = scale (1 + rest), with a power of 2 for scale and rest from -0.3 to 0.42. x is clamped to -86..86. The functions below have
// a relative error up to 1.8e-7, and propagate NaN.
struct Exponential {
  Floats scale, rest;

  INLINE explicit Exponential(Floats x) {
    x = within(x, -86.0f, 86.0f);
    const Floats magic = all(12582912.0f + 127.0f);  // 1.5 * 2^23 plus the exponent's bias: adding it rounds to an integer
    const Floats shifted = x * 1.44269504088896341f + magic;
    const Floats power = shifted - magic;
    Floats r = x - power * 0.693359375f;
    r = r + power * 2.12194440e-4f;
    Floats series = all(1.9875691500e-4f);
    series = series * r + 1.3981999507e-3f;
    series = series * r + 8.3334519073e-3f;
    series = series * r + 4.1665795894e-2f;
    series = series * r + 1.6666665459e-1f;
    series = series * r + 5.0000001201e-1f;
    rest = series * (r * r) + r;
    scale = reinterpret_cast<Floats>(reinterpret_cast<Integers>(shifted) << 23);  // the integer is in the lowest bits
  }
};

INLINE Floats sigmoid(Floats x) {
  const Exponential e(-x);
  return 1.0f / (e.scale * e.rest + (e.scale + 1.0f));
}

INLINE Floats hyperbolic_tangent(Floats x) {
  const Exponential e(x + x);
  const Floats less_one = e.scale * e.rest + (e.scale - 1.0f);
  return less_one / (less_one + 2.0f);
}

INLINE Floats exponential(Floats x) {
  const Exponential e(x);
  return e.scale * e.rest + e.scale;
}

// Natural logarithm of x >= 1.2e-38, with a relative error up to 2e-7 or an absolute error up to 6e-8. It propagates NaN. x is
// 2^power (1 + rest), with rest from -0.3 to 0.42; the series is from Cephes.
INLINE Floats logarithm(Floats x) {
  const Integers bits = reinterpret_cast<Integers>(x);
  const Integers exponent = (bits - 0x3F3504F3) >> 23;  // minus the bits of the square root of 1/2
  const Floats power = reinterpret_cast<Floats>(exponent + 0x4B400000) - 12582912.0f;  // conversion to float through 1.5 * 2^23
  const Floats rest = reinterpret_cast<Floats>(bits - (exponent << 23)) - 1.0f;
  const Floats square = rest * rest;
  Floats series = all(7.0376836292e-2f);
  series = series * rest - 1.1514610310e-1f;
  series = series * rest + 1.1676998740e-1f;
  series = series * rest - 1.2420140846e-1f;
  series = series * rest + 1.4249322787e-1f;
  series = series * rest - 1.6668057665e-1f;
  series = series * rest + 2.0000714765e-1f;
  series = series * rest - 2.4999993993e-1f;
  series = series * rest + 3.3333331174e-1f;
  series = series * rest * square - power * 2.12194440e-4f - square * 0.5f;
  const Floats result = rest + series + power * 0.693359375f;
  return x <= all(3.40282347e38f) ? result : x;
}

// --- convolution --------------------------------------------------------------------------------------------------------------

// Copies an item's frames with zeros around them, so that frame t's window is "taps" contiguous rows.
void pad(float* to, const float* x, const Convolution& shape, long counting) {
  const long before = shape.padding * shape.inputs, count = counting * shape.inputs;
  clear(to, before);
  copy(to + before, x, count);
  clear(to + before + count, (shape.frames + 2 * shape.padding) * shape.inputs - before - count);
}

INLINE long counting(const int64_t* lengths, long item, long frames) {
  if (!lengths) return frames;
  return lengths[item] < 0 ? 0 : least(lengths[item], frames);
}

// Applies ReLU and max pooling to an item's rows at the stride "width". POOL is shape.pool, or 0 for a pool known only at run time.
template <long POOL>
void pool_rows(const Convolution& shape, const float* convolved, long width, float* y, uint8_t* codes) {
  const long pooled = shape.pooled(), outputs = shape.outputs, pool = POOL ? POOL : shape.pool;
  for (long t = 0; t < pooled; ++t, y += outputs, codes += outputs, convolved += pool * width) {
    for_vectors(outputs, [&](long o, auto part) ALWAYS {
      Floats best{};
      Integers code = Integers{} + NOWHERE;
      for (int32_t j = 0; j < pool; ++j) {
        const Floats value = load(convolved + j * width + o);
        const Integers better = (value > best) | (value != value);  // propagate NaN, so that divergence shows
        best = better ? value : best;
        code = better ? Integers{} + j : code;
      }
      part.store(y + o, best);
      part.store_codes(codes + o, narrowed(code));
    });
  }
}

// Pools an item's rows, or copies them if there is no pooling.
void pool_item(const Convolution& shape, const float* convolved, long width, float* y, uint8_t* codes) {
  if (shape.pool) return (shape.pool == 2 ? pool_rows<2> : pool_rows<0>)(shape, convolved, width, y, codes);
  for (long t = 0; t < shape.pooled(); ++t) copy(y + t * shape.outputs, convolved + t * width, shape.outputs);
}

// Distributes an item's dy to the rows before pooling, and adds its sum to bias_sums. The rows' padding does not change.
template <long POOL>
void unpool_rows(const Convolution& shape, const float* dy, const uint8_t* codes, long width, float* to, float* bias_sums) {
  const long pooled = shape.pooled(), outputs = shape.outputs, pool = POOL ? POOL : shape.pool;
  for (long t = 0; t < pooled; ++t, dy += outputs, codes += outputs, to += pool * width) {
    for_vectors(outputs, [&](long o, auto part) ALWAYS {
      const Floats value = part.load(dy + o);
      const Integers code = part.load_codes(codes + o);
      Floats sum = part.load(bias_sums + o);
      for (int32_t j = 0; j < pool; ++j) {
        const Floats here = reinterpret_cast<Floats>(reinterpret_cast<Integers>(value) & (code == j));
        part.store(to + j * width + o, here);
        sum += here;
      }
      part.store(bias_sums + o, sum);
    });
  }
}

void unpool_item(const Convolution& shape, const float* dy, const uint8_t* codes, long width, float* to, float* bias_sums) {
  if (shape.pool) return (shape.pool == 2 ? unpool_rows<2> : unpool_rows<0>)(shape, dy, codes, width, to, bias_sums);
  for (long t = 0; t < shape.pooled(); ++t, dy += shape.outputs, to += width) {
    copy(to, dy, shape.outputs);
    add(bias_sums, dy, shape.outputs);
  }
}

#include "convolution_at_points.h"

void convolve(const Convolution& shape, const float* x, const float* weight, const float* bias, const int64_t* lengths, float* y,
              uint8_t* codes) {
  if (fits_points(shape)) {
    shape.taps == 3 ? convolve_at_points<3>(shape, x, weight, bias, lengths, y, codes)
                    : convolve_at_points<5>(shape, x, weight, bias, lengths, y, codes);
    return;
  }
  const long depth = shape.taps * shape.inputs, width = rounded_up(shape.outputs), pooled = shape.pooled();
  const long rows = shape.pool ? pooled * shape.pool : pooled;
  float* ordered = scratch(0, depth * shape.outputs);  // weight, as [outputs, taps, inputs]
  for (long o = 0; o < shape.outputs; ++o)
    for (long c = 0; c < shape.inputs; ++c)
      for (long k = 0; k < shape.taps; ++k)
        ordered[(o * shape.taps + k) * shape.inputs + c] = weight[(o * shape.inputs + c) * shape.taps + k];
  const Panels panels = pack(scratch(1, packed_size(depth, shape.outputs)), ordered, depth, shape.outputs, 1, depth);
  float* padded = scratch(2, (shape.frames + 2 * shape.padding) * shape.inputs);
  float* convolved = scratch(3, rows * width);
  float* wide_bias = scratch(4, width);
  clear(wide_bias, width);
  copy(wide_bias, bias, shape.outputs);
  for (long item = 0; item < shape.batch; ++item) {
    pad(padded, x + item * shape.frames * shape.inputs, shape, counting(lengths, item, shape.frames));
    if (!shape.pool) {
      multiply<false>(rows, shape.outputs, depth, padded, shape.inputs, panels, y, shape.outputs, Start::BIAS, wide_bias);
      y += rows * shape.outputs;
      continue;
    }
    multiply<false>(rows, width, depth, padded, shape.inputs, panels, convolved, width, Start::BIAS, wide_bias);
    pool_item(shape, convolved, width, y, codes);
    y += pooled * shape.outputs;
    codes += pooled * shape.outputs;
  }
}

void convolve_backward(const Convolution& shape, const float* dy, const uint8_t* codes, const float* x, const float* weight,
                       const int64_t* lengths, float* dx, float* dweight, float* dbias) {
  if (fits_points(shape)) {
    shape.taps == 3 ? convolve_backward_at_points<3>(shape, dy, codes, x, weight, lengths, dx, dweight, dbias)
                    : convolve_backward_at_points<5>(shape, dy, codes, x, weight, lengths, dx, dweight, dbias);
    return;
  }
  const long depth = shape.taps * shape.inputs, width = rounded_up(shape.outputs), pooled = shape.pooled();
  const long rows = shape.pool ? pooled * shape.pool : pooled;
  const long before = shape.taps - 1 - shape.padding, window = shape.taps * width;
  float* padded = scratch(2, (shape.frames + 2 * shape.padding) * shape.inputs);
  float* spread = scratch(3, (shape.frames + shape.taps - 1) * width);  // dy before pooling, padded with zeros
  float* sums = scratch(4, depth * width + width);                     // dweight, as [taps, inputs, width], then dbias
  float* bias_sums = sums + depth * width;
  clear(spread, (shape.frames + shape.taps - 1) * width);
  clear(sums, depth * width + width);
  Panels panels{};
  if (dx) {  // rows (tap from last to first, output), columns inputs
    float* ordered = scratch(0, window * shape.inputs);
    clear(ordered, window * shape.inputs);
    for (long o = 0; o < shape.outputs; ++o)
      for (long c = 0; c < shape.inputs; ++c)
        for (long k = 0; k < shape.taps; ++k)
          ordered[((shape.taps - 1 - k) * width + o) * shape.inputs + c] = weight[(o * shape.inputs + c) * shape.taps + k];
    panels = pack(scratch(1, packed_size(window, shape.inputs)), ordered, window, shape.inputs, shape.inputs, 1);
  }
  for (long item = 0; item < shape.batch; ++item) {
    const long count = counting(lengths, item, shape.frames);
    pad(padded, x + item * shape.frames * shape.inputs, shape, count);
    unpool_item(shape, dy, codes, width, spread + before * width, bias_sums);
    dy += pooled * shape.outputs;
    if (shape.pool) codes += pooled * shape.outputs;
    multiply<true>(depth, width, rows, padded, shape.inputs, {spread + before * width, PANEL, width}, sums, width, Start::SUM);
    if (dx) {
      multiply<false>(count, shape.inputs, window, spread, width, panels, dx, shape.inputs, Start::ZERO);
      clear(dx + count * shape.inputs, (shape.frames - count) * shape.inputs);
      dx += shape.frames * shape.inputs;
    }
  }
  for (long o = 0; o < shape.outputs; ++o)
    for (long c = 0; c < shape.inputs; ++c)
      for (long k = 0; k < shape.taps; ++k)
        dweight[(o * shape.inputs + c) * shape.taps + k] = sums[(k * shape.inputs + c) * width + o];
  copy(dbias, bias_sums, shape.outputs);
}

#include "convolution_2d.h"
#if RAYDFL_LANES < 16
#include "normalisation.h"
#endif

// --- GRU ----------------------------------------------------------------------------------------------------------------------
//
// Gates r, z, n and s = W_hn h + b_hn:  h' = (1 - z) n + z h,  n = tanh(i + r s).  A "step" is a frame in a direction's own order.
// "gates" holds r, z, n, s for each (step, item), with "padded" units each. Units beyond "hidden" have the weight 0 and stay 0.

void gate_row(long padded, float* gates, const float* before, float* after) {
  // Two loops, because r, n and h in a single loop form a long chain of dependent operations.
  for (long u = 0; u < 2 * padded; u += LANES) store(gates + u, sigmoid(load(gates + u)));
  for (long u = 0; u < padded; u += LANES) {
    const Floats n = hyperbolic_tangent(load(gates + 2 * padded + u) + load(gates + u) * load(gates + 3 * padded + u));
    store(gates + 2 * padded + u, n);
    store(after + u, n + load(gates + padded + u) * (load(before + u) - n));
  }
}

void recur_direction(const Recurrence& shape, bool reverse, const float* x, const Direction& weights, const int64_t* lengths,
                     float* y, float* gates) {
  const long hidden = shape.hidden, padded = rounded_up(hidden), batch = shape.batch, frames = shape.frames;
  const long inputs = shape.inputs, wide = 4 * padded, ldy = shape.directions * hidden;
  // Input and state form a single row [x, h], because r and z depend on the sum of their products.
  const long depth = inputs + hidden, row = inputs + padded, apart = depth * PANEL;
  float* packed = scratch(0, 3 * packed_size(depth, hidden));  // for each gate, with padded columns
  for (int gate = 0; gate < 3; ++gate) {
    float* to = packed + gate * depth * padded;
    pack_apart(to, apart, weights.input_weight + gate * hidden * inputs, inputs, hidden, 1, inputs);
    pack_apart(to + inputs * PANEL, apart, weights.hidden_weight + gate * hidden * hidden, hidden, hidden, 1, hidden);
  }
  const Panels to_both{packed, apart, PANEL}, to_n{packed + 2 * depth * padded, apart, PANEL};
  const Panels to_s{to_n.data + inputs * PANEL, apart, PANEL};
  float* bias = scratch(1, wide);  // of r, z, n and s
  clear(bias, wide);
  for (int gate = 0; gate < 3; ++gate) copy(bias + gate * padded, weights.input_bias + gate * hidden, hidden);
  add(bias, weights.hidden_bias, hidden);
  add(bias + padded, weights.hidden_bias + hidden, hidden);
  copy(bias + 3 * padded, weights.hidden_bias + 2 * hidden, hidden);
  float* before = scratch(2, 2 * batch * row);  // [x, h] of each item: x of this step, h of the previous step
  float* after = before + batch * row;
  clear(before, batch * row);
  for (long step = 0; step < frames; ++step, gates += batch * wide) {
    const long frame = reverse ? frames - 1 - step : step, of_state = step > 0 ? hidden : 0;
    for (long item = 0; item < batch; ++item) copy(before + item * row, x + (item * frames + frame) * inputs, inputs);
    multiply<false>(batch, 2 * padded, inputs + of_state, before, row, to_both, gates, wide, Start::BIAS, bias);
    multiply<false>(batch, padded, inputs, before, row, to_n, gates + 2 * padded, wide, Start::BIAS, bias + 2 * padded);
    multiply<false>(batch, padded, of_state, before + inputs, row, to_s, gates + 3 * padded, wide, Start::BIAS, bias + 3 * padded);
    for (long item = 0; item < batch; ++item) {
      float* state = after + item * row + inputs;
      if (frame < counting(lengths, item, frames))
        gate_row(padded, gates + item * wide, before + item * row + inputs, state);
      else
        clear(state, padded);
      copy(y + (item * frames + frame) * ldy, state, hidden);
    }
    float* swap = before;
    before = after;
    after = swap;
  }
}

void recur(const Recurrence& shape, const float* x, const Direction* directions, const int64_t* lengths, float* y, float* gates) {
  for (int d = 0; d < shape.directions; ++d)
    recur_direction(shape, d == 1, x, directions[d], lengths, y + d * shape.hidden,
                    gates + d * shape.frames * shape.batch * 4 * rounded_up(shape.hidden));
}

// Computes the gradients of s, r, z and n before their activations for an item and step, in panels at the stride "apart". The first
// three belong to the previous state, the last three to the input. "carry" is dL/dh after the step, and becomes its direct part for
// the previous state.
void gate_row_backward(long padded, const float* gates, const float* before, const float* dy, float* carry, float* to, long apart) {
  const long gate = padded / PANEL * apart;
  for (long first = 0; first < padded; first += PANEL, to += apart) {
    // Prefetch the item after the next (items run backwards), because the hardware prefetcher cannot follow so many streams.
    for (int g = -8; g < -4; ++g) __builtin_prefetch(gates + g * padded + first);
    for (long u = first; u < first + PANEL; u += LANES) {
      const Floats r = load(gates + u), z = load(gates + padded + u), n = load(gates + 2 * padded + u);
      const Floats s = load(gates + 3 * padded + u);
      const Floats dh = load(dy + u) + load(carry + u);
      const Floats dn = dh * (1.0f - z) * (1.0f - n * n);
      float* place = to + u - first;
      store(place, dn * r);
      store(place + gate, dn * s * r * (1.0f - r));
      store(place + 2 * gate, dh * (load(before + u) - n) * z * (1.0f - z));
      store(place + 3 * gate, dn);
      store(carry + u, dh * z);
    }
  }
}

// Returns the width of the next tile, dividing the remaining columns almost evenly among the remaining tiles.
INLINE long next_width(long columns, long tiles) { return (columns + tiles - 1) / tiles; }
INLINE long tiles_of(long columns) { return (columns + TILE - 1) / TILE; }

template <int WIDTH>
INLINE void pack_tile(float* to, const float* x, long row, long rows) {
  for (long r = 0; r < rows; ++r) copy(to + r * WIDTH, x + r * row, WIDTH);
}

// Packs rows of x at the stride "row" into tiles of a left factor with "depth" rows, starting at row "begin".
void pack_tiles(float* to, long depth, long begin, const float* x, long row, long rows, long columns) {
  for (long tiles = tiles_of(columns); tiles > 0; --tiles) {
    const long width = next_width(columns, tiles);
    float* place = to + begin * width;
    switch (width) {
      case 6: pack_tile<6>(place, x, row, rows); break;
      case 5: pack_tile<5>(place, x, row, rows); break;
      case 4: pack_tile<4>(place, x, row, rows); break;
      case 3: pack_tile<3>(place, x, row, rows); break;
      case 2: pack_tile<2>(place, x, row, rows); break;
      default: pack_tile<1>(place, x, row, rows);
    }
    to += depth * width;
    x += width;
    columns -= width;
  }
}

// Sums the columns of a panel.
void sum_rows(long rows, const float* panel, long columns, float* to) {
  Floats sums[4][2] = {};  // independent sums over every fourth row
  long row = 0;
  for (; row + 4 <= rows; row += 4)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, panel += PANEL) sums[i][0] += load(panel), sums[i][1] += load(panel + LANES);
  for (; row < rows; ++row, panel += PANEL) sums[0][0] += load(panel), sums[0][1] += load(panel + LANES);
  float line[PANEL];
  store(line, (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]));
  store(line + LANES, (sums[0][1] + sums[1][1]) + (sums[2][1] + sums[3][1]));
  copy(to, line, columns);
}

// Computes the gradients of weights [units, inputs] for a panel's units: inputs in tiles, from row "begin" to "depth", times the
// panel. The product has a row for each input, because gate_row_backward writes panels in this layout, and packing inputs is
// cheaper than packing gradients. The result is transposed while it is in the cache.
void weight_gradient(long inputs, long depth, long begin, const float* tiles, const float* panel, float* product, long units,
                     float* to) {
  long k = begin;
  do {
    const long count = least(depth - k, 256);  // this part of the panel and of a tile fits the first-level cache
    const Start start = k == begin ? Start::ZERO : Start::SUM;
    for (long row = 0, left = tiles_of(inputs); left > 0; --left) {
      const long rows = next_width(inputs - row, left);
      tile_of<true>(rows, count, tiles + row * depth + k * rows, rows, panel + k * PANEL, PANEL, product + row * PANEL, PANEL,
                    PANEL, start, nullptr);
      row += rows;
    }
    k += count;
  } while (k < depth);
  turn(to, inputs, product, PANEL, inputs, units);
}

void recur_direction_backward(const Recurrence& shape, bool reverse, const float* dy, const float* y, const float* gates,
                              const float* x, const Direction& weights, const int64_t* lengths, float* dx,
                              const DirectionGradient& gradient) {
  const long hidden = shape.hidden, padded = rounded_up(hidden), batch = shape.batch, frames = shape.frames;
  const long inputs = shape.inputs, ldy = shape.directions * hidden, rows = frames * batch;
  const long of_gate = padded / PANEL, depth = 3 * padded;
  const long apart = ((rows + 15) / 16 | 1) * 16 * PANEL;  // an odd number of KiB, so that panels use different sets of the cache
  float* steps = scratch(0, 4 * of_gate * apart);        // rows [step, item]: gradients of s, r, z, n in panels
  float* states = scratch(1, rows * (hidden + inputs));  // rows [step, item]: the previous state, in tiles
  float* xs = states + rows * hidden;                    // and x
  float* carry = scratch(2, (batch + 2) * padded);
  float* line = carry + batch * padded;  // of dy
  float* state_line = line + padded;     // of y
  clear(carry, (batch + 2) * padded);
  const long of_state[3] = {1, 2, 0}, of_input[3] = {1, 2, 3};  // positions of r, z, n in "steps"
  float* packed = scratch(3, packed_size(depth, hidden) + packed_size(depth, inputs));  // rows (column of "steps"), columns units
  float* packed_inputs = packed + packed_size(depth, hidden);                           // and inputs
  if (padded != hidden) clear(packed, packed_size(depth, hidden) + packed_size(depth, inputs));
  for (int gate = 0; gate < 3; ++gate) {
    pack_apart(packed + of_state[gate] * padded * PANEL, depth * PANEL, weights.hidden_weight + gate * hidden * hidden, hidden,
               hidden, hidden, 1);
    if (dx)
      pack_apart(packed_inputs + gate * padded * PANEL, depth * PANEL, weights.input_weight + gate * hidden * inputs, hidden,
                 inputs, inputs, 1);
  }
  for (long step = frames - 1; step >= 0; --step) {
    const long frame = reverse ? frames - 1 - step : step, frame_before = reverse ? frame + 1 : frame - 1;
    float* now = steps + step * batch * PANEL;
    for (long item = batch - 1; item >= 0; --item) {  // backwards through memory, like the steps
      float* row = now + item * PANEL;
      if (frame >= counting(lengths, item, frames)) {
        for (long panel = 0; panel < 4 * of_gate; ++panel) clear(row + panel * apart, PANEL);
        clear(carry + item * padded, padded);
        continue;
      }
      const float* above = dy + (item * frames + frame) * ldy;
      const float* before = y + (item * frames + frame_before) * ldy;
      if (padded != hidden) {
        copy(line, above, hidden);
        above = line;
      }
      if (padded != hidden || step == 0) {
        step ? copy(state_line, before, hidden) : clear(state_line, hidden);
        before = state_line;
      }
      gate_row_backward(padded, gates + (step * batch + item) * 4 * padded, before, above, carry + item * padded, row, apart);
    }
    if (step > 0) {
      multiply<IN_PANELS>(batch, padded, depth, now, apart, {packed, depth * PANEL, PANEL}, carry, padded, Start::SUM);
      pack_tiles(states, rows, step * batch, y + frame_before * ldy, frames * ldy, batch, hidden);
    }
    pack_tiles(xs, rows, step * batch, x + frame * inputs, frames * inputs, batch, inputs);
    if (dx)
      multiply<IN_PANELS>(batch, inputs, depth, now + of_gate * apart, apart, {packed_inputs, depth * PANEL, PANEL},
                          dx + frame * inputs, frames * inputs, reverse ? Start::SUM : Start::ZERO);
  }
  float* product = scratch(4, (hidden > inputs ? hidden : inputs) * PANEL);
  for (int gate = 0; gate < 3; ++gate) {
    for (long unit = 0; unit < hidden; unit += PANEL) {
      const long units = least(hidden - unit, PANEL), place = gate * hidden + unit;
      const float* to_state = steps + (of_state[gate] * of_gate + unit / PANEL) * apart;
      const float* to_input = steps + (of_input[gate] * of_gate + unit / PANEL) * apart;
      sum_rows(rows, to_state, units, gradient.hidden_bias + place);
      weight_gradient(hidden, rows, batch, states, to_state, product, units, gradient.hidden_weight + place * hidden);
      if (to_input == to_state)
        copy(gradient.input_bias + place, gradient.hidden_bias + place, units);
      else
        sum_rows(rows, to_input, units, gradient.input_bias + place);
      weight_gradient(inputs, rows, 0, xs, to_input, product, units, gradient.input_weight + place * inputs);
    }
  }
}

void recur_backward(const Recurrence& shape, const float* dy, const float* y, const float* gates, const float* x,
                    const Direction* directions, const int64_t* lengths, float* dx, DirectionGradient* gradients) {
  for (int d = 0; d < shape.directions; ++d)
    recur_direction_backward(shape, d == 1, dy + d * shape.hidden, y + d * shape.hidden,
                             gates + d * shape.frames * shape.batch * 4 * rounded_up(shape.hidden), x, directions[d], lengths, dx,
                             gradients[d]);
}

// --- mean over time -----------------------------------------------------------------------------------------------------------

void average(long batch, long frames, long channels, const float* x, const int64_t* lengths, float* y) {
  for (long item = 0; item < batch; ++item, y += channels) {
    const float* frame = x + item * frames * channels;
    const long count = counting(lengths, item, frames);
    clear(y, channels);
    for (long t = 0; t < count; ++t, frame += channels) add(y, frame, channels);
    const float share = count ? 1.0f / static_cast<float>(count) : 0.0f;
    for (long c = 0; c < channels; ++c) y[c] *= share;
  }
}

void average_backward(long batch, long frames, long channels, const float* dy, const int64_t* lengths, float* dx) {
  for (long item = 0; item < batch; ++item, dy += channels) {
    const long count = counting(lengths, item, frames);
    const float share = count ? 1.0f / static_cast<float>(count) : 0.0f;
    for (long t = 0; t < count; ++t, dx += channels)
      for (long c = 0; c < channels; ++c) dx[c] = dy[c] * share;
    clear(dx, (frames - count) * channels);
    dx += (frames - count) * channels;
  }
}

// --- dropout ------------------------------------------------------------------------------------------------------------------

void drop(long rows, long columns, uint32_t first_key, uint32_t second_key, uint32_t threshold, float scale, const float* x,
          float* y) {
  for (long row = 0; row < rows; ++row, x += columns, y += columns) {
    const uint32_t start = static_cast<uint32_t>(row) * 0x9E3779B1u;
    for (long column = 0; column < columns; ++column) {
      uint32_t bits = (start + static_cast<uint32_t>(column)) ^ first_key;
      bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
      bits ^= second_key;
      bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
      bits ^= bits >> 16;
      y[column] = bits >= threshold ? x[column] * scale : 0.0f;
    }
  }
}

// --- powers of spectra --------------------------------------------------------------------------------------------------------

// Applies a function to each vector of x [count] in place.
template <typename Function>
INLINE void change(long count, float* x, const Function& function) {
  for_vectors(count, [&](long i, auto part) ALWAYS { part.store(x + i, function(part.load(x + i))); });
}

struct Power {
  Floats factor;
  INLINE Floats operator()(Floats x) const { return exponential(x * factor); }
};

void exponentiate(long count, float factor, float* x) { change(count, x, Power{all(factor)}); }

struct Level {
  Floats least, factor;
  INLINE Floats operator()(Floats x) const { return logarithm(x < least ? least : x) * factor; }
};

void take_logarithm(long count, float least, float factor, float* x) { change(count, x, Level{all(least), all(factor)}); }

}  // namespace

// Memory limits normalisation. Vectors of 16 floats would not be faster, and slower with 24 channels, because they cross the lines
// of the cache.
#if RAYDFL_LANES == 16
const auto normalise = avx2_kernels.normalise;
const auto normalise_backward = avx2_kernels.normalise_backward;
#endif

const Kernels RAYDFL_KERNELS = {RAYDFL_NAME,
                                PANEL,
                                convolve,
                                convolve_backward,
                                convolve_2d,
                                convolve_2d_backward,
                                normalise,
                                normalise_backward,
                                recur,
                                recur_backward,
                                average,
                                average_backward,
                                drop,
                                exponentiate,
                                take_logarithm};

}  // namespace raydfl
