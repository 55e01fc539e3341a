// What the c10d backend refuses, before anything is enqueued: a wrong tensor would hang or harm the other ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace monarch::checks {

using Tensors = std::vector<at::Tensor>;

// A reduction as the library is told of it: a complex number is two real ones.
struct Reduction {
  int type;
  int op;  // kPreMulSum: to be made of `factor`
  std::size_t parts;
  at::Tensor factor;
};
constexpr int kPreMulSum = -1;

inline int type_code(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar:
      return 0;
    case at::kByte:
    case at::kBool:
      return 1;
    case at::kInt:
      return 2;
    case at::kUInt32:
      return 3;
    case at::kLong:
      return 4;
    case at::kUInt64:
      return 5;
    case at::kHalf:
      return 6;
    case at::kFloat:
    case at::kComplexFloat:
      return 7;
    case at::kDouble:
    case at::kComplexDouble:
      return 8;
    case at::kBFloat16:
      return 9;
    case at::kFloat8_e4m3fn:
      return 10;
    case at::kFloat8_e5m2:
      return 11;
    default:
      TORCH_CHECK_TYPE(false, "backend monarch cannot reduce ", dtype);
  }
}

inline Reduction pre_mul_sum(const c10d::ReduceOp& op, at::ScalarType dtype, c10::Device device) {
  TORCH_CHECK_VALUE(at::isFloatingType(dtype), "PREMUL_SUM of ", dtype, ": a float dtype expected");
  const auto* given = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(given != nullptr, "PREMUL_SUM without a factor");
  at::Tensor factor = given->tensor_factor;
  if (!factor.defined()) factor = at::full({1}, given->double_factor, at::TensorOptions().dtype(dtype));
  TORCH_CHECK_VALUE(factor.scalar_type() == dtype, "the factor of PREMUL_SUM is ", factor.scalar_type(),
                    ", the tensor ", dtype);
  TORCH_CHECK_VALUE(factor.is_cpu() || factor.device() == device, "the factor of PREMUL_SUM is on ", factor.device(),
                    ", the group on ", device);
  return {.type = type_code(dtype), .op = kPreMulSum, .parts = 1, .factor = factor};
}

inline Reduction reduction(const c10d::ReduceOp& op, at::ScalarType dtype, c10::Device device) {
  const int type = type_code(dtype);
  const bool is_bool = dtype == at::kBool;
  const std::size_t parts = at::isComplexType(dtype) ? 2 : 1;
  const auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
  if (kind == c10d::ReduceOp::PREMUL_SUM) return pre_mul_sum(op, dtype, device);
  TORCH_CHECK_TYPE(parts == 1 || kind == c10d::ReduceOp::SUM || kind == c10d::ReduceOp::AVG, "backend monarch reduces ",
                   dtype, " by SUM and AVG only");
  TORCH_CHECK_TYPE(!is_bool || kind != c10d::ReduceOp::AVG, "backend monarch cannot reduce booleans by AVG");
  switch (kind) {
    case c10d::ReduceOp::SUM:
      return {.type = type,
              .op = is_bool ? 2 : 0,
              .parts = parts,
              .factor = {}};  // of booleans: or, which is the maximum of bytes
    case c10d::ReduceOp::PRODUCT:
      return {.type = type, .op = is_bool ? 3 : 1, .parts = parts, .factor = {}};
    case c10d::ReduceOp::MAX:
      return {.type = type, .op = 2, .parts = parts, .factor = {}};
    case c10d::ReduceOp::MIN:
      return {.type = type, .op = 3, .parts = parts, .factor = {}};
    case c10d::ReduceOp::AVG:
      return {.type = type, .op = 4, .parts = parts, .factor = {}};
    default:
      TORCH_CHECK_VALUE(false, "backend monarch reduces by SUM, PRODUCT, MAX, MIN, AVG and PREMUL_SUM only");
  }
}

inline const at::Tensor& only(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, ": one tensor expected, not ", tensors.size());
  return tensors[0];
}

// The one list of a rank, with a tensor for each rank.
inline const Tensors& one_each(const std::vector<Tensors>& lists, int size, const char* what) {
  TORCH_CHECK_VALUE(lists.size() == 1, what, ": one list of tensors expected, not ", lists.size());
  TORCH_CHECK_VALUE(lists[0].size() == static_cast<std::size_t>(size), what, ": ", size,
                    " tensors expected, one for each rank, not ", lists[0].size());
  return lists[0];
}

// Any layout without gaps, channels_last too: what only adds or copies does not ask for the order.
inline void dense(const at::Tensor& tensor, c10::Device device, const char* what) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, what, ": a dense tensor expected, not ", tensor.layout());
  TORCH_CHECK_VALUE(tensor.device() == device, what, ": the tensor is on ", tensor.device(), ", the group on ", device);
  TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), what, ": the tensor of sizes ",
                    tensor.sizes(), " and strides ", tensor.strides(), " is not contiguous; use .contiguous()");
}

inline void contiguous(const at::Tensor& tensor, c10::Device device, const char* what) {
  dense(tensor, device, what);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), what, ": the tensor of sizes ", tensor.sizes(), " and strides ",
                    tensor.strides(), " is not contiguous; use .contiguous()");
}

inline void same_dtype(const at::Tensor& output, const at::Tensor& input, const char* what) {
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), what, ": the output is ", output.scalar_type(),
                   ", the input ", input.scalar_type());
}

// `whole` has as many elements as `part` for each of `size` ranks.
inline void parts_of(const at::Tensor& whole, const at::Tensor& part, int size, const char* what) {
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, what, ": a tensor of ", whole.numel(), " elements is not ",
                    size, " times one of ", part.numel());
}

inline void same_count(const Tensors& outputs, const Tensors& inputs, const char* what) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size() && !outputs.empty(), what,
                    ": as many outputs as inputs expected, and at least one; there are ", outputs.size(), " and ",
                    inputs.size());
}

// Each of `list` has the dtype and number of elements of `one`.
inline void all_like(const Tensors& list, const at::Tensor& one, const char* what) {
  for (const at::Tensor& each : list) {
    same_dtype(each, one, what);
    TORCH_CHECK_VALUE(each.numel() == one.numel(), what, ": a tensor of the list has ", each.numel(),
                      " elements, the other side's ", one.numel());
  }
}

inline void nothing(const std::vector<Tensors>& lists, const char* what) {
  TORCH_CHECK_VALUE(lists.empty(), what, ": only the root gives a list of tensors");
}

inline int rank_of(int64_t rank, int size, const char* what) {
  TORCH_CHECK_VALUE(0 <= rank && rank < size, what, ": there is no rank ", rank, " in a group of ", size);
  return static_cast<int>(rank);
}

// Bytes of each rank's part of a tensor that is split along its first dimension; without sizes into equal parts.
inline std::vector<std::size_t> split(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int size,
                                      const char* what) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, what, ": a tensor without dimensions cannot be split");
  const int64_t rows = tensor.size(0);
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, what, ": the first dimension, ", rows, ", does not divide by ", size,
                      "; give split sizes");
    return std::vector<std::size_t>(static_cast<std::size_t>(size), tensor.nbytes() / static_cast<std::size_t>(size));
  }
  TORCH_CHECK_VALUE(sizes.size() == static_cast<std::size_t>(size), what, ": ", size, " split sizes expected, not ",
                    sizes.size());
  const std::size_t row_bytes = rows == 0 ? 0 : tensor.nbytes() / static_cast<std::size_t>(rows);
  int64_t left = rows;
  std::vector<std::size_t> bytes;
  for (const int64_t each : sizes) {
    TORCH_CHECK_VALUE(0 <= each && each <= left, what, ": split sizes ", sizes, " do not fit a first dimension of ",
                      rows);
    left -= each;
    bytes.push_back(static_cast<std::size_t>(each) * row_bytes);
  }
  TORCH_CHECK_VALUE(left == 0, what, ": split sizes ", sizes, " do not fill a first dimension of ", rows);
  return bytes;
}

}  // namespace monarch::checks
