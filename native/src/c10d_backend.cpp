#include "c10d_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "c10d_checks.h"

namespace monarch {

namespace {

constexpr int kByte = 1;  // ncclUint8: what only moves goes as bytes, whatever its dtype
constexpr int kMax = 2;

std::size_t count(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }

// What the library calls a reduction, for one call.
class ReductionOp {
 public:
  ReductionOp(ccl::Comm& comm, const checks::Reduction& how)
      : comm_(comm), is_made_(how.op == checks::kPreMulSum), code_(how.op) {
    if (is_made_) code_ = comm_.pre_mul_sum(how.factor.data_ptr(), !how.factor.is_cpu(), how.type);
  }
  ~ReductionOp() {
    if (is_made_) comm_.drop_op(code_);
  }
  ReductionOp(const ReductionOp&) = delete;
  ReductionOp& operator=(const ReductionOp&) = delete;
  int code() const noexcept { return code_; }

 private:
  ccl::Comm& comm_;
  bool is_made_;
  int code_;
};

// The tensors, and the factors that the device reads.
Tensors touched_by(Tensors tensors, const std::vector<checks::Reduction>& how) {
  for (const checks::Reduction& each : how) {
    if (each.factor.defined() && !each.factor.is_cpu()) tensors.push_back(each.factor);
  }
  return tensors;
}

bool same_sizes(const Tensors& tensors) {
  return std::ranges::all_of(tensors, [&](const at::Tensor& each) { return each.numel() == tensors[0].numel(); });
}

Tensors joined(const Tensors& some, const Tensors& others) {
  Tensors all = some;
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

}  // namespace

class MonarchBackend::Attempt {
 public:
  explicit Attempt(MonarchBackend& backend) : backend_(backend) {}
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;
  ~Attempt() {
    if (std::uncaught_exceptions() > before_) backend_.give_up_block();
  }

 private:
  MonarchBackend& backend_;
  const int before_ = std::uncaught_exceptions();
};

MonarchBackend::MonarchBackend(int rank, int size, std::shared_ptr<ccl::Comm> comm, c10::Stream stream, void* handle,
                               Milliseconds timeout, const std::vector<std::string>& gpu_libraries)
    : Backend(rank, size),
      comm_(std::move(comm)),
      stream_(stream),
      handle_(handle),
      timeout_(timeout),
      watch_(gpu_libraries, handle) {}

MonarchBackend::~MonarchBackend() { give_up_block(); }

void MonarchBackend::give_up_block() {
  for (const Operation& operation : collected_) operation.work->give_up();
  collected_.clear();
  collecting_ = false;
}

WorkPtr MonarchBackend::launch(c10d::OpType type, Tensors touched, Tensors outputs, Step enqueue, Step after,
                               Milliseconds host_timeout) {
  const auto given_up = [](const Operation& operation) { return operation.work->given_up(); };
  if (std::ranges::any_of(collected_, given_up)) give_up_block();
  const c10::impl::VirtualGuardImpl guard(stream_.device_type());
  c10::Event ready(stream_.device_type());
  ready.record(guard.getStream(device()));
  ready.block(stream_);
  auto work = c10::make_intrusive<StreamWork>(getRank(), type, comm_, device(), std::move(outputs), host_timeout);
  std::vector<Operation> one{
      {.work = work, .touched = std::move(touched), .enqueue = std::move(enqueue), .after = std::move(after)}};
  if (collecting_) {
    collected_.push_back(std::move(one[0]));
  } else {
    start(one, false);
  }
  return work;
}

void MonarchBackend::start(std::vector<Operation>& operations, bool as_group) {
  const c10::StreamGuard on_stream(stream_);
  try {
    if (as_group) {
      ccl::Group group(*comm_);
      for (const Operation& each : operations) each.enqueue();
      group.end();
    } else {
      for (const Operation& each : operations) each.enqueue();
    }
  } catch (const ccl::Error& error) {
    TORCH_CHECK_WITH(DistBackendError, false, error.what());
  }
  const c10::impl::VirtualGuardImpl guard(stream_.device_type());
  for (const Operation& each : operations) {
    if (each.after) each.after();
    for (const at::Tensor& tensor : each.touched) {
      if (tensor.numel() > 0) guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
    }
    each.work->started(stream_);
    watch_.add(each.work->event(), each.work->retrieveOpType(), timeout_);
  }
}

// Memory of the backend's stream: kept by the operation's steps until they have been enqueued.
at::Tensor MonarchBackend::scratch(int64_t rows, const at::Tensor& like) const {
  const c10::StreamGuard on_stream(stream_);
  return at::empty({rows, like.numel()}, like.options());
}

// Calls `call` with 0 to n - 1; more than one call is a group.
void MonarchBackend::grouped(std::size_t n, const std::function<void(std::size_t)>& call) {
  if (n == 1) return call(0);
  ccl::Group group(*comm_);
  for (std::size_t i = 0; i < n; ++i) call(i);
  group.end();
}

void MonarchBackend::send_bytes(const at::Tensor& tensor, int peer) {
  comm_->send(tensor.data_ptr(), tensor.nbytes(), kByte, peer, handle_);
}

void MonarchBackend::recv_bytes(const at::Tensor& tensor, int peer) {
  comm_->recv(tensor.data_ptr(), tensor.nbytes(), kByte, peer, handle_);
}

// The library's own group is opened when the block ends: an exception within the block must not leave it open, as it
// would hold up every communicator of this thread.
void MonarchBackend::startCoalescing() {
  give_up_block();
  collecting_ = true;
}

WorkPtr MonarchBackend::endCoalescing() {
  TORCH_CHECK(collecting_, "no coalescing block is open: an operation in it was refused, or it has not been started");
  const Attempt attempt(*this);
  auto work =
      c10::make_intrusive<StreamWork>(getRank(), c10d::OpType::COALESCED, comm_, device(), Tensors(), Milliseconds(0));
  collected_.push_back({.work = work, .touched = {}, .enqueue = [] {}, .after = {}});
  start(collected_, true);
  collected_.clear();
  collecting_ = false;
  return work;
}

WorkPtr MonarchBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const Attempt attempt(*this);
  const at::Tensor tensor = checks::only(tensors, "broadcast");
  checks::dense(tensor, device(), "broadcast");
  const int root = checks::rank_of(options.rootRank, getSize(), "broadcast");
  return launch(c10d::OpType::BROADCAST, tensors, tensors, [=, this] {
    comm_->broadcast(tensor.data_ptr(), tensor.data_ptr(), tensor.nbytes(), kByte, root, handle_);
  });
}

WorkPtr MonarchBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const Attempt attempt(*this);
  checks::only(tensors, "allreduce");
  return reduce_each(c10d::OpType::ALLREDUCE, tensors, options.reduceOp, "allreduce");
}

WorkPtr MonarchBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const Attempt attempt(*this);
  return reduce_each(c10d::OpType::ALLREDUCE_COALESCED, tensors, options.reduceOp, "allreduce_coalesced");
}

WorkPtr MonarchBackend::reduce_each(c10d::OpType type, const Tensors& tensors, const c10d::ReduceOp& op,
                                    const char* what) {
  checks::same_count(tensors, tensors, what);
  std::vector<checks::Reduction> how;
  for (const at::Tensor& tensor : tensors) {
    checks::dense(tensor, device(), what);
    how.push_back(checks::reduction(op, tensor.scalar_type(), device()));
  }
  return launch(type, touched_by(tensors, how), tensors, [=, this] {
    grouped(tensors.size(), [&](std::size_t i) {
      comm_->all_reduce(tensors[i].data_ptr(), tensors[i].data_ptr(), count(tensors[i]) * how[i].parts, how[i].type,
                        ReductionOp(*comm_, how[i]).code(), handle_);
    });
  });
}

WorkPtr MonarchBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Attempt attempt(*this);
  const at::Tensor tensor = checks::only(tensors, "reduce");
  checks::dense(tensor, device(), "reduce");
  const int root = checks::rank_of(options.rootRank, getSize(), "reduce");
  const checks::Reduction how = checks::reduction(options.reduceOp, tensor.scalar_type(), device());
  return launch(c10d::OpType::REDUCE, touched_by(tensors, {how}), tensors, [=, this] {
    comm_->reduce(tensor.data_ptr(), tensor.data_ptr(), count(tensor) * how.parts, how.type,
                  ReductionOp(*comm_, how).code(), root, handle_);
  });
}

WorkPtr MonarchBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  const Attempt attempt(*this);
  return gather_each(c10d::OpType::_ALLGATHER_BASE, {output}, {input}, "allgather_into_tensor");
}

WorkPtr MonarchBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions&) {
  const Attempt attempt(*this);
  return gather_each(c10d::OpType::COALESCED, outputs, inputs, "allgather_into_tensor_coalesced");
}

WorkPtr MonarchBackend::gather_each(c10d::OpType type, const Tensors& outputs, const Tensors& inputs,
                                    const char* what) {
  checks::same_count(outputs, inputs, what);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    checks::contiguous(outputs[i], device(), what);
    checks::contiguous(inputs[i], device(), what);
    checks::same_dtype(outputs[i], inputs[i], what);
    checks::parts_of(outputs[i], inputs[i], getSize(), what);
  }
  return launch(type, joined(outputs, inputs), outputs, [=, this] {
    grouped(outputs.size(), [&](std::size_t i) {
      comm_->all_gather(inputs[i].data_ptr(), outputs[i].data_ptr(), inputs[i].nbytes(), kByte, handle_);
    });
  });
}

WorkPtr MonarchBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  const Attempt attempt(*this);
  const at::Tensor input = checks::only(inputs, "allgather");
  const Tensors made = checks::one_each(outputs, getSize(), "allgather");
  checks::contiguous(input, device(), "allgather");
  for (const at::Tensor& output : made) {
    checks::contiguous(output, device(), "allgather");
    checks::same_dtype(output, input, "allgather");
  }
  const auto mine = static_cast<std::size_t>(getRank());
  checks::all_like({made[mine]}, input, "allgather");
  if (!same_sizes(made)) {  // of one size they are gathered at once, else each rank sends to all
    return launch(c10d::OpType::ALLGATHER, joined(made, inputs), made, [=, this] {
      grouped(made.size(), [&](std::size_t i) {
        comm_->broadcast(i == mine ? input.data_ptr() : made[i].data_ptr(), made[i].data_ptr(), made[i].nbytes(), kByte,
                         static_cast<int>(i), handle_);
      });
    });
  }
  const at::Tensor flat = scratch(getSize(), input);
  return launch(
      c10d::OpType::ALLGATHER, joined(made, inputs), made,
      [=, this] { comm_->all_gather(input.data_ptr(), flat.data_ptr(), input.nbytes(), kByte, handle_); },
      [=] {
        for (std::size_t i = 0; i < made.size(); ++i) made[i].view(-1).copy_(flat[static_cast<int64_t>(i)], true);
      });
}

WorkPtr MonarchBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::ReduceScatterOptions& options) {
  const Attempt attempt(*this);
  return scatter_each(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {input}, options.reduceOp, "reduce_scatter_tensor");
}

WorkPtr MonarchBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::ReduceScatterOptions& options) {
  const Attempt attempt(*this);
  return scatter_each(c10d::OpType::COALESCED, outputs, inputs, options.reduceOp, "reduce_scatter_tensor_coalesced");
}

WorkPtr MonarchBackend::scatter_each(c10d::OpType type, const Tensors& outputs, const Tensors& inputs,
                                     const c10d::ReduceOp& op, const char* what) {
  checks::same_count(outputs, inputs, what);
  std::vector<checks::Reduction> how;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    checks::contiguous(outputs[i], device(), what);
    checks::contiguous(inputs[i], device(), what);
    checks::same_dtype(outputs[i], inputs[i], what);
    checks::parts_of(inputs[i], outputs[i], getSize(), what);
    how.push_back(checks::reduction(op, inputs[i].scalar_type(), device()));
  }
  return launch(type, touched_by(joined(outputs, inputs), how), outputs, [=, this] {
    grouped(outputs.size(), [&](std::size_t i) {
      comm_->reduce_scatter(inputs[i].data_ptr(), outputs[i].data_ptr(), count(outputs[i]) * how[i].parts, how[i].type,
                            ReductionOp(*comm_, how[i]).code(), handle_);
    });
  });
}

WorkPtr MonarchBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const c10d::ReduceScatterOptions& options) {
  const Attempt attempt(*this);
  const at::Tensor output = checks::only(outputs, "reduce_scatter");
  const Tensors parts = checks::one_each(inputs, getSize(), "reduce_scatter");
  checks::contiguous(output, device(), "reduce_scatter");
  for (const at::Tensor& part : parts) {
    checks::contiguous(part, device(), "reduce_scatter");
    checks::same_dtype(output, part, "reduce_scatter");
  }
  const auto mine = static_cast<std::size_t>(getRank());
  checks::all_like({parts[mine]}, output, "reduce_scatter");
  const checks::Reduction how = checks::reduction(options.reduceOp, output.scalar_type(), device());
  if (!same_sizes(parts)) {
    return launch(c10d::OpType::REDUCE_SCATTER, touched_by(joined(parts, outputs), {how}), outputs, [=, this] {
      grouped(parts.size(), [&](std::size_t i) {
        comm_->reduce(parts[i].data_ptr(), i == mine ? output.data_ptr() : parts[i].data_ptr(),
                      count(parts[i]) * how.parts, how.type, ReductionOp(*comm_, how).code(), static_cast<int>(i),
                      handle_);
      });
    });
  }
  const at::Tensor flat = scratch(getSize(), output);
  return launch(c10d::OpType::REDUCE_SCATTER, touched_by(joined(parts, outputs), {how}), outputs, [=, this] {
    for (std::size_t i = 0; i < parts.size(); ++i) flat[static_cast<int64_t>(i)].copy_(parts[i].view(-1), true);
    comm_->reduce_scatter(flat.data_ptr(), output.data_ptr(), count(output) * how.parts, how.type,
                          ReductionOp(*comm_, how).code(), handle_);
  });
}

WorkPtr MonarchBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) {
  const Attempt attempt(*this);
  checks::contiguous(output, device(), "alltoall_base");
  checks::contiguous(input, device(), "alltoall_base");
  checks::same_dtype(output, input, "alltoall_base");
  const std::vector<std::size_t> sent = checks::split(input, input_sizes, getSize(), "alltoall_base");
  const std::vector<std::size_t> received = checks::split(output, output_sizes, getSize(), "alltoall_base");
  return launch(c10d::OpType::ALLTOALL_BASE, {output, input}, {output}, [=, this] {
    ccl::Group group(*comm_);
    char* from = static_cast<char*>(input.data_ptr());
    char* to = static_cast<char*>(output.data_ptr());
    for (std::size_t i = 0; i < sent.size(); ++i) {
      comm_->send(from, sent[i], kByte, static_cast<int>(i), handle_);
      comm_->recv(to, received[i], kByte, static_cast<int>(i), handle_);
      from += sent[i];
      to += received[i];
    }
    group.end();
  });
}

WorkPtr MonarchBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  const Attempt attempt(*this);
  const Tensors received = checks::one_each({outputs}, getSize(), "alltoall");
  const Tensors sent = checks::one_each({inputs}, getSize(), "alltoall");
  for (std::size_t i = 0; i < sent.size(); ++i) {
    checks::contiguous(received[i], device(), "alltoall");
    checks::contiguous(sent[i], device(), "alltoall");
    checks::same_dtype(received[i], sent[i], "alltoall");
  }
  const auto mine = static_cast<std::size_t>(getRank());
  checks::all_like({received[mine]}, sent[mine], "alltoall");
  return launch(c10d::OpType::ALLTOALL, joined(received, sent), received, [=, this] {
    ccl::Group group(*comm_);
    for (std::size_t i = 0; i < sent.size(); ++i) {
      send_bytes(sent[i], static_cast<int>(i));
      recv_bytes(received[i], static_cast<int>(i));
    }
    group.end();
  });
}

WorkPtr MonarchBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const Attempt attempt(*this);
  const at::Tensor input = checks::only(inputs, "gather");
  const int root = checks::rank_of(options.rootRank, getSize(), "gather");
  const Tensors made = list_of_root(outputs, input, root, "gather");
  return launch(c10d::OpType::GATHER, joined(made, inputs), made, [=, this] {
    ccl::Group group(*comm_);
    send_bytes(input, root);
    for (std::size_t i = 0; i < made.size(); ++i) recv_bytes(made[i], static_cast<int>(i));
    group.end();
  });
}

WorkPtr MonarchBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const Attempt attempt(*this);
  const at::Tensor output = checks::only(outputs, "scatter");
  const int root = checks::rank_of(options.rootRank, getSize(), "scatter");
  const Tensors sent = list_of_root(inputs, output, root, "scatter");
  return launch(c10d::OpType::SCATTER, joined(sent, outputs), outputs, [=, this] {
    ccl::Group group(*comm_);
    for (std::size_t i = 0; i < sent.size(); ++i) send_bytes(sent[i], static_cast<int>(i));
    recv_bytes(output, root);
    group.end();
  });
}

// The root's tensors, one for each rank and each like its `own`; nothing on the other ranks.
Tensors MonarchBackend::list_of_root(const std::vector<Tensors>& lists, const at::Tensor& own, int root,
                                     const char* what) const {
  checks::contiguous(own, device(), what);
  if (getRank() != root) {
    checks::nothing(lists, what);
    return {};
  }
  const Tensors list = checks::one_each(lists, getSize(), what);
  for (const at::Tensor& each : list) checks::contiguous(each, device(), what);
  checks::all_like(list, own, what);
  return list;
}

WorkPtr MonarchBackend::send(Tensors& tensors, int peer, int) {
  const Attempt attempt(*this);
  const at::Tensor tensor = one_for(tensors, peer, "send");
  return launch(c10d::OpType::SEND, tensors, tensors, [=, this] { send_bytes(tensor, peer); });
}

WorkPtr MonarchBackend::recv(Tensors& tensors, int peer, int) {
  const Attempt attempt(*this);
  const at::Tensor tensor = one_for(tensors, peer, "recv");
  return launch(c10d::OpType::RECV, tensors, tensors, [=, this] { recv_bytes(tensor, peer); });
}

// Within a block a rank may send to itself: it receives there, too.
at::Tensor MonarchBackend::one_for(const Tensors& tensors, int peer, const char* what) const {
  const at::Tensor& tensor = checks::only(tensors, what);
  checks::dense(tensor, device(), what);
  checks::rank_of(peer, getSize(), what);
  TORCH_CHECK_VALUE(peer != getRank() || collecting_, what, ": rank ", peer, " is this rank itself; copy the tensor");
  return tensor;
}

WorkPtr MonarchBackend::barrier(const c10d::BarrierOptions& options) {
  const Attempt attempt(*this);
  at::Tensor flag;
  {
    const c10::StreamGuard on_stream(stream_);
    flag = at::zeros({1}, at::TensorOptions().dtype(at::kByte).device(device()));
  }
  return launch(
      c10d::OpType::BARRIER, {flag}, {},
      [=, this] { comm_->all_reduce(flag.data_ptr(), flag.data_ptr(), 1, kByte, kMax, handle_); }, {},
      options.timeout.count() > 0 ? options.timeout : timeout_.load());
}

std::string MonarchBackend::overdue() {
  if (!comm_->aborted()) return watch_.overdue();
  watch_.clear();
  return {};
}

void MonarchBackend::abort() { comm_->abort("the process group was aborted"); }

void MonarchBackend::shutdown() {
  if (comm_->aborted()) return;
  c10::Event last(stream_.device_type());
  last.record(stream_);
  if (poll([&] { return last.query() || comm_->aborted(); }, timeout_)) {
    comm_->destroy();
  } else {
    comm_->abort("the process group was destroyed while its operations waited for other ranks");
  }
}

}  // namespace monarch

namespace py = pybind11;

namespace {

c10::intrusive_ptr<c10d::Backend> create(int rank, int size, const py::capsule& comm, const c10::Stream& stream,
                                         std::uint64_t handle, double timeout_s,
                                         const std::vector<std::string>& gpu_libraries) {
  // The capsule is `Comm.capsule()` of _native, which is built from the same ccl.h.
  const char* name = comm.name();
  TORCH_CHECK_VALUE(name != nullptr && std::strcmp(name, "monarch_slurm.ccl.Comm") == 0,
                    "not a communicator of _native");
  const auto* shared = comm.get_pointer<std::shared_ptr<monarch::ccl::Comm>>();
  TORCH_CHECK_VALUE((*shared)->rank() == rank && (*shared)->size() == size,
                    "the communicator has another rank or size");
  return c10::make_intrusive<monarch::MonarchBackend>(rank, size, *shared, stream, reinterpret_cast<void*>(handle),
                                                      monarch::Milliseconds(static_cast<int64_t>(1e3 * timeout_s)),
                                                      gpu_libraries);
}

std::string overdue(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* ours = dynamic_cast<monarch::MonarchBackend*>(backend.get());
  TORCH_CHECK_TYPE(ours != nullptr, "not a backend of this module");
  return ours->overdue();
}

}  // namespace

PYBIND11_MODULE(_c10d, m) {
  m.doc() = "torch.distributed's backend `monarch`; see monarch_slurm.collectives.c10d";
  m.def("create", &create, py::arg("rank"), py::arg("size"), py::arg("comm"), py::arg("stream"), py::arg("handle"),
        py::arg("timeout_s"), py::arg("gpu_libraries") = std::vector<std::string>());
  m.def("overdue", &overdue, py::call_guard<py::gil_scoped_release>());
}
