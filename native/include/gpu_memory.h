// GPU memory: virtual-memory-management allocations, their file descriptors, dmabuf export, IPC handles.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "dl.h"
#include "gpu_api.h"

namespace monarch::gpu {

// A call of the GPU runtime failed; the text names the call, the code and what it means.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A file descriptor that is closed when it is not released.
class Fd {
 public:
  explicit Fd(int fd = -1) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&&) = delete;
  ~Fd();
  int get() const noexcept { return fd_; }
  int release() noexcept {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

// A dmabuf of device memory: the buffer begins `offset_bytes` into what the descriptor stands for.
struct Dmabuf {
  Fd fd;
  std::uint64_t offset_bytes;
  std::uint64_t length_bytes;  // of the exported, page-aligned range
};

class Runtime {
 public:
  // Opens the driver (libcuda or libamdhip64) from the first candidate and starts it.
  // Throws LibraryMissing when there is none, Error when there is no device.
  Runtime(const std::vector<std::string>& candidates, std::vector<std::string> hsa_candidates);

  int device_count() const;
  void check(Result result, const char* call) const;
  std::string describe(Result result) const;
  std::size_t granularity_bytes(int device) const;
  Dmabuf export_dmabuf(int device, Address address, std::size_t bytes) const;
  // The allocation of `device` that holds an address: its base and size.
  std::pair<Address, std::size_t> range_of(int device, Address address) const;
  const Table& table() const noexcept { return table_; }
  const std::string& path() const noexcept { return library_.path(); }

 private:
  Library library_;
  std::vector<std::string> hsa_candidates_;
  Table table_{};
};

// Makes a device the calling thread's current one, and gives it back its own in the end. CUDA calls fail on a thread
// that has none, and a caller of ours must not find another device current than before.
class OnDevice {
 public:
  OnDevice(const Runtime& runtime, int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const Table& table_;
#if defined(MONARCH_PLATFORM_ROCM)
  int before_ = 0;
#else
  void* before_ = nullptr;
#endif
};

// Physical memory of one device, one or more allocations at successive addresses, mapped and readable and writable
// there. Torn down in the reverse order of its making.
class Mapping {
 public:
  // New memory of at least `bytes`, rounded up to the granularity, exportable as a file descriptor.
  static std::unique_ptr<Mapping> create(std::shared_ptr<Runtime> runtime, int device, std::size_t bytes);
  // Allocations that another process exported, with their sizes there. The descriptors stay the caller's.
  static std::unique_ptr<Mapping> import(std::shared_ptr<Runtime> runtime, int device, const std::vector<int>& fds,
                                         const std::vector<std::size_t>& sizes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  Address address() const noexcept { return address_; }
  std::size_t bytes() const noexcept { return bytes_; }
  int device() const noexcept { return device_; }
  // Of the first allocation, which is the only one of memory made by `create`.
  Fd export_fd() const;

 private:
  struct Part {
    Handle handle;
    std::size_t bytes;
  };
  Mapping(std::shared_ptr<Runtime> runtime, int device);
  void reserve_and_map();

  std::shared_ptr<Runtime> runtime_;
  int device_;
  std::size_t bytes_ = 0;
  std::vector<Part> parts_;
  Address address_ = 0;
  std::size_t mapped_bytes_ = 0;  // the first of parts_ that are mapped, together
};

// Memory of another process, opened by its IPC handle until this is destroyed.
class IpcMapping {
 public:
  IpcMapping(std::shared_ptr<Runtime> runtime, int device, const IpcHandle& handle);
  ~IpcMapping();
  IpcMapping(const IpcMapping&) = delete;
  IpcMapping& operator=(const IpcMapping&) = delete;
  Address address() const noexcept { return address_; }

 private:
  std::shared_ptr<Runtime> runtime_;
  int device_;
  Address address_ = 0;
};

// The descriptor of the VMM allocation that holds an address; Error when it is plain memory (use its IPC handle).
Fd export_allocation(const Runtime& runtime, int device, Address address);

}  // namespace monarch::gpu
