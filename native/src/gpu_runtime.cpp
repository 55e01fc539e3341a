#include <unistd.h>

#include <utility>

#include "gpu_memory.h"

namespace monarch::gpu {

namespace {

#if defined(MONARCH_PLATFORM_ROCM)
constexpr const char* kWhat = "the HIP runtime";
constexpr const char* kAdvice = "install ROCm's runtime (libamdhip64), or run on a node that has it";
#elif defined(MONARCH_PLATFORM_CUDA)
constexpr const char* kWhat = "the CUDA driver";
constexpr const char* kAdvice = "install NVIDIA's driver (libcuda.so.1), or run on a node that has it";
#else
constexpr const char* kWhat = "a GPU runtime";
#endif

constexpr Result kNoDevice = 100;       // CUDA_ERROR_NO_DEVICE, hipErrorNoDevice
constexpr Result kInvalidDevice = 101;  // what hipInit says on a machine without a GPU

Library open(const std::vector<std::string>& candidates) {
#if defined(MONARCH_PLATFORM_NONE)
  (void)candidates;
  throw LibraryMissing(std::string("cannot load ") + kWhat +
                       ": this build is for no GPU; set MONARCH_SLURM_GPU_PLATFORM to rocm or cuda and build again");
#else
  return Library(kWhat, candidates, kAdvice);
#endif
}

void fill(const Library& library, Table& table) {
  library.require(table.init, MONARCH_GPU_SYMBOL("cuInit", "hipInit"));
  library.require(table.device_count, MONARCH_GPU_SYMBOL("cuDeviceGetCount", "hipGetDeviceCount"));
  library.find(table.error_string, MONARCH_GPU_SYMBOL("cuGetErrorString", "hipDrvGetErrorString"));
#if defined(MONARCH_PLATFORM_ROCM)
  library.find(table.error_text, "hipGetErrorString");
  library.require(table.set_device, "hipSetDevice");
  library.require(table.get_device, "hipGetDevice");
#else
  library.require(table.retain_primary, "cuDevicePrimaryCtxRetain");
  library.require(table.set_current, "cuCtxSetCurrent");
  library.require(table.get_current, "cuCtxGetCurrent");
#endif
  library.require(table.synchronize, MONARCH_GPU_SYMBOL("cuCtxSynchronize", "hipDeviceSynchronize"));
  library.require(table.alloc, MONARCH_GPU_SYMBOL("cuMemAlloc_v2", "hipMalloc"));
  library.require(table.free, MONARCH_GPU_SYMBOL("cuMemFree_v2", "hipFree"));
  library.require(table.copy_to_host, MONARCH_GPU_SYMBOL("cuMemcpyDtoH_v2", "hipMemcpyDtoH"));
  library.require(table.copy_to_device, MONARCH_GPU_SYMBOL("cuMemcpyHtoD_v2", "hipMemcpyHtoD"));
  library.require(table.granularity,
                  MONARCH_GPU_SYMBOL("cuMemGetAllocationGranularity", "hipMemGetAllocationGranularity"));
  library.require(table.create, MONARCH_GPU_SYMBOL("cuMemCreate", "hipMemCreate"));
  library.require(table.release, MONARCH_GPU_SYMBOL("cuMemRelease", "hipMemRelease"));
  library.require(table.reserve, MONARCH_GPU_SYMBOL("cuMemAddressReserve", "hipMemAddressReserve"));
  library.require(table.unreserve, MONARCH_GPU_SYMBOL("cuMemAddressFree", "hipMemAddressFree"));
  library.require(table.map, MONARCH_GPU_SYMBOL("cuMemMap", "hipMemMap"));
  library.require(table.unmap, MONARCH_GPU_SYMBOL("cuMemUnmap", "hipMemUnmap"));
  library.require(table.set_access, MONARCH_GPU_SYMBOL("cuMemSetAccess", "hipMemSetAccess"));
  library.require(table.export_handle,
                  MONARCH_GPU_SYMBOL("cuMemExportToShareableHandle", "hipMemExportToShareableHandle"));
  library.require(table.import_handle,
                  MONARCH_GPU_SYMBOL("cuMemImportFromShareableHandle", "hipMemImportFromShareableHandle"));
  library.require(table.retain_handle,
                  MONARCH_GPU_SYMBOL("cuMemRetainAllocationHandle", "hipMemRetainAllocationHandle"));
  library.require(table.address_range, MONARCH_GPU_SYMBOL("cuMemGetAddressRange_v2", "hipMemGetAddressRange"));
  library.find(table.range_handle,
               MONARCH_GPU_SYMBOL("cuMemGetHandleForAddressRange", "hipMemGetHandleForAddressRange"));
  library.require(table.ipc_get, MONARCH_GPU_SYMBOL("cuIpcGetMemHandle", "hipIpcGetMemHandle"));
  library.require(table.ipc_open, MONARCH_GPU_SYMBOL("cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle"));
  library.require(table.ipc_close, MONARCH_GPU_SYMBOL("cuIpcCloseMemHandle", "hipIpcCloseMemHandle"));
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Runtime::Runtime(const std::vector<std::string>& candidates, std::vector<std::string> hsa_candidates)
    : library_(open(candidates)), hsa_candidates_(std::move(hsa_candidates)) {
  fill(library_, table_);
  const Result started = table_.init(0);
  if (started == kNoDevice || started == kInvalidDevice) {
    throw Error(
        std::string(MONARCH_PLATFORM_NAME) + ": Init failed: " + describe(started) +
        "; there is no GPU here that this process may use. Does the node have one, and did the job ask for it?");
  }
  check(started, "Init");
}

std::string Runtime::describe(Result result) const {
  const char* text = nullptr;
  if (table_.error_string != nullptr) table_.error_string(result, &text);
#if defined(MONARCH_PLATFORM_ROCM)
  if (text == nullptr && table_.error_text != nullptr) text = table_.error_text(result);
#endif
  return "error " + std::to_string(result) + (text != nullptr ? std::string(" (") + text + ")" : "");
}

void Runtime::check(Result result, const char* call) const {
  if (result == 0) return;
  throw Error(std::string(MONARCH_PLATFORM_NAME) + ": " + call + " failed: " + describe(result));
}

int Runtime::device_count() const {
  int count = 0;
  check(table_.device_count(&count), "GetDeviceCount");
  return count;
}

OnDevice::OnDevice(const Runtime& runtime, int device) : table_(runtime.table()) {
#if defined(MONARCH_PLATFORM_ROCM)
  runtime.check(table_.get_device(&before_), "GetDevice");
  runtime.check(table_.set_device(device), "SetDevice");
#else
  // The primary context is the one that torch uses; it is retained for the life of the process on purpose.
  void* context = nullptr;
  runtime.check(table_.retain_primary(&context, device), "DevicePrimaryCtxRetain");
  runtime.check(table_.get_current(&before_), "CtxGetCurrent");
  runtime.check(table_.set_current(context), "CtxSetCurrent");
#endif
}

OnDevice::~OnDevice() {
#if defined(MONARCH_PLATFORM_ROCM)
  table_.set_device(before_);
#else
  table_.set_current(before_);
#endif
}

std::pair<Address, std::size_t> Runtime::range_of(int device, Address address) const {
  const OnDevice here(*this, device);
  Address base = 0;
  std::size_t bytes = 0;
  check(table_.address_range(&base, &bytes, address), "MemGetAddressRange");
  return {base, bytes};
}

Dmabuf Runtime::export_dmabuf(int device, Address address, std::size_t bytes) const {
  if (bytes == 0) throw Error("export_dmabuf: a range of 0 bytes has no dmabuf");
  const OnDevice here(*this, device);
  // The driver wants whole pages of the host; the caller gets what lies before its buffer as an offset.
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const Address start = address / page * page;
  const std::uint64_t length = (address + bytes - start + page - 1) / page * page;
  if (table_.range_handle != nullptr) {
    int fd = -1;
    check(table_.range_handle(&fd, start, length, kDmabufFd, 0), "MemGetHandleForAddressRange(dmabuf)");
    return {Fd(fd), address - start, length};
  }
#if defined(MONARCH_PLATFORM_ROCM)
  const Library hsa("the HSA runtime", hsa_candidates_, "install ROCm's libhsa-runtime64");
  int (*portable_export)(const void*, std::size_t, int*, std::uint64_t*) = nullptr;
  hsa.require(portable_export, "hsa_amd_portable_export_dmabuf");
  int fd = -1;
  std::uint64_t offset = 0;
  const int status = portable_export(reinterpret_cast<const void*>(address), bytes, &fd, &offset);
  if (status != 0) throw Error("hsa_amd_portable_export_dmabuf failed: HSA status " + std::to_string(status));
  return {Fd(fd), offset, offset + bytes};
#else
  throw Error("this driver cannot export a dmabuf (no MemGetHandleForAddressRange); install a newer one");
#endif
}

}  // namespace monarch::gpu
