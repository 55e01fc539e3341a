// torch's PrivateUse1 device on host memory: several devices, whose streams are threads, so that work which lacks an
// event between two streams comes too early here as it does on a GPU. Memory is overwritten when it is freed, once the
// stream of its making and those it was recorded on have come so far. What is not defined here runs on the CPU, after
// the stream.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_and_resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "fake_stream.h"

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 8;

class Stream : public FakeStream {
 public:
  Stream() {
    std::thread([this] { work(); }).detach();  // for the life of the process, as all streams are
  }
  void run(std::function<void()> job) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_all();
  }
  void synchronize() {
    std::promise<void> reached;
    run([&] { reached.set_value(); });
    reached.get_future().wait();
  }
  // What is enqueued from now on waits until `release`.
  void hold() {
    const auto number = ++held_;
    run([this, number] {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return released_ >= number; });
    });
  }
  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    released_ = held_;
    changed_.notify_all();
  }

 private:
  [[noreturn]] void work() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !jobs_.empty(); });
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::atomic<unsigned> held_{0};
  unsigned released_ = 0;
};

// All streams; the first kDevices are the devices' own. Left behind at the end of the process, as their threads are.
std::vector<Stream*>& streams() {
  static auto& made = *new std::vector<Stream*>;
  static std::once_flag once;
  std::call_once(once, [] {
    for (int i = 0; i < kDevices; ++i) made.push_back(new Stream);
  });
  return made;
}

std::mutex streams_mutex;
thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};  // 0: the device's own

Stream& find(c10::DeviceIndex device, c10::StreamId id) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  return *streams().at(id == 0 ? device : id);
}
Stream& find(const c10::Stream& stream) { return find(stream.device_index(), stream.id()); }
Stream& current(c10::DeviceIndex device) { return find(device, current_streams.at(device)); }

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned recorded = 0;
  unsigned reached = 0;
};
using SharedEvent = std::shared_ptr<Event>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    const auto index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams.at(device.has_index() ? device.index() : current_device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    streams().push_back(new Stream);
    return stream(device, static_cast<c10::StreamId>(streams().size()) - 1);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = getStream(next.device());
    current_streams.at(next.device_index()) = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return static_cast<FakeStream*>(&find(stream));
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto reached = std::make_shared<std::promise<void>>();
    find(stream).run([reached] { reached->set_value(); });
    return reached->get_future().wait_for(std::chrono::milliseconds(1)) == std::future_status::ready;
  }
  void synchronizeStream(const c10::Stream& stream) const override { find(stream).synchronize(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new SharedEvent(std::make_shared<Event>());
    const SharedEvent shared = *static_cast<SharedEvent*>(*event);
    const std::lock_guard<std::mutex> lock(shared->mutex);
    find(stream).run([shared, version = ++shared->recorded] {
      const std::lock_guard<std::mutex> inner(shared->mutex);
      shared->reached = std::max(shared->reached, version);
      shared->changed.notify_all();
    });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const SharedEvent shared = *static_cast<SharedEvent*>(event);
    const std::lock_guard<std::mutex> lock(shared->mutex);
    find(stream).run([shared, version = shared->recorded] {
      std::unique_lock<std::mutex> inner(shared->mutex);
      shared->changed.wait(inner, [&] { return shared->reached >= version; });
    });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    Event& shared = **static_cast<SharedEvent*>(event);
    const std::lock_guard<std::mutex> lock(shared.mutex);
    return shared.reached == shared.recorded;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const SharedEvent shared = *static_cast<SharedEvent*>(event);
    std::unique_lock<std::mutex> lock(shared->mutex);
    shared->changed.wait(lock, [&] { return shared->reached == shared->recorded; });
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<SharedEvent*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Device memory. It goes when every stream that has to do with it has come to the point where it was freed.
struct Block {
  explicit Block(std::size_t bytes) : size(bytes), memory(new char[bytes]) { std::memset(memory.get(), 0x5a, size); }
  ~Block() { std::memset(memory.get(), 0xa5, size); }
  const std::size_t size;
  const std::unique_ptr<char[]> memory;
};

struct Owned {
  std::shared_ptr<Block> block;
  std::mutex mutex;
  std::set<Stream*> users;
};

void give_back(void* context) {
  const std::unique_ptr<Owned> owned(static_cast<Owned*>(context));
  for (Stream* user : owned->users) user->run([block = owned->block] {});
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    auto owned = std::make_unique<Owned>();
    owned->block = std::make_shared<Block>(bytes);
    owned->users.insert(&current(current_device));
    void* const at = bytes == 0 ? nullptr : owned->block->memory.get();
    return {at, owned.release(), give_back, c10::Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  if (data.get_deleter() != give_back) return;
  auto* owned = static_cast<Owned*>(data.get_context());
  const std::lock_guard<std::mutex> lock(owned->mutex);
  owned->users.insert(&find(stream));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

using Sizes = c10::IntArrayRef;
using OptionalDevice = std::optional<c10::Device>;

c10::Device device_or_current(const OptionalDevice& device) {
  return device && device->has_index() ? *device : c10::Device(kType, current_device);
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(Sizes size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, OptionalDevice device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard here(device_or_current(device));
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Sizes size, Sizes stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         OptionalDevice device, std::optional<bool>) {
  const c10::DeviceGuard here(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool) {
  const bool both = !to.is_cpu() && !from.is_cpu();
  Stream& stream = current(to.is_cpu() ? from.device().index() : to.device().index());
  const at::Tensor target = on_host(to), source = on_host(from.is_cpu() ? from.expand_as(to) : from).expand_as(target);
  stream.run([target, source] { target.copy_(source); });
  if (!both) stream.synchronize();  // memory of the host is not in the order of the stream
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::Tensor target = to;
  return copy_(target, from, false);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) { return copy_from(from, to, false); }

at::Tensor& fill_(at::Tensor& tensor, const c10::Scalar& value) {
  current(tensor.device().index()).run([target = on_host(tensor), value] { target.fill_(value); });
  return tensor;
}

at::Tensor& zero_(at::Tensor& tensor) { return fill_(tensor, 0); }

at::Tensor as_strided(const at::Tensor& tensor, Sizes size, Sizes stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

at::Tensor view(const at::Tensor& tensor, Sizes size) { return at::native::view(tensor, size); }

at::Tensor reshape_alias(const at::Tensor& tensor, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

c10::Scalar local_scalar(const at::Tensor& tensor) { return tensor.to(c10::kCPU).item(); }

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("fill_.Scalar", fill_);
  m.impl("zero_", zero_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_local_scalar_dense", local_scalar);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

}  // namespace

extern "C" {
int fake_device_current() { return current_device; }
void fake_device_set(int device) { current_device = static_cast<c10::DeviceIndex>(device); }
void* fake_device_stream(int device, std::int64_t id) {
  return static_cast<FakeStream*>(&find(static_cast<c10::DeviceIndex>(device), id));
}
void fake_device_hold(void* stream) { static_cast<Stream*>(static_cast<FakeStream*>(stream))->hold(); }
void fake_device_release(void* stream) { static_cast<Stream*>(static_cast<FakeStream*>(stream))->release(); }
}
