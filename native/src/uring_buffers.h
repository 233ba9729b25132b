// The table of registered buffers of an io_uring, one entry at a time, for rings set up by anyone.
//
// Replacing one entry pins one buffer; replacing the whole table would pin every arena again.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offloadd {

// Makes an empty table (Linux 5.19+). std::system_error on refusal.
void uring_reserve_buffers(int ring_fd, unsigned slots);
// Fills one entry with memory (at most 1 GiB; Linux 5.13+), or empties it: address 0, length 0. std::system_error on
// refusal; ENOMEM means the limit on locked memory.
void uring_set_buffer(int ring_fd, unsigned slot, std::uint64_t address, std::size_t length);

}  // namespace offloadd
