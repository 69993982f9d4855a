// PyTorch operators: they check shapes, allocate results and run the kernels for each client.
//
// Either all tensors of an operator have a leading dimension of clients, or none.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "operators.h"

namespace raydfl {

float* scratch(int index, long floats) {
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  struct Block {
    std::unique_ptr<float, Free> memory;
    long floats = 0;
  };
  thread_local Block blocks[6];
  Block& block = blocks[index];
  if (floats > block.floats) {
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
    block.memory.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    TORCH_CHECK(block.memory, "raydfl: no memory for ", bytes, " bytes of intermediate results");
    block.floats = floats;
  }
  return block.memory.get() ? block.memory.get() : scratch(index, 16);
}

const Kernels& kernels() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const Kernels& chosen = []() -> const Kernels& {
    const char* most = std::getenv("RAYDFL_KERNELS");
    const std::string name = most ? most : "avx512";
    if (name == "portable" || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return portable_kernels;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return wide && name != "avx2" ? avx512_kernels : avx2_kernels;
  }();
  return chosen;
#else
  return portable_kernels;
#endif
}

namespace {

struct Convolved {
  bool grouped;
  int64_t clients;
  Tensor x, weight;
  OptionalTensor lengths;
  Convolution shape;

  Convolved(const Tensor& x_, const Tensor& weight_, const OptionalTensor& lengths_, int64_t padding, int64_t pool)
      : grouped(x_.dim() == 4),
        clients(grouped ? x_.size(0) : 1),
        x(checked(x_, 3 + grouped, "x")),
        weight(checked(weight_, 3 + grouped, "weight")),
        lengths(checked_lengths(lengths_, grouped, clients, x.size(-3))),
        shape{x.size(-3), x.size(-2), x.size(-1), weight.size(-3), weight.size(-1), padding, pool} {
    check_shape(weight, shaped(grouped, clients, {shape.outputs, shape.inputs, shape.taps}), "weight");
    TORCH_CHECK(shape.taps > padding && padding >= 0, "raydfl: padding ", padding, " does not fit a kernel of ", shape.taps);
    TORCH_CHECK(shape.convolved() >= 0 && 0 <= pool && pool < NOWHERE, "raydfl: a pool of ", pool, " cannot be");
  }
};

std::tuple<Tensor, Tensor> conv_forward(const Tensor& x, const Tensor& weight, const Tensor& bias_, const OptionalTensor& lengths,
                                        int64_t padding, int64_t pool) {
  const Convolved c(x, weight, lengths, padding, pool);
  const Convolution& s = c.shape;
  const Tensor bias = checked(bias_, 1 + c.grouped, "bias");
  check_shape(bias, shaped(c.grouped, c.clients, {s.outputs}), "bias");
  const auto shape = shaped(c.grouped, c.clients, {s.batch, s.pooled(), s.outputs});
  const Tensor y = at::empty(shape, c.x.options());
  const Tensor codes = at::empty(pool ? shape : shaped(c.grouped, c.clients, {0}), c.x.options().dtype(at::kByte));
  const float *px = c.x.const_data_ptr<float>(), *pw = c.weight.const_data_ptr<float>(), *pb = bias.const_data_ptr<float>();
  float* py = y.mutable_data_ptr<float>();
  uint8_t* pc = codes.mutable_data_ptr<uint8_t>();
  const int64_t item = s.batch * s.pooled() * s.outputs;
  for_each_client(c.clients, [&](int64_t i) {
    kernels().convolve(s, px + i * s.batch * s.frames * s.inputs, pw + i * s.outputs * s.inputs * s.taps, pb + i * s.outputs,
                       of_client(c.lengths, i, s.batch), py + i * item, pool ? pc + i * item : nullptr);
  });
  return {y, codes};
}

std::tuple<Tensor, Tensor, Tensor> conv_backward(const Tensor& dy_, const Tensor& codes_, const Tensor& x, const Tensor& weight,
                                                 const OptionalTensor& lengths, int64_t padding, int64_t pool, bool need_x) {
  const Convolved c(x, weight, lengths, padding, pool);
  const Convolution& s = c.shape;
  const Tensor dy = checked(dy_, 3 + c.grouped, "the gradient"), codes = codes_.contiguous();
  const auto shape = shaped(c.grouped, c.clients, {s.batch, s.pooled(), s.outputs});
  check_shape(dy, shape, "the gradient");
  if (pool) check_shape(codes, shape, "codes");
  const Tensor dx = need_x ? at::empty_like(c.x) : at::empty(shaped(c.grouped, c.clients, {0}), c.x.options());
  const Tensor dweight = at::empty_like(c.weight);
  const Tensor dbias = at::empty(shaped(c.grouped, c.clients, {s.outputs}), c.x.options());
  const float *pd = dy.const_data_ptr<float>(), *px = c.x.const_data_ptr<float>(), *pw = c.weight.const_data_ptr<float>();
  const uint8_t* pc = codes.const_data_ptr<uint8_t>();
  float *gx = dx.mutable_data_ptr<float>(), *gw = dweight.mutable_data_ptr<float>(), *gb = dbias.mutable_data_ptr<float>();
  const int64_t item = s.batch * s.pooled() * s.outputs, input = s.batch * s.frames * s.inputs;
  const int64_t size = s.outputs * s.inputs * s.taps;
  for_each_client(c.clients, [&](int64_t i) {
    kernels().convolve_backward(s, pd + i * item, pool ? pc + i * item : nullptr, px + i * input, pw + i * size,
                                of_client(c.lengths, i, s.batch), need_x ? gx + i * input : nullptr, gw + i * size,
                                gb + i * s.outputs);
  });
  return {dx, dweight, dbias};
}

struct Recurred {
  bool grouped;
  int64_t clients;
  Tensor x;
  OptionalTensor lengths;
  std::vector<Tensor> weights;
  Recurrence shape;

  Recurred(const Tensor& x_, const OptionalTensor& lengths_, at::TensorList weights_)
      : grouped(x_.dim() == 4),
        clients(grouped ? x_.size(0) : 1),
        x(checked(x_, 3 + grouped, "x")),
        lengths(checked_lengths(lengths_, grouped, clients, x.size(-3))) {
    TORCH_CHECK(weights_.size() == 4 || weights_.size() == 8, "raydfl: ", weights_.size(), " weights are not 4 per direction");
    for (size_t i = 0; i < weights_.size(); ++i)
      weights.push_back(checked(weights_[i], (i % 4 < 2 ? 2 : 1) + grouped, "a weight of the GRU"));
    shape = {x.size(-3), x.size(-2), x.size(-1), weights[1].size(-1), static_cast<int>(weights.size() / 4)};
    for (size_t i = 0; i < weights.size(); i += 4) {
      check_shape(weights[i], shaped(grouped, clients, {3 * shape.hidden, shape.inputs}), "weight_ih");
      check_shape(weights[i + 1], shaped(grouped, clients, {3 * shape.hidden, shape.hidden}), "weight_hh");
      check_shape(weights[i + 2], shaped(grouped, clients, {3 * shape.hidden}), "bias_ih");
      check_shape(weights[i + 3], shaped(grouped, clients, {3 * shape.hidden}), "bias_hh");
    }
  }

  int64_t padded() const { return (shape.hidden + kernels().panel - 1) / kernels().panel * kernels().panel; }
  int64_t input() const { return shape.batch * shape.frames * shape.inputs; }
  int64_t output() const { return shape.batch * shape.frames * shape.directions * shape.hidden; }
  int64_t gates() const { return shape.directions * shape.frames * shape.batch * 4 * padded(); }
  std::vector<int64_t> output_shape() const {
    return shaped(grouped, clients, {shape.batch, shape.frames, shape.directions * shape.hidden});
  }
  std::vector<int64_t> gates_shape() const {
    return shaped(grouped, clients, {shape.directions, shape.frames, shape.batch, 4, padded()});
  }

  // Returns the weights of a client.
  void of(int64_t client, Direction* directions) const {
    const int64_t h = shape.hidden;
    for (int d = 0; d < shape.directions; ++d)
      directions[d] = {weights[4 * d].const_data_ptr<float>() + client * 3 * h * shape.inputs,
                       weights[4 * d + 1].const_data_ptr<float>() + client * 3 * h * h,
                       weights[4 * d + 2].const_data_ptr<float>() + client * 3 * h,
                       weights[4 * d + 3].const_data_ptr<float>() + client * 3 * h};
  }
};

std::tuple<Tensor, Tensor> gru_forward(const Tensor& x, const OptionalTensor& lengths, at::TensorList weights) {
  const Recurred r(x, lengths, weights);
  const Tensor y = at::empty(r.output_shape(), r.x.options()), gates = at::empty(r.gates_shape(), r.x.options());
  const float* px = r.x.const_data_ptr<float>();
  float *py = y.mutable_data_ptr<float>(), *pg = gates.mutable_data_ptr<float>();
  for_each_client(r.clients, [&](int64_t i) {
    Direction directions[2];
    r.of(i, directions);
    kernels().recur(r.shape, px + i * r.input(), directions, of_client(r.lengths, i, r.shape.batch), py + i * r.output(),
                    pg + i * r.gates());
  });
  return {y, gates};
}

std::vector<Tensor> gru_backward(const Tensor& dy_, const Tensor& y_, const Tensor& gates_, const Tensor& x,
                                 const OptionalTensor& lengths, at::TensorList weights, bool need_x) {
  const Recurred r(x, lengths, weights);
  const Tensor dy = checked(dy_, 3 + r.grouped, "the gradient"), y = checked(y_, 3 + r.grouped, "the output");
  const Tensor gates = gates_.contiguous();
  check_shape(dy, r.output_shape(), "the gradient");
  check_shape(y, r.output_shape(), "the output");
  check_shape(gates, r.gates_shape(), "the gates");
  std::vector<Tensor> gradients{need_x ? at::empty_like(r.x) : at::empty(shaped(r.grouped, r.clients, {0}), r.x.options())};
  for (const Tensor& weight : r.weights) gradients.push_back(at::empty_like(weight));
  const float *pd = dy.const_data_ptr<float>(), *py = y.const_data_ptr<float>(), *pg = gates.const_data_ptr<float>();
  const float* px = r.x.const_data_ptr<float>();
  std::vector<float*> to;
  for (const Tensor& gradient : gradients) to.push_back(gradient.mutable_data_ptr<float>());
  const int64_t h = r.shape.hidden;
  for_each_client(r.clients, [&](int64_t i) {
    Direction directions[2];
    DirectionGradient parts[2];
    r.of(i, directions);
    for (int d = 0; d < r.shape.directions; ++d)
      parts[d] = {to[4 * d + 1] + i * 3 * h * r.shape.inputs, to[4 * d + 2] + i * 3 * h * h, to[4 * d + 3] + i * 3 * h,
                  to[4 * d + 4] + i * 3 * h};
    kernels().recur_backward(r.shape, pd + i * r.output(), py + i * r.output(), pg + i * r.gates(), px + i * r.input(), directions,
                             of_client(r.lengths, i, r.shape.batch), need_x ? to[0] + i * r.input() : nullptr, parts);
  });
  return gradients;
}

struct Averaged {
  bool grouped;
  int64_t clients, batch, frames, channels;
  OptionalTensor lengths;

  // shape: of x, [batch, frames, channels] or [clients, batch, frames, channels].
  Averaged(at::IntArrayRef shape, const OptionalTensor& lengths_) : grouped(shape.size() == 4), clients(grouped ? shape[0] : 1) {
    TORCH_CHECK(grouped || shape.size() == 3, "raydfl: x has ", shape.size(), " dimensions, not 3");
    batch = shape[grouped], frames = shape[grouped + 1], channels = shape[grouped + 2];
    lengths = checked_lengths(lengths_, grouped, clients, batch);
  }
};

Tensor mean_forward(const Tensor& x_, const OptionalTensor& lengths) {
  const Averaged a(x_.sizes(), lengths);
  const Tensor x = checked(x_, 3 + a.grouped, "x");
  const Tensor y = at::empty(shaped(a.grouped, a.clients, {a.batch, a.channels}), x.options());
  const float* px = x.const_data_ptr<float>();
  float* py = y.mutable_data_ptr<float>();
  for_each_client(a.clients, [&](int64_t i) {
    kernels().average(a.batch, a.frames, a.channels, px + i * a.batch * a.frames * a.channels,
                      of_client(a.lengths, i, a.batch), py + i * a.batch * a.channels);
  });
  return y;
}

Tensor mean_backward(const Tensor& dy_, const OptionalTensor& lengths, int64_t frames) {
  std::vector<int64_t> shape = dy_.sizes().vec();
  TORCH_CHECK(shape.size() > 1, "raydfl: the gradient has ", shape.size(), " dimensions, not 2");
  shape.insert(shape.end() - 1, frames);
  const Averaged a(shape, lengths);
  const Tensor dy = checked(dy_, 2 + a.grouped, "the gradient");
  const Tensor dx = at::empty(shape, dy.options());
  const float* pd = dy.const_data_ptr<float>();
  float* px = dx.mutable_data_ptr<float>();
  for_each_client(a.clients, [&](int64_t i) {
    kernels().average_backward(a.batch, a.frames, a.channels, pd + i * a.batch * a.channels,
                               of_client(a.lengths, i, a.batch), px + i * a.batch * a.frames * a.channels);
  });
  return dx;
}

// Returns the two keys of a draw from a seed, by the splitmix64 generator.
uint64_t keys(uint64_t seed, uint64_t call) {
  uint64_t bits = seed + (call + 1) * 0x9E3779B97F4A7C15u;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  return bits ^ (bits >> 31);
}

// x is [rows, ...] with a scalar seed, or [clients, rows, ...] with a seed for each client.
Tensor drop(const Tensor& x_, const Tensor& seeds_, int64_t call, int64_t threshold, double scale) {
  const bool grouped = seeds_.dim() == 1;
  const Tensor x = checked(x_, x_.dim(), "x"), seeds = seeds_.contiguous();
  const int64_t clients = grouped ? seeds.size(0) : 1;
  TORCH_CHECK(seeds.scalar_type() == at::kLong && seeds.dim() <= 1, "raydfl: the seed is not one int64 for each client");
  TORCH_CHECK(x.dim() > grouped && (!grouped || x.size(0) == clients), "raydfl: x and the seeds are of different clients");
  const Tensor y = at::empty_like(x);
  const int64_t rows = x.size(grouped), size = clients ? x.numel() / clients : 0;
  const float* px = x.const_data_ptr<float>();
  const int64_t* ps = seeds.const_data_ptr<int64_t>();
  float* py = y.mutable_data_ptr<float>();
  for_each_client(size ? clients : 0, [&](int64_t i) {
    const uint64_t both = keys(static_cast<uint64_t>(ps[i]), static_cast<uint64_t>(call));
    kernels().drop(rows, size / rows, static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32),
                   static_cast<uint32_t>(threshold), static_cast<float>(scale), px + i * size, py + i * size);
  });
  return y;
}

std::string instruction_set() { return kernels().name; }

}  // namespace
}  // namespace raydfl

TORCH_LIBRARY(raydfl, library) {
  library.def("conv_forward(Tensor x, Tensor weight, Tensor bias, Tensor? lengths, int padding, int pool) -> (Tensor, Tensor)");
  library.def(
      "conv_backward(Tensor dy, Tensor codes, Tensor x, Tensor weight, Tensor? lengths, int padding, int pool, bool need_x) -> "
      "(Tensor, Tensor, Tensor)");
  library.def("gru_forward(Tensor x, Tensor? lengths, Tensor[] weights) -> (Tensor, Tensor)");
  library.def(
      "gru_backward(Tensor dy, Tensor y, Tensor gates, Tensor x, Tensor? lengths, Tensor[] weights, bool need_x) -> Tensor[]");
  library.def("mean_forward(Tensor x, Tensor? lengths) -> Tensor");
  library.def("mean_backward(Tensor dy, Tensor? lengths, int frames) -> Tensor");
  library.def("drop(Tensor x, Tensor seed, int call, int threshold, float scale) -> Tensor");
  library.def("instruction_set() -> str", raydfl::instruction_set);
}

TORCH_LIBRARY_IMPL(raydfl, CPU, library) {
  library.impl("conv_forward", raydfl::conv_forward);
  library.impl("conv_backward", raydfl::conv_backward);
  library.impl("gru_forward", raydfl::gru_forward);
  library.impl("gru_backward", raydfl::gru_backward);
  library.impl("mean_forward", raydfl::mean_forward);
  library.impl("mean_backward", raydfl::mean_backward);
  library.impl("drop", raydfl::drop);
}
