// Our own declarations of the few driver functions that are used, under one set of names for CUDA and HIP.
// They need no vendor header; check/ compares them with the vendors' when those are there. Both vendors pass device
// addresses and allocation handles in one 8-byte register, so one declaration fits both.
#pragma once

#include <cstddef>
#include <cstdint>

#include "platform.h"

namespace monarch::gpu {

using Result = int;
using Address = std::uint64_t;
using Handle = std::uint64_t;

constexpr int kPinned = 1;         // CU_MEM_ALLOCATION_TYPE_PINNED, hipMemAllocationTypePinned
constexpr int kPosixFd = 1;        // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, hipMemHandleTypePosixFileDescriptor
constexpr int kOnDevice = 1;       // CU_MEM_LOCATION_TYPE_DEVICE, hipMemLocationTypeDevice
constexpr int kReadWrite = 3;      // CU_MEM_ACCESS_FLAGS_PROT_READWRITE, hipMemAccessFlagsProtReadWrite
constexpr int kDmabufFd = 1;       // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, hipMemRangeHandleTypeDmaBufFd
constexpr unsigned kLazyPeer = 1;  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, hipIpcMemLazyEnablePeerAccess
constexpr int kRecommended = 1;    // CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, hipMemAllocationGranularityRecommended

struct Location {
  int type;
  int id;
};

struct AllocationProp {
  int type;
  int handle_types;
  Location location;
  void* win32;
  unsigned char compression;
  unsigned char gpu_direct_rdma;
  unsigned short usage;
  unsigned char reserved[4];
};

struct AccessDesc {
  Location location;
  int flags;
};

struct IpcHandle {
  unsigned char bytes[64];
};

// Entries that may be null are marked; the others are there once a Runtime was made.
struct Table {
  Result (*init)(unsigned flags);
  Result (*device_count)(int* count);
  Result (*error_string)(Result result, const char** text);  // may be null
#if defined(MONARCH_PLATFORM_ROCM)
  const char* (*error_text)(Result result);  // may be null; of runtimes that have no error_string
  Result (*set_device)(int device);
  Result (*get_device)(int* device);
#else
  Result (*retain_primary)(void** context, int device);
  Result (*set_current)(void* context);
  Result (*get_current)(void** context);
#endif
  Result (*synchronize)();
  Result (*alloc)(Address* address, std::size_t bytes);
  Result (*free)(Address address);
  Result (*copy_to_host)(void* host, Address device, std::size_t bytes);
  Result (*copy_to_device)(Address device, const void* host, std::size_t bytes);
  Result (*granularity)(std::size_t* bytes, const AllocationProp* prop, int option);
  Result (*create)(Handle* handle, std::size_t bytes, const AllocationProp* prop, unsigned long long flags);
  Result (*release)(Handle handle);
  Result (*reserve)(Address* address, std::size_t bytes, std::size_t alignment, Address hint, unsigned long long flags);
  Result (*unreserve)(Address address, std::size_t bytes);
  Result (*map)(Address address, std::size_t bytes, std::size_t offset, Handle handle, unsigned long long flags);
  Result (*unmap)(Address address, std::size_t bytes);
  Result (*set_access)(Address address, std::size_t bytes, const AccessDesc* desc, std::size_t count);
  Result (*export_handle)(void* fd, Handle handle, int type, unsigned long long flags);
  Result (*import_handle)(Handle* handle, void* fd, int type);
  Result (*retain_handle)(Handle* handle, Address address);
  Result (*address_range)(Address* base, std::size_t* bytes, Address address);
  Result (*range_handle)(void* fd, Address address, std::size_t bytes, int type,
                         unsigned long long flags);  // may be null
  Result (*ipc_get)(IpcHandle* handle, Address address);
  Result (*ipc_open)(Address* address, IpcHandle handle, unsigned flags);
  Result (*ipc_close)(Address address);
};

}  // namespace monarch::gpu
