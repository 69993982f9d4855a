// PyTorch operators on images: 2-d convolution, and normalisation with ReLU and pooling. As in operators.cpp, tensors may have a
// leading dimension of clients. Channels come last.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "operators.h"

namespace raydfl {
namespace {

struct Convolved2d {
  bool grouped;
  int64_t clients;
  Tensor x, weight;
  Convolution2d s;

  Convolved2d(const Tensor& x_, const Tensor& weight_, at::IntArrayRef stride, at::IntArrayRef padding)
      : grouped(x_.dim() == 5),
        clients(grouped ? x_.size(0) : 1),
        x(checked(x_, 4 + grouped, "x")),
        weight(checked(weight_, 4 + grouped, "weight")) {
    TORCH_CHECK(stride.size() == 2 && padding.size() == 4, "raydfl: a stride of two numbers and a padding of four are needed");
    s = {x.size(-4),   x.size(-3), x.size(-2), x.size(-1), weight.size(-4), weight.size(-2), weight.size(-1), stride[0],
         stride[1], padding[0], padding[1], padding[2], padding[3]};
    check_shape(weight, shaped(grouped, clients, {s.outputs, s.inputs, s.kernel_rows, s.kernel_columns}), "weight");
    TORCH_CHECK(s.row_stride > 0 && s.column_stride > 0, "raydfl: a stride of ", stride, " cannot be");
    TORCH_CHECK(s.kernel_rows > 0 && s.top >= 0 && s.bottom >= 0 && s.top < s.kernel_rows && s.bottom < s.kernel_rows &&
                    s.kernel_columns > 0 && s.left >= 0 && s.right >= 0 && s.left < s.kernel_columns &&
                    s.right < s.kernel_columns,
                "raydfl: padding ", padding, " does not fit a kernel of ", s.kernel_rows, " x ", s.kernel_columns);
    TORCH_CHECK(s.rows + s.top + s.bottom >= s.kernel_rows && s.columns + s.left + s.right >= s.kernel_columns,
                "raydfl: images of ", s.rows, " x ", s.columns, " are smaller than the kernel");
  }

  int64_t input() const { return s.batch * s.rows * s.columns * s.inputs; }
  int64_t output() const { return s.batch * s.out_rows() * s.out_columns() * s.outputs; }
  int64_t size() const { return s.outputs * s.inputs * s.kernel_rows * s.kernel_columns; }
  std::vector<int64_t> output_shape() const {
    return shaped(grouped, clients, {s.batch, s.out_rows(), s.out_columns(), s.outputs});
  }
};

Tensor conv2d_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias_, at::IntArrayRef stride,
                      at::IntArrayRef padding) {
  const Convolved2d c(x, weight, stride, padding);
  const Tensor bias = bias_ ? checked(*bias_, 1 + c.grouped, "bias") : Tensor();
  if (bias_) check_shape(bias, shaped(c.grouped, c.clients, {c.s.outputs}), "bias");
  const Tensor y = at::empty(c.output_shape(), c.x.options());
  const float *px = c.x.const_data_ptr<float>(), *pw = c.weight.const_data_ptr<float>();
  const float* pb = bias_ ? bias.const_data_ptr<float>() : nullptr;
  float* py = y.mutable_data_ptr<float>();
  for_each_client(c.clients, [&](int64_t i) {
    kernels().convolve_2d(c.s, px + i * c.input(), pw + i * c.size(), pb ? pb + i * c.s.outputs : nullptr, py + i * c.output());
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> conv2d_backward(const Tensor& dy_, const Tensor& x, const Tensor& weight, at::IntArrayRef stride,
                                                   at::IntArrayRef padding, bool need_x) {
  const Convolved2d c(x, weight, stride, padding);
  const Tensor dy = checked(dy_, 4 + c.grouped, "the gradient");
  check_shape(dy, c.output_shape(), "the gradient");
  const Tensor dx = need_x ? at::empty_like(c.x) : at::empty(shaped(c.grouped, c.clients, {0}), c.x.options());
  const Tensor dweight = at::empty_like(c.weight);
  const Tensor dbias = at::empty(shaped(c.grouped, c.clients, {c.s.outputs}), c.x.options());
  const float *pd = dy.const_data_ptr<float>(), *px = c.x.const_data_ptr<float>(), *pw = c.weight.const_data_ptr<float>();
  float *gx = dx.mutable_data_ptr<float>(), *gw = dweight.mutable_data_ptr<float>(), *gb = dbias.mutable_data_ptr<float>();
  for_each_client(c.clients, [&](int64_t i) {
    kernels().convolve_2d_backward(c.s, pd + i * c.output(), px + i * c.input(), pw + i * c.size(),
                                   need_x ? gx + i * c.input() : nullptr, gw + i * c.size(), gb + i * c.s.outputs);
  });
  return {dx, dweight, dbias};
}

// Images of equal size, each with its own normalisation. Their results are concatenated over channels.
struct Normalised {
  bool grouped;
  int64_t clients, width = 0;
  OptionalTensor lengths;
  std::vector<Tensor> xs, weights, biases;
  std::vector<int64_t> before;  // first channel of each image in the result
  Normalisation s;

  Normalised(at::TensorList xs_, at::TensorList weights_, at::TensorList biases_, const OptionalTensor& lengths_, int64_t groups,
             double epsilon, bool relu, int64_t pool, bool ceil) {
    TORCH_CHECK(!xs_.empty() && (groups == 0 || (weights_.size() == xs_.size() && biases_.size() == xs_.size())),
                "raydfl: ", xs_.size(), " images, ", weights_.size(), " weights and ", biases_.size(), " biases do not belong together");
    grouped = xs_[0].dim() == 5;
    clients = grouped ? xs_[0].size(0) : 1;
    TORCH_CHECK(0 <= pool && pool < 16 && (relu || !pool), "raydfl: a pool of ", pool, " cannot be, or has no ReLU before it");
    for (size_t i = 0; i < xs_.size(); ++i) {
      xs.push_back(checked(xs_[i], 4 + grouped, "x"));
      const Tensor& x = xs.back();
      const int64_t channels = x.size(-1);
      if (!i)
        s = {x.size(-4), x.size(-3), x.size(-2), 0, groups, groups * static_cast<int64_t>(xs_.size()), static_cast<float>(epsilon),
             relu, pool, ceil};
      check_shape(x, shaped(grouped, clients, {s.batch, s.rows, s.columns, channels}), "x");
      before.push_back(width);
      width += channels;
      if (!groups) continue;
      TORCH_CHECK(channels % groups == 0, "raydfl: ", channels, " channels make no ", groups, " equal groups");
      weights.push_back(checked(weights_[i], 1 + grouped, "weight"));
      biases.push_back(checked(biases_[i], 1 + grouped, "bias"));
      check_shape(weights.back(), shaped(grouped, clients, {channels}), "weight");
      check_shape(biases.back(), shaped(grouped, clients, {channels}), "bias");
    }
    lengths = checked_lengths(lengths_, grouped, clients, s.batch);
  }

  int64_t output() const { return s.batch * s.out_rows() * s.out_columns() * width; }
  std::vector<int64_t> output_shape() const {
    return shaped(grouped, clients, {s.batch, s.out_rows(), s.out_columns(), width});
  }
  std::vector<int64_t> moments_shape() const { return shaped(grouped, clients, {2, s.batch, s.means}); }

  // Runs a kernel for each client and image, with the arguments of both kernels.
  template <typename Work>
  void for_each(const Work& work) const {
    for_each_client(clients, [&](int64_t client) {
      for (size_t i = 0; i < xs.size(); ++i) {
        Normalisation one = s;
        one.channels = xs[i].size(-1);
        const int64_t first = client * one.channels;
        work(client, i, one, xs[i].const_data_ptr<float>() + client * s.batch * s.rows * s.columns * one.channels,
             s.groups ? weights[i].const_data_ptr<float>() + first : nullptr,
             s.groups ? biases[i].const_data_ptr<float>() + first : nullptr, of_client(lengths, client, s.batch));
      }
    });
  }
};

std::tuple<Tensor, Tensor, Tensor> norm_forward(at::TensorList xs, at::TensorList weights, at::TensorList biases,
                                                const OptionalTensor& lengths, int64_t groups, double epsilon, bool relu,
                                                int64_t pool, bool ceil) {
  const Normalised n(xs, weights, biases, lengths, groups, epsilon, relu, pool, ceil);
  const auto options = n.xs[0].options();
  const Tensor y = at::empty(n.output_shape(), options), moments = at::empty(n.moments_shape(), options);
  const Tensor codes = at::empty(pool ? n.output_shape() : shaped(n.grouped, n.clients, {0}), options.dtype(at::kByte));
  float *py = y.mutable_data_ptr<float>(), *pm = moments.mutable_data_ptr<float>();
  uint8_t* pc = codes.mutable_data_ptr<uint8_t>();
  const int64_t half = n.s.batch * n.s.means;
  n.for_each([&](int64_t client, size_t i, const Normalisation& s, const float* x, const float* weight, const float* bias,
                 const int64_t* counts) {
    const int64_t place = client * n.output() + n.before[i];
    float* means = pm + client * 2 * half + static_cast<int64_t>(i) * s.groups;
    kernels().normalise(s, x, weight, bias, counts, py + place, n.width, pool ? pc + place : nullptr, means, means + half);
  });
  return {y, codes, moments};
}

std::vector<Tensor> norm_backward(const Tensor& dy_, const Tensor& codes_, const Tensor& moments_, at::TensorList xs,
                                  at::TensorList weights, at::TensorList biases, const OptionalTensor& lengths, int64_t groups,
                                  double epsilon, bool relu, int64_t pool, bool ceil) {
  const Normalised n(xs, weights, biases, lengths, groups, epsilon, relu, pool, ceil);
  const Tensor dy = checked(dy_, 4 + n.grouped, "the gradient"), codes = codes_.contiguous(), moments = moments_.contiguous();
  check_shape(dy, n.output_shape(), "the gradient");
  if (pool) check_shape(codes, n.output_shape(), "codes");
  check_shape(moments, n.moments_shape(), "the moments");
  std::vector<Tensor> gradients;
  for (const auto& group : {n.xs, n.weights, n.biases})
    for (const Tensor& tensor : group) gradients.push_back(at::empty_like(tensor));
  std::vector<float*> to;
  for (const Tensor& gradient : gradients) to.push_back(gradient.mutable_data_ptr<float>());
  const float *pd = dy.const_data_ptr<float>(), *pm = moments.const_data_ptr<float>();
  const uint8_t* pc = codes.const_data_ptr<uint8_t>();
  const int64_t half = n.s.batch * n.s.means;
  const size_t count = n.xs.size();
  n.for_each([&](int64_t client, size_t i, const Normalisation& s, const float* x, const float* weight, const float* bias,
                 const int64_t* counts) {
    const int64_t place = client * n.output() + n.before[i];
    const float* means = pm + client * 2 * half + static_cast<int64_t>(i) * s.groups;
    kernels().normalise_backward(s, pd + place, n.width, pool ? pc + place : nullptr, x, weight, bias, counts, means, means + half,
                                 to[i] + client * s.batch * s.rows * s.columns * s.channels,
                                 s.groups ? to[count + i] + client * s.channels : nullptr,
                                 s.groups ? to[2 * count + i] + client * s.channels : nullptr);
  });
  return gradients;
}

}  // namespace
}  // namespace raydfl

TORCH_LIBRARY_FRAGMENT(raydfl, library) {
  library.def("conv2d_forward(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding) -> Tensor");
  library.def(
      "conv2d_backward(Tensor dy, Tensor x, Tensor weight, int[] stride, int[] padding, bool need_x) -> (Tensor, Tensor, Tensor)");
  library.def(
      "norm_forward(Tensor[] xs, Tensor[] weights, Tensor[] biases, Tensor? lengths, int groups, float epsilon, bool relu, "
      "int pool, bool ceil) -> (Tensor, Tensor, Tensor)");
  library.def(
      "norm_backward(Tensor dy, Tensor codes, Tensor moments, Tensor[] xs, Tensor[] weights, Tensor[] biases, Tensor? lengths, "
      "int groups, float epsilon, bool relu, int pool, bool ceil) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(raydfl, CPU, library) {
  library.impl("conv2d_forward", raydfl::conv2d_forward);
  library.impl("conv2d_backward", raydfl::conv2d_backward);
  library.impl("norm_forward", raydfl::norm_forward);
  library.impl("norm_backward", raydfl::norm_backward);
}
