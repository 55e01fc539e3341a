#include <torch/csrc/utils/pybind.h>

#include "c10d_backend.h"

namespace py = pybind11;

namespace {

c10::intrusive_ptr<c10d::Backend> create(int rank, int size, const py::capsule& comm, c10::StreamId stream_id,
                                         c10::DeviceIndex device, std::uint64_t handle) {
  // The capsule is `Comm.capsule()` of _native, which is built from the same ccl.h.
  const auto* shared = comm.get_pointer<std::shared_ptr<monarch::ccl::Comm>>();
  TORCH_CHECK_VALUE(std::string(comm.name()) == "monarch_slurm.ccl.Comm", "not a communicator of _native");
  const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), stream_id);
  return c10::make_intrusive<monarch::MonarchBackend>(rank, size, *shared, stream, reinterpret_cast<void*>(handle));
}

}  // namespace

PYBIND11_MODULE(_c10d, m) {
  m.doc() = "torch.distributed's backend `monarch`; see monarch_slurm.collectives.c10d";
  m.def("create", &create);
}
