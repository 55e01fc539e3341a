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

Mapping::Mapping(std::shared_ptr<Runtime> runtime, int device, std::size_t bytes)
    : runtime_(std::move(runtime)), device_(device), bytes_(bytes) {}

std::unique_ptr<Mapping> Mapping::create(std::shared_ptr<Runtime> runtime, int device, std::size_t bytes) {
  if (bytes == 0) throw Error("an allocation of 0 bytes cannot be mapped; ask for at least 1");
  runtime->use_device(device);
  const std::size_t granularity = runtime->granularity_bytes(device);
  const std::size_t whole = (bytes + granularity - 1) / granularity * granularity;
  std::unique_ptr<Mapping> mapping(new Mapping(std::move(runtime), device, whole));
  const Runtime& rt = *mapping->runtime_;
  AllocationProp prop = exportable_on(device);
  Result result = rt.table().create(&mapping->handle_, whole, &prop, 0);
  if (result != 0) {
    prop.gpu_direct_rdma = 0;  // some devices refuse the flag; the memory is as good for everything but RDMA
    result = rt.table().create(&mapping->handle_, whole, &prop, 0);
  }
  rt.check(result, ("MemCreate of " + std::to_string(whole) + " bytes").c_str());
  mapping->created_ = true;
  mapping->reserve_and_map();
  return mapping;
}

std::unique_ptr<Mapping> Mapping::import(std::shared_ptr<Runtime> runtime, int device, int fd, std::size_t bytes) {
  runtime->use_device(device);
  std::unique_ptr<Mapping> mapping(new Mapping(std::move(runtime), device, bytes));
  const Runtime& rt = *mapping->runtime_;
  void* os_handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  rt.check(rt.table().import_handle(&mapping->handle_, os_handle, kPosixFd), "MemImportFromShareableHandle");
  mapping->created_ = true;
  mapping->reserve_and_map();
  return mapping;
}

void Mapping::reserve_and_map() {
  const Table& table = runtime_->table();
  runtime_->check(table.reserve(&address_, bytes_, 0, 0, 0), "MemAddressReserve");
  runtime_->check(table.map(address_, bytes_, 0, handle_, 0), "MemMap");
  mapped_ = true;
  const AccessDesc access{{kOnDevice, device_}, kReadWrite};
  runtime_->check(table.set_access(address_, bytes_, &access, 1), "MemSetAccess");
}

Mapping::~Mapping() {
  // A destructor cannot report; what fails here fails because the device is gone, and its memory with it.
  const Table& table = runtime_->table();
  if (mapped_) table.unmap(address_, bytes_);
  if (address_ != 0) table.unreserve(address_, bytes_);
  if (created_) table.release(handle_);
}

Fd Mapping::export_fd() const {
  int fd = -1;
  runtime_->check(runtime_->table().export_handle(&fd, handle_, kPosixFd, 0), "MemExportToShareableHandle");
  return Fd(fd);
}

IpcMapping::IpcMapping(std::shared_ptr<Runtime> runtime, int device, const IpcHandle& handle)
    : runtime_(std::move(runtime)) {
  runtime_->use_device(device);
  runtime_->check(runtime_->table().ipc_open(&address_, handle, kLazyPeer), "IpcOpenMemHandle");
}

IpcMapping::~IpcMapping() { runtime_->table().ipc_close(address_); }

Fd export_allocation(const Runtime& runtime, Address address) {
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
