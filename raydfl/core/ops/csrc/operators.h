// Shared parts of the operators: checks of tensors, and the loop over clients.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>

#include <optional>
#include <vector>

#include "kernels.h"

namespace raydfl {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Tensor checked(const Tensor& tensor, int64_t dimensions, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, "raydfl: ", name, " is ", tensor.scalar_type(), ", not float32");
  TORCH_CHECK(tensor.dim() == dimensions, "raydfl: ", name, " has ", tensor.dim(), " dimensions, not ", dimensions);
  return tensor.contiguous();
}

inline void check_shape(const Tensor& tensor, at::IntArrayRef shape, const char* name) {
  TORCH_CHECK(tensor.sizes() == shape, "raydfl: ", name, " has shape ", tensor.sizes(), ", not ", shape);
}

// Returns the shape with a leading dimension of clients if tensors have one.
inline std::vector<int64_t> shaped(bool grouped, int64_t clients, std::initializer_list<int64_t> sizes) {
  std::vector<int64_t> shape(sizes);
  if (grouped) shape.insert(shape.begin(), clients);
  return shape;
}

inline OptionalTensor checked_lengths(const OptionalTensor& lengths, bool grouped, int64_t clients, int64_t batch) {
  if (!lengths) return std::nullopt;
  TORCH_CHECK(lengths->scalar_type() == at::kLong, "raydfl: lengths are ", lengths->scalar_type(), ", not int64");
  check_shape(*lengths, shaped(grouped, clients, {batch}), "lengths");
  return lengths->contiguous();
}

inline const int64_t* of_client(const OptionalTensor& lengths, int64_t client, int64_t batch) {
  return lengths ? lengths->const_data_ptr<int64_t>() + client * batch : nullptr;
}

template <typename Work>
void for_each_client(int64_t clients, const Work& work) {
  at::parallel_for(0, clients, 1, [&](int64_t first, int64_t next) {
    for (int64_t client = first; client < next; ++client) work(client);
  });
}

}  // namespace raydfl
