#include "c10d_backend.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace monarch {

namespace {

constexpr int kByte = 1;  // ncclUint8: what only moves goes as bytes, whatever its dtype

int type_code(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kChar:
      return 0;
    case at::kByte:
    case at::kBool:
      return 1;
    case at::kInt:
      return 2;
    case at::kLong:
      return 4;
    case at::kHalf:
      return 6;
    case at::kFloat:
      return 7;
    case at::kDouble:
      return 8;
    case at::kBFloat16:
      return 9;
    case at::kFloat8_e4m3fn:
      return 10;
    case at::kFloat8_e5m2:
      return 11;
    default:
      TORCH_CHECK_TYPE(false, "backend monarch cannot reduce ", tensor.scalar_type());
  }
}

int op_code(c10d::ReduceOp::RedOpType op, const at::Tensor& tensor) {
  const bool is_bool = tensor.scalar_type() == at::kBool;
  switch (op) {
    case c10d::ReduceOp::SUM:
      return is_bool ? 2 : 0;  // of booleans: or, which is the maximum of bytes
    case c10d::ReduceOp::PRODUCT:
      return is_bool ? 3 : 1;
    case c10d::ReduceOp::MAX:
      return 2;
    case c10d::ReduceOp::MIN:
      return 3;
    case c10d::ReduceOp::AVG:
      return 4;
    default:
      TORCH_CHECK_VALUE(false, "backend monarch reduces by SUM, PRODUCT, MAX, MIN, AVG and PREMUL_SUM only");
  }
}

// What the library calls a reduction, for one call.
class Reduction {
 public:
  Reduction(ccl::Comm& comm, const c10d::ReduceOp& op, const at::Tensor& tensor) : comm_(comm) {
    is_made_ = op == c10d::ReduceOp::PREMUL_SUM;
    code_ = is_made_ ? pre_mul_sum(op, tensor) : op_code(op, tensor);
  }
  ~Reduction() {
    if (is_made_) comm_.drop_op(code_);
  }
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;
  int code() const noexcept { return code_; }

 private:
  int pre_mul_sum(const c10d::ReduceOp& op, const at::Tensor& tensor) {
    const auto* given = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK_VALUE(tensor.is_floating_point(), "PREMUL_SUM of ", tensor.scalar_type(), ": a float dtype expected");
    if (!given->tensor_factor.defined()) {
      at::Tensor factor = at::full({1}, given->double_factor, at::TensorOptions().dtype(tensor.scalar_type()));
      return comm_.pre_mul_sum(factor.data_ptr(), false, type_code(tensor));
    }
    const at::Tensor& factor = given->tensor_factor;
    TORCH_CHECK_VALUE(factor.scalar_type() == tensor.scalar_type(), "the factor of PREMUL_SUM is ",
                      factor.scalar_type(), ", the tensor ", tensor.scalar_type());
    return comm_.pre_mul_sum(factor.data_ptr(), !factor.is_cpu(), type_code(tensor));
  }

  ccl::Comm& comm_;
  bool is_made_ = false;
  int code_ = 0;
};

std::size_t count(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

at::Tensor& only(Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "one tensor per call expected, not ", tensors.size());
  return tensors[0];
}

}  // namespace

StreamWork::StreamWork(int rank, c10d::OpType type, std::shared_ptr<ccl::Comm> comm, c10::Stream stream,
                       Tensors outputs)
    : Work(rank, type),
      comm_(std::move(comm)),
      device_(stream.device()),
      event_(stream.device_type()),
      outputs_(std::move(outputs)) {
  event_.record(stream);
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{device_});
  const c10::StreamGuard guard(stream);  // the future records what is current
  future_->markCompleted(c10::IValue(outputs_));
}

bool StreamWork::isCompleted() { return comm_->aborted() || event_.query(); }

bool StreamWork::isSuccess() const { return !comm_->aborted(); }

void StreamWork::synchronize() {
  const std::string failure = comm_->aborted() ? comm_->async_error() : std::string();
  TORCH_CHECK_WITH(DistBackendError, failure.empty(), failure);
  event_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

bool StreamWork::wait(std::chrono::milliseconds) {
  synchronize();
  return true;
}

MonarchBackend::MonarchBackend(int rank, int size, std::shared_ptr<ccl::Comm> comm, c10::Stream stream, void* handle)
    : Backend(rank, size), comm_(std::move(comm)), stream_(stream), handle_(handle) {}

void MonarchBackend::check(const at::Tensor& tensor, const char* what) const {
  TORCH_CHECK_VALUE(tensor.device() == stream_.device(), what, " is on ", tensor.device(), ", the group on ",
                    stream_.device());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), what, " is not contiguous; use .contiguous()");
}

WorkPtr MonarchBackend::launch(c10d::OpType type, const Tensors& touched, const Tensors& outputs,
                               const std::function<void()>& enqueue) {
  for (const at::Tensor& tensor : touched) check(tensor, "a tensor");
  const c10::impl::VirtualGuardImpl device(stream_.device_type());
  c10::Event ready(stream_.device_type());
  ready.record(device.getStream(stream_.device()));
  ready.block(stream_);
  {
    const c10::StreamGuard guard(stream_);
    try {
      enqueue();
    } catch (const ccl::Error& error) {
      TORCH_CHECK_WITH(DistBackendError, false, error.what());
    }
  }
  for (const at::Tensor& tensor : touched) {
    if (tensor.numel() > 0) device.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
  }
  return c10::make_intrusive<StreamWork>(getRank(), type, comm_, stream_, outputs);
}

void MonarchBackend::group(const std::function<void()>& calls) {
  comm_->group_start();
  try {
    calls();
  } catch (...) {
    comm_->group_end();
    throw;
  }
  comm_->group_end();
}

void MonarchBackend::send_bytes(const at::Tensor& tensor, int peer) {
  comm_->send(tensor.data_ptr(), tensor.nbytes(), kByte, peer, handle_);
}

void MonarchBackend::recv_bytes(const at::Tensor& tensor, int peer) {
  comm_->recv(tensor.data_ptr(), tensor.nbytes(), kByte, peer, handle_);
}

void MonarchBackend::startCoalescing() { comm_->group_start(); }

WorkPtr MonarchBackend::endCoalescing() {
  return launch(c10d::OpType::COALESCED, {}, {}, [&] { comm_->group_end(); });
}

WorkPtr MonarchBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only(tensors);
  return launch(c10d::OpType::BROADCAST, tensors, tensors, [&] {
    comm_->broadcast(tensor.data_ptr(), tensor.data_ptr(), tensor.nbytes(), kByte, static_cast<int>(options.rootRank),
                     handle_);
  });
}

WorkPtr MonarchBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors);
  return launch(c10d::OpType::ALLREDUCE, tensors, tensors, [&] {
    comm_->all_reduce(tensor.data_ptr(), tensor.data_ptr(), count(tensor), type_code(tensor),
                      Reduction(*comm_, options.reduceOp, tensor).code(), handle_);
  });
}

WorkPtr MonarchBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return launch(c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors, [&] {
    group([&] {
      for (const at::Tensor& tensor : tensors) {
        comm_->all_reduce(tensor.data_ptr(), tensor.data_ptr(), count(tensor), type_code(tensor),
                          Reduction(*comm_, options.reduceOp, tensor).code(), handle_);
      }
    });
  });
}

WorkPtr MonarchBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only(tensors);
  return launch(c10d::OpType::REDUCE, tensors, tensors, [&] {
    comm_->reduce(tensor.data_ptr(), tensor.data_ptr(), count(tensor), type_code(tensor),
                  Reduction(*comm_, options.reduceOp, tensor).code(), static_cast<int>(options.rootRank), handle_);
  });
}

WorkPtr MonarchBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  TORCH_CHECK_VALUE(output.nbytes() == input.nbytes() * getSize(), "the output must hold ", getSize(), " inputs");
  return launch(c10d::OpType::_ALLGATHER_BASE, {output, input}, {output},
                [&] { comm_->all_gather(input.data_ptr(), output.data_ptr(), input.nbytes(), kByte, handle_); });
}

WorkPtr MonarchBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions&) {
  Tensors touched = outputs;
  touched.insert(touched.end(), inputs.begin(), inputs.end());
  return launch(c10d::OpType::COALESCED, touched, outputs, [&] {
    group([&] {
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        comm_->all_gather(inputs[i].data_ptr(), outputs[i].data_ptr(), inputs[i].nbytes(), kByte, handle_);
      }
    });
  });
}

WorkPtr MonarchBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  const at::Tensor& input = only(inputs);
  Tensors touched = outputs.at(0);
  touched.push_back(input);
  return launch(c10d::OpType::ALLGATHER, touched, outputs[0], [&] {
    at::Tensor flat = at::empty({getSize(), input.numel()}, input.options());
    comm_->all_gather(input.data_ptr(), flat.data_ptr(), input.nbytes(), kByte, handle_);
    for (int peer = 0; peer < getSize(); ++peer) outputs[0][peer].view(-1).copy_(flat[peer], true);
  });
}

WorkPtr MonarchBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize(), "the input must hold ", getSize(), " outputs");
  return launch(c10d::OpType::_REDUCE_SCATTER_BASE, {output, input}, {output}, [&] {
    comm_->reduce_scatter(input.data_ptr(), output.data_ptr(), count(output), type_code(input),
                          Reduction(*comm_, options.reduceOp, input).code(), handle_);
  });
}

WorkPtr MonarchBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::ReduceScatterOptions& options) {
  Tensors touched = outputs;
  touched.insert(touched.end(), inputs.begin(), inputs.end());
  return launch(c10d::OpType::COALESCED, touched, outputs, [&] {
    group([&] {
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        comm_->reduce_scatter(inputs[i].data_ptr(), outputs[i].data_ptr(), count(outputs[i]), type_code(inputs[i]),
                              Reduction(*comm_, options.reduceOp, inputs[i]).code(), handle_);
      }
    });
  });
}

WorkPtr MonarchBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only(outputs);
  Tensors touched = inputs.at(0);
  touched.push_back(output);
  return launch(c10d::OpType::REDUCE_SCATTER, touched, outputs, [&] {
    at::Tensor flat = at::empty({getSize(), output.numel()}, output.options());
    for (int peer = 0; peer < getSize(); ++peer) flat[peer].copy_(inputs[0][peer].view(-1), true);
    comm_->reduce_scatter(flat.data_ptr(), output.data_ptr(), count(output), type_code(output),
                          Reduction(*comm_, options.reduceOp, output).code(), handle_);
  });
}

WorkPtr MonarchBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) {
  return launch(c10d::OpType::ALLTOALL_BASE, {output, input}, {output}, [&] {
    const Tensors sent = input_sizes.empty() ? input.chunk(getSize()) : input.split_with_sizes(input_sizes);
    const Tensors received = output_sizes.empty() ? output.chunk(getSize()) : output.split_with_sizes(output_sizes);
    TORCH_CHECK_VALUE(static_cast<int>(sent.size()) == getSize() && static_cast<int>(received.size()) == getSize(),
                      "the first dimension must divide by ", getSize(), ", or split sizes be given");
    group([&] {
      for (int peer = 0; peer < getSize(); ++peer) {
        send_bytes(sent[peer], peer);
        recv_bytes(received[peer], peer);
      }
    });
  });
}

WorkPtr MonarchBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  Tensors touched = outputs;
  touched.insert(touched.end(), inputs.begin(), inputs.end());
  return launch(c10d::OpType::ALLTOALL, touched, outputs, [&] {
    group([&] {
      for (int peer = 0; peer < getSize(); ++peer) {
        send_bytes(inputs.at(peer), peer);
        recv_bytes(outputs.at(peer), peer);
      }
    });
  });
}

WorkPtr MonarchBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  Tensors touched = getRank() == root ? outputs.at(0) : Tensors();
  const Tensors made = touched;
  touched.push_back(only(inputs));
  return launch(c10d::OpType::GATHER, touched, made, [&] {
    group([&] {
      send_bytes(inputs[0], root);
      for (std::size_t peer = 0; peer < made.size(); ++peer) recv_bytes(made[peer], static_cast<int>(peer));
    });
  });
}

WorkPtr MonarchBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  Tensors touched = getRank() == root ? inputs.at(0) : Tensors();
  const Tensors sent = touched;
  touched.push_back(only(outputs));
  return launch(c10d::OpType::SCATTER, touched, outputs, [&] {
    group([&] {
      for (std::size_t peer = 0; peer < sent.size(); ++peer) send_bytes(sent[peer], static_cast<int>(peer));
      recv_bytes(outputs[0], root);
    });
  });
}

WorkPtr MonarchBackend::send(Tensors& tensors, int peer, int) {
  const at::Tensor& tensor = only(tensors);
  return launch(c10d::OpType::SEND, tensors, tensors, [&] { send_bytes(tensor, peer); });
}

WorkPtr MonarchBackend::recv(Tensors& tensors, int peer, int) {
  const at::Tensor& tensor = only(tensors);
  return launch(c10d::OpType::RECV, tensors, tensors, [&] { recv_bytes(tensor, peer); });
}

WorkPtr MonarchBackend::barrier(const c10d::BarrierOptions&) {
  const at::Tensor flag = at::zeros({1}, at::TensorOptions().dtype(at::kByte).device(stream_.device()));
  WorkPtr work = launch(c10d::OpType::BARRIER, {flag}, {},
                        [&] { comm_->all_reduce(flag.data_ptr(), flag.data_ptr(), 1, kByte, 2, handle_); });
  return work;
}

void MonarchBackend::abort() { comm_->abort("the process group was aborted"); }

void MonarchBackend::shutdown() { comm_->abort("the process group was destroyed"); }

}  // namespace monarch
