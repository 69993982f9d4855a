// Loss term against client drift (raydfl/core/ops/reductions.py), over all weights of a network in a single call.
//
// It runs at the speed of memory: weights are read once forward and once backward. Sums have a fixed order, a single thread for
// each client, and no fused multiply-adds, so the bits do not depend on the CPU.

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "for_each_cpu.h"
#include "operators.h"

namespace raydfl {
namespace {

constexpr int64_t kBlock = 4096;  // elements of a block: sums are float32 within a block, and float64 over blocks
constexpr int64_t kLanes = 16;    // partial sums of a block

const float kZeros[kBlock] = {};  // missing anchors or slopes; they stay in the first-level cache

// Returns the block's sum of (w - a) (pull / 2 (w - a) + s).
RAYDFL_FOR_EACH_CPU
double sum_of_block(const float* w, const float* a, const float* s, float half, int64_t count) {
  float sums[kLanes] = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float away = w[i + lane] - a[i + lane];
      sums[lane] += away * (half * away + s[i + lane]);
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    const float away = w[i] - a[i];
    sums[i - whole] += away * (half * away + s[i]);
  }
  double total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

// Computes dw = scale (pull (w - a) + s) for a block.
RAYDFL_FOR_EACH_CPU
void differentiate(const float* w, const float* a, const float* s, float pull, float scale, int64_t count, float* dw) {
  for (int64_t i = 0; i < count; ++i) dw[i] = scale * (pull * (w[i] - a[i]) + s[i]);
}

struct Pulled {
  bool grouped;
  int64_t clients;
  Tensor pull;
  std::vector<Tensor> weights, anchors, slopes;

  Pulled(at::TensorList weights_, at::TensorList anchors_, at::TensorList slopes_, const Tensor& pull_)
      : grouped(pull_.dim() == 1), clients(grouped ? pull_.size(0) : 1), pull(checked(pull_, grouped, "pull")) {
    for (const auto& [given, into, name] : {std::tuple(weights_, &weights, "a weight"), std::tuple(anchors_, &anchors, "an anchor"),
                                            std::tuple(slopes_, &slopes, "a slope")}) {
      TORCH_CHECK(given.empty() || given.size() == weights_.size(), "raydfl: ", given.size(), " anchors or slopes for ",
                  weights_.size(), " weights");
      for (size_t i = 0; i < given.size(); ++i) {
        check_shape(given[i], weights_[i].sizes(), name);
        into->push_back(checked(given[i], given[i].dim(), name));
      }
    }
    for (const Tensor& weight : weights)
      TORCH_CHECK(!grouped || (weight.dim() > 0 && weight.size(0) == clients), "raydfl: weights are of different clients");
  }

  // Calls work(index of the weight, first element, number of elements, weight, anchors, slopes) for each block of a client.
  template <typename Work>
  void for_each_block(int64_t client, const Work& work) const {
    for (size_t number = 0; number < weights.size(); ++number) {
      const int64_t count = weights[number].numel() / clients, begin = client * count;
      const auto of = [&](const std::vector<Tensor>& tensors) {
        return tensors.empty() ? nullptr : tensors[number].const_data_ptr<float>();
      };
      const float *w = of(weights), *a = of(anchors), *s = of(slopes);
      for (int64_t i = begin; i < begin + count; i += kBlock)
        work(number, i, std::min(kBlock, begin + count - i), w + i, a ? a + i : kZeros, s ? s + i : kZeros);
    }
  }
};

Tensor drift_forward(at::TensorList weights, at::TensorList anchors, at::TensorList slopes, const Tensor& pull) {
  const Pulled p(weights, anchors, slopes, pull);
  const Tensor values = at::empty_like(p.pull);
  const float* pulls = p.pull.const_data_ptr<float>();
  float* to = values.mutable_data_ptr<float>();
  for_each_client(p.clients, [&](int64_t client) {
    double total = 0;
    p.for_each_block(client, [&](size_t, int64_t, int64_t count, const float* w, const float* a, const float* s) {
      total += sum_of_block(w, a, s, pulls[client] / 2, count);
    });
    to[client] = static_cast<float>(total);
  });
  return values;
}

std::vector<Tensor> drift_backward(const Tensor& dy_, at::TensorList weights, at::TensorList anchors, at::TensorList slopes,
                                   const Tensor& pull) {
  const Pulled p(weights, anchors, slopes, pull);
  check_shape(dy_, p.pull.sizes(), "the gradient");
  const Tensor dy = checked(dy_, p.grouped, "the gradient");
  std::vector<Tensor> gradients;
  std::vector<float*> to;
  for (const Tensor& weight : p.weights) {
    gradients.push_back(at::empty_like(weight));
    to.push_back(gradients.back().mutable_data_ptr<float>());
  }
  const float *pulls = p.pull.const_data_ptr<float>(), *scales = dy.const_data_ptr<float>();
  for_each_client(p.clients, [&](int64_t client) {
    p.for_each_block(client, [&](size_t number, int64_t first, int64_t count, const float* w, const float* a, const float* s) {
      differentiate(w, a, s, pulls[client], scales[client], count, to[number] + first);
    });
  });
  return gradients;
}

}  // namespace
}  // namespace raydfl

TORCH_LIBRARY_FRAGMENT(raydfl, library) {
  library.def("drift_forward(Tensor[] weights, Tensor[] anchors, Tensor[] slopes, Tensor pull) -> Tensor");
  library.def("drift_backward(Tensor dy, Tensor[] weights, Tensor[] anchors, Tensor[] slopes, Tensor pull) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(raydfl, CPU, library) {
  library.impl("drift_forward", raydfl::drift_forward);
  library.impl("drift_backward", raydfl::drift_backward);
}
