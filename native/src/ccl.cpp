#include "ccl.h"

#include <chrono>
#include <thread>
#include <utility>

#include "platform.h"

namespace monarch::ccl {

namespace {

#if defined(MONARCH_PLATFORM_ROCM)
constexpr const char* kWhat = "RCCL";
constexpr const char* kAdvice = "install ROCm's librccl, or a torch for ROCm, which carries it";
#else
constexpr const char* kWhat = "NCCL";
constexpr const char* kAdvice = "install it (pip install nvidia-nccl-cu13), or a torch for CUDA, which brings it";
#endif

}  // namespace

Ccl::Ccl(const std::vector<std::string>& candidates) : library_(kWhat, candidates, kAdvice) {
  library_.require(table_.get_version, "ncclGetVersion");
  library_.require(table_.get_unique_id, "ncclGetUniqueId");
  library_.require(table_.init_rank, "ncclCommInitRankConfig");
  library_.require(table_.destroy, "ncclCommDestroy");
  library_.require(table_.abort, "ncclCommAbort");
  library_.require(table_.async_error, "ncclCommGetAsyncError");
  library_.find(table_.split, "ncclCommSplit");
  library_.find(table_.error_string, "ncclGetErrorString");
  library_.find(table_.last_error, "ncclGetLastError");
  library_.require(table_.all_reduce, "ncclAllReduce");
  library_.require(table_.all_gather, "ncclAllGather");
  library_.require(table_.reduce_scatter, "ncclReduceScatter");
  library_.require(table_.broadcast, "ncclBroadcast");
  library_.require(table_.reduce, "ncclReduce");
  library_.require(table_.send, "ncclSend");
  library_.require(table_.recv, "ncclRecv");
  library_.require(table_.group_start, "ncclGroupStart");
  library_.require(table_.group_end, "ncclGroupEnd");
  library_.find(table_.pre_mul_sum, "ncclRedOpCreatePreMulSum");
  library_.find(table_.drop_op, "ncclRedOpDestroy");
}

int Ccl::version() const {
  int version = 0;
  check(table_.get_version(&version), "GetVersion");
  return version;
}

UniqueId Ccl::unique_id() const {
  UniqueId id{};
  check(table_.get_unique_id(&id), "GetUniqueId");
  return id;
}

void Ccl::check(int result, const char* call, void* comm) const {
  if (result == 0) return;
  std::string text = std::string(kWhat) + ": " + call + " failed: error " + std::to_string(result);
  if (table_.error_string != nullptr) text += std::string(" (") + table_.error_string(result) + ")";
  const char* last = table_.last_error != nullptr ? table_.last_error(comm) : nullptr;
  if (last != nullptr && last[0] != '\0') text += std::string(": ") + last;
  throw Error(text);
}

std::shared_ptr<Comm> Comm::init(std::shared_ptr<Ccl> ccl, const UniqueId& id, int size, int rank) {
  Config config;
  void* comm = nullptr;
  ccl->check(ccl->table().init_rank(&comm, size, id, rank, &config), "CommInitRankConfig");
  return std::make_shared<Comm>(std::move(ccl), comm, size, rank);
}

Comm::Comm(std::shared_ptr<Ccl> ccl, void* comm, int size, int rank)
    : ccl_(std::move(ccl)), comm_(comm), size_(size), rank_(rank) {}

Comm::~Comm() {
  // Not destroyed by its owner: operations may still run, so only an abort returns for certain.
  if (void* comm = comm_.exchange(nullptr)) ccl_->table().abort(comm);
}

void* Comm::live() const {
  void* comm = comm_.load();
  if (comm != nullptr) return comm;
  const std::lock_guard<std::mutex> lock(mutex_);
  throw Aborted(reason_);
}

std::string Comm::failure() const {
  if (!failed_) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

class Comm::Use {
 public:
  explicit Use(Comm& comm) : in_use_(comm.in_use_) {
    ++in_use_;  // before it is looked at: `end` takes it away before it looks at this
    try {
      handle_ = comm.live();
    } catch (const Error&) {
      --in_use_;
      throw;
    }
  }
  ~Use() { --in_use_; }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  void* handle() const { return handle_; }

 private:
  std::atomic<int>& in_use_;
  void* handle_ = nullptr;
};

#define MONARCH_CCL_CALL(name, call) \
  const Use use(*this);              \
  void* comm = use.handle();         \
  const int result = call;           \
  if (result != 0) {                 \
    live();                          \
    ccl_->check(result, name, comm); \
  }

void Comm::all_reduce(const void* send, void* recv, std::size_t count, int type, int op, void* stream) {
  MONARCH_CCL_CALL("AllReduce", ccl_->table().all_reduce(send, recv, count, type, op, comm, stream))
}

void Comm::all_gather(const void* send, void* recv, std::size_t count, int type, void* stream) {
  MONARCH_CCL_CALL("AllGather", ccl_->table().all_gather(send, recv, count, type, comm, stream))
}

void Comm::reduce_scatter(const void* send, void* recv, std::size_t count, int type, int op, void* stream) {
  MONARCH_CCL_CALL("ReduceScatter", ccl_->table().reduce_scatter(send, recv, count, type, op, comm, stream))
}

void Comm::broadcast(const void* send, void* recv, std::size_t count, int type, int root, void* stream) {
  MONARCH_CCL_CALL("Broadcast", ccl_->table().broadcast(send, recv, count, type, root, comm, stream))
}

void Comm::reduce(const void* send, void* recv, std::size_t count, int type, int op, int root, void* stream) {
  MONARCH_CCL_CALL("Reduce", ccl_->table().reduce(send, recv, count, type, op, root, comm, stream))
}

void Comm::send(const void* buffer, std::size_t count, int type, int peer, void* stream) {
  MONARCH_CCL_CALL("Send", ccl_->table().send(buffer, count, type, peer, comm, stream))
}

void Comm::recv(void* buffer, std::size_t count, int type, int peer, void* stream) {
  MONARCH_CCL_CALL("Recv", ccl_->table().recv(buffer, count, type, peer, comm, stream))
}

// From its start to its end a group is in use, as the library keeps the communicators of its calls.
void Comm::group_start() {
  const Use use(*this);
  ccl_->check(ccl_->table().group_start(), "GroupStart");
  ++in_use_;
}

void Comm::group_end() {
  // Ended also after an abort: the library counts starts and ends per thread, whatever happened between.
  const int result = ccl_->table().group_end();
  --in_use_;
  const Use use(*this);
  ccl_->check(result, "GroupEnd", use.handle());
}

int Comm::pre_mul_sum(void* factor, bool on_device, int type) {
  if (ccl_->table().pre_mul_sum == nullptr || ccl_->table().drop_op == nullptr) {
    throw LibraryMissing(std::string(kWhat) + " (" + ccl_->path() + ") cannot multiply before a sum: it is too old");
  }
  int op = 0;
  const int residence = on_device ? 0 : 1;
  MONARCH_CCL_CALL("RedOpCreatePreMulSum", ccl_->table().pre_mul_sum(&op, factor, type, residence, comm))
  return op;
}

void Comm::drop_op(int op) noexcept {
  ++in_use_;
  void* comm = comm_.load();
  if (comm != nullptr) ccl_->table().drop_op(op, comm);  // it has gone with an aborted communicator
  --in_use_;
}

#undef MONARCH_CCL_CALL

std::shared_ptr<Comm> Comm::split(int color, int key, int new_size, int new_rank) {
  const Use use(*this);
  if (ccl_->table().split == nullptr) {
    throw LibraryMissing(std::string(kWhat) + " (" + ccl_->path() + ") cannot split: it is older than 2.18");
  }
  void* made = nullptr;
  Config config;
  const int result = ccl_->table().split(use.handle(), color < 0 ? -1 : color, key, &made, &config);
  ccl_->check(result, "CommSplit", live());
  return color < 0 ? nullptr : std::make_shared<Comm>(ccl_, made, new_size, new_rank);
}

std::string Comm::async_error() {
  const std::lock_guard<std::mutex> lock(mutex_);  // so that the communicator is not ended meanwhile
  void* comm = comm_.load();
  if (comm == nullptr) return reason_;
  int error = 0;
  ccl_->table().async_error(comm, &error);
  if (error == 0) return {};
  std::string text = "error " + std::to_string(error);
  if (ccl_->table().error_string != nullptr) text += std::string(" (") + ccl_->table().error_string(error) + ")";
  return text;
}

void Comm::abort(const std::string& reason) {
  if (void* comm = end(reason.empty() ? "the communicator was aborted" : reason, true)) ccl_->table().abort(comm);
}

void Comm::destroy() {
  void* comm = end("the communicator was closed", false);
  if (comm == nullptr) return;
  // Only an abort may free what a call still uses.
  if (in_use_ > 0) {
    ccl_->table().abort(comm);
  } else {
    ccl_->check(ccl_->table().destroy(comm), "CommDestroy");
  }
}

void* Comm::end(const std::string& reason, bool failed) {
  void* comm = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    comm = comm_.load();
    if (comm == nullptr) return nullptr;
    reason_ = reason;
    failed_ = failed;
    comm_ = nullptr;
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  while (in_use_ > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return comm;
}

}  // namespace monarch::ccl
