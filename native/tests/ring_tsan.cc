// Producer and consumer on one ring, with sleep and wake-up over an eventfd; built with -fsanitize=thread by
// tests/unit/native/test_ring_threads.py. Exits 0 when every entry arrived in order and no wake-up was lost.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../src/ring.h"

namespace {

constexpr std::uint32_t kEntries = 64;
constexpr std::uint32_t kEntryBytes = 64;
constexpr std::uint64_t kTotal = 1'000'000;
constexpr int kWaitMs = 20'000;

struct Entry {
  std::uint64_t words[kEntryBytes / 8];
};

// Small bursts of varying size, so that both "full" and "empty" are met often.
std::size_t burst(std::uint64_t at) { return 1 + (at * 2654435761u >> 7) % 97; }

void produce(std::byte* memory, int doorbell) {
  offloadd::Ring ring(memory, kEntries, kEntryBytes, 1, false);
  std::vector<Entry> batch(128);
  for (std::uint64_t next = 0; next < kTotal;) {
    std::size_t count = 0;
    for (; count < burst(next) && next + count < kTotal; ++count) {
      for (auto& word : batch[count].words) word = next + count;
    }
    for (std::size_t sent = 0; sent < count;) {
      const auto [taken, ring_doorbell] =
          ring.push(reinterpret_cast<const std::byte*>(batch.data() + sent), count - sent);
      sent += taken;
      const std::uint64_t one = 1;
      if (ring_doorbell && ::write(doorbell, &one, sizeof one) != sizeof one) std::abort();
      if (taken == 0) std::this_thread::yield();
    }
    next += count;
  }
}

bool wait_for(int doorbell) {
  pollfd poll_for{doorbell, POLLIN, 0};
  if (::poll(&poll_for, 1, kWaitMs) != 1) return false;
  std::uint64_t rings;
  return ::read(doorbell, &rings, sizeof rings) == sizeof rings;
}

int consume(std::byte* memory, int doorbell) {
  offloadd::Ring ring(memory, kEntries, kEntryBytes, 1, false);
  std::vector<Entry> batch(kEntries);
  std::uint64_t sleeps = 0;
  for (std::uint64_t next = 0; next < kTotal;) {
    const std::size_t got = ring.pop(reinterpret_cast<std::byte*>(batch.data()), burst(next) % kEntries + 1);
    for (std::size_t i = 0; i < got; ++i, ++next) {
      for (const auto word : batch[i].words) {
        if (word != next) {
          std::fprintf(stderr, "entry %llu holds %llu\n", static_cast<unsigned long long>(next),
                       static_cast<unsigned long long>(word));
          return 1;
        }
      }
    }
    if (got > 0 || !ring.sleep()) continue;
    ++sleeps;
    if (!wait_for(doorbell)) {
      std::fprintf(stderr, "a wake-up was lost after %llu entries\n", static_cast<unsigned long long>(next));
      return 1;
    }
    ring.wake();
  }
  std::printf("%llu entries, %llu sleeps\n", static_cast<unsigned long long>(kTotal),
              static_cast<unsigned long long>(sleeps));
  return sleeps > 0 ? 0 : 2;  // a run that never slept has shown nothing about wake-ups
}

}  // namespace

int main() {
  const std::size_t bytes = offloadd::ring_bytes(kEntries, kEntryBytes);
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(offloadd::kPage, bytes));
  const int doorbell = ::eventfd(0, EFD_NONBLOCK);
  if (memory == nullptr || doorbell < 0) return 3;
  const offloadd::Ring created(memory, kEntries, kEntryBytes, 1, true);
  std::thread producer(produce, memory, doorbell);
  const int result = consume(memory, doorbell);
  if (result == 1) std::_Exit(1);  // the producer may be stuck on a full ring
  producer.join();
  ::close(doorbell);
  std::free(memory);
  return result;
}
