#include "checksum_pool.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "crc32c.h"

namespace offloadd {
namespace {

// Granules taken from a span at a time: enough that the lock costs nothing, few enough that threads share a span.
constexpr std::size_t kGrab = 4;
constexpr std::size_t kThreadsMax = 256;

}  // namespace

struct ChecksumPool::Job {
  std::uint64_t user;
  const std::byte* data;
  std::size_t length;
  std::size_t next = 0;     // first granule not yet taken; guarded by the pool's mutex
  std::size_t missing = 0;  // granules not yet computed; guarded likewise
  std::vector<std::uint32_t> granules;
};

ChecksumPool::ChecksumPool(std::size_t threads, std::size_t granule_bytes) : granule_bytes_(granule_bytes) {
  if (threads == 0 || threads > kThreadsMax) throw std::invalid_argument("a checksum pool has 1 to 256 threads");
  if (granule_bytes == 0) throw std::invalid_argument("a checksum granule cannot be empty");
  eventfd_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (eventfd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  try {
    for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (...) {
    close();
    ::close(eventfd_);
    throw;
  }
}

ChecksumPool::~ChecksumPool() {
  close();
  ::close(eventfd_);
}

void ChecksumPool::signal() const {
  const std::uint64_t one = 1;
  // A failure can only be EAGAIN at 2^64 - 2 unread signals, when the descriptor is readable anyway.
  [[maybe_unused]] const ssize_t written = ::write(eventfd_, &one, sizeof one);
}

void ChecksumPool::submit(std::uint64_t user, const std::byte* data, std::size_t length) {
  auto job = std::make_shared<Job>();
  job->user = user;
  job->data = data;
  job->length = length;
  job->missing = (length + granule_bytes_ - 1) / granule_bytes_;
  job->granules.resize(job->missing);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closing_) throw std::invalid_argument("the checksum pool is closed");
  if (job->missing == 0) {
    done_.push_back({user, {}});
    signal();
    return;
  }
  const bool wide = job->missing > kGrab;
  queue_.push_back(std::move(job));
  if (wide) {
    wanted_.notify_all();
  } else {
    wanted_.notify_one();
  }
}

void ChecksumPool::run(Job& job, std::size_t first, std::size_t last) const {
  for (std::size_t granule = first; granule < last; ++granule) {
    const std::size_t start = granule * granule_bytes_;
    job.granules[granule] = crc32c(job.data + start, std::min(granule_bytes_, job.length - start));
  }
}

void ChecksumPool::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const std::shared_ptr<Job> job = queue_.front();
    const std::size_t first = job->next;
    const std::size_t last = std::min(first + kGrab, job->granules.size());
    job->next = last;
    if (last == job->granules.size()) queue_.pop_front();
    lock.unlock();
    run(*job, first, last);
    lock.lock();
    job->missing -= last - first;
    if (job->missing == 0) {
      done_.push_back({job->user, std::move(job->granules)});
      signal();
    }
  }
}

std::vector<ChecksumResult> ChecksumPool::reap() {
  std::vector<ChecksumResult> results;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (done_.empty()) return results;
  // Under the lock, so that a signal for a result not taken here cannot be swallowed.
  std::uint64_t count;
  // NOLINTNEXTLINE(clang-analyzer-unix.BlockInCriticalSection): the eventfd does not block.
  [[maybe_unused]] const ssize_t got = ::read(eventfd_, &count, sizeof count);
  results.swap(done_);
  return results;
}

void ChecksumPool::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace offloadd
