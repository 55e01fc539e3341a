// Collectives of NCCL and RCCL through our own declarations (both have the same C interface).
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "dl.h"

namespace monarch::ccl {

struct UniqueId {
  char bytes[128];
};

// The part of ncclConfig_t that every release since 2.17 knows; the library reads `size` bytes of it.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21700;
  int blocking = 1;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
};

// A call of the library failed; the text names call, result and the library's own last error.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The communicator was aborted: by a peer's death or by the caller. The text says why.
class Aborted : public Error {
 public:
  using Error::Error;
};

struct Table {
  int (*get_version)(int* version);
  int (*get_unique_id)(UniqueId* id);
  int (*init_rank)(void** comm, int size, UniqueId id, int rank, Config* config);
  int (*destroy)(void* comm);
  int (*abort)(void* comm);
  int (*async_error)(void* comm, int* error);
  int (*split)(void* comm, int color, int key, void** made, Config* config);  // may be null (before 2.18)
  const char* (*error_string)(int result);                                    // may be null
  const char* (*last_error)(void* comm);                                      // may be null
  int (*all_reduce)(const void* send, void* recv, std::size_t count, int type, int op, void* comm, void* stream);
  int (*all_gather)(const void* send, void* recv, std::size_t count, int type, void* comm, void* stream);
  int (*reduce_scatter)(const void* send, void* recv, std::size_t count, int type, int op, void* comm, void* stream);
  int (*broadcast)(const void* send, void* recv, std::size_t count, int type, int root, void* comm, void* stream);
  int (*reduce)(const void* send, void* recv, std::size_t count, int type, int op, int root, void* comm, void* stream);
  int (*send)(const void* buffer, std::size_t count, int type, int peer, void* comm, void* stream);
  int (*recv)(void* buffer, std::size_t count, int type, int peer, void* comm, void* stream);
  int (*group_start)();
  int (*group_end)();
  int (*pre_mul_sum)(int* op, void* factor, int type, int residence, void* comm);  // may be null (before 2.11)
  int (*drop_op)(int op, void* comm);                                              // likewise
};

class Ccl {
 public:
  explicit Ccl(const std::vector<std::string>& candidates);
  int version() const;
  UniqueId unique_id() const;
  // `comm` may be null. Throws Error unless the result is success.
  void check(int result, const char* call, void* comm = nullptr) const;
  const Table& table() const noexcept { return table_; }
  const std::string& path() const noexcept { return library_.path(); }

 private:
  Library library_;
  Table table_{};
};

// One rank of a communicator. Operations enqueue on the caller's stream and return; abort may come from any thread.
class Comm {
 public:
  // Blocks until all `size` ranks are there, which may be for ever: the caller gives it a thread of its own, with the
  // right device current, and stops waiting when it wants.
  static std::shared_ptr<Comm> init(std::shared_ptr<Ccl> ccl, const UniqueId& id, int size, int rank);
  Comm(std::shared_ptr<Ccl> ccl, void* comm, int size, int rank);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  int size() const noexcept { return size_; }
  int rank() const noexcept { return rank_; }
  // Ended, by `abort` or `destroy`.
  bool aborted() const noexcept { return comm_.load() == nullptr; }
  // Why `abort` ended it; empty while it lives, and after `destroy`.
  std::string failure() const;

  void all_reduce(const void* send, void* recv, std::size_t count, int type, int op, void* stream);
  void all_gather(const void* send, void* recv, std::size_t count, int type, void* stream);
  void reduce_scatter(const void* send, void* recv, std::size_t count, int type, int op, void* stream);
  void broadcast(const void* send, void* recv, std::size_t count, int type, int root, void* stream);
  void reduce(const void* send, void* recv, std::size_t count, int type, int op, int root, void* stream);
  void send(const void* buffer, std::size_t count, int type, int peer, void* stream);
  void recv(void* buffer, std::size_t count, int type, int peer, void* stream);
  void group_start();
  void group_end();

  // A reduction that multiplies this rank's elements by `factor`, of the same type, before it sums. The factor is read
  // at once, or by each use if it is on the device.
  int pre_mul_sum(void* factor, bool on_device, int type);
  void drop_op(int op) noexcept;

  // Ranks with the same color make a new communicator, ordered by key; null for a negative color. Blocking.
  std::shared_ptr<Comm> split(int color, int key, int new_size, int new_rank);
  // Empty when all is well, else what the library says went wrong in the background.
  std::string async_error();
  // Ends every running operation of this rank; later calls throw Aborted with `reason`. Safe from any thread.
  void abort(const std::string& reason);
  // Waits for nothing: the caller has synchronized its streams. Aborts if a call is still running after a moment.
  void destroy();

 private:
  // A call of the library that has the communicator in hand.
  class Use;
  // The library's communicator; throws Aborted once there is none.
  void* live() const;
  // Takes it away, for good and with a reason; null if somebody else did before. Gives calls that go on a moment to
  // return, as the library frees the communicator; no more, as one that waits for a peer returns only when it does.
  void* end(const std::string& reason, bool failed);

  std::shared_ptr<Ccl> ccl_;
  std::atomic<void*> comm_;  // null once it was ended
  std::atomic<int> in_use_{0};
  std::atomic<bool> failed_{false};
  int size_;
  int rank_;
  mutable std::mutex mutex_;  // guards the end of comm_, and reason_
  std::string reason_;
};

// Calls that the library starts as one. Ended on every way out, as the library counts starts and ends of each thread.
class Group {
 public:
  explicit Group(Comm& comm) : comm_(comm) { comm_.group_start(); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    try {
      if (open_) comm_.group_end();
    } catch (const Error&) {  // an error is on its way already, and that one says what was wrong
      open_ = false;
    }
  }
  void end() {
    open_ = false;
    comm_.group_end();
  }

 private:
  Comm& comm_;
  bool open_ = true;
};

}  // namespace monarch::ccl
