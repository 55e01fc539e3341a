// One operation of the c10d backend.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "ccl.h"

namespace monarch {

using Tensors = std::vector<at::Tensor>;
using Milliseconds = std::chrono::milliseconds;

// Until `done`, at most so long; 0 is for ever. Returns whether it is done.
inline bool poll(const std::function<bool()>& done, Milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  auto pause = std::chrono::microseconds(20);
  while (!done()) {
    if (timeout.count() > 0 && std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(2000));
  }
  return true;
}

// An operation on the backend's stream. wait() orders the caller's stream behind it; it blocks the host as well when a
// timeout is given, or the operation is a barrier.
class StreamWork : public c10d::Work {
 public:
  // `host_timeout` above 0: wait() blocks the host, at most so long.
  StreamWork(int rank, c10d::OpType type, std::shared_ptr<ccl::Comm> comm, c10::Device device, Tensors outputs,
             Milliseconds host_timeout);
  // An operation of a coalescing block is started when the block ends; until then it is collected.
  void started(const c10::Stream& stream);
  // What stands behind it on the stream, once it has been started.
  const std::shared_ptr<c10::Event>& event() const { return event_; }
  void give_up() noexcept;
  bool given_up() const { return state_ == State::kGivenUp; }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override;
  bool wait(Milliseconds timeout) override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
  void blockCurrentStream() override { synchronize(); }
#endif
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  enum class State : std::uint8_t { kCollected, kStarted, kGivenUp };
  // Why the operation cannot end well; empty when it can.
  std::string failure() const;

  std::shared_ptr<ccl::Comm> comm_;
  c10::Device device_;
  std::shared_ptr<c10::Event> event_;
  Tensors outputs_;
  Milliseconds host_timeout_;
  std::atomic<State> state_{State::kCollected};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

inline StreamWork::StreamWork(int rank, c10d::OpType type, std::shared_ptr<ccl::Comm> comm, c10::Device device,
                              Tensors outputs, Milliseconds host_timeout)
    : Work(rank, type),
      comm_(std::move(comm)),
      device_(device),
      event_(std::make_shared<c10::Event>(device.type())),
      outputs_(std::move(outputs)),
      host_timeout_(host_timeout),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device})) {}

inline void StreamWork::started(const c10::Stream& stream) {
  event_->record(stream);
  state_ = State::kStarted;
  const c10::StreamGuard guard(stream);  // the future records what is current
  future_->markCompleted(c10::IValue(outputs_));
}

inline void StreamWork::give_up() noexcept {
  State collected = State::kCollected;
  if (!state_.compare_exchange_strong(collected, State::kGivenUp)) return;
  try {
    future_->setErrorIfNeeded(exception());
  } catch (const std::exception& error) {  // of a callback; whoever waits for the future is told all the same
    TORCH_WARN("a callback of an operation that was given up has failed: ", error.what());
  }
}

inline std::string StreamWork::failure() const {
  std::string reason = comm_->failure();
  if (!reason.empty() || state_ == State::kStarted) return reason;
  if (state_ == State::kGivenUp) return "the operation was given up with its coalescing block, which never ended";
  return "the operation starts when its coalescing block ends, which has not been; it cannot be waited for before";
}

inline bool StreamWork::isCompleted() {
  return given_up() || !comm_->failure().empty() || (state_ == State::kStarted && event_->query());
}

inline bool StreamWork::isSuccess() const { return failure().empty(); }

inline std::exception_ptr StreamWork::exception() const {
  try {
    const std::string reason = failure();
    TORCH_CHECK_WITH(DistBackendError, reason.empty(), reason);
  } catch (const c10::DistBackendError&) {
    return std::current_exception();
  }
  return nullptr;
}

inline void StreamWork::synchronize() {
  const std::string reason = failure();
  give_up();  // whoever waits inside of a block is not going to end it
  TORCH_CHECK_WITH(DistBackendError, reason.empty(), reason);
  event_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

inline bool StreamWork::wait(Milliseconds timeout) {
  synchronize();
  const Milliseconds limit = timeout.count() > 0 ? timeout : host_timeout_;
  if (limit.count() > 0) {
    const bool done = poll([this] { return isCompleted(); }, limit);
    const std::string reason = failure();  // an aborted operation ends, too
    TORCH_CHECK_WITH(DistBackendError, reason.empty(), reason);
    TORCH_CHECK_WITH(DistBackendError, done, opTypeToString(retrieveOpType()), " is not through after ", limit.count(),
                     " ms; another rank has not come to it, or hangs");
  }
  return true;
}

}  // namespace monarch
