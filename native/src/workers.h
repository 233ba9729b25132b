// A persistent team of threads for kernels that split one array. The caller's thread is member 0 of every team.
//
// Used by the optimizer kernels. Threads are started once and kept; they are never joined, because the process may end
// while they wait. A forked child finds no threads and starts its own.
#pragma once

#include <cstddef>
#include <functional>

namespace offloadd {

// Runs task(member) for member 0 .. members-1 and returns when all are done. Teams of more than one member take turns;
// a team of one is a plain call. The task must not throw.
void run_team(std::size_t members, const std::function<void(std::size_t)>& task);

}  // namespace offloadd
