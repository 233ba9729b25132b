#include "ring.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace offloadd {
namespace {

constexpr std::uint64_t kEntriesMax = 1u << 20;
constexpr std::uint64_t kEntryBytesMax = 4096;

bool power_of_two(std::uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

}  // namespace

std::size_t ring_bytes(std::uint64_t entries, std::uint64_t entry_bytes) {
  if (!power_of_two(entries) || entries > kEntriesMax) {
    throw std::invalid_argument("a ring's entries must be a power of two of at most 2^20");
  }
  if (entry_bytes == 0 || entry_bytes % 8 != 0 || entry_bytes > kEntryBytesMax) {
    throw std::invalid_argument("a ring's entry size must be a multiple of 8 of at most 4096 bytes");
  }
  const std::size_t bytes = sizeof(RingHeader) + entries * entry_bytes;
  return (bytes + kPage - 1) / kPage * kPage;
}

Ring::Ring(std::byte* memory, std::uint32_t entries, std::uint32_t entry_bytes, std::uint64_t generation, bool create)
    : header_(reinterpret_cast<RingHeader*>(memory)),
      slots_(memory + sizeof(RingHeader)),
      entries_(entries),
      entry_bytes_(entry_bytes),
      generation_(generation) {
  ring_bytes(entries, entry_bytes);  // throws on a geometry that cannot be
  if (reinterpret_cast<std::uintptr_t>(memory) % kCacheLine != 0) {
    throw std::invalid_argument("a ring must start on a 64-byte boundary");
  }
  if (create) {
    new (header_) RingHeader{};
    header_->generation.store(generation, std::memory_order_relaxed);
    header_->version.store(kRingVersion, std::memory_order_relaxed);
    header_->entries.store(entries, std::memory_order_relaxed);
    header_->entry_bytes.store(entry_bytes, std::memory_order_relaxed);
    // Pairs with the acquire load of the magic in check_identity(): who sees it sees the whole header.
    header_->magic.store(kRingMagic, std::memory_order_release);
    return;
  }
  check_identity();
  if (header_->version.load(std::memory_order_relaxed) != kRingVersion) {
    throw RingCorruptError("the ring has another layout version");
  }
  if (header_->entries.load(std::memory_order_relaxed) != entries ||
      header_->entry_bytes.load(std::memory_order_relaxed) != entry_bytes) {
    throw RingCorruptError("the ring has another geometry than agreed");
  }
  head_ = header_->head.load(std::memory_order_acquire);  // pairs with the release store in pop()
  tail_ = header_->tail.load(std::memory_order_acquire);  // pairs with the store in push()
  checked_used(tail_, head_);
}

std::byte* Ring::slot(std::uint64_t index) const { return slots_ + (index & (entries_ - 1)) * entry_bytes_; }

void Ring::check_identity() const {
  // Pairs with the release store of the magic in the constructor.
  if (header_->magic.load(std::memory_order_acquire) != kRingMagic) {
    throw RingCorruptError("the ring's magic number is wrong");
  }
  if (header_->generation.load(std::memory_order_relaxed) != generation_) {
    throw RingCorruptError("the ring belongs to another generation");
  }
}

std::size_t Ring::checked_used(std::uint64_t tail, std::uint64_t head) const {
  const std::uint64_t used = tail - head;  // free-running 64-bit indices: a difference is right across a wrap
  if (used > entries_) throw RingCorruptError("the ring's indices lie further apart than it has entries");
  return static_cast<std::size_t>(used);
}

std::size_t Ring::free() const {
  // Pairs with the release store of head in pop(): the consumer has finished copying out what it freed.
  const std::uint64_t head = header_->head.load(std::memory_order_acquire);
  return entries_ - checked_used(tail_, head);
}

std::pair<std::size_t, bool> Ring::push(const std::byte* source, std::size_t count) {
  const std::size_t taken = std::min(count, free());
  if (taken == 0) return {0, false};
  const std::size_t first = std::min<std::size_t>(taken, entries_ - (tail_ & (entries_ - 1)));
  std::memcpy(slot(tail_), source, first * entry_bytes_);
  std::memcpy(slots_, source + first * entry_bytes_, (taken - first) * entry_bytes_);
  tail_ += taken;
  // As a release store this pairs with the acquire loads of tail in pending() and pop(). It is sequentially consistent,
  // as are the flag's load below and both accesses in sleep(): with anything weaker (Dekker's pattern) the producer
  // could read the flag before its entry is visible while the consumer reads the tail before its flag is, and both
  // would wait. On x86 the cost is the same one fence.
  header_->tail.store(tail_, std::memory_order_seq_cst);
  if (header_->sleeping.load(std::memory_order_seq_cst) == 0) return {taken, false};
  // Whoever clears the flag rings: one doorbell per sleep, however many entries follow before the consumer is up.
  return {taken, header_->sleeping.exchange(0, std::memory_order_seq_cst) != 0};
}

std::size_t Ring::pending() const {
  check_identity();
  // Pairs with the store of tail in push(): entries below it are complete.
  return checked_used(header_->tail.load(std::memory_order_acquire), head_);
}

std::size_t Ring::pop(std::byte* target, std::size_t limit) {
  const std::size_t given = std::min(limit, pending());
  if (given == 0) return 0;
  const std::size_t first = std::min<std::size_t>(given, entries_ - (head_ & (entries_ - 1)));
  std::memcpy(target, slot(head_), first * entry_bytes_);
  std::memcpy(target + first * entry_bytes_, slots_, (given - first) * entry_bytes_);
  head_ += given;
  // Pairs with the acquire load of head in free(): the copies above are done before the producer may overwrite.
  header_->head.store(head_, std::memory_order_release);
  return given;
}

bool Ring::sleep() {
  header_->sleeping.store(1, std::memory_order_seq_cst);
  // Sequentially consistent against push(): either this load sees the new tail, or push() sees the flag.
  const std::uint64_t tail = header_->tail.load(std::memory_order_seq_cst);
  if (checked_used(tail, head_) == 0) return true;
  wake();
  return false;
}

void Ring::wake() { header_->sleeping.store(0, std::memory_order_seq_cst); }

}  // namespace offloadd
