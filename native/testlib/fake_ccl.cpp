// NCCL's and RCCL's symbols for ranks that are threads of one process, over host memory. It checks the bindings, errors
// and aborts of ccl.cpp, and the c10d backend, without a device. On a stream of fake_device operations are enqueued;
// without a stream they are complete when the call returns.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "ccl.h"
#include "fake_stream.h"

using monarch::ccl::Config;
using monarch::ccl::UniqueId;

namespace {

constexpr int kUnhandled = 1, kInvalid = 4;

std::atomic<int> waiting{0};  // calls that wait for other ranks

// What the ranks of a communicator share. A round ends when each has posted its buffers and read what it wants.
struct Group {
  explicit Group(int n) : size(n), posted(n) {}
  const int size;
  struct Post {
    const void* send;
    double factor;  // of PreMulSum
  };
  std::vector<Post> posted;
  std::map<std::pair<int, int>, std::vector<std::string>> mail;  // from, to
  int arrived = 0;
  unsigned round = 0;
  bool aborted = false;
  std::mutex mutex;
  std::condition_variable changed;

  // An abort keeps ranks from coming together, not from going on together: they read each other's buffers.
  int meet(bool first = false) {
    std::unique_lock<std::mutex> lock(mutex);
    if (first && aborted) return kUnhandled;
    const unsigned mine = round;
    if (++arrived == size) {
      arrived = 0;
      ++round;
      changed.notify_all();
    }
    ++waiting;
    changed.wait(lock, [&] { return round != mine || (first && aborted); });
    --waiting;
    if (round != mine) return 0;
    --arrived;
    return kUnhandled;
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
// Calls of an open group: receives wait behind the sends, as all are one kernel of the real libraries.
struct Call {
  void* stream;
  bool receives;
  std::function<int()> run;
};
thread_local std::vector<Call> grouped;

// NCCL's dtypes. Floating-point ones: bytes, bits of the exponent and of the fraction.
struct Format {
  std::size_t bytes;
  int exponent, fraction;
};
constexpr Format kFormats[] = {{1, 0, 0},  {1, 0, 0},  {4, 0, 0},   {4, 0, 0}, {8, 0, 0}, {8, 0, 0},
                               {2, 5, 10}, {4, 8, 23}, {8, 11, 52}, {2, 8, 7}, {1, 4, 3}, {1, 5, 2}};
constexpr int kTypes = sizeof kFormats / sizeof *kFormats;

// Buffers of nothing may be null.
void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

std::size_t width(int type) { return kFormats[type].bytes; }

// Finite numbers only. A double holds the small ones of the tests exactly, whatever their dtype.
double load(const char* at, int type) {
  const Format format = kFormats[type];
  std::uint64_t bits = 0;
  std::memcpy(&bits, at, format.bytes);
  if (format.exponent == 0) {
    const bool is_signed = type == 0 || type == 2 || type == 4;
    const int spare = 64 - 8 * static_cast<int>(format.bytes);
    return is_signed ? static_cast<double>(static_cast<std::int64_t>(bits << spare) >> spare)
                     : static_cast<double>(bits);
  }
  const int bias = (1 << (format.exponent - 1)) - 1;
  const auto power = static_cast<int>((bits >> format.fraction) & ((1u << format.exponent) - 1));
  const auto fraction = static_cast<double>(bits & ((std::uint64_t{1} << format.fraction) - 1));
  const double one = power == 0 ? 0.0 : std::ldexp(1.0, format.fraction);
  const double value = std::ldexp(one + fraction, std::max(power, 1) - bias - format.fraction);
  return ((bits >> (format.exponent + format.fraction)) & 1) != 0 ? -value : value;
}

void store(char* at, int type, double value) {
  const Format format = kFormats[type];
  std::uint64_t bits = 0;
  if (format.exponent == 0) {
    bits = value < 0 ? static_cast<std::uint64_t>(static_cast<std::int64_t>(value)) : static_cast<std::uint64_t>(value);
  } else if (value != 0) {
    const int bias = (1 << (format.exponent - 1)) - 1;
    const int power = std::max(std::ilogb(value), 1 - bias);
    const double units = std::nearbyint(std::ldexp(std::fabs(value), format.fraction - power));
    bits = (static_cast<std::uint64_t>(power + bias - 1) << format.fraction) + static_cast<std::uint64_t>(units);
    if (value < 0) bits |= std::uint64_t{1} << (format.exponent + format.fraction);
  }
  std::memcpy(at, &bits, format.bytes);
}

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
int collective(const Rank& rank, const void* send, const std::function<void()>& work, double factor = 1) {
  rank.group->posted[rank.rank] = {send, factor};
  if (const int result = rank.group->meet(true)) return result;
  work();
  return rank.group->meet();
}

// Reductions that were made: where the factor is, null once it has been read.
struct PreMulSum {
  const char* device_factor;
  double factor;
  int type;
};
std::mutex made_mutex;
std::map<int, PreMulSum> made;  // from kFirstMade on
constexpr int kFirstMade = 5;

double combine(int op, double a, double b) {
  switch (op) {
    case 1:
      return a * b;
    case 2:
      return std::max(a, b);
    case 3:
      return std::min(a, b);
    default:
      return a + b;
  }
}

// The reduction of elements [first, first + count) of all ranks.
std::string reduced(const Rank& rank, std::size_t first, std::size_t count, int type, int op) {
  const std::size_t bytes = width(type);
  std::string result(count * bytes, '\0');
  for (std::size_t i = 0; i < count; ++i) {
    double total = 0;
    for (int peer = 0; peer < rank.group->size; ++peer) {
      const Group::Post& post = rank.group->posted[peer];
      const double part = post.factor * load(static_cast<const char*>(post.send) + (first + i) * bytes, type);
      total = peer == 0 ? part : combine(op, total, part);
    }
    store(&result[i * bytes], type, op == 4 ? total / rank.group->size : total);
  }
  return result;
}

// Now, in the stream's order, or at the end of the group that is open on this thread.
int start(Call call) {
  if (group_depth > 0) return grouped.push_back(std::move(call)), 0;
  if (call.stream == nullptr) return call.run();
  static_cast<FakeStream*>(call.stream)->run([run = std::move(call.run)] { run(); });
  return 0;
}

// As others' inputs may be where this rank's output goes, it is written only when all have read.
int reduce_to(void* comm, const void* send, void* recv, std::size_t count, int type, int op, bool scatter, int root,
              void* stream) {
  const Rank rank = *static_cast<Rank*>(comm);
  if (type < 0 || type >= kTypes || op < 0 || root >= rank.group->size) return kInvalid;
  PreMulSum how{nullptr, 1.0, type};
  if (op >= kFirstMade) {
    const std::lock_guard<std::mutex> lock(made_mutex);
    if (made.count(op) == 0) return kInvalid;
    how = made[op];
  }
  return start({stream, false, [=] {
                  const double factor = how.device_factor == nullptr ? how.factor : load(how.device_factor, type);
                  std::string result;
                  const std::size_t first = scatter ? count * static_cast<std::size_t>(rank.rank) : 0;
                  const int status =
                      collective(rank, send, [&] { result = reduced(rank, first, count, type, op); }, factor);
                  if (status == 0 && (root < 0 || rank.rank == root)) copy(recv, result.data(), result.size());
                  return status == 0 ? rank.group->meet() : status;
                }});
}

}  // namespace

extern "C" {
void fake_ccl_set_background_error(int error) { background_error = error; }
int fake_ccl_waiting() { return waiting; }
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
int ncclCommAbort(void* comm) {
  const std::unique_ptr<Rank> rank(static_cast<Rank*>(comm));
  const std::lock_guard<std::mutex> lock(rank->group->mutex);
  rank->group->aborted = true;
  rank->group->changed.notify_all();
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
  const Rank rank = *static_cast<Rank*>(comm);
  const int status = collective(rank, &mine, [&] {
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
int ncclAllReduce(const void* send, void* recv, std::size_t count, int type, int op, void* comm, void* stream) {
  return reduce_to(comm, send, recv, count, type, op, false, -1, stream);
}
int ncclReduce(const void* send, void* recv, std::size_t count, int type, int op, int root, void* comm, void* stream) {
  return reduce_to(comm, send, recv, count, type, op, false, root, stream);
}
int ncclReduceScatter(const void* send, void* recv, std::size_t count, int type, int op, void* comm, void* stream) {
  return reduce_to(comm, send, recv, count, type, op, true, -1, stream);
}
int ncclAllGather(const void* send, void* recv, std::size_t count, int type, void* comm, void* stream) {
  const Rank rank = *static_cast<Rank*>(comm);
  const std::size_t bytes = count * width(type);
  return start({stream, false, [=] {
                  std::string all;
                  const int status = collective(rank, send, [&] {
                    for (const auto& post : rank.group->posted) all.append(static_cast<const char*>(post.send), bytes);
                  });
                  if (status == 0) copy(recv, all.data(), all.size());
                  return status == 0 ? rank.group->meet() : status;
                }});
}
int ncclBroadcast(const void* send, void* recv, std::size_t count, int type, int root, void* comm, void* stream) {
  const Rank rank = *static_cast<Rank*>(comm);
  if (root < 0 || root >= rank.group->size) return kInvalid;
  return start({stream, false, [=] {
                  return collective(rank, send, [&] {
                    const void* from = rank.group->posted[root].send;
                    if (recv != from) copy(recv, from, count * width(type));
                  });
                }});
}
int ncclSend(const void* buffer, std::size_t count, int type, int peer, void* comm, void* stream) {
  const Rank rank = *static_cast<Rank*>(comm);
  if (peer < 0 || peer >= rank.group->size) return kInvalid;
  return start({stream, false, [=] {
                  const std::lock_guard<std::mutex> lock(rank.group->mutex);
                  rank.group->mail[{rank.rank, peer}].emplace_back(static_cast<const char*>(buffer),
                                                                   count * width(type));
                  rank.group->changed.notify_all();
                  return 0;
                }});
}
int ncclRecv(void* buffer, std::size_t count, int type, int peer, void* comm, void* stream) {
  const Rank rank = *static_cast<Rank*>(comm);
  if (peer < 0 || peer >= rank.group->size) return kInvalid;
  return start({stream, true, [=] {
                  std::unique_lock<std::mutex> lock(rank.group->mutex);
                  auto& box = rank.group->mail[{peer, rank.rank}];
                  rank.group->changed.wait(lock, [&] { return !box.empty() || rank.group->aborted; });
                  if (box.empty()) return kUnhandled;
                  if (box.front().size() != count * width(type)) return kInvalid;
                  copy(buffer, box.front().data(), box.front().size());
                  box.erase(box.begin());
                  return 0;
                }});
}
int ncclRedOpCreatePreMulSum(int* op, void* factor, int type, int residence, void*) {
  const std::lock_guard<std::mutex> lock(made_mutex);
  static int next = kFirstMade;
  const auto* at = static_cast<const char*>(factor);
  made[*op = next++] = residence == 0 ? PreMulSum{at, 0, type} : PreMulSum{nullptr, load(at, type), type};
  return 0;
}
int ncclRedOpDestroy(int op, void*) {
  const std::lock_guard<std::mutex> lock(made_mutex);
  return made.erase(op) == 1 ? 0 : kInvalid;
}
int ncclGroupStart() { return ++group_depth, 0; }
int ncclGroupEnd() {
  if (--group_depth > 0) return 0;
  std::vector<Call> calls;
  calls.swap(grouped);
  std::stable_partition(calls.begin(), calls.end(), [](const Call& call) { return !call.receives; });
  int result = 0;
  for (Call& call : calls) result = std::max(result, start(std::move(call)));
  return result;
}
}
