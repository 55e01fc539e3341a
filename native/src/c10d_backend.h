// torch.distributed's backend "monarch": its collectives on a communicator of ccl.h. Needs no header of CUDA or HIP:
// streams and events are torch's device-generic ones, and the raw stream handle comes from Python.
#pragma once

#include <c10/core/Event.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "ccl.h"

namespace monarch {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// An operation on the backend's stream. wait() orders the caller's stream behind it; it does not block the host.
class StreamWork : public c10d::Work {
 public:
  StreamWork(int rank, c10d::OpType type, std::shared_ptr<ccl::Comm> comm, c10::Stream stream, Tensors outputs);
  bool isCompleted() override;
  bool isSuccess() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<ccl::Comm> comm_;
  c10::Device device_;
  c10::Event event_;
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class MonarchBackend : public c10d::Backend {
 public:
  // `stream` is where operations run, `handle` its raw handle; its owner keeps it while the backend lives.
  MonarchBackend(int rank, int size, std::shared_ptr<ccl::Comm> comm, c10::Stream stream, void* handle);

  const std::string getBackendName() const override { return "monarch"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void abort() override;
  void shutdown() override;

 private:
  // Runs `enqueue` on the backend's stream, behind what is on the caller's; `touched` must outlive it on the device.
  WorkPtr launch(c10d::OpType type, const Tensors& touched, const Tensors& outputs,
                 const std::function<void()>& enqueue);
  void group(const std::function<void()>& calls);
  void check(const at::Tensor& tensor, const char* what) const;
  void send_bytes(const at::Tensor& tensor, int peer);
  void recv_bytes(const at::Tensor& tensor, int peer);

  std::shared_ptr<ccl::Comm> comm_;
  c10::Stream stream_;
  void* handle_;
};

}  // namespace monarch
