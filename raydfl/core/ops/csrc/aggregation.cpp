// Sums over many clients' vectors, each vector read at the speed of memory; what raydfl/rows.py says about them holds here.
//
// Work goes strip by strip: what is summed up stays in the first-level cache while the clients' strips stream past it.
// Each element is one chain of operations in client order, and products are rounded before they are added (the
// instruction sets named below have no fused multiply-add), so the bits do not depend on strips, vector width or compiler.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define RAYDFL_FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define RAYDFL_FOR_EACH_CPU
#endif

namespace raydfl {
namespace {

constexpr int64_t kStrip = 4096;            // elements: as float64 they fill a first-level cache of 32 KiB
constexpr int64_t kCached = 128 * 1024;     // float32 elements of all clients: half of a second-level cache of 1 MiB
constexpr int64_t kLanes = 8;               // partial sums of squares of a client

// total += weights[0] * rows[0] + ... + weights[3] * rows[3], one after another: a quarter of the traffic of add_one.
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

// total += rows[0] + ... + rows[count - 1], one after another.
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

// The rows' memory, after a check that all of them hold the elements up to `stop`.
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

void add_weighted(const at::Tensor& total, at::TensorList rows, at::ArrayRef<double> weights, int64_t start) {
  const int64_t elements = total.numel();
  TORCH_CHECK(total.scalar_type() == at::kDouble && total.dim() == 1 && total.is_contiguous(),
              "raydfl: the total has to be a contiguous float64 vector");
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
      for (size_t row = 0; row < strips.size(); ++row) {
        // These strips are in the cache by now: while they are computed with, memory brings the next ones.
        for (int64_t i = 0; i < following; i += 16) __builtin_prefetch(strips[row] + now + i, 0, 2);
        add_squares(&lanes[row * kLanes], strips[row], mean.data(), now);
      }
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
  library.def("squared_deviations(Tensor[] rows, int[] starts, int[] stops) -> Tensor");
}

TORCH_LIBRARY_IMPL(raydfl, CPU, library) {
  library.impl("add_weighted", raydfl::add_weighted);
  library.impl("squared_deviations", raydfl::squared_deviations);
}
