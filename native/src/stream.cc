// The yardstick for adam_step: the same streams with next to no arithmetic, so that only memory bandwidth is measured.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "adam.h"
#include "workers.h"

namespace offloadd {
namespace {

struct Streams {
  float* a;
  float* b;
  float* c;
  const std::uint16_t* in;
  std::uint16_t* out;  // null with three write streams
};

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void pass(const Streams& s, std::size_t first, std::size_t last) {
  float* __restrict a = s.a;
  float* __restrict b = s.b;
  float* __restrict c = s.c;
  const std::uint16_t* __restrict in = s.in;
  std::uint16_t* __restrict out = s.out;
  for (std::size_t i = first; i < last; ++i) {
    const float x = static_cast<float>(in[i]);
    a[i] = a[i] + x;
    b[i] = b[i] + x;
    c[i] = c[i] + x;
  }
  if (out == nullptr) return;
  for (std::size_t i = first; i < last; ++i) out[i] = in[i];
}

}  // namespace

double stream_copy_bytes(std::size_t threads, std::size_t bytes, int writes) {
  if (writes != 3 && writes != 4) throw std::invalid_argument("the yardstick has 3 or 4 write streams");
  threads = std::clamp<std::size_t>(threads, 1, 512);
  // Per element: three fp32 arrays read and written, 16 bits read and, with four writes, 16 bits written.
  const std::size_t per_element = 3 * 8 + 2 + (writes == 4 ? 2 : 0);
  const std::size_t count = std::max<std::size_t>(bytes / 16, 4096);
  std::vector<float> a(count), b(count), c(count);
  std::vector<std::uint16_t> in(count, 1), out(writes == 4 ? count : 0);
  const Streams streams{a.data(), b.data(), c.data(), in.data(), writes == 4 ? out.data() : nullptr};
  constexpr std::size_t kTile = 1024;  // the copy of a tile finds its input still in the first-level cache
  const auto once = [&] {
    run_team(threads, [&](std::size_t member) {
      const std::size_t last = count * (member + 1) / threads;
      for (std::size_t at = count * member / threads; at < last; at += kTile) {
        pass(streams, at, std::min(at + kTile, last));
      }
    });
  };
  once();  // pages in
  double best = 1e30;
  for (int round = 0; round < 3; ++round) {
    const auto start = std::chrono::steady_clock::now();
    once();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return static_cast<double>(count * per_element) / best;
}

}  // namespace offloadd
