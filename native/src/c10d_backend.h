// torch.distributed's backend "monarch": its collectives on a communicator of ccl.h. Needs no header of CUDA or HIP:
// streams and events are torch's device-generic ones, and the raw stream handle comes from Python.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "c10d_watch.h"
#include "c10d_work.h"
#include "ccl.h"

namespace monarch {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class MonarchBackend : public c10d::Backend {
 public:
  // `stream` is where operations run, `handle` its raw handle; its owner keeps it while the backend lives. `timeout` is
  // how long an operation, a barrier and the end of the group wait for other ranks.
  MonarchBackend(int rank, int size, std::shared_ptr<ccl::Comm> comm, c10::Stream stream, void* handle,
                 Milliseconds timeout, const std::vector<std::string>& gpu_libraries);
  ~MonarchBackend() override;
  MonarchBackend(const MonarchBackend&) = delete;
  MonarchBackend& operator=(const MonarchBackend&) = delete;

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
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
  // For operations that are started from now on.
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
#endif
  // Which operation has not ended in time; empty when all is well.
  std::string overdue();
  // Ends what runs; from any thread.
  void abort() override;
  // Waits for what was started, at most the group's timeout.
  void shutdown() override;

 private:
  using Step = std::function<void()>;
  struct Operation {
    c10::intrusive_ptr<StreamWork> work;
    Tensors touched;  // must outlive it on the device
    Step enqueue;
    Step after;  // enqueued behind it, may be empty
  };
  // An operation that is refused takes its coalescing block with it: nobody is going to end that.
  class Attempt;

  // Starts an operation behind what is on the caller's stream, or collects it when a coalescing block is open.
  WorkPtr launch(c10d::OpType type, Tensors touched, Tensors outputs, Step enqueue, Step after = {},
                 Milliseconds host_timeout = Milliseconds(0));
  void start(std::vector<Operation>& operations, bool as_group);
  void give_up_block();
  c10::Device device() const { return stream_.device(); }
  at::Tensor scratch(int64_t rows, const at::Tensor& like) const;
  WorkPtr reduce_each(c10d::OpType type, const Tensors& tensors, const c10d::ReduceOp& op, const char* what);
  WorkPtr gather_each(c10d::OpType type, const Tensors& outputs, const Tensors& inputs, const char* what);
  WorkPtr scatter_each(c10d::OpType type, const Tensors& outputs, const Tensors& inputs, const c10d::ReduceOp& op,
                       const char* what);
  Tensors list_of_root(const std::vector<Tensors>& lists, const at::Tensor& own, int root, const char* what) const;
  at::Tensor one_for(const Tensors& tensors, int peer, const char* what) const;
  void grouped(std::size_t n, const std::function<void(std::size_t)>& call);
  void send_bytes(const at::Tensor& tensor, int peer);
  void recv_bytes(const at::Tensor& tensor, int peer);

  std::shared_ptr<ccl::Comm> comm_;
  c10::Stream stream_;
  void* handle_;
  std::atomic<Milliseconds> timeout_;
  Watch watch_;
  bool collecting_ = false;
  std::vector<Operation> collected_;
};

}  // namespace monarch
