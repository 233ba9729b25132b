// Which instruction set the kernels use. One level for the whole process, chosen at first use, forced only by tests.
#pragma once

#include <string>
#include <vector>

namespace offloadd {

enum class CpuLevel { kBaseline = 0, kSse42 = 1, kAvx2 = 2, kAvx512 = 3 };

CpuLevel cpu_level();
const char* cpu_level_name(CpuLevel level);
// Every level this CPU and operating system can run, best first.
std::vector<CpuLevel> cpu_levels();
// Throws std::invalid_argument for a level that is unknown or that this CPU lacks.
void set_cpu_level(const std::string& name);

}  // namespace offloadd
