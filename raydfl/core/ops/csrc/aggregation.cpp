// Sums over many clients' vectors at the speed of memory (see raydfl/core/ops/sums.py).
//
// Work proceeds strip by strip: totals stay in the first-level cache while the clients' strips stream through it. Each element
// accumulates products in client order, and products are rounded before they are added (the instruction sets below have no fused
// multiply-add), so the bits do not depend on strips, vector width or compiler.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "for_each_cpu.h"

namespace raydfl {
namespace {

// Vector of four doubles, without alignment in memory.
typedef double Quad __attribute__((vector_size(32), aligned(8), may_alias));
#define RAYDFL_QUAD_AT(place) (*reinterpret_cast<const Quad*>(place))
#define RAYDFL_WIDENED(place) \
  Quad{static_cast<double>((place)[0]), static_cast<double>((place)[1]), static_cast<double>((place)[2]), \
       static_cast<double>((place)[3])}

constexpr int64_t kStrip = 4096;            // elements: float64 totals fill a first-level cache of 32 KiB
constexpr int64_t kHalf = kStrip / 2;        // strip for two totals
constexpr int64_t kCached = 128 * 1024;     // float32 elements of all clients: half of a second-level cache of 1 MiB
constexpr int64_t kLanes = 8;               // partial sums of squares of a client

// total += weights[0] * rows[0] + ... + weights[3] * rows[3], in order. It reads the total a quarter as often as add_one.
RAYDFL_FOR_EACH_CPU
void add_four(double* __restrict total, const float* const* rows, const double* weights, int64_t elements) {
  const float *a = rows[0], *b = rows[1], *c = rows[2], *d = rows[3];
  const double weight_a = weights[0], weight_b = weights[1], weight_c = weights[2], weight_d = weights[3];
  for (int64_t i = 0; i < elements; ++i) {
    double sum = total[i];
    sum += weight_a * static_cast<double>(a[i]);
    sum += weight_b * static_cast<double>(b[i]);
    sum += weight_c * static_cast<double>(c[i]);
    sum += weight_d * static_cast<double>(d[i]);
    total[i] = sum;
  }
}

RAYDFL_FOR_EACH_CPU
void add_one(double* __restrict total, const float* __restrict row, double weight, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) total[i] += weight * static_cast<double>(row[i]);
}

// total += rows[0] + ... + rows[count - 1], in order.
RAYDFL_FOR_EACH_CPU
void add_all(double* __restrict total, const float* const* rows, size_t count, int64_t elements) {
  size_t row = 0;
  for (; row + 4 <= count; row += 4) {
    const float *a = rows[row], *b = rows[row + 1], *c = rows[row + 2], *d = rows[row + 3];
    for (int64_t i = 0; i < elements; ++i) {
      double sum = total[i];
      sum += static_cast<double>(a[i]);
      sum += static_cast<double>(b[i]);
      sum += static_cast<double>(c[i]);
      sum += static_cast<double>(d[i]);
      total[i] = sum;
    }
  }
  for (; row < count; ++row) {
    const float* a = rows[row];
    for (int64_t i = 0; i < elements; ++i) total[i] += static_cast<double>(a[i]);
  }
}

// lanes[i % 8] += (row[i] - mean[i]) squared.
RAYDFL_FOR_EACH_CPU
void add_squares(double* __restrict lanes, const float* __restrict row, const double* __restrict mean, int64_t elements) {
  double sums[kLanes];
  std::copy(lanes, lanes + kLanes, sums);
  int64_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double apart = static_cast<double>(row[i + lane]) - mean[i + lane];
      sums[lane] += apart * apart;
    }
  }
  for (int64_t lane = 0; i < elements; ++i, ++lane) {
    const double apart = static_cast<double>(row[i]) - mean[i];
    sums[lane] += apart * apart;
  }
  std::copy(sums, sums + kLanes, lanes);
}

// add_squares for four rows at a time with equal results, so that each mean is read once. It prefetches the rows' next strip.
RAYDFL_FOR_EACH_CPU
void add_four_squares(double* lanes, const float* const* rows, const double* mean, int64_t elements, int64_t following) {
  Quad low[4], high[4];
  for (int64_t row = 0; row < 4; ++row) {
    low[row] = RAYDFL_QUAD_AT(lanes + row * kLanes);
    high[row] = RAYDFL_QUAD_AT(lanes + row * kLanes + 4);
  }
  int64_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) {
    const Quad mean_low = RAYDFL_QUAD_AT(mean + i), mean_high = RAYDFL_QUAD_AT(mean + i + 4);
    const bool ask = i % 16 == 0 && i < following;
    for (int64_t row = 0; row < 4; ++row) {
      const float* const here = rows[row] + i;
      if (ask) __builtin_prefetch(here + elements);
      const Quad from_low = RAYDFL_WIDENED(here) - mean_low, from_high = RAYDFL_WIDENED(here + 4) - mean_high;
      low[row] += from_low * from_low;
      high[row] += from_high * from_high;
    }
  }
  for (int64_t row = 0; row < 4; ++row) {
    double* const own = lanes + row * kLanes;
    *reinterpret_cast<Quad*>(own) = low[row];
    *reinterpret_cast<Quad*>(own + 4) = high[row];
    if (i < elements) add_squares(own, rows[row] + i, mean + i, elements - i);
  }
}

// Returns the rows' memory, after checking that they have at least `stop` elements.
std::vector<const float*> memory_of(at::TensorList rows, int64_t stop) {
  std::vector<const float*> memory;
  memory.reserve(rows.size());
  for (const at::Tensor& row : rows) {
    TORCH_CHECK(row.scalar_type() == at::kFloat && row.dim() == 1 && row.is_contiguous() && row.numel() >= stop,
                "raydfl: every row has to be a contiguous float32 vector of at least ", stop, " elements");
    memory.push_back(row.const_data_ptr<float>());
  }
  return memory;
}

// Adds weighted values to stretches of a row. A stretch is a first column and a number of columns; values are contiguous.
RAYDFL_FOR_EACH_CPU
void add_stretches(double* __restrict total, const float* __restrict values, double weight, const int64_t* stretches,
                   int64_t count) {
  for (int64_t stretch = 0; stretch < count; ++stretch) {
    double* const sums = total + stretches[2 * stretch];
    const int64_t columns = stretches[2 * stretch + 1];
    for (int64_t i = 0; i < columns; ++i) sums[i] += weight * static_cast<double>(values[i]);
    values += columns;
  }
}

RAYDFL_FOR_EACH_CPU
void add_to_stretches(double* total, double weight, const int64_t* stretches, int64_t count) {
  for (int64_t stretch = 0; stretch < count; ++stretch) {
    double* const sums = total + stretches[2 * stretch];
    for (int64_t i = 0; i < stretches[2 * stretch + 1]; ++i) sums[i] += weight;
  }
}

// Adds a weight to single columns. Loops over stretches of one or two columns would mispredict their ends too often.
void add_to_columns(double* total, double weight, const int64_t* columns, int64_t count) {
  for (int64_t i = 0; i < count; ++i) total[columns[i]] += weight;
}

// total += weight * row and counted += weight, element-wise.
template <typename Weight>
RAYDFL_FOR_EACH_CPU
void add_each(double* __restrict total, double* __restrict counted, const float* __restrict row,
                                  const Weight* __restrict weights, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    const double weight = static_cast<double>(weights[i]);
    total[i] += weight * static_cast<double>(row[i]);
    counted[i] += weight;
  }
}

void check_total(const at::Tensor& total) {
  TORCH_CHECK(total.scalar_type() == at::kDouble && total.dim() == 1 && total.is_contiguous(),
              "raydfl: the total has to be a contiguous float64 vector");
}

void add_weighted(const at::Tensor& total, at::TensorList rows, at::ArrayRef<double> weights, int64_t start) {
  const int64_t elements = total.numel();
  check_total(total);
  TORCH_CHECK(weights.size() == rows.size(), "raydfl: ", rows.size(), " rows need as many weights, not ", weights.size());
  TORCH_CHECK(start >= 0, "raydfl: the start ", start, " is before the rows' first element");
  std::vector<const float*> strips = memory_of(rows, start + elements);
  for (const float*& strip : strips) strip += start;
  double* const sums = total.data_ptr<double>();
  for (int64_t done = 0; done < elements; done += kStrip) {
    const int64_t now = std::min(kStrip, elements - done);
    size_t row = 0;
    for (; row + 4 <= strips.size(); row += 4) add_four(sums + done, &strips[row], &weights[row], now);
    for (; row < strips.size(); ++row) add_one(sums + done, strips[row], weights[row], now);
    for (const float*& strip : strips) strip += now;
  }
}

// A client's slice (rows and columns) of a matrix of totals.
struct Slice {
  struct Row {
    int64_t there, here;  // row in the total, and in the values
    double weight;
  };
  const float* values = nullptr;    // [rows of the slice, width]; null: all 1
  std::vector<Row> rows;            // ascending in the total, without rows of weight 0
  std::vector<int64_t> stretches;   // pairs: first column of the total and number of columns
  std::vector<int64_t> columns;     // columns of the total, replacing short stretches of slices without values
  int64_t width = 0;
  bool whole = false;               // whether the slice has all columns
};

// Returns the indices in an int64 vector after checks; null for an empty vector, which selects all.
const int64_t* kept_of(const at::Tensor& kept, int64_t size) {
  TORCH_CHECK(kept.scalar_type() == at::kLong && kept.dim() == 1 && kept.is_contiguous(),
              "raydfl: the rows and columns of a slice have to be contiguous vectors of int64");
  if (kept.numel() == 0) return nullptr;
  const int64_t* const numbers = kept.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < kept.numel(); ++i)
    TORCH_CHECK(numbers[i] >= 0 && numbers[i] < size, "raydfl: row or column ", numbers[i],
                " of a slice is outside of the total's ", size);
  return numbers;
}

Slice slice_of(const at::Tensor* values, const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& columns,
               int64_t height, int64_t width, int64_t unit) {
  Slice slice;
  const int64_t* const kept_rows = kept_of(rows, height);
  const int64_t count = kept_rows ? rows.numel() : height;
  TORCH_CHECK(weights.scalar_type() == at::kDouble && weights.dim() == 1 && weights.is_contiguous() &&
                  (weights.numel() == count || weights.numel() == 1),
              "raydfl: a slice needs one float64 weight, or one for each of its rows");
  const double* const weight = weights.const_data_ptr<double>();
  slice.rows.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    const double own = weight[weights.numel() == 1 ? 0 : i];
    if (own != 0) slice.rows.push_back({kept_rows ? kept_rows[i] : i, i, own});
  }
  const auto before = [](const Slice::Row& a, const Slice::Row& b) { return a.there < b.there; };
  if (!std::is_sorted(slice.rows.begin(), slice.rows.end(), before)) std::sort(slice.rows.begin(), slice.rows.end(), before);
  TORCH_CHECK(unit > 0 && width % unit == 0, "raydfl: a row of ", width, " elements has no columns of ", unit);
  if (const int64_t* const kept_columns = kept_of(columns, width / unit)) {
    for (int64_t i = 0; i < columns.numel(); ++i) {
      if (i > 0 && kept_columns[i] == kept_columns[i - 1] + 1) {
        slice.stretches.back() += unit;
      } else {
        slice.stretches.push_back(kept_columns[i] * unit);
        slice.stretches.push_back(unit);
      }
    }
    slice.width = columns.numel() * unit;
    if (values == nullptr && slice.width < 4 * static_cast<int64_t>(slice.stretches.size())) {
      for (size_t pair = 0; pair < slice.stretches.size(); pair += 2)
        for (int64_t i = 0; i < slice.stretches[pair + 1]; ++i) slice.columns.push_back(slice.stretches[pair] + i);
      slice.stretches.clear();
    }
  } else {
    slice.stretches = {0, width};
    slice.width = width;
  }
  slice.whole = slice.stretches.size() == 2 && slice.width == width;
  if (values != nullptr) {
    TORCH_CHECK(values->scalar_type() == at::kFloat && values->dim() == 1 && values->is_contiguous() &&
                    values->numel() == count * slice.width,
                "raydfl: the values of a slice have to be a contiguous float32 vector of ", count * slice.width, " elements");
    slice.values = values->const_data_ptr<float>();
  }
  return slice;
}

// Proceeds row by row of the total, so that totals stay in the cache. Each element accumulates in client order.
void add_slices(const at::Tensor& total, int64_t height, at::TensorList values, at::TensorList rows, at::TensorList weights,
                at::TensorList columns, at::IntArrayRef units) {
  check_total(total);
  TORCH_CHECK(height > 0 && total.numel() % height == 0, "raydfl: a total of ", total.numel(), " elements has no ", height,
              " rows");
  const size_t count = rows.size();
  TORCH_CHECK(count == weights.size() && count == columns.size() && count == units.size() &&
                  (values.empty() || count == values.size()),
              "raydfl: each slice needs rows, weights, columns and a unit, and values if others have some");
  const int64_t width = total.numel() / height;
  std::vector<Slice> slices;
  for (size_t i = 0; i < count; ++i)
    slices.push_back(
        slice_of(values.empty() ? nullptr : &values[i], rows[i], weights[i], columns[i], height, width, units[i]));
  std::vector<size_t> next(count, 0);
  std::vector<const float*> waiting;  // whole rows, to be added four at a time
  std::vector<double> counted;
  for (int64_t row = 0; row < height; ++row) {
    double* const sums = total.data_ptr<double>() + row * width;
    const auto add_waiting = [&] {
      size_t i = 0;
      for (; i + 4 <= waiting.size(); i += 4) add_four(sums, &waiting[i], &counted[i], width);
      for (; i < waiting.size(); ++i) add_one(sums, waiting[i], counted[i], width);
      waiting.clear();
      counted.clear();
    };
    for (size_t i = 0; i < count; ++i) {
      const Slice& slice = slices[i];
      for (; next[i] < slice.rows.size() && slice.rows[next[i]].there == row; ++next[i]) {
        const Slice::Row& own = slice.rows[next[i]];
        const int64_t stretches = static_cast<int64_t>(slice.stretches.size()) / 2;
        if (slice.values == nullptr) {
          add_to_stretches(sums, own.weight, slice.stretches.data(), stretches);
          add_to_columns(sums, own.weight, slice.columns.data(), static_cast<int64_t>(slice.columns.size()));
        } else if (slice.whole) {
          waiting.push_back(slice.values + own.here * width);
          counted.push_back(own.weight);
        } else {
          add_waiting();
          add_stretches(sums, slice.values + own.here * slice.width, own.weight, slice.stretches.data(), stretches);
        }
      }
    }
    add_waiting();
  }
}

template <typename Weight>
void add_elements_of(const at::Tensor& total, const at::Tensor& counted, std::vector<const float*> strips,
                     at::TensorList weights) {
  std::vector<const Weight*> their;
  for (const at::Tensor& each : weights) their.push_back(each.const_data_ptr<Weight>());
  for (int64_t done = 0; done < total.numel(); done += kHalf) {
    const int64_t now = std::min(kHalf, total.numel() - done);
    for (size_t row = 0; row < strips.size(); ++row)
      add_each(total.data_ptr<double>() + done, counted.data_ptr<double>() + done, strips[row] + done, their[row] + done, now);
  }
}

void add_elements(const at::Tensor& total, const at::Tensor& counted, at::TensorList rows, at::TensorList weights) {
  check_total(total);
  check_total(counted);
  const int64_t elements = total.numel();
  TORCH_CHECK(counted.numel() == elements, "raydfl: ", elements, " elements cannot be counted in ", counted.numel());
  TORCH_CHECK(rows.size() == weights.size(), "raydfl: ", rows.size(), " rows need as many weights, not ", weights.size());
  if (rows.empty()) return;
  const at::ScalarType type = weights[0].scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kDouble, "raydfl: the weights have to be float32 or float64");
  for (const at::Tensor& each : weights)
    TORCH_CHECK(each.scalar_type() == type && each.dim() == 1 && each.is_contiguous() && each.numel() >= elements,
                "raydfl: the weights of every row have to be a contiguous vector of at least ", elements,
                " elements, all of one type");
  if (type == at::kFloat) {
    add_elements_of<float>(total, counted, memory_of(rows, elements), weights);
  } else {
    add_elements_of<double>(total, counted, memory_of(rows, elements), weights);
  }
}

at::Tensor squared_deviations(at::TensorList rows, at::IntArrayRef starts, at::IntArrayRef stops) {
  TORCH_CHECK(starts.size() == stops.size(), "raydfl: as many starts as stops are needed");
  const int64_t clients = static_cast<int64_t>(rows.size());
  const int64_t last = stops.empty() ? 0 : *std::max_element(stops.begin(), stops.end());
  const std::vector<const float*> memory = memory_of(rows, last);
  const int64_t strip = std::clamp(kCached / std::max<int64_t>(clients, 1) / 64 * 64, int64_t{512}, kStrip);
  std::vector<const float*> strips(memory.size());
  std::vector<double> lanes(memory.size() * kLanes, 0.0), mean(strip);
  for (size_t part = 0; part < starts.size(); ++part) {
    TORCH_CHECK(starts[part] >= 0 && starts[part] <= stops[part], "raydfl: a part of the rows cannot be from ",
                starts[part], " to ", stops[part]);
    for (int64_t start = starts[part]; start < stops[part]; start += strip) {
      const int64_t now = std::min(strip, stops[part] - start);
      for (size_t row = 0; row < memory.size(); ++row) strips[row] = memory[row] + start;
      std::fill(mean.begin(), mean.end(), 0.0);
      add_all(mean.data(), strips.data(), strips.size(), now);
      for (double& value : mean) value /= static_cast<double>(clients);
      const int64_t following = std::min(strip, stops[part] - start - now);
      size_t row = 0;
      for (; row + 4 <= strips.size(); row += 4)
        add_four_squares(&lanes[row * kLanes], &strips[row], mean.data(), now, following);
      for (; row < strips.size(); ++row) add_squares(&lanes[row * kLanes], strips[row], mean.data(), now);
    }
  }
  at::Tensor squares = at::empty({clients}, at::kDouble);
  double* const results = squares.data_ptr<double>();
  for (int64_t row = 0; row < clients; ++row) {
    const double* const sums = &lanes[row * kLanes];
    results[row] = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  }
  return squares;
}

}  // namespace
}  // namespace raydfl

TORCH_LIBRARY_FRAGMENT(raydfl, library) {
  library.def("add_weighted(Tensor(a!) total, Tensor[] rows, float[] weights, int start) -> ()");
  library.def(
      "add_slices(Tensor(a!) total, int height, Tensor[] values, Tensor[] rows, Tensor[] weights, Tensor[] columns, "
      "int[] units) -> ()");
  library.def("add_elements(Tensor(a!) total, Tensor(b!) counted, Tensor[] rows, Tensor[] weights) -> ()");
  library.def("squared_deviations(Tensor[] rows, int[] starts, int[] stops) -> Tensor");
}

TORCH_LIBRARY_IMPL(raydfl, CPU, library) {
  library.impl("add_weighted", raydfl::add_weighted);
  library.impl("add_slices", raydfl::add_slices);
  library.impl("add_elements", raydfl::add_elements);
  library.impl("squared_deviations", raydfl::squared_deviations);
}
