#include "workers.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace offloadd {
namespace {

constexpr std::size_t kMembersMax = 512;

class Team {
 public:
  void run(std::size_t members, const std::function<void(std::size_t)>& task) {
    const std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    for (; started_ + 1 < members; ++started_) std::thread([this, member = started_ + 1] { serve(member); }).detach();
    task_ = &task;
    members_ = members;
    busy_ = members - 1;
    ++round_;
    lock.unlock();
    begin_.notify_all();
    task(0);
    lock.lock();
    end_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void serve(std::size_t member) {
    std::unique_lock<std::mutex> lock(mutex_);
    // A thread is started while its first round is being set up, under the same lock.
    std::uint64_t seen = round_ - 1;
    for (;;) {
      begin_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (member >= members_) continue;
      const auto* task = task_;
      lock.unlock();
      (*task)(member);
      lock.lock();
      if (--busy_ == 0) end_.notify_one();
    }
  }

  std::mutex turn_;
  std::mutex mutex_;
  std::condition_variable begin_, end_;
  const std::function<void(std::size_t)>* task_ = nullptr;
  std::size_t members_ = 0, busy_ = 0, started_ = 0;
  std::uint64_t round_ = 0;
};

Team& team() {
  // Replaced after a fork: the parent's threads and the state of its locks do not exist here. The old one is left
  // alone, since nothing of it can be destroyed safely.
  static std::mutex guard;
  static Team* current = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(guard);
  if (current == nullptr || owner != ::getpid()) {
    current = new Team;
    owner = ::getpid();
  }
  return *current;
}

}  // namespace

void run_team(std::size_t members, const std::function<void(std::size_t)>& task) {
  members = std::clamp<std::size_t>(members, 1, kMembersMax);
  if (members == 1) {
    task(0);
    return;
  }
  team().run(members, task);
}

}  // namespace offloadd
