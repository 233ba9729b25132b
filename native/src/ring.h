// One single-producer single-consumer queue in memory shared between two processes that do not trust each other.
//
// Used by both ends: each end keeps its own index in private memory and only publishes it, so that the peer can confuse
// itself but never the other side. Whatever is read from shared memory is checked before it is used. The ring never
// waits; sleeping and doorbells belong to the caller, `sleep` and `push` only say when they are needed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace offloadd {

// The other side wrote something that cannot be.
class RingCorruptError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kPage = 4096;
constexpr std::uint64_t kRingMagic = 0x31676e6952644f21ULL;
constexpr std::uint32_t kRingVersion = 1;

// Each index has a cache line of its own: producer and consumer write different ones on every operation.
struct RingHeader {
  alignas(kCacheLine) std::atomic<std::uint64_t> magic;
  std::atomic<std::uint64_t> generation;
  std::atomic<std::uint32_t> version;
  std::atomic<std::uint32_t> entries;
  std::atomic<std::uint32_t> entry_bytes;
  alignas(kCacheLine) std::atomic<std::uint64_t> head;      // written by the consumer
  alignas(kCacheLine) std::atomic<std::uint64_t> tail;      // written by the producer
  alignas(kCacheLine) std::atomic<std::uint32_t> sleeping;  // set by the consumer, cleared by either
};
static_assert(sizeof(RingHeader) == 4 * kCacheLine);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "atomics shared between processes must not lock");

// Bytes of one queue, header included, page-aligned. Throws std::invalid_argument.
std::size_t ring_bytes(std::uint64_t entries, std::uint64_t entry_bytes);

class Ring {
 public:
  // `memory` holds ring_bytes(entries, entry_bytes) bytes, is 64-byte aligned and outlives the ring.
  Ring(std::byte* memory, std::uint32_t entries, std::uint32_t entry_bytes, std::uint64_t generation, bool create);

  // Producer: copies in as many of `count` entries as fit. Second: the consumer sleeps, ring its doorbell.
  std::pair<std::size_t, bool> push(const std::byte* source, std::size_t count);
  // Producer: entries that push would take now.
  std::size_t free() const;

  // Consumer: entries that pop would give now.
  std::size_t pending() const;
  // Consumer: copies out up to `limit` entries.
  std::size_t pop(std::byte* target, std::size_t limit);
  // Consumer: announces sleep and looks again. True: empty, wait. False: something came, the flag is cleared.
  bool sleep();
  // Consumer: clears the flag after waiting.
  void wake();

  std::uint32_t entry_bytes() const { return entry_bytes_; }

 private:
  std::byte* slot(std::uint64_t index) const;
  void check_identity() const;
  std::size_t checked_used(std::uint64_t tail, std::uint64_t head) const;

  RingHeader* header_;
  std::byte* slots_;
  std::uint32_t entries_;
  std::uint32_t entry_bytes_;
  std::uint64_t generation_;
  std::uint64_t head_ = 0;  // consumer's own; the shared one is a copy for the producer
  std::uint64_t tail_ = 0;  // producer's own; the shared one is a copy for the consumer
};

}  // namespace offloadd
