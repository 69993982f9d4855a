// Rules of autograd and torch.func.vmap for the operators of operators.cpp, images.cpp and drift.cpp.
//
// Autograd: each forward operator has a node that calls its backward operator. Like PyTorch's own operators, they use nodes instead
// of torch::autograd::Function, because the latter does not work inside torch.func. vmap: all operators share a rule, because all
// accept a leading dimension of clients.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace raydfl {
namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

// Looks up an operator of this library by name, once.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

const auto& conv_forward() {
  static const auto found = find<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                            int64_t, int64_t)>("raydfl::conv_forward");
  return found;
}

const auto& conv_backward() {
  static const auto found =
      find<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                              int64_t, int64_t, bool)>("raydfl::conv_backward");
  return found;
}

const auto& conv2d_forward() {
  static const auto found = find<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, at::IntArrayRef, at::IntArrayRef)>(
      "raydfl::conv2d_forward");
  return found;
}

const auto& conv2d_backward() {
  static const auto found =
      find<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, bool)>(
          "raydfl::conv2d_backward");
  return found;
}

const auto& norm_forward() {
  static const auto found =
      find<std::tuple<Tensor, Tensor, Tensor>(at::TensorList, at::TensorList, at::TensorList, const OptionalTensor&, int64_t, double,
                                              bool, int64_t, bool)>("raydfl::norm_forward");
  return found;
}

const auto& norm_backward() {
  static const auto found =
      find<std::vector<Tensor>(const Tensor&, const Tensor&, const Tensor&, at::TensorList, at::TensorList, at::TensorList,
                               const OptionalTensor&, int64_t, double, bool, int64_t, bool)>("raydfl::norm_backward");
  return found;
}

const auto& gru_forward() {
  static const auto found =
      find<std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, at::TensorList)>("raydfl::gru_forward");
  return found;
}

const auto& gru_backward() {
  static const auto found = find<std::vector<Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                     const OptionalTensor&, at::TensorList, bool)>("raydfl::gru_backward");
  return found;
}

const auto& mean_forward() {
  static const auto found = find<Tensor(const Tensor&, const OptionalTensor&)>("raydfl::mean_forward");
  return found;
}

const auto& mean_backward() {
  static const auto found = find<Tensor(const Tensor&, const OptionalTensor&, int64_t)>("raydfl::mean_backward");
  return found;
}

const auto& drop() {
  static const auto found = find<Tensor(const Tensor&, const Tensor&, int64_t, int64_t, double)>("raydfl::drop");
  return found;
}

const auto& drift_forward() {
  static const auto found =
      find<Tensor(at::TensorList, at::TensorList, at::TensorList, const Tensor&)>("raydfl::drift_forward");
  return found;
}

const auto& drift_backward() {
  static const auto found = find<std::vector<Tensor>(const Tensor&, at::TensorList, at::TensorList, at::TensorList, const Tensor&)>(
      "raydfl::drift_backward");
  return found;
}

// Base of the nodes: it saves tensors until the graph is freed. A second backward pass then raises PyTorch's usual error.
struct Kept : public Node {
  std::vector<SavedVariable> kept;

  void keep(const Tensor& tensor, bool is_output = false) { kept.emplace_back(tensor, is_output); }
  void keep(const OptionalTensor& tensor) { kept.emplace_back(tensor.value_or(Tensor()), false); }
  void keep(at::TensorList tensors) {
    for (const Tensor& tensor : tensors) keep(tensor);
  }
  std::vector<Tensor> several(size_t first, size_t count) {
    std::vector<Tensor> tensors;
    for (size_t i = first; i < first + count; ++i) tensors.push_back(get(i));
    return tensors;
  }
  Tensor get(size_t index) {
    TORCH_CHECK(index < kept.size(), torch::autograd::ERR_BACKWARD_TWICE);
    return kept[index].unpack(getptr());
  }
  OptionalTensor get_optional(size_t index) {
    Tensor tensor = get(index);
    return tensor.defined() ? OptionalTensor(std::move(tensor)) : std::nullopt;
  }
  void release_variables() override { kept.clear(); }
};

struct ConvolutionNode : public Kept {
  int64_t padding, pool;

  std::string name() const override { return "RaydflConvolution"; }
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(3);
    const bool needed = task_should_compute_output(0);
    auto [dx, dweight, dbias] =
        conv_backward().call(gradients[0], get(3), get(0), get(1), get_optional(2), padding, pool, needed);
    return {needed ? dx : Tensor(), dweight, dbias};
  }
};

struct Convolution2dNode : public Kept {
  std::vector<int64_t> stride, padding;
  bool biased;

  std::string name() const override { return "RaydflConvolution2d"; }
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(3);
    const bool needed = task_should_compute_output(0);
    auto [dx, dweight, dbias] = conv2d_backward().call(gradients[0], get(0), get(1), stride, padding, needed);
    return {needed ? dx : Tensor(), dweight, biased ? dbias : Tensor()};
  }
};

struct NormalisationNode : public Kept {
  size_t images, parameters;  // numbers of saved tensors, in this order: images, weights, biases, lengths, codes, moments
  int64_t groups, pool;
  double epsilon;
  bool relu, ceil;

  std::string name() const override { return "RaydflNormalisation"; }
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(images + 2 * parameters);
    const size_t lengths = images + 2 * parameters;
    return norm_backward().call(gradients[0], get(lengths + 1), get(lengths + 2), several(0, images), several(images, parameters),
                                several(images + parameters, parameters), get_optional(lengths), groups, epsilon, relu, pool, ceil);
  }
};

struct RecurrenceNode : public Kept {
  std::string name() const override { return "RaydflRecurrence"; }
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(num_outputs());
    const bool needed = task_should_compute_output(0);
    const size_t last = kept.size() - 1;
    variable_list all = gru_backward().call(gradients[0], get(last - 1), get(last), get(0), get_optional(1),
                                            several(2, last - 3), needed);
    if (!needed) all[0] = Tensor();
    return all;
  }
};

struct MeanNode : public Kept {
  int64_t frames;

  std::string name() const override { return "RaydflMean"; }
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(1);
    return {mean_backward().call(gradients[0], get_optional(0), frames)};
  }
};

struct DropNode : public Kept {
  int64_t call, threshold;
  double scale;

  std::string name() const override { return "RaydflDrop"; }
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(1);
    return {drop().call(gradients[0], get(0), call, threshold, scale)};
  }
};

struct DriftNode : public Kept {
  size_t weights, anchors, slopes;  // numbers of saved tensors, in this order; then the pull

  std::string name() const override { return "RaydflDrift"; }
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(weights);
    return drift_backward().call(gradients[0], several(0, weights), several(weights, anchors),
                                 several(weights + anchors, slopes), get(weights + anchors + slopes));
  }
};

void refuse_tangents(const char* name, const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(tensor), name,
                              " of raydfl.ops has no forward-mode differentiation; use it inside of raydfl.ops.use('torch')");
}

void refuse_tangents(const char* name, at::TensorList tensors) {
  for (const Tensor& tensor : tensors) refuse_tangents(name, tensor);
}

// PyTorch's pointer type of nodes: std::shared_ptr in 2.11, c10::intrusive_ptr in later versions.
using NodePointer = std::decay_t<decltype(std::declval<const Tensor&>().grad_fn())>;

template <typename Type>
auto own(std::unique_ptr<Type> node) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>) {
    // A generic lambda, because deleteNode is not declared where nodes are intrusive.
    return std::shared_ptr<Type>(node.release(), [](auto* pointer) { deleteNode(pointer); });
  } else {
    return c10::intrusive_ptr<Type>(std::move(node));
  }
}

template <typename Type, typename... Arguments>
decltype(own(std::unique_ptr<Type>())) node_for(const char* name, const Arguments&... inputs) {
  (refuse_tangents(name, inputs), ...);
  if (!torch::autograd::compute_requires_grad(inputs...)) return nullptr;
  auto node = own(std::make_unique<Type>());
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

std::tuple<Tensor, Tensor> conv_forward_autograd(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                 const OptionalTensor& lengths, int64_t padding, int64_t pool) {
  const auto node = node_for<ConvolutionNode>("Conv1d", x, weight, bias);
  if (node) {
    node->padding = padding;
    node->pool = pool;
    node->keep(x);
    node->keep(weight);
    node->keep(lengths);
  }
  auto [y, codes] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return conv_forward().call(x, weight, bias, lengths, padding, pool);
  }();
  if (node) {
    torch::autograd::set_history(y, node);
    node->keep(codes);
  }
  return {y, codes};
}

Tensor conv2d_forward_autograd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
                               at::IntArrayRef padding) {
  const auto node = node_for<Convolution2dNode>("Conv2d", x, weight, bias.value_or(Tensor()));
  if (node) {
    node->stride = stride.vec();
    node->padding = padding.vec();
    node->biased = bias.has_value();
    node->keep(x);
    node->keep(weight);
  }
  Tensor y = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return conv2d_forward().call(x, weight, bias, stride, padding);
  }();
  if (node) torch::autograd::set_history(y, node);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> norm_forward_autograd(at::TensorList xs, at::TensorList weights, at::TensorList biases,
                                                         const OptionalTensor& lengths, int64_t groups, double epsilon, bool relu,
                                                         int64_t pool, bool ceil) {
  const auto node = node_for<NormalisationNode>("group_norm", xs, weights, biases);
  if (node) {
    node->images = xs.size(), node->parameters = weights.size();
    node->groups = groups, node->pool = pool, node->epsilon = epsilon, node->relu = relu, node->ceil = ceil;
    for (const auto& tensors : {xs, weights, biases}) node->keep(tensors);
    node->keep(lengths);
  }
  auto [y, codes, moments] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return norm_forward().call(xs, weights, biases, lengths, groups, epsilon, relu, pool, ceil);
  }();
  if (node) {
    torch::autograd::set_history(y, node);
    node->keep(codes);
    node->keep(moments);
  }
  return {y, codes, moments};
}

std::tuple<Tensor, Tensor> gru_forward_autograd(const Tensor& x, const OptionalTensor& lengths, at::TensorList weights) {
  const auto node = node_for<RecurrenceNode>("GRU", x, weights);
  if (node) {
    node->keep(x);
    node->keep(lengths);
    node->keep(weights);
  }
  auto [y, gates] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return gru_forward().call(x, lengths, weights);
  }();
  if (node) {
    torch::autograd::set_history(y, node);
    node->keep(y, true);
    node->keep(gates);
  }
  return {y, gates};
}

Tensor mean_forward_autograd(const Tensor& x, const OptionalTensor& lengths) {
  const auto node = node_for<MeanNode>("mean_over_time", x);
  Tensor y = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return mean_forward().call(x, lengths);
  }();
  if (node) {
    node->keep(lengths);
    node->frames = x.size(-2);
    torch::autograd::set_history(y, node);
  }
  return y;
}

Tensor drop_autograd(const Tensor& x, const Tensor& seed, int64_t call, int64_t threshold, double scale) {
  const auto node = node_for<DropNode>("Dropout", x);
  Tensor y = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return drop().call(x, seed, call, threshold, scale);
  }();
  if (node) {
    node->keep(seed);
    node->call = call;
    node->threshold = threshold;
    node->scale = scale;
    torch::autograd::set_history(y, node);
  }
  return y;
}

Tensor drift_forward_autograd(at::TensorList weights, at::TensorList anchors, at::TensorList slopes, const Tensor& pull) {
  TORCH_CHECK(!torch::autograd::compute_requires_grad(anchors, slopes, pull),
              "drift_term of raydfl.ops has gradients for weights alone; detach anchors, slopes and pull");
  const auto node = node_for<DriftNode>("drift_term", weights);
  if (node) {
    node->weights = weights.size(), node->anchors = anchors.size(), node->slopes = slopes.size();
    for (const auto& tensors : {weights, anchors, slopes}) node->keep(tensors);
    node->keep(pull);
  }
  Tensor y = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return drift_forward().call(weights, anchors, slopes, pull);
  }();
  if (node) torch::autograd::set_history(y, node);
  return y;
}

// Node behind a gradient. It raises an error, because second derivatives are not supported.
NodePointer refusal(const std::string& name, const variable_list& inputs, const char* instead = nullptr) {
  if (!torch::autograd::compute_requires_grad(inputs)) return nullptr;
  const std::string use = instead ? instead : name + " of torch.nn in a network";
  return own(std::make_unique<torch::autograd::Error>(
      name + " of raydfl.ops cannot be differentiated twice; use " + use + " whose loss contains gradients",
      torch::autograd::collect_next_edges(inputs)));
}

std::tuple<Tensor, Tensor, Tensor> conv_backward_autograd(const Tensor& dy, const Tensor& codes, const Tensor& x,
                                                          const Tensor& weight, const OptionalTensor& lengths, int64_t padding,
                                                          int64_t pool, bool need_x) {
  const auto node = refusal("Conv1d", {dy, x, weight});
  auto [dx, dweight, dbias] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return conv_backward().call(dy, codes, x, weight, lengths, padding, pool, need_x);
  }();
  if (node) torch::autograd::set_history({dx, dweight, dbias}, node);
  return {dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> conv2d_backward_autograd(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                            at::IntArrayRef stride, at::IntArrayRef padding, bool need_x) {
  const auto node = refusal("Conv2d", {dy, x, weight});
  auto [dx, dweight, dbias] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return conv2d_backward().call(dy, x, weight, stride, padding, need_x);
  }();
  if (node) torch::autograd::set_history({dx, dweight, dbias}, node);
  return {dx, dweight, dbias};
}

std::vector<Tensor> norm_backward_autograd(const Tensor& dy, const Tensor& codes, const Tensor& moments, at::TensorList xs,
                                           at::TensorList weights, at::TensorList biases, const OptionalTensor& lengths,
                                           int64_t groups, double epsilon, bool relu, int64_t pool, bool ceil) {
  variable_list inputs{dy};
  for (const auto& tensors : {xs, weights, biases}) inputs.insert(inputs.end(), tensors.begin(), tensors.end());
  const auto node = refusal("GroupNorm", inputs);
  std::vector<Tensor> gradients = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return norm_backward().call(dy, codes, moments, xs, weights, biases, lengths, groups, epsilon, relu, pool, ceil);
  }();
  if (node) torch::autograd::set_history(gradients, node);
  return gradients;
}

std::vector<Tensor> gru_backward_autograd(const Tensor& dy, const Tensor& y, const Tensor& gates, const Tensor& x,
                                          const OptionalTensor& lengths, at::TensorList weights, bool need_x) {
  variable_list inputs{dy, y, x};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  const auto node = refusal("GRU", inputs);
  std::vector<Tensor> gradients = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return gru_backward().call(dy, y, gates, x, lengths, weights, need_x);
  }();
  if (node) torch::autograd::set_history(gradients, node);
  return gradients;
}

Tensor mean_backward_autograd(const Tensor& dy, const OptionalTensor& lengths, int64_t frames) {
  const auto node = refusal("mean_over_time", {dy});
  Tensor dx = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return mean_backward().call(dy, lengths, frames);
  }();
  if (node) torch::autograd::set_history(dx, node);
  return dx;
}

std::vector<Tensor> drift_backward_autograd(const Tensor& dy, at::TensorList weights, at::TensorList anchors,
                                            at::TensorList slopes, const Tensor& pull) {
  variable_list inputs{dy};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  const auto node = refusal("drift_term", inputs, "PyTorch's own operations in a method");
  std::vector<Tensor> gradients = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return drift_backward().call(dy, weights, anchors, slopes, pull);
  }();
  if (node) torch::autograd::set_history(gradients, node);
  return gradients;
}

// --- vmap ---------------------------------------------------------------------------------------------------------------------

// Applies a function in place to every tensor among an operator's arguments, including tensors in lists.
template <typename Work>
void for_each_tensor(at::ArrayRef<c10::IValue> values, std::vector<c10::IValue>& results, const Work& work) {
  for (const c10::IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined()) {
      results.emplace_back(work(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(work(tensor));
      results.emplace_back(std::move(list));
    } else {
      results.push_back(value);
    }
  }
}

// Runs an operator on all clients at once: mapped dimensions move to the front, and shared arguments are expanded. Nested maps are
// resolved from the innermost one outwards.
void batched(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  const std::vector<c10::IValue> arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  int64_t level = 0, clients = 0;
  std::vector<c10::IValue> unwrapped;
  for_each_tensor(arguments, unwrapped, [&](const Tensor& tensor) {
    const auto* mapped = at::functorch::maybeGetBatchedImpl(tensor);
    if (mapped && mapped->level() > level) {
      level = mapped->level();
      clients = mapped->value().size(mapped->bdim());
    }
    return tensor;
  });
  unwrapped.clear();
  for_each_tensor(arguments, unwrapped, [&](const Tensor& tensor) {
    const auto* mapped = at::functorch::maybeGetBatchedImpl(tensor);
    if (mapped && mapped->level() == level) return mapped->value().movedim(mapped->bdim(), 0);
    std::vector<int64_t> shape = tensor.sizes().vec();
    shape.insert(shape.begin(), clients);
    return tensor.expand(shape);
  });
  for (c10::IValue& value : unwrapped) stack->push_back(std::move(value));
  op.callBoxed(stack);
  const std::vector<c10::IValue> outputs = torch::jit::pop(*stack, op.schema().returns().size());
  std::vector<c10::IValue> wrapped;
  for_each_tensor(outputs, wrapped, [&](const Tensor& tensor) { return at::functorch::makeBatched(tensor, 0, level); });
  for (c10::IValue& value : wrapped) stack->push_back(std::move(value));
}

}  // namespace
}  // namespace raydfl

TORCH_LIBRARY_IMPL(raydfl, Autograd, library) {
  library.impl("conv_forward", raydfl::conv_forward_autograd);
  library.impl("conv_backward", raydfl::conv_backward_autograd);
  library.impl("conv2d_forward", raydfl::conv2d_forward_autograd);
  library.impl("conv2d_backward", raydfl::conv2d_backward_autograd);
  library.impl("norm_forward", raydfl::norm_forward_autograd);
  library.impl("norm_backward", raydfl::norm_backward_autograd);
  library.impl("gru_forward", raydfl::gru_forward_autograd);
  library.impl("gru_backward", raydfl::gru_backward_autograd);
  library.impl("mean_forward", raydfl::mean_forward_autograd);
  library.impl("mean_backward", raydfl::mean_backward_autograd);
  library.impl("drop", raydfl::drop_autograd);
  library.impl("drift_forward", raydfl::drift_forward_autograd);
  library.impl("drift_backward", raydfl::drift_backward_autograd);
}

TORCH_LIBRARY_IMPL(raydfl, FuncTorchBatched, library) {
  for (const char* name : {"conv_forward", "conv_backward", "conv2d_forward", "conv2d_backward", "norm_forward", "norm_backward",
                           "gru_forward", "gru_backward", "mean_forward", "mean_backward", "drop", "drift_forward", "drift_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&raydfl::batched>());
}
