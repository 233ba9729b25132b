// An io_uring on the raw system calls: arrays of operations in, arrays of completions out.
//
// Used by one thread at a time; what a thread submits must complete before it ends. It never has more requests in
// flight than the completion queue holds, so that queue cannot overflow. It decides nothing: no retries, no continuing
// of short transfers. Source: io_uring_setup(2), io_uring_enter(2), io_uring_register(2).
#pragma once

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace offloadd {

// One device request. Mirrors the numpy dtype URING_OP, field by field.
struct UringOp {
  std::uint8_t op;      // 0 read, 1 write, 2 fdatasync
  std::int32_t buffer;  // index of the registered buffer that holds the address, or -1
  std::int32_t fd;
  std::uint64_t file_offset;
  std::uint64_t address;
  std::uint32_t length;
  std::uint64_t user;  // comes back in the completion
};

// Mirrors URING_COMPLETION.
struct UringCompletion {
  std::uint64_t user;
  std::int32_t result;  // bytes or -errno
};

class Uring {
 public:
  explicit Uring(unsigned entries);  // std::system_error when no set-up works
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  int fileno() const { return eventfd_; }
  int ring_fileno() const { return fd_; }
  std::string flags() const;
  void register_buffers(const std::uint64_t* addresses, const std::uint64_t* lengths, std::size_t count);
  std::size_t submit(const UringOp* operations, std::size_t count);
  std::size_t reap(UringCompletion* out, std::size_t capacity);
  bool wait(int timeout_ms);
  void close();  // idempotent; the kernel finishes or cancels what is in flight

 private:
  struct Mapping {
    void* address = nullptr;
    std::size_t length = 0;
  };
  void map_queues(const io_uring_params& params);
  void fill(io_uring_sqe& sqe, const UringOp& operation) const;
  int enter(unsigned submit, unsigned complete, unsigned flags);
  bool has_deferred_work() const;
  unsigned completions_ready() const;
  void run_deferred_work();
  void clear_eventfd() const;
  void signal() const;
  void require_open() const;

  int fd_ = -1;
  int eventfd_ = -1;
  unsigned setup_flags_ = 0;
  bool buffers_registered_ = false;
  std::size_t inflight_ = 0;

  Mapping sq_map_, cq_map_, sqe_map_;
  unsigned sq_entries_ = 0, cq_entries_ = 0;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_flags_ = nullptr, *sq_array_ = nullptr;
  unsigned *cq_head_ = nullptr, *cq_tail_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
};

}  // namespace offloadd
