// The Python face of the C++ core: converts, releases the GIL, maps errors. It decides nothing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <system_error>

#include "adam.h"
#include "checksum_pool.h"
#include "cpu.h"
#include "crc32c.h"
#include "ring.h"
#include "ring_wait.h"
#include "uring.h"
#include "uring_buffers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace offloadd {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "checksums and ring entries are little-endian");

// A contiguous view of a Python buffer; keeps the exporter alive and its memory in place until it goes.
class View {
 public:
  View(nb::handle object, bool writable) {
    const int flags = writable ? (PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) : PyBUF_C_CONTIGUOUS;
    if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) throw nb::python_error();
  }
  ~View() { PyBuffer_Release(&buffer_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(buffer_.buf); }
  std::size_t bytes() const { return static_cast<std::size_t>(buffer_.len); }
  template <typename T>
  T* items(std::size_t& count, const char* dtype) const {
    if (buffer_.itemsize != sizeof(T)) throw nb::value_error(dtype);
    count = bytes() / sizeof(T);
    return reinterpret_cast<T*>(buffer_.buf);
  }

 private:
  Py_buffer buffer_{};
};

// The one place where C++ errors become Python ones; what is not listed here nanobind maps by itself.
void translate(const std::exception_ptr& error, void* corrupt) {
  try {
    std::rethrow_exception(error);
  } catch (const RingCorruptError& corruption) {
    PyErr_SetString(static_cast<PyObject*>(corrupt), corruption.what());
  } catch (const std::system_error& failure) {
    const nb::tuple arguments = nb::make_tuple(failure.code().value(), failure.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

// ---- ring -------------------------------------------------------------------------------------------------------

class PyRing {
 public:
  PyRing(nb::handle memory, std::size_t offset, std::uint32_t entries, std::uint32_t entry_bytes,
         std::uint64_t generation, bool create)
      : view_(memory, true), ring_(start(offset, entries, entry_bytes), entries, entry_bytes, generation, create) {}

  std::pair<std::size_t, bool> push(nb::bytes entries) {
    const std::size_t size = ring_.entry_bytes();
    if (entries.size() % size != 0) throw nb::value_error("push takes whole entries");
    return ring_.push(reinterpret_cast<const std::byte*>(entries.c_str()), entries.size() / size);
  }
  nb::object pop(std::size_t limit) {
    const std::size_t count = std::min(limit, ring_.pending());
    PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * ring_.entry_bytes()));
    if (bytes == nullptr) throw nb::python_error();
    nb::object result = nb::steal(bytes);
    const std::size_t got = ring_.pop(reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes)), count);
    // Only a peer that moves its tail back between the two looks makes this differ.
    if (got != count) throw RingCorruptError("the ring's tail went backwards");
    return result;
  }
  std::size_t free() const { return ring_.free(); }
  std::size_t pending() const { return ring_.pending(); }
  bool sleep() { return ring_.sleep(); }
  void wake() { ring_.wake(); }
  int wait(int doorbell, int liveness, double spin_us, int timeout_ms) {
    const nb::gil_scoped_release unlocked;
    return static_cast<int>(ring_wait(ring_, doorbell, liveness, spin_us, timeout_ms));
  }

 private:
  std::byte* start(std::size_t offset, std::uint32_t entries, std::uint32_t entry_bytes) const {
    const std::size_t needed = ring_bytes(entries, entry_bytes);
    if (offset > view_.bytes() || view_.bytes() - offset < needed) {
      throw nb::value_error("the memory is too short for this ring");
    }
    return view_.data() + offset;
  }

  View view_;
  Ring ring_;
};

void bind_ring(nb::module_& m) {
  m.def("ring_bytes", &ring_bytes, "entries"_a, "entry_bytes"_a);
  nb::class_<PyRing>(m, "Ring")
      .def(nb::init<nb::handle, std::size_t, std::uint32_t, std::uint32_t, std::uint64_t, bool>(), "memory"_a,
           "offset"_a, "entries"_a, "entry_bytes"_a, "generation"_a, "create"_a)
      .def("push", &PyRing::push, "entries"_a)
      .def("pop", &PyRing::pop, "limit"_a)
      .def("free", &PyRing::free)
      .def("pending", &PyRing::pending)
      .def("sleep", &PyRing::sleep)
      .def("wake", &PyRing::wake)
      .def("wait", &PyRing::wait, "doorbell"_a, "liveness"_a, "spin_us"_a, "timeout_ms"_a);
}

// ---- io_uring ---------------------------------------------------------------------------------------------------

constexpr const char* kNotOps = "expected a contiguous array of URING_OP";
constexpr const char* kNotCompletions = "expected a contiguous array of URING_COMPLETION";
constexpr const char* kNotU64 = "expected a contiguous array of uint64";

void uring_register(Uring& ring, nb::handle addresses, nb::handle lengths) {
  const View address_view(addresses, false), length_view(lengths, false);
  std::size_t count = 0, length_count = 0;
  const auto* address_items = address_view.items<std::uint64_t>(count, kNotU64);
  const auto* length_items = length_view.items<std::uint64_t>(length_count, kNotU64);
  if (count != length_count) throw nb::value_error("addresses and lengths differ in number");
  const nb::gil_scoped_release released;  // pinning a GiB takes a while
  ring.register_buffers(address_items, length_items, count);
}

std::size_t uring_submit(Uring& ring, nb::handle operations) {
  const View view(operations, false);
  std::size_t count = 0;
  const auto* items = view.items<UringOp>(count, kNotOps);
  const nb::gil_scoped_release released;
  return ring.submit(items, count);
}

std::size_t uring_reap(Uring& ring, nb::handle out) {
  const View view(out, true);
  std::size_t count = 0;
  auto* items = view.items<UringCompletion>(count, kNotCompletions);
  return ring.reap(items, count);  // short: keeping the GIL costs less than giving it up
}

nb::object structured_dtype(std::initializer_list<std::pair<const char*, const char*>> fields, std::size_t bytes) {
  nb::list description;
  for (const auto& [name, format] : fields) description.append(nb::make_tuple(name, format));
  nb::object dtype = nb::module_::import_("numpy").attr("dtype")(description, "align"_a = true);
  if (nb::cast<std::size_t>(dtype.attr("itemsize")) != bytes) {
    throw nb::import_error("numpy lays a structure out differently from the C++ compiler");
  }
  return dtype;
}

void bind_uring(nb::module_& m) {
  m.attr("URING_OP") = structured_dtype({{"op", "u1"},
                                         {"buffer", "i4"},
                                         {"fd", "i4"},
                                         {"file_offset", "u8"},
                                         {"address", "u8"},
                                         {"length", "u4"},
                                         {"user", "u8"}},
                                        sizeof(UringOp));
  m.attr("URING_COMPLETION") = structured_dtype({{"user", "u8"}, {"result", "i4"}}, sizeof(UringCompletion));
  m.def("uring_reserve_buffers", &uring_reserve_buffers, "ring_fd"_a, "slots"_a);
  m.def("uring_set_buffer", &uring_set_buffer, "ring_fd"_a, "slot"_a, "address"_a, "length"_a,
        nb::call_guard<nb::gil_scoped_release>());  // pinning a GiB takes a while
  nb::class_<Uring>(m, "Uring")
      .def(nb::init<unsigned>(), "entries"_a)
      .def("fileno", &Uring::fileno)
      .def("ring_fileno", &Uring::ring_fileno)
      .def("flags", &Uring::flags)
      .def("register_buffers", &uring_register, "addresses"_a, "lengths"_a)
      .def("submit", &uring_submit, "operations"_a)
      .def("reap", &uring_reap, "out"_a)
      .def("wait", &Uring::wait, "timeout_ms"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Uring::close, nb::call_guard<nb::gil_scoped_release>());
}

// ---- checksums --------------------------------------------------------------------------------------------------

std::uint32_t py_crc32c(nb::handle data, std::uint32_t value) {
  const View view(data, false);
  const nb::gil_scoped_release released;
  return crc32c(view.data(), view.bytes(), value);
}

nb::list pool_reap(ChecksumPool& pool) {
  nb::list results;
  for (const ChecksumResult& result : pool.reap()) {
    const nb::bytes granules(reinterpret_cast<const char*>(result.granules.data()), result.granules.size() * 4);
    results.append(nb::make_tuple(result.user, granules));
  }
  return results;
}

void bind_checksums(nb::module_& m) {
  m.def("crc32c", &py_crc32c, "data"_a, "value"_a = 0);
  nb::class_<ChecksumPool>(m, "ChecksumPool")
      .def(nb::init<std::size_t, std::size_t>(), "threads"_a, "granule_bytes"_a)
      .def("fileno", &ChecksumPool::fileno)
      .def(
          "submit",
          [](ChecksumPool& pool, std::uint64_t user, std::uintptr_t address, std::size_t length) {
            pool.submit(user, reinterpret_cast<const std::byte*>(address), length);
          },
          "user"_a, "address"_a, "length"_a)
      .def("reap", &pool_reap)
      .def("close", &ChecksumPool::close, nb::call_guard<nb::gil_scoped_release>());
}

// ---- optimizer kernels and instruction sets ---------------------------------------------------------------------

Dtype checked_dtype(int dtype) {
  if (dtype < 0 || dtype > 2) throw nb::value_error("dtype must be F32, BF16 or F16");
  return static_cast<Dtype>(dtype);
}

void py_adam_step(std::uintptr_t master, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::uintptr_t grad,
                  int grad_dtype, std::uintptr_t out, int out_dtype, std::size_t count, double lr, double beta1,
                  double beta2, double eps, double weight_decay, double bias_correction1, double bias_correction2_sqrt,
                  double grad_scale, bool adamw, std::size_t threads) {
  const AdamArrays arrays{reinterpret_cast<float*>(master),
                          reinterpret_cast<float*>(exp_avg),
                          reinterpret_cast<float*>(exp_avg_sq),
                          reinterpret_cast<const void*>(grad),
                          checked_dtype(grad_dtype),
                          reinterpret_cast<void*>(out),
                          checked_dtype(out_dtype),
                          count};
  const AdamScalars scalars{lr,         beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2_sqrt,
                            grad_scale, adamw};
  const nb::gil_scoped_release released;
  adam_step(arrays, scalars, threads);
}

void bind_kernels(nb::module_& m) {
  m.attr("F32") = static_cast<int>(Dtype::kF32);
  m.attr("BF16") = static_cast<int>(Dtype::kBf16);
  m.attr("F16") = static_cast<int>(Dtype::kF16);
  m.def("adam_step", &py_adam_step, "master"_a, "exp_avg"_a, "exp_avg_sq"_a, "grad"_a, "grad_dtype"_a, "out"_a,
        "out_dtype"_a, "count"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "bias_correction1"_a,
        "bias_correction2_sqrt"_a, "grad_scale"_a, "adamw"_a, "threads"_a);
  m.def("stream_copy_bytes", &stream_copy_bytes, "threads"_a, "bytes_"_a, "writes"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("cpu_level", [] { return std::string(cpu_level_name(cpu_level())); });
  m.def("cpu_levels", [] {
    std::vector<std::string> names;
    for (const CpuLevel level : cpu_levels()) names.emplace_back(cpu_level_name(level));
    return names;
  });
  m.def("set_cpu_level", &set_cpu_level, "level"_a);
}

}  // namespace
}  // namespace offloadd

NB_MODULE(_ext, m) {
  // Rings may be alive when the interpreter ends, as when an error ends a rank; that is no leak.
  nb::set_leak_warnings(false);
  static PyObject* corrupt = PyErr_NewException("offloadd_native.RingCorrupt", PyExc_ValueError, nullptr);
  if (corrupt == nullptr) throw nb::python_error();
  m.attr("RingCorrupt") = nb::borrow(corrupt);
  nb::register_exception_translator(&offloadd::translate, corrupt);
  offloadd::bind_ring(m);
  offloadd::bind_uring(m);
  offloadd::bind_checksums(m);
  offloadd::bind_kernels(m);
}
