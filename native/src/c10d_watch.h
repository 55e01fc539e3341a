// Operations of a group that are under way: one that does not end in time is noticed, by a thread that asks.
#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "capture_api.h"
#include "dl.h"
#include "platform.h"

namespace monarch {

class Watch {
 public:
  // `libraries` are candidates for the GPU runtime, `stream` the raw stream of the operations.
  Watch(const std::vector<std::string>& libraries, void* stream) : stream_(stream) {
    try {
      const Library library("the GPU runtime", libraries, "");
      library.find(table_.is_capturing, MONARCH_GPU_SYMBOL("cuStreamIsCapturing", "hipStreamIsCapturing"));
      library.find(table_.exchange_mode,
                   MONARCH_GPU_SYMBOL("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"));
    } catch (const LibraryMissing&) {
      table_ = {};  // without a GPU runtime there are no graphs
    }
  }

  // `event` stands behind the operation on the stream. What is captured into a graph does not run, and is not watched.
  void add(std::shared_ptr<c10::Event> event, c10d::OpType type, std::chrono::milliseconds timeout) {
    int capturing = 0;
    if (table_.is_capturing != nullptr) table_.is_capturing(stream_, &capturing);
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    const std::lock_guard<std::mutex> lock(mutex_);
    ++started_;
    if (capturing == 0) {
      running_.push_back(
          {.event = std::move(event), .type = type, .number = started_, .deadline = deadline, .timeout = timeout});
    }
  }

  // What has not ended in time; empty when all is well. For one thread at a time.
  std::string overdue() {
    const Relaxed relaxed(table_);
    const std::lock_guard<std::mutex> lock(mutex_);
    while (!running_.empty() && running_.front().event->query()) running_.pop_front();
    if (running_.empty() || std::chrono::steady_clock::now() < running_.front().deadline) return {};
    const Running& first = running_.front();
    return c10d::opTypeToString(first.type) + ", operation " + std::to_string(first.number) +
           " of the group, is not through after " + std::to_string(first.timeout.count()) +
           " ms; another rank has not come to it, or hangs";
  }

  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_.clear();
  }

 private:
  struct Running {
    std::shared_ptr<c10::Event> event;
    c10d::OpType type;
    std::uint64_t number;
    std::chrono::steady_clock::time_point deadline;
    std::chrono::milliseconds timeout;
  };

  // While a thread captures a graph, in the mode that is usual, no other may ask for an event unless it says so.
  class Relaxed {
   public:
    explicit Relaxed(const capture::Table& table) : table_(table) { exchange(); }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;
    ~Relaxed() { exchange(); }

   private:
    void exchange() {
      if (table_.exchange_mode != nullptr) table_.exchange_mode(&mode_);
    }
    const capture::Table& table_;
    int mode_ = capture::kRelaxed;
  };

  void* stream_;
  capture::Table table_{};
  std::mutex mutex_;
  std::deque<Running> running_;
  std::uint64_t started_ = 0;
};

}  // namespace monarch
