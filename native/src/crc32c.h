// CRC-32C (Castagnoli polynomial, RFC 3720 appendix B.4), by instruction where the CPU has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offloadd {

// Continues `value`, the checksum of what came before (0 at the start).
std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t value = 0);

}  // namespace offloadd
