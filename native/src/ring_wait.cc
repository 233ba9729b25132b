#include "ring_wait.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace offloadd {
namespace {

using Clock = std::chrono::steady_clock;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool spin(const Ring& ring, double spin_us) {
  const auto end = Clock::now() + std::chrono::duration<double, std::micro>(spin_us);
  do {
    for (int i = 0; i < 16; ++i) {
      if (ring.pending() != 0) return true;
      relax();
    }
  } while (Clock::now() < end);
  return false;
}

}  // namespace

RingWait ring_wait(Ring& ring, int doorbell, int liveness, double spin_us, int timeout_ms) {
  if (spin(ring, spin_us)) return RingWait::kPending;
  if (!ring.sleep()) return RingWait::kPending;
  pollfd watched[2] = {{doorbell, POLLIN, 0}, {liveness, POLLIN, 0}};
  const int ready = poll(watched, 2, timeout_ms);
  const int error = errno;
  ring.wake();
  if (ready < 0 && error != EINTR) throw std::system_error(error, std::generic_category(), "poll");
  if (ready > 0 && watched[0].revents != 0) {
    std::uint64_t count = 0;
    // Another wait may have cleared it meanwhile; the descriptor does not block.
    if (read(doorbell, &count, sizeof count) < 0 && errno != EAGAIN && errno != EINTR) {
      throw std::system_error(errno, std::generic_category(), "reading the doorbell");
    }
  }
  if (ring.pending() != 0) return RingWait::kPending;
  return ready > 0 && watched[1].revents != 0 ? RingWait::kPeerGone : RingWait::kTimedOut;
}

}  // namespace offloadd
