// The Python face of GPU memory and collectives. Pointers and streams are ints; no torch type is known here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "ccl.h"
#include "gpu_memory.h"

namespace py = pybind11;
using namespace monarch;
using NoGil = py::call_guard<py::gil_scoped_release>;

namespace {

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

template <typename Plain>
Plain from_bytes(const std::string& bytes, const char* what) {
  Plain plain{};
  if (bytes.size() != sizeof plain) {
    throw py::value_error(std::string(what) + " has " + std::to_string(sizeof plain) + " bytes, not " +
                          std::to_string(bytes.size()));
  }
  std::memcpy(&plain, bytes.data(), sizeof plain);
  return plain;
}

void bind_gpu(py::module_& m) {
  py::class_<gpu::Runtime, std::shared_ptr<gpu::Runtime>>(m, "Runtime", py::module_local())
      .def(py::init<const std::vector<std::string>&, std::vector<std::string>>())
      .def_property_readonly("path", &gpu::Runtime::path)
      .def("device_count", &gpu::Runtime::device_count)
      .def("granularity_bytes", &gpu::Runtime::granularity_bytes)
      .def("range_of", &gpu::Runtime::range_of)
      .def("alloc",
           [](gpu::Runtime& rt, int device, std::size_t bytes) {
             const gpu::OnDevice here(rt, device);
             gpu::Address address = 0;
             rt.check(rt.table().alloc(&address, bytes), "MemAlloc");
             return address;
           })
      .def("free",
           [](gpu::Runtime& rt, int device, gpu::Address address) {
             const gpu::OnDevice here(rt, device);
             rt.check(rt.table().free(address), "MemFree");
           })
      .def("read",
           [](gpu::Runtime& rt, int device, gpu::Address address, std::size_t bytes) {
             const gpu::OnDevice here(rt, device);
             std::string host(bytes, '\0');
             rt.check(rt.table().copy_to_host(host.data(), address, bytes), "MemcpyDtoH");
             return py::bytes(host);
           })
      .def("write",
           [](gpu::Runtime& rt, int device, gpu::Address address, const std::string& data) {
             const gpu::OnDevice here(rt, device);
             rt.check(rt.table().copy_to_device(address, data.data(), data.size()), "MemcpyHtoD");
           })
      .def("export_dmabuf",
           [](gpu::Runtime& rt, int device, gpu::Address address, std::size_t bytes) {
             gpu::Dmabuf made = rt.export_dmabuf(device, address, bytes);
             return py::make_tuple(made.fd.release(), made.offset_bytes, made.length_bytes);
           })
      .def("export_allocation",
           [](gpu::Runtime& rt, int device, gpu::Address address) {
             return gpu::export_allocation(rt, device, address).release();
           })
      .def("ipc_handle", [](gpu::Runtime& rt, int device, gpu::Address address) {
        const gpu::OnDevice here(rt, device);
        gpu::IpcHandle handle{};
        rt.check(rt.table().ipc_get(&handle, address), "IpcGetMemHandle");
        return py::bytes(reinterpret_cast<const char*>(handle.bytes), sizeof handle.bytes);
      });
  py::class_<gpu::Mapping>(m, "Mapping", py::module_local())
      .def_static("create", &gpu::Mapping::create, NoGil())
      .def_static("import_fds", &gpu::Mapping::import, NoGil())
      .def_property_readonly("address", &gpu::Mapping::address)
      .def_property_readonly("bytes", &gpu::Mapping::bytes)
      .def_property_readonly("device", &gpu::Mapping::device)
      .def("export_fd", [](const gpu::Mapping& mapping) { return mapping.export_fd().release(); });
  py::class_<gpu::IpcMapping>(m, "IpcMapping", py::module_local())
      .def(py::init([](std::shared_ptr<gpu::Runtime> rt, int device, const std::string& handle) {
        return std::make_unique<gpu::IpcMapping>(std::move(rt), device,
                                                 from_bytes<gpu::IpcHandle>(handle, "an IPC handle"));
      }))
      .def_property_readonly("address", &gpu::IpcMapping::address);
}

void bind_ccl(py::module_& m) {
  py::class_<ccl::Ccl, std::shared_ptr<ccl::Ccl>>(m, "Ccl", py::module_local())
      .def(py::init<const std::vector<std::string>&>())
      .def_property_readonly("path", &ccl::Ccl::path)
      .def("version", &ccl::Ccl::version)
      .def("unique_id", [](const ccl::Ccl& library) {
        const ccl::UniqueId id = library.unique_id();
        return py::bytes(id.bytes, sizeof id.bytes);
      });
  using ccl::Comm;
  using U64 = std::uint64_t;
  py::class_<Comm, std::shared_ptr<Comm>>(m, "Comm", py::module_local())
      .def_static("init",
                  [](std::shared_ptr<ccl::Ccl> library, const std::string& id, int size, int rank) {
                    const auto unique = from_bytes<ccl::UniqueId>(id, "a unique id");
                    const py::gil_scoped_release released;
                    return Comm::init(std::move(library), unique, size, rank);
                  })
      .def_property_readonly("size", &Comm::size)
      .def_property_readonly("rank", &Comm::rank)
      .def_property_readonly("aborted", &Comm::aborted)
      .def(
          "all_reduce",
          [](Comm& c, U64 send, U64 recv, std::size_t n, int type, int op, U64 stream) {
            c.all_reduce(pointer(send), pointer(recv), n, type, op, pointer(stream));
          },
          NoGil())
      .def(
          "all_gather",
          [](Comm& c, U64 send, U64 recv, std::size_t n, int type, U64 stream) {
            c.all_gather(pointer(send), pointer(recv), n, type, pointer(stream));
          },
          NoGil())
      .def(
          "reduce_scatter",
          [](Comm& c, U64 send, U64 recv, std::size_t n, int type, int op, U64 stream) {
            c.reduce_scatter(pointer(send), pointer(recv), n, type, op, pointer(stream));
          },
          NoGil())
      .def(
          "broadcast",
          [](Comm& c, U64 send, U64 recv, std::size_t n, int type, int root, U64 stream) {
            c.broadcast(pointer(send), pointer(recv), n, type, root, pointer(stream));
          },
          NoGil())
      .def(
          "reduce",
          [](Comm& c, U64 send, U64 recv, std::size_t n, int type, int op, int root, U64 stream) {
            c.reduce(pointer(send), pointer(recv), n, type, op, root, pointer(stream));
          },
          NoGil())
      .def(
          "send",
          [](Comm& c, U64 buffer, std::size_t n, int type, int peer, U64 stream) {
            c.send(pointer(buffer), n, type, peer, pointer(stream));
          },
          NoGil())
      .def(
          "recv",
          [](Comm& c, U64 buffer, std::size_t n, int type, int peer, U64 stream) {
            c.recv(pointer(buffer), n, type, peer, pointer(stream));
          },
          NoGil())
      .def("group_start", &Comm::group_start, NoGil())
      .def("group_end", &Comm::group_end, NoGil())
      .def("split", &Comm::split, NoGil())
      .def("async_error", &Comm::async_error, NoGil())
      .def("abort", &Comm::abort, NoGil())
      .def("destroy", &Comm::destroy, NoGil())
      // For _c10d, which is built from the same sources at the same time: a shared_ptr<Comm> of its own.
      .def("capsule", [](std::shared_ptr<Comm> comm) {
        return py::capsule(new std::shared_ptr<Comm>(std::move(comm)), "monarch_slurm.ccl.Comm", [](PyObject* capsule) {
          delete static_cast<std::shared_ptr<Comm>*>(PyCapsule_GetPointer(capsule, "monarch_slurm.ccl.Comm"));
        });
      });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "GPU memory and collectives of monarch_slurm; see monarch_slurm.gpu and monarch_slurm.collectives";
  m.attr("platform") = MONARCH_PLATFORM_NAME;
  const py::object root = py::module_::import("monarch_slurm.errors").attr("MonarchSlurmError");
  py::register_local_exception<LibraryMissing>(m, "LibraryMissing", root.ptr());
  py::register_local_exception<gpu::Error>(m, "GpuError", root.ptr());
  py::register_local_exception<ccl::Error>(m, "CclError", root.ptr());
  py::register_local_exception<ccl::Aborted>(m, "CclAborted", m.attr("CclError").ptr());
  bind_gpu(m);
  bind_ccl(m);
}
