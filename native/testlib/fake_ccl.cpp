// NCCL's and RCCL's symbols for ranks that are threads of one process, over host memory: floats, sums and maxima. It
// checks the bindings, errors and aborts of ccl.cpp without a device. Operations are complete when the call returns.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "ccl.h"

using monarch::ccl::Config;
using monarch::ccl::UniqueId;

namespace {

constexpr int kFloat = 7, kBytes = 1, kMax = 2;
constexpr int kUnhandled = 1, kInvalid = 4;

// What the ranks of a communicator share. A round ends when each has posted its buffers and read what it wants.
struct Group {
  explicit Group(int n) : size(n), posted(n) {}
  struct Post {
    const void* send;
    void* recv;
  };
  const int size;
  std::vector<Post> posted;
  std::map<std::pair<int, int>, std::vector<std::string>> mail;  // from, to
  int arrived = 0;
  unsigned round = 0;
  int members = 0;
  bool aborted = false;
  std::mutex mutex;
  std::condition_variable changed;

  int meet() {
    std::unique_lock<std::mutex> lock(mutex);
    const unsigned mine = round;
    if (++arrived == size) {
      arrived = 0;
      ++round;
      changed.notify_all();
    }
    changed.wait(lock, [&] { return round != mine || aborted; });
    return round == mine ? kUnhandled : 0;
  }
};

struct Rank {
  std::shared_ptr<Group> group;
  int rank;
};

std::mutex registry_mutex;
std::map<std::string, std::shared_ptr<Group>> registry;
std::atomic<int> background_error{0};
thread_local int group_depth = 0;
thread_local std::vector<std::function<int()>> grouped;

std::size_t width(int type) { return type == kFloat ? 4 : 1; }

int join(void** made, const std::string& key, int size, int rank) {
  std::shared_ptr<Group> group;
  {
    const std::lock_guard<std::mutex> lock(registry_mutex);
    auto& known = registry[key];
    if (!known) known = std::make_shared<Group>(size);
    group = known;
  }
  *made = new Rank{group, rank};
  return group->meet();
}

// Posts this rank's buffers, lets `work` read those of all, and returns when every rank is through.
int collective(void* comm, const void* send, void* recv, const std::function<void(Rank&)>& work) {
  Rank& rank = *static_cast<Rank*>(comm);
  rank.group->posted[rank.rank] = {send, recv};
  if (const int result = rank.group->meet()) return result;
  work(rank);
  return rank.group->meet();
}

// The reduction of elements [first, first + count) of all ranks' floats.
std::string reduced(const Rank& rank, std::size_t first, std::size_t count, int op) {
  std::vector<float> total(count, op == kMax ? -3e38f : 0.0f);
  for (const auto& post : rank.group->posted) {
    const float* part = static_cast<const float*>(post.send) + first;
    for (std::size_t i = 0; i < count; ++i) total[i] = op == kMax ? std::max(total[i], part[i]) : total[i] + part[i];
  }
  return {reinterpret_cast<const char*>(total.data()), count * sizeof(float)};
}

// As others' inputs may be where this rank's output goes, it is written only when all have read.
int reduce_to(void* comm, const void* send, void* recv, std::size_t count, int type, int op, bool scatter, int root) {
  if (type != kFloat) return kInvalid;
  std::string result;
  const int status = collective(comm, send, recv, [&](Rank& rank) {
    result = reduced(rank, scatter ? count * static_cast<std::size_t>(rank.rank) : 0, count, op);
  });
  const bool wants = root < 0 || static_cast<Rank*>(comm)->rank == root;
  if (status == 0 && wants) std::memcpy(recv, result.data(), result.size());
  return status == 0 ? static_cast<Rank*>(comm)->group->meet() : status;
}

int now_or_grouped(std::function<int()> call) {
  if (group_depth == 0) return call();
  grouped.push_back(std::move(call));
  return 0;
}

}  // namespace

extern "C" {
void fake_ccl_set_background_error(int error) { background_error = error; }
int ncclGetVersion(int* version) { return *version = 22800, 0; }
int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<unsigned> next{1};
  std::memset(id, 0, sizeof *id);
  const unsigned number = next++;
  std::memcpy(id->bytes, &number, sizeof number);
  return 0;
}
int ncclCommInitRankConfig(void** comm, int size, UniqueId id, int rank, Config* config) {
  if (config->magic != 0xcafebeef || config->size != sizeof(Config) || rank < 0 || rank >= size) return kInvalid;
  return join(comm, std::string(id.bytes, sizeof id.bytes), size, rank);
}
int ncclCommDestroy(void* comm) { return delete static_cast<Rank*>(comm), 0; }
// The rank stays, as calls of other threads may still look at it.
int ncclCommAbort(void* comm) {
  Group& group = *static_cast<Rank*>(comm)->group;
  const std::lock_guard<std::mutex> lock(group.mutex);
  group.aborted = true;
  group.changed.notify_all();
  return 0;
}
int ncclCommGetAsyncError(void*, int* error) { return *error = background_error, 0; }
const char* ncclGetErrorString(int result) { return result == kInvalid ? "invalid argument" : "unhandled error"; }
const char* ncclGetLastError(void*) { return "from the fake"; }
int ncclCommSplit(void* comm, int color, int key, void** made, Config*) {
  static std::atomic<unsigned> next{1};
  unsigned number = next;
  struct Wish {
    int color, key;
    unsigned number;
  } mine{color, key, number};
  std::vector<Wish> wishes;
  const int status = collective(comm, &mine, nullptr, [&](Rank& rank) {
    for (const auto& post : rank.group->posted) wishes.push_back(*static_cast<const Wish*>(post.send));
  });
  if (status != 0 || color < 0) return status;
  ++next;
  int size = 0, place = 0;
  for (const Wish& wish : wishes) {
    size += wish.color == color;
    place += wish.color == color && wish.key < key;
  }
  return join(made, "split" + std::to_string(wishes[0].number) + "." + std::to_string(color), size, place);
}
int ncclAllReduce(const void* send, void* recv, std::size_t count, int type, int op, void* comm, void*) {
  return reduce_to(comm, send, recv, count, type, op, false, -1);
}
int ncclReduce(const void* send, void* recv, std::size_t count, int type, int op, int root, void* comm, void*) {
  return reduce_to(comm, send, recv, count, type, op, false, root);
}
int ncclReduceScatter(const void* send, void* recv, std::size_t count, int type, int op, void* comm, void*) {
  return reduce_to(comm, send, recv, count, type, op, true, -1);
}
int ncclAllGather(const void* send, void* recv, std::size_t count, int type, void* comm, void*) {
  return collective(comm, send, recv, [&](Rank& rank) {
    for (std::size_t i = 0; i < rank.group->posted.size(); ++i) {
      std::memcpy(static_cast<char*>(recv) + i * count * width(type), rank.group->posted[i].send, count * width(type));
    }
  });
}
int ncclBroadcast(const void* send, void* recv, std::size_t count, int type, int root, void* comm, void*) {
  return collective(comm, send, recv, [&](Rank& rank) {
    if (rank.rank != root) std::memcpy(recv, rank.group->posted[root].send, count * width(type));
  });
}
int ncclSend(const void* buffer, std::size_t count, int type, int peer, void* comm, void*) {
  return now_or_grouped([=] {
    const Rank& rank = *static_cast<Rank*>(comm);
    const std::lock_guard<std::mutex> lock(rank.group->mutex);
    rank.group->mail[{rank.rank, peer}].emplace_back(static_cast<const char*>(buffer), count * width(type));
    rank.group->changed.notify_all();
    return 0;
  });
}
int ncclRecv(void* buffer, std::size_t count, int type, int peer, void* comm, void*) {
  return now_or_grouped([=] {
    const Rank& rank = *static_cast<Rank*>(comm);
    std::unique_lock<std::mutex> lock(rank.group->mutex);
    auto& box = rank.group->mail[{peer, rank.rank}];
    rank.group->changed.wait(lock, [&] { return !box.empty() || rank.group->aborted; });
    if (box.empty()) return kUnhandled;
    if (box.front().size() != count * width(type)) return kInvalid;
    std::memcpy(buffer, box.front().data(), box.front().size());
    box.erase(box.begin());
    return 0;
  });
}
int ncclGroupStart() { return ++group_depth, 0; }
int ncclGroupEnd() {
  if (--group_depth > 0) return 0;
  std::vector<std::function<int()>> calls;
  calls.swap(grouped);
  int result = 0;
  for (const auto& call : calls) result = std::max(result, call());
  return result;
}
}
