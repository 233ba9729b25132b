#include "uring_buffers.h"

#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#ifndef IORING_RSRC_REGISTER_SPARSE
#define IORING_RSRC_REGISTER_SPARSE (1U << 0)
#endif

namespace offloadd {
namespace {

void do_register(int ring_fd, unsigned operation, void* argument, unsigned size, const char* what) {
  if (::syscall(__NR_io_uring_register, ring_fd, operation, argument, size) < 0) {
    throw std::system_error(errno, std::generic_category(), what);
  }
}

}  // namespace

void uring_reserve_buffers(int ring_fd, unsigned slots) {
  // Spelled out, because older headers have another name for the second field.
  struct {
    std::uint32_t count, flags;
    std::uint64_t reserved, data, tags;
  } table{slots, IORING_RSRC_REGISTER_SPARSE, 0, 0, 0};
  do_register(ring_fd, IORING_REGISTER_BUFFERS2, &table, sizeof table, "reserving io_uring buffers");
}

void uring_set_buffer(int ring_fd, unsigned slot, std::uint64_t address, std::size_t length) {
  iovec buffer{reinterpret_cast<void*>(address), length};
  io_uring_rsrc_update2 update{};
  update.offset = slot;
  update.data = reinterpret_cast<std::uint64_t>(&buffer);
  update.nr = 1;
  do_register(ring_fd, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update, "registering an io_uring buffer");
}

}  // namespace offloadd
