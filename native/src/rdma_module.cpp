// What Python sees of ibverbs. The interpreter's lock is released wherever the kernel or the device may take its time.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "dl.h"
#include "rdma.h"

namespace py = pybind11;

namespace {

// To give memory or queue pairs back takes the device its time, too.
template <typename T>
struct DeleteWithoutLock {
  void operator()(T* object) const {
    if (PyGILState_Check() == 0) {
      delete object;
      return;
    }
    const py::gil_scoped_release release;
    delete object;
  }
};

template <typename T, typename... Arguments>
std::shared_ptr<T> made(Arguments... arguments) {
  return std::shared_ptr<T>(new T(std::move(arguments)...), DeleteWithoutLock<T>());
}

}  // namespace

PYBIND11_MODULE(_rdma, m) {
  m.doc() = "ibverbs: devices, memory regions and links";
  py::register_exception<monarch::LibraryMissing>(m, "LibraryMissing");
#ifdef MONARCH_HAS_VERBS
  using namespace monarch::rdma;
  using Release = py::call_guard<py::gil_scoped_release>;
  m.attr("has_verbs") = true;
  static py::handle error = py::exception<VerbsError>(m, "VerbsError", PyExc_OSError).release();
  py::register_exception_translator(
      [](std::exception_ptr raised) {  // NOLINT(performance-unnecessary-value-param): pybind11 wants it so
        try {
          if (raised) std::rethrow_exception(raised);
        } catch (const VerbsError& failure) {
          PyErr_SetObject(error.ptr(), py::make_tuple(failure.code(), failure.what()).ptr());
        }
      });
  py::class_<Device, std::shared_ptr<Device>>(m, "Device")
      .def(py::init<const std::string&, int, int>(), Release())
      .def_property_readonly("gid", [](const Device& device) { return py::bytes(device.gid()); })
      .def_property_readonly("lid", &Device::lid)
      .def_property_readonly("mtu", &Device::mtu)
      .def("port_is_active", &Device::port_is_active, Release());
  py::class_<Region, std::shared_ptr<Region>>(m, "Region")
      .def(py::init(&made<Region, std::shared_ptr<Device>, std::uint64_t, std::uint64_t, bool, bool>), Release())
      .def_static(
          "of_dmabuf",
          [](std::shared_ptr<Device> device, int fd, std::uint64_t offset, std::uint64_t address, std::uint64_t nbytes,
             bool local_write,
             bool remote) { return made<Region>(std::move(device), fd, offset, address, nbytes, local_write, remote); },
          Release())
      .def_property_readonly("lkey", &Region::lkey)
      .def_property_readonly("rkey", &Region::rkey);
  py::class_<Link, std::shared_ptr<Link>>(m, "Link")
      .def(py::init(&made<Link, std::shared_ptr<Device>, int, int>), Release())
      .def_property_readonly("numbers", &Link::numbers)
      .def("connect", &Link::connect, Release())
      .def("cancel", &Link::cancel)
      .def("transfer",
           [](Link& link,
              const std::vector<
                  std::tuple<bool, std::uint64_t, std::uint32_t, std::uint64_t, std::uint32_t, std::uint64_t>>& copies,
              std::uint64_t chunk_bytes, double seconds) {
             std::vector<Copy> list;
             list.reserve(copies.size());
             for (const auto& [write, local, lkey, remote, rkey, nbytes] : copies) {
               list.push_back({write, local, lkey, remote, rkey, nbytes});
             }
             Outcome outcome;
             {
               py::gil_scoped_release release;
               outcome = link.transfer(list, chunk_bytes, seconds);
             }
             return std::make_pair(outcome.kind, outcome.text);
           });
#else
  m.attr("has_verbs") = false;
#endif
}
