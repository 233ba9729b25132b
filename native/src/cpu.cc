#include "cpu.h"

#include <atomic>
#include <stdexcept>

namespace offloadd {
namespace {

CpuLevel detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();  // also asks the operating system whether it saves the wide registers
  if (!__builtin_cpu_supports("sse4.2")) return CpuLevel::kBaseline;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (!avx2) return CpuLevel::kSse42;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? CpuLevel::kAvx512 : CpuLevel::kAvx2;
#else
  return CpuLevel::kBaseline;
#endif
}

CpuLevel best() {
  static const CpuLevel level = detect();
  return level;
}

std::atomic<int> forced{-1};

}  // namespace

CpuLevel cpu_level() {
  const int level = forced.load(std::memory_order_relaxed);
  return level < 0 ? best() : static_cast<CpuLevel>(level);
}

const char* cpu_level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kAvx512:
      return "avx512";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kSse42:
      return "sse42";
    case CpuLevel::kBaseline:
      return "baseline";
  }
  return "baseline";
}

std::vector<CpuLevel> cpu_levels() {
  std::vector<CpuLevel> levels;
  for (int level = static_cast<int>(best()); level >= 0; --level) levels.push_back(static_cast<CpuLevel>(level));
  return levels;
}

void set_cpu_level(const std::string& name) {
  for (const CpuLevel level : cpu_levels()) {
    if (name == cpu_level_name(level)) {
      forced.store(static_cast<int>(level), std::memory_order_relaxed);
      return;
    }
  }
  throw std::invalid_argument("this CPU has no level '" + name + "'");
}

}  // namespace offloadd
