#include "gpu_memory.h"

#include <utility>

namespace monarch::gpu {

namespace {

AllocationProp exportable_on(int device) {
  AllocationProp prop{};
  prop.type = kPinned;
  prop.handle_types = kPosixFd;
  prop.location = {kOnDevice, device};
  prop.gpu_direct_rdma = 1;
  return prop;
}

}  // namespace

std::size_t Runtime::granularity_bytes(int device) const {
  const AllocationProp prop = exportable_on(device);
  std::size_t bytes = 0;
  check(table_.granularity(&bytes, &prop, kRecommended), "MemGetAllocationGranularity");
  if (bytes == 0) throw Error("MemGetAllocationGranularity gave 0 bytes: the driver is broken or too old");
  return bytes;
}

Mapping::Mapping(std::shared_ptr<Runtime> runtime, int device) : runtime_(std::move(runtime)), device_(device) {}

std::unique_ptr<Mapping> Mapping::create(std::shared_ptr<Runtime> runtime, int device, std::size_t bytes) {
  if (bytes == 0) throw Error("an allocation of 0 bytes cannot be mapped; ask for at least 1");
  const OnDevice here(*runtime, device);
  const std::size_t granularity = runtime->granularity_bytes(device);
  const std::size_t whole = (bytes + granularity - 1) / granularity * granularity;
  std::unique_ptr<Mapping> mapping(new Mapping(std::move(runtime), device));
  const Runtime& rt = *mapping->runtime_;
  AllocationProp prop = exportable_on(device);
  Handle handle = 0;
  Result result = rt.table().create(&handle, whole, &prop, 0);
  if (result != 0) {
    prop.gpu_direct_rdma = 0;  // some devices refuse the flag; the memory is as good for everything but RDMA
    result = rt.table().create(&handle, whole, &prop, 0);
  }
  rt.check(result, ("MemCreate of " + std::to_string(whole) + " bytes").c_str());
  mapping->parts_.push_back({handle, whole});
  mapping->reserve_and_map();
  return mapping;
}

std::unique_ptr<Mapping> Mapping::import(std::shared_ptr<Runtime> runtime, int device, const std::vector<int>& fds,
                                         const std::vector<std::size_t>& sizes) {
  if (fds.empty() || fds.size() != sizes.size()) {
    throw Error("to map exported memory, one size for each of at least one descriptor is needed");
  }
  const OnDevice here(*runtime, device);
  std::unique_ptr<Mapping> mapping(new Mapping(std::move(runtime), device));
  const Runtime& rt = *mapping->runtime_;
  for (std::size_t i = 0; i < fds.size(); ++i) {
    void* os_handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(fds[i]));
    Handle handle = 0;
    rt.check(rt.table().import_handle(&handle, os_handle, kPosixFd), "MemImportFromShareableHandle");
    mapping->parts_.push_back({handle, sizes[i]});
  }
  mapping->reserve_and_map();
  return mapping;
}

void Mapping::reserve_and_map() {
  const Table& table = runtime_->table();
  std::size_t bytes = 0;
  for (const Part& part : parts_) bytes += part.bytes;
  runtime_->check(table.reserve(&address_, bytes, 0, 0, 0), "MemAddressReserve");
  bytes_ = bytes;
  for (const Part& part : parts_) {
    runtime_->check(table.map(address_ + mapped_bytes_, part.bytes, 0, part.handle, 0), "MemMap");
    mapped_bytes_ += part.bytes;
  }
  const AccessDesc access{{kOnDevice, device_}, kReadWrite};
  runtime_->check(table.set_access(address_, bytes_, &access, 1), "MemSetAccess");
}

Mapping::~Mapping() {
  // A destructor cannot report; what fails here fails because the device is gone, and its memory with it.
  const Table& table = runtime_->table();
  std::size_t offset = 0;
  for (const Part& part : parts_) {
    if (offset < mapped_bytes_) table.unmap(address_ + offset, part.bytes);
    offset += part.bytes;
  }
  if (bytes_ != 0) table.unreserve(address_, bytes_);
  for (const Part& part : parts_) table.release(part.handle);
}

Fd Mapping::export_fd() const {
  int fd = -1;
  runtime_->check(runtime_->table().export_handle(&fd, parts_.front().handle, kPosixFd, 0),
                  "MemExportToShareableHandle");
  return Fd(fd);
}

IpcMapping::IpcMapping(std::shared_ptr<Runtime> runtime, int device, const IpcHandle& handle)
    : runtime_(std::move(runtime)), device_(device) {
  const OnDevice here(*runtime_, device_);
  runtime_->check(runtime_->table().ipc_open(&address_, handle, kLazyPeer), "IpcOpenMemHandle");
}

IpcMapping::~IpcMapping() {
  try {
    const OnDevice here(*runtime_, device_);
    runtime_->table().ipc_close(address_);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the device is gone, and its memory with it
  }
}

Fd export_allocation(const Runtime& runtime, int device, Address address) {
  const OnDevice here(runtime, device);
  const Table& table = runtime.table();
  Handle handle = 0;
  runtime.check(table.retain_handle(&handle, address), "MemRetainAllocationHandle");
  int fd = -1;
  const Result result = table.export_handle(&fd, handle, kPosixFd, 0);
  table.release(handle);
  runtime.check(result, "MemExportToShareableHandle");
  return Fd(fd);
}

}  // namespace monarch::gpu
