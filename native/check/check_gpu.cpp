// Compiled in tests against a vendor's real header; never part of a module. Our declarations must have the vendor's
// number of arguments, each of the same size and passed the same way, and structs and constants must agree.
#include "capture_api.h"
#include "gpu_api.h"

#if defined(MONARCH_PLATFORM_ROCM)
#include <hip/hip_runtime_api.h>
#include <hsa/hsa.h>
#include <hsa/hsa_ext_amd.h>
#define VENDOR(cuda, hip) hip
#else
#include <cuda.h>
#define VENDOR(cuda, hip) cuda
#endif

#include "same_abi.h"

namespace {

using namespace monarch::gpu;
using monarch::check::SameAbi;

#define SAME(entry, cuda, hip)                                                        \
  static_assert(SameAbi<decltype(Table::entry), decltype(&VENDOR(cuda, hip))>::value, \
                #entry " differs from the vendor's")

SAME(init, cuInit, hipInit);
SAME(device_count, cuDeviceGetCount, hipGetDeviceCount);
SAME(error_string, cuGetErrorString, hipDrvGetErrorString);
#if defined(MONARCH_PLATFORM_ROCM)
static_assert(SameAbi<decltype(Table::error_text), decltype(&hipGetErrorString)>::value, "error_text");
static_assert(SameAbi<decltype(Table::set_device), decltype(&hipSetDevice)>::value, "set_device");
static_assert(SameAbi<decltype(Table::get_device), decltype(&hipGetDevice)>::value, "get_device");
#else
static_assert(SameAbi<decltype(Table::retain_primary), decltype(&cuDevicePrimaryCtxRetain)>::value, "retain_primary");
static_assert(SameAbi<decltype(Table::set_current), decltype(&cuCtxSetCurrent)>::value, "set_current");
static_assert(SameAbi<decltype(Table::get_current), decltype(&cuCtxGetCurrent)>::value, "get_current");
#endif
SAME(synchronize, cuCtxSynchronize, hipDeviceSynchronize);
#if defined(MONARCH_PLATFORM_ROCM)  // hipMalloc is overloaded by a template in C++
static_assert(SameAbi<decltype(Table::alloc), hipError_t (*)(void**, std::size_t)>::value, "alloc");
constexpr hipError_t (*kMalloc)(void**, std::size_t) = &hipMalloc;
[[maybe_unused]] constexpr auto kTaken = kMalloc;
#else
SAME(alloc, cuMemAlloc, cuMemAlloc);
#endif
SAME(free, cuMemFree, hipFree);
SAME(copy_to_host, cuMemcpyDtoH, hipMemcpyDtoH);
SAME(copy_to_device, cuMemcpyHtoD, hipMemcpyHtoD);
SAME(granularity, cuMemGetAllocationGranularity, hipMemGetAllocationGranularity);
SAME(create, cuMemCreate, hipMemCreate);
SAME(release, cuMemRelease, hipMemRelease);
SAME(reserve, cuMemAddressReserve, hipMemAddressReserve);
SAME(unreserve, cuMemAddressFree, hipMemAddressFree);
SAME(map, cuMemMap, hipMemMap);
SAME(unmap, cuMemUnmap, hipMemUnmap);
SAME(set_access, cuMemSetAccess, hipMemSetAccess);
SAME(export_handle, cuMemExportToShareableHandle, hipMemExportToShareableHandle);
SAME(import_handle, cuMemImportFromShareableHandle, hipMemImportFromShareableHandle);
SAME(retain_handle, cuMemRetainAllocationHandle, hipMemRetainAllocationHandle);
SAME(address_range, cuMemGetAddressRange, hipMemGetAddressRange);
SAME(range_handle, cuMemGetHandleForAddressRange, hipMemGetHandleForAddressRange);
SAME(ipc_get, cuIpcGetMemHandle, hipIpcGetMemHandle);
SAME(ipc_open, cuIpcOpenMemHandle, hipIpcOpenMemHandle);
SAME(ipc_close, cuIpcCloseMemHandle, hipIpcCloseMemHandle);

using monarch::capture::kRelaxed;
static_assert(SameAbi<decltype(monarch::capture::Table::is_capturing),
                      decltype(&VENDOR(cuStreamIsCapturing, hipStreamIsCapturing))>::value);
static_assert(SameAbi<decltype(monarch::capture::Table::exchange_mode),
                      decltype(&VENDOR(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode))>::value);
static_assert(kRelaxed == static_cast<int>(VENDOR(CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed)));
static_assert(VENDOR(CU_STREAM_CAPTURE_STATUS_NONE, hipStreamCaptureStatusNone) == 0);

using Prop = VENDOR(CUmemAllocationProp, hipMemAllocationProp);
static_assert(sizeof(AllocationProp) == sizeof(Prop));
static_assert(offsetof(AllocationProp, handle_types) == offsetof(Prop, requestedHandleTypes));
static_assert(offsetof(AllocationProp, location) == offsetof(Prop, location));
static_assert(offsetof(AllocationProp, win32) == offsetof(Prop, win32HandleMetaData));
static_assert(offsetof(AllocationProp, gpu_direct_rdma) == offsetof(Prop, allocFlags.gpuDirectRDMACapable));
static_assert(sizeof(AccessDesc) == sizeof(VENDOR(CUmemAccessDesc, hipMemAccessDesc)));
static_assert(offsetof(AccessDesc, flags) == offsetof(VENDOR(CUmemAccessDesc, hipMemAccessDesc), flags));
static_assert(sizeof(IpcHandle) == sizeof(VENDOR(CUipcMemHandle, hipIpcMemHandle_t)));
static_assert(kPinned == static_cast<int>(VENDOR(CU_MEM_ALLOCATION_TYPE_PINNED, hipMemAllocationTypePinned)));
static_assert(kPosixFd ==
              static_cast<int>(VENDOR(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, hipMemHandleTypePosixFileDescriptor)));
static_assert(kOnDevice == static_cast<int>(VENDOR(CU_MEM_LOCATION_TYPE_DEVICE, hipMemLocationTypeDevice)));
static_assert(kReadWrite ==
              static_cast<int>(VENDOR(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, hipMemAccessFlagsProtReadWrite)));
static_assert(kDmabufFd ==
              static_cast<int>(VENDOR(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, hipMemRangeHandleTypeDmaBufFd)));
static_assert(kRecommended ==
              static_cast<int>(VENDOR(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, hipMemAllocationGranularityRecommended)));
static_assert(kLazyPeer ==
              static_cast<unsigned>(VENDOR(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, hipIpcMemLazyEnablePeerAccess)));
#if defined(MONARCH_PLATFORM_ROCM)
using PortableExport = int (*)(const void*, std::size_t, int*, std::uint64_t*);
static_assert(SameAbi<PortableExport, decltype(&hsa_amd_portable_export_dmabuf)>::value);
#endif

}  // namespace
