#include "crc32c.h"

#include <array>
#include <cstring>

#include "cpu.h"
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace offloadd {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // 0x1edc6f41 with its bits reversed
using Table = std::array<std::array<std::uint32_t, 256>, 8>;

// table[k][b]: the register after byte b and then k zero bytes.
constexpr Table make_tables() {
  Table table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    table[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = table[k - 1][byte];
      table[k][byte] = (before >> 8) ^ table[0][before & 0xff];
    }
  }
  return table;
}
constexpr Table kTable = make_tables();

std::uint64_t load64(const unsigned char* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

// The register (not inverted) after `length` more bytes: eight table look-ups per eight bytes.
std::uint32_t extend_portable(std::uint32_t crc, const unsigned char* data, std::size_t length) {
  for (; length >= 8; data += 8, length -= 8) {
    const std::uint64_t word = load64(data) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kTable[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; length > 0; ++data, --length) crc = (crc >> 8) ^ kTable[0][(crc ^ *data) & 0xff];
  return crc;
}

#if defined(__x86_64__)

// Appending a fixed number of zero bytes is linear over GF(2), so it is four look-ups once tabulated.
class ZeroShift {
 public:
  explicit ZeroShift(std::size_t zero_bytes) {
    std::array<std::uint32_t, 32> image{};
    const std::array<unsigned char, 256> zeros{};
    for (std::size_t bit = 0; bit < 32; ++bit) {
      std::uint32_t crc = 1u << bit;
      for (std::size_t left = zero_bytes; left > 0;) {
        const std::size_t step = left < zeros.size() ? left : zeros.size();
        crc = extend_portable(crc, zeros.data(), step);
        left -= step;
      }
      image[bit] = crc;
    }
    for (std::size_t byte = 0; byte < 4; ++byte) {
      for (std::size_t value = 0; value < 256; ++value) {
        std::uint32_t sum = 0;
        for (std::size_t bit = 0; bit < 8; ++bit) {
          if ((value >> bit) & 1) sum ^= image[8 * byte + bit];
        }
        table_[byte][value] = sum;
      }
    }
  }
  std::uint32_t operator()(std::uint32_t crc) const {
    return table_[0][crc & 0xff] ^ table_[1][(crc >> 8) & 0xff] ^ table_[2][(crc >> 16) & 0xff] ^ table_[3][crc >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> table_;
};

// Three lanes at a time: the instruction has a latency of three cycles and a throughput of one per cycle.
template <std::size_t kLane>
__attribute__((target("sse4.2"))) std::uint64_t three_lanes(std::uint64_t crc, const unsigned char*& data,
                                                            std::size_t& length) {
  static const ZeroShift shift(kLane);
  while (length >= 3 * kLane) {
    std::uint64_t a = crc, b = 0, c = 0;
    for (std::size_t at = 0; at < kLane; at += 8) {
      a = _mm_crc32_u64(a, load64(data + at));
      b = _mm_crc32_u64(b, load64(data + kLane + at));
      c = _mm_crc32_u64(c, load64(data + 2 * kLane + at));
    }
    crc = shift(shift(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^ c;
    data += 3 * kLane;
    length -= 3 * kLane;
  }
  return crc;
}

__attribute__((target("sse4.2"))) std::uint32_t extend_sse42(std::uint32_t start, const unsigned char* data,
                                                             std::size_t length) {
  std::uint64_t crc = start;
  crc = three_lanes<8192>(crc, data, length);
  crc = three_lanes<256>(crc, data, length);
  for (; length >= 8; data += 8, length -= 8) crc = _mm_crc32_u64(crc, load64(data));
  auto narrow = static_cast<std::uint32_t>(crc);
  for (; length > 0; ++data, --length) narrow = _mm_crc32_u8(narrow, *data);
  return narrow;
}

#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t length, std::uint32_t value) {
  const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  if (cpu_level() >= CpuLevel::kSse42) return ~extend_sse42(~value, bytes, length);
#endif
  return ~extend_portable(~value, bytes, length);
}

}  // namespace offloadd
