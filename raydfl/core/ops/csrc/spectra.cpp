// In-place transforms of a batch's spectrograms before training: power and logarithm, z-scores, noise and masks (see spectra.py).
//
// Examples are processed one by one, without padding. So an example's bits do not depend on its batch, and its data stays in the
// first-level cache. x is [..., frames, bands]; further arguments are [...] or [..., values of an example].

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"

namespace raydfl {
namespace {

using at::Tensor;

constexpr int64_t kTogether = 16;  // minimum number of examples for a thread

struct Spectra {
  int64_t frames, bands, examples;
  Tensor counts;

  Spectra(const Tensor& x, const Tensor& counts_) : counts(counts_.contiguous()) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "raydfl: x is not float32 and contiguous");
    TORCH_CHECK(x.dim() >= 2 && counts.scalar_type() == at::kLong && counts.sizes() == x.sizes().slice(0, x.dim() - 2),
                "raydfl: frames are not one int64 for each example");
    frames = x.size(-2), bands = x.size(-1), examples = counts.numel();
  }

  // Calls work(index of the example, its valid frames, its first element).
  template <typename Work>
  void for_each(Tensor& x, const Work& work) const {
    float* data = x.mutable_data_ptr<float>();
    const int64_t* count = counts.const_data_ptr<int64_t>();
    at::parallel_for(0, examples, kTogether, [&](int64_t first, int64_t next) {
      for (int64_t i = first; i < next; ++i)
        work(i, std::clamp<int64_t>(count[i], 0, frames), data + i * frames * bands);
    });
  }

  // Returns arguments of the examples, [examples, each].
  template <typename Number>
  Tensor of_each(const Tensor& numbers, int64_t each, const char* name) const {
    TORCH_CHECK(numbers.scalar_type() == c10::CppTypeToScalarType<Number>::value && numbers.numel() == examples * each,
                "raydfl: ", name, " has shape ", numbers.sizes(), " of ", numbers.scalar_type(), ", which does not fit the examples");
    return numbers.contiguous();
  }
};

double sum(const float* x, int64_t count) {
  constexpr int64_t kLanes = 8;
  double sums[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += static_cast<double>(x[i + lane]);
  for (int64_t i = whole; i < count; ++i) sums[0] += static_cast<double>(x[i]);
  double total = 0.0;
  for (const double each : sums) total += each;
  return total;
}

void to_power(Tensor x, const Tensor& frames, double factor) {
  const Spectra spectra(x, frames);
  spectra.for_each(x, [&](int64_t, int64_t count, float* own) {
    kernels().exponentiate(count * spectra.bands, static_cast<float>(factor), own);
  });
}

void to_logarithm(Tensor x, const Tensor& frames, double least, double factor) {
  const Spectra spectra(x, frames);
  spectra.for_each(x, [&](int64_t, int64_t count, float* own) {
    kernels().take_logarithm(count * spectra.bands, static_cast<float>(least), static_cast<float>(factor), own);
  });
}

void to_z_scores(Tensor x, const Tensor& frames, double epsilon) {
  const Spectra spectra(x, frames);
  const int64_t bands = spectra.bands;
  spectra.for_each(x, [&](int64_t, int64_t count, float* own) {
    std::vector<double> sums(bands);
    std::vector<float> mean(bands), share(bands);
    const double each = 1.0 / static_cast<double>(std::max<int64_t>(count, 1));
    for (int64_t t = 0; t < count; ++t)
      for (int64_t b = 0; b < bands; ++b) sums[b] += static_cast<double>(own[t * bands + b]);
    for (int64_t b = 0; b < bands; ++b) mean[b] = static_cast<float>(sums[b] * each);
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t b = 0; b < bands; ++b) {
        const float apart = own[t * bands + b] -= mean[b];
        sums[b] += static_cast<double>(apart * apart);
      }
    }
    for (int64_t b = 0; b < bands; ++b) share[b] = static_cast<float>(1.0 / (std::sqrt(sums[b] * each) + epsilon));
    for (int64_t t = 0; t < count; ++t)
      for (int64_t b = 0; b < bands; ++b) own[t * bands + b] *= share[b];
  });
}

void add_noise(Tensor x, const Tensor& frames, const Tensor& noise_, const Tensor& first_, const Tensor& ratio_) {
  const Spectra spectra(x, frames);
  const int64_t bands = spectra.bands;
  const Tensor noise = noise_.contiguous();
  TORCH_CHECK(noise.scalar_type() == at::kFloat && noise.dim() == 2 && noise.size(0) > 0 && noise.size(1) == bands,
              "raydfl: the noise has shape ", noise.sizes(), ", not float32 [1 or more, ", bands, "]");
  const Tensor first = spectra.of_each<int64_t>(first_, 1, "first"), ratio = spectra.of_each<float>(ratio_, 1, "ratio");
  const int64_t rows = noise.size(0), *begin = first.const_data_ptr<int64_t>();
  const float *from = noise.const_data_ptr<float>(), *of_power = ratio.const_data_ptr<float>();
  spectra.for_each(x, [&](int64_t i, int64_t count, float* own) {
    if (of_power[i] == 0.0f || count == 0) return;
    const float factor = of_power[i] * static_cast<float>(sum(own, count * bands) / static_cast<double>(count));
    int64_t row = (begin[i] % rows + rows) % rows;
    for (int64_t t = 0; t < count; ++t, own += bands, row = row + 1 == rows ? 0 : row + 1)
      for (int64_t b = 0; b < bands; ++b) own[b] += from[row * bands + b] * factor;
  });
}

void mask(Tensor x, const Tensor& frames, const Tensor& firsts_, const Tensor& lengths_, const Tensor& lowest_,
          const Tensor& widths_) {
  const Spectra spectra(x, frames);
  const int64_t bands = spectra.bands, times = firsts_.size(-1), stripes = lowest_.size(-1);
  const Tensor firsts = spectra.of_each<int64_t>(firsts_, times, "firsts"), lowest = spectra.of_each<int64_t>(lowest_, stripes, "lowest");
  const Tensor lengths = spectra.of_each<int64_t>(lengths_, times, "lengths"), widths = spectra.of_each<int64_t>(widths_, stripes, "widths");
  const int64_t *first = firsts.const_data_ptr<int64_t>(), *length = lengths.const_data_ptr<int64_t>();
  const int64_t *low = lowest.const_data_ptr<int64_t>(), *width = widths.const_data_ptr<int64_t>();
  spectra.for_each(x, [&](int64_t i, int64_t count, float* own) {
    const float mean = count ? static_cast<float>(sum(own, count * bands) / static_cast<double>(count * bands)) : 0.0f;
    for (int64_t m = i * times; m < (i + 1) * times; ++m) {
      const int64_t begin = std::clamp<int64_t>(first[m], 0, count), end = std::clamp<int64_t>(first[m] + length[m], begin, count);
      std::fill(own + begin * bands, own + end * bands, mean);
    }
    for (int64_t m = i * stripes; m < (i + 1) * stripes; ++m) {
      const int64_t begin = std::clamp<int64_t>(low[m], 0, bands), end = std::clamp<int64_t>(low[m] + width[m], begin, bands);
      for (int64_t t = 0; t < count; ++t) std::fill(own + t * bands + begin, own + t * bands + end, mean);
    }
  });
}

}  // namespace
}  // namespace raydfl

TORCH_LIBRARY_FRAGMENT(raydfl, library) {
  library.def("to_power(Tensor(a!) x, Tensor frames, float factor) -> ()");
  library.def("to_logarithm(Tensor(a!) x, Tensor frames, float least, float factor) -> ()");
  library.def("to_z_scores(Tensor(a!) x, Tensor frames, float epsilon) -> ()");
  library.def("add_noise(Tensor(a!) x, Tensor frames, Tensor noise, Tensor first, Tensor ratio) -> ()");
  library.def("mask(Tensor(a!) x, Tensor frames, Tensor firsts, Tensor lengths, Tensor lowest, Tensor widths) -> ()");
}

TORCH_LIBRARY_IMPL(raydfl, CPU, library) {
  library.impl("to_power", raydfl::to_power);
  library.impl("to_logarithm", raydfl::to_logarithm);
  library.impl("to_z_scores", raydfl::to_z_scores);
  library.impl("add_noise", raydfl::add_noise);
  library.impl("mask", raydfl::mask);
}
