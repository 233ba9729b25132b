// Native threads that checksum spans granule by granule, so that Python never touches the bytes.
//
// Called by one engine thread. Several threads share one large span. Results wait in a list until `reap`; an eventfd
// says when there are some. The caller keeps the memory mapped until then.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace offloadd {

struct ChecksumResult {
  std::uint64_t user;
  std::vector<std::uint32_t> granules;
};

class ChecksumPool {
 public:
  ChecksumPool(std::size_t threads, std::size_t granule_bytes);
  ~ChecksumPool();
  ChecksumPool(const ChecksumPool&) = delete;
  ChecksumPool& operator=(const ChecksumPool&) = delete;

  int fileno() const { return eventfd_; }
  void submit(std::uint64_t user, const std::byte* data, std::size_t length);
  std::vector<ChecksumResult> reap();
  // Finishes what is queued and joins the threads; results stay reapable. Idempotent.
  void close();

 private:
  struct Job;
  void work();
  void run(Job& job, std::size_t first, std::size_t last) const;
  void signal() const;

  const std::size_t granule_bytes_;
  int eventfd_;
  std::mutex mutex_;
  std::condition_variable wanted_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::vector<ChecksumResult> done_;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace offloadd
