// A GPU driver made of host memory: memfd for mapped allocations, so that exports are real descriptors. It has the
// C symbols of CUDA or HIP (by platform) that gpu_runtime.cpp wants, and refuses what the real ones refuse.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "gpu_api.h"

using namespace monarch::gpu;

namespace {

constexpr std::size_t kGranularity = 2u << 20;
constexpr Result kInvalid = 1, kNoContext = 201;

struct State {
  std::mutex mutex;
  std::map<Address, std::size_t> ranges;          // plain allocations and mappings
  std::map<Address, std::pair<int, int>> mapped;  // address: fd, count of unmaps owed
};

State& state() {
  static State instance;
  return instance;
}

#if defined(MONARCH_PLATFORM_ROCM)
thread_local int current = 0;  // HIP has device 0 current on every new thread
bool is_ready() { return true; }
#else
thread_local void* current = nullptr;  // CUDA's driver has none
bool is_ready() { return current != nullptr; }
#endif

}  // namespace

// What a call of the driver's says first of all.
#define NEEDS_CONTEXT \
  if (!is_ready()) return kNoContext

#define FAKE(cuda, hip) extern "C" Result MONARCH_GPU_SYMBOL(cuda, hip)

FAKE(cuInit, hipInit)(unsigned) { return std::getenv("FAKE_GPU_NO_DEVICE") != nullptr ? 100 : 0; }
FAKE(cuDeviceGetCount, hipGetDeviceCount)(int* count) {
  *count = 2;
  return 0;
}
FAKE(cuGetErrorString, hipDrvGetErrorString)(Result result, const char** text) {
  *text = result == 100 ? "no device" : "invalid value";
  return 0;
}
#if defined(MONARCH_PLATFORM_ROCM)
extern "C" Result hipSetDevice(int device) {
  if (device != 0 && device != 1) return 101;
  current = device;
  return 0;
}
extern "C" Result hipGetDevice(int* device) { return *device = current, 0; }
#else
extern "C" Result cuDevicePrimaryCtxRetain(void** context, int device) {
  static int devices[2];
  if (device != 0 && device != 1) return 101;
  *context = &devices[device];
  return 0;
}
extern "C" Result cuCtxSetCurrent(void* context) { return current = context, 0; }
extern "C" Result cuCtxGetCurrent(void** context) { return *context = current, 0; }
#endif
FAKE(cuCtxSynchronize, hipDeviceSynchronize)() { return is_ready() ? 0 : kNoContext; }
FAKE(cuMemAlloc_v2, hipMalloc)(Address* address, std::size_t bytes) {
  NEEDS_CONTEXT;
  void* memory = std::malloc(bytes);
  *address = reinterpret_cast<Address>(memory);
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().ranges[*address] = bytes;
  return 0;
}
FAKE(cuMemFree_v2, hipFree)(Address address) {
  NEEDS_CONTEXT;
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (state().ranges.erase(address) == 0) return kInvalid;
  std::free(reinterpret_cast<void*>(address));
  return 0;
}
FAKE(cuMemcpyDtoH_v2, hipMemcpyDtoH)(void* host, Address device, std::size_t bytes) {
  NEEDS_CONTEXT;
  std::memcpy(host, reinterpret_cast<void*>(device), bytes);
  return 0;
}
FAKE(cuMemcpyHtoD_v2, hipMemcpyHtoD)(Address device, const void* host, std::size_t bytes) {
  NEEDS_CONTEXT;
  std::memcpy(reinterpret_cast<void*>(device), host, bytes);
  return 0;
}
FAKE(cuMemGetAllocationGranularity, hipMemGetAllocationGranularity)(std::size_t* bytes, const AllocationProp*, int) {
  *bytes = kGranularity;
  return 0;
}
FAKE(cuMemCreate, hipMemCreate)(Handle* handle, std::size_t bytes, const AllocationProp* prop, unsigned long long) {
  if (bytes % kGranularity != 0 || prop->type != kPinned || prop->handle_types != kPosixFd) return kInvalid;
  const int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return 2;
  *handle = static_cast<Handle>(fd);
  return 0;
}
FAKE(cuMemRelease, hipMemRelease)(Handle handle) { return close(static_cast<int>(handle)) == 0 ? 0 : kInvalid; }
FAKE(cuMemAddressReserve, hipMemAddressReserve)(Address* address, std::size_t bytes, std::size_t, Address,
                                                unsigned long long) {
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *address = reinterpret_cast<Address>(range);
  return range == MAP_FAILED ? 2 : 0;
}
FAKE(cuMemAddressFree, hipMemAddressFree)(Address address, std::size_t bytes) {
  return munmap(reinterpret_cast<void*>(address), bytes) == 0 ? 0 : kInvalid;
}
FAKE(cuMemMap, hipMemMap)(Address address, std::size_t bytes, std::size_t offset, Handle handle, unsigned long long) {
  void* range = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                     static_cast<int>(handle), static_cast<off_t>(offset));
  if (range == MAP_FAILED) return kInvalid;
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().ranges[address] = bytes;
  state().mapped[address] = {static_cast<int>(handle), 1};
  return 0;
}
FAKE(cuMemUnmap, hipMemUnmap)(Address address, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (state().mapped.erase(address) == 0) return kInvalid;
  state().ranges.erase(address);
  void* range =
      mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return range == MAP_FAILED ? kInvalid : 0;
}
FAKE(cuMemSetAccess, hipMemSetAccess)(Address address, std::size_t bytes, const AccessDesc*, std::size_t) {
  return mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : kInvalid;
}
FAKE(cuMemExportToShareableHandle, hipMemExportToShareableHandle)(void* fd, Handle handle, int, unsigned long long) {
  *static_cast<int*>(fd) = dup(static_cast<int>(handle));
  return 0;
}
FAKE(cuMemImportFromShareableHandle, hipMemImportFromShareableHandle)(Handle* handle, void* fd, int) {
  const int copy = dup(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)));
  *handle = static_cast<Handle>(copy);
  return copy < 0 ? kInvalid : 0;
}
FAKE(cuMemRetainAllocationHandle, hipMemRetainAllocationHandle)(Handle* handle, Address address) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().mapped.find(address);
  if (found == state().mapped.end()) return kInvalid;
  *handle = static_cast<Handle>(dup(found->second.first));
  return 0;
}
FAKE(cuMemGetAddressRange_v2, hipMemGetAddressRange)(Address* base, std::size_t* bytes, Address address) {
  NEEDS_CONTEXT;
  const std::lock_guard<std::mutex> lock(state().mutex);
  for (const auto& [start, length] : state().ranges) {
    if (address < start || address >= start + length) continue;
    *base = start;
    *bytes = length;
    return 0;
  }
  return kInvalid;
}
FAKE(cuMemGetHandleForAddressRange, hipMemGetHandleForAddressRange)(void* fd, Address address, std::size_t bytes,
                                                                    int type, unsigned long long) {
  NEEDS_CONTEXT;
  if (address % 4096 != 0 || bytes % 4096 != 0 || type != kDmabufFd) return kInvalid;
  *static_cast<int*>(fd) = memfd_create("fake-dmabuf", MFD_CLOEXEC);
  return 0;
}
FAKE(cuIpcGetMemHandle, hipIpcGetMemHandle)(IpcHandle* handle, Address address) {
  NEEDS_CONTEXT;
  std::memcpy(handle->bytes, &address, sizeof address);
  return 0;
}
FAKE(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle)(Address* address, IpcHandle handle, unsigned) {
  NEEDS_CONTEXT;
  std::memcpy(address, handle.bytes, sizeof *address);
  return 0;
}
FAKE(cuIpcCloseMemHandle, hipIpcCloseMemHandle)(Address) { return is_ready() ? 0 : kNoContext; }
