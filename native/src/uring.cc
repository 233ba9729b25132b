#include "uring.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <vector>

// Headers older than Linux 6.1 lack some of these; the numbers are kernel ABI.
#ifndef IORING_SETUP_SUBMIT_ALL
#define IORING_SETUP_SUBMIT_ALL (1U << 7)
#endif
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_TASKRUN_FLAG
#define IORING_SETUP_TASKRUN_FLAG (1U << 9)
#endif
#ifndef IORING_SQ_TASKRUN
#define IORING_SQ_TASKRUN (1U << 2)
#endif

namespace offloadd {
namespace {

constexpr int kBusyRetriesMax = 64;
constexpr int kDeferredRoundsMax = 8;

// SINGLE_ISSUER | DEFER_TASKRUN is not among them. It gave a tenth more 4 KiB reads per second and nothing at the sizes
// that are moved here, but ties the ring to the thread that made it, and a daemon makes and measures its engine on
// another thread than the one that then uses it.
constexpr unsigned kSetups[] = {
    IORING_SETUP_SUBMIT_ALL | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
    0,
};

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

// Queue indices are shared with the kernel as plain integers, hence the builtins.
unsigned load_acquire(const unsigned* index) { return __atomic_load_n(index, __ATOMIC_ACQUIRE); }
void store_release(unsigned* index, unsigned value) { __atomic_store_n(index, value, __ATOMIC_RELEASE); }

void* map_ring(int fd, std::size_t length, std::uint64_t offset) {
  void* address =
      ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  if (address == MAP_FAILED) fail(errno, "mmap of io_uring");
  ::madvise(address, length, MADV_DONTFORK);  // a forked child must not touch the parent's queues
  return address;
}

template <typename T>
T* at(void* base, unsigned offset) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(base) + offset);
}

}  // namespace

Uring::Uring(unsigned entries) {
  if (entries == 0 || entries > 32768) throw std::invalid_argument("an io_uring has 1 to 32768 entries");
  io_uring_params params{};
  int error = 0;
  for (const unsigned setup : kSetups) {
    params = {};
    params.flags = setup;
    fd_ = static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params));
    if (fd_ >= 0) break;
    error = errno;
    if (error != EINVAL) break;  // EINVAL: an older kernel that lacks the flags
  }
  if (fd_ < 0) fail(error, "io_uring_setup");
  try {
    setup_flags_ = params.flags;
    map_queues(params);
    eventfd_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (eventfd_ < 0) fail(errno, "eventfd");
    if (::syscall(__NR_io_uring_register, fd_, IORING_REGISTER_EVENTFD, &eventfd_, 1) < 0) {
      fail(errno, "registering the io_uring's eventfd");
    }
  } catch (...) {
    close();
    throw;
  }
}

Uring::~Uring() { close(); }

void Uring::map_queues(const io_uring_params& params) {
  sq_entries_ = params.sq_entries;
  cq_entries_ = params.cq_entries;
  std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  const bool single = (params.features & IORING_FEAT_SINGLE_MMAP) != 0;
  if (single) sq_bytes = std::max(sq_bytes, cq_bytes);
  sq_map_ = {map_ring(fd_, sq_bytes, IORING_OFF_SQ_RING), sq_bytes};
  void* cq = sq_map_.address;
  if (!single) {
    cq_map_ = {map_ring(fd_, cq_bytes, IORING_OFF_CQ_RING), cq_bytes};
    cq = cq_map_.address;
  }
  const std::size_t sqe_bytes = params.sq_entries * sizeof(io_uring_sqe);
  sqe_map_ = {map_ring(fd_, sqe_bytes, IORING_OFF_SQES), sqe_bytes};
  sqes_ = static_cast<io_uring_sqe*>(sqe_map_.address);
  sq_head_ = at<unsigned>(sq_map_.address, params.sq_off.head);
  sq_tail_ = at<unsigned>(sq_map_.address, params.sq_off.tail);
  sq_flags_ = at<unsigned>(sq_map_.address, params.sq_off.flags);
  sq_array_ = at<unsigned>(sq_map_.address, params.sq_off.array);
  cq_head_ = at<unsigned>(cq, params.cq_off.head);
  cq_tail_ = at<unsigned>(cq, params.cq_off.tail);
  cqes_ = at<io_uring_cqe>(cq, params.cq_off.cqes);
  // Slot i of the indirection array always names entry i; only the tail moves afterwards.
  for (unsigned i = 0; i < sq_entries_; ++i) sq_array_[i] = i;
}

void Uring::require_open() const {
  if (fd_ < 0) throw std::invalid_argument("the io_uring is closed");
}

std::string Uring::flags() const { return setup_flags_ & IORING_SETUP_COOP_TASKRUN ? "COOP_TASKRUN" : "plain"; }

void Uring::register_buffers(const std::uint64_t* addresses, const std::uint64_t* lengths, std::size_t count) {
  require_open();
  if (buffers_registered_) {
    if (::syscall(__NR_io_uring_register, fd_, IORING_UNREGISTER_BUFFERS, nullptr, 0) < 0) {
      fail(errno, "unregistering io_uring buffers");
    }
    buffers_registered_ = false;
  }
  if (count == 0) return;
  std::vector<iovec> buffers(count);
  for (std::size_t i = 0; i < count; ++i) buffers[i] = {reinterpret_cast<void*>(addresses[i]), lengths[i]};
  if (::syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS, buffers.data(), count) < 0) {
    fail(errno, "registering io_uring buffers");
  }
  buffers_registered_ = true;
}

void Uring::fill(io_uring_sqe& sqe, const UringOp& operation) const {
  std::memset(&sqe, 0, sizeof sqe);
  sqe.fd = operation.fd;
  sqe.user_data = operation.user;
  if (operation.op == 2) {
    sqe.opcode = IORING_OP_FSYNC;
    sqe.fsync_flags = IORING_FSYNC_DATASYNC;
    return;
  }
  const bool fixed = operation.buffer >= 0;
  const bool write = operation.op == 1;
  sqe.opcode =
      fixed ? (write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED) : (write ? IORING_OP_WRITE : IORING_OP_READ);
  if (fixed) sqe.buf_index = static_cast<std::uint16_t>(operation.buffer);
  sqe.off = operation.file_offset;
  sqe.addr = operation.address;
  sqe.len = operation.length;
}

int Uring::enter(unsigned submit, unsigned complete, unsigned flags) {
  const long result = ::syscall(__NR_io_uring_enter, fd_, submit, complete, flags, nullptr, _NSIG / 8);
  return result < 0 ? -errno : static_cast<int>(result);
}

std::size_t Uring::submit(const UringOp* operations, std::size_t count) {
  require_open();
  for (std::size_t i = 0; i < count; ++i) {
    if (operations[i].op > 2 || operations[i].buffer > 0xffff) {
      throw std::invalid_argument("an io_uring operation has an unknown code or buffer");
    }
  }
  std::size_t done = 0;
  int busy = 0;
  while (done < count) {
    const std::size_t room = std::min<std::size_t>(sq_entries_, cq_entries_ - inflight_);
    const auto batch = static_cast<unsigned>(std::min(count - done, room));
    if (batch == 0) break;
    const unsigned tail = *sq_tail_;
    for (unsigned i = 0; i < batch; ++i) fill(sqes_[(tail + i) & (sq_entries_ - 1)], operations[done + i]);
    // Pairs with the kernel's acquire load of the tail in io_uring_enter: the entries above are complete.
    store_release(sq_tail_, tail + batch);
    const int result = enter(batch, 0, 0);
    // Without a polling thread the kernel looks at the queue only inside enter, so what it left can be taken back.
    const unsigned taken = load_acquire(sq_head_) - tail;
    store_release(sq_tail_, tail + taken);
    done += taken;
    inflight_ += taken;
    if (result >= 0 || taken > 0 || result == -EINTR) {
      if (taken == 0 && ++busy > kBusyRetriesMax) break;
      continue;
    }
    if (result != -EAGAIN && result != -EBUSY) {
      if (done > 0) break;  // the caller meets the error again with the rest
      fail(-result, "io_uring_enter");
    }
    run_deferred_work();
    if (++busy > kBusyRetriesMax) break;
  }
  return done;
}

bool Uring::has_deferred_work() const { return (load_acquire(sq_flags_) & IORING_SQ_TASKRUN) != 0; }

unsigned Uring::completions_ready() const {
  // Pairs with the kernel's release store of the completion tail: entries below it are complete.
  return load_acquire(cq_tail_) - *cq_head_;
}

void Uring::run_deferred_work() {
  const int result = enter(0, 0, IORING_ENTER_GETEVENTS);
  if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) fail(-result, "io_uring_enter");
}

void Uring::clear_eventfd() const {
  std::uint64_t count;
  // EAGAIN: it was clear already.
  [[maybe_unused]] const ssize_t got = ::read(eventfd_, &count, sizeof count);
}

void Uring::signal() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(eventfd_, &one, sizeof one);
}

std::size_t Uring::reap(UringCompletion* out, std::size_t capacity) {
  require_open();
  // With COOP_TASKRUN a completion is posted only once the thread that submitted it enters the kernel, and posting
  // fires the eventfd. So: enter first, clear after, and look at the flag once more, because work that came in between
  // has had its signal cleared here.
  int rounds = 0;
  do {
    if (has_deferred_work()) run_deferred_work();
    clear_eventfd();
  } while (has_deferred_work() && ++rounds < kDeferredRoundsMax);
  const unsigned ready = completions_ready();
  const auto taken = static_cast<unsigned>(std::min<std::size_t>(ready, capacity));
  const unsigned head = *cq_head_;
  for (unsigned i = 0; i < taken; ++i) {
    const io_uring_cqe& cqe = cqes_[(head + i) & (cq_entries_ - 1)];
    out[i].user = cqe.user_data;
    out[i].result = cqe.res;
  }
  // Pairs with the kernel's acquire load of the completion head: the entries have been copied out.
  store_release(cq_head_, head + taken);
  inflight_ -= taken;
  if (ready > taken || has_deferred_work()) signal();  // what is left must keep the descriptor readable
  return taken;
}

bool Uring::wait(int timeout_ms) {
  require_open();
  if (completions_ready() > 0) return true;
  struct {
    std::int64_t seconds;
    long long nanoseconds;
  } timeout{timeout_ms / 1000, (timeout_ms % 1000) * 1000000LL};
  io_uring_getevents_arg argument{};
  argument.ts = reinterpret_cast<std::uint64_t>(&timeout);
  const long result = ::syscall(__NR_io_uring_enter, fd_, 0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG,
                                &argument, sizeof argument);
  const int error = errno;
  if (result < 0 && error != ETIME && error != EINTR && error != EAGAIN && error != EBUSY) {
    fail(error, "waiting in io_uring_enter");
  }
  return completions_ready() > 0;
}

void Uring::close() {
  for (Mapping* mapping : {&sqe_map_, &cq_map_, &sq_map_}) {
    if (mapping->address != nullptr) ::munmap(mapping->address, mapping->length);
    *mapping = {};
  }
  if (fd_ >= 0) ::close(fd_);
  if (eventfd_ >= 0) ::close(eventfd_);
  fd_ = eventfd_ = -1;
}

}  // namespace offloadd
