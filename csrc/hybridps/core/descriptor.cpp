#include "hybridps/core/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "hybridps/core/fork.h"

namespace hybridps::core {
namespace {

// Process-wide by nature: fork() copies the process, not an engine.
struct Table {
  std::mutex mutex;
  std::vector<int> descriptors;
};

Table& table();

void before_fork() { table().mutex.lock(); }
void after_fork_in_parent() { table().mutex.unlock(); }
void after_fork_in_child() {
  for (int fd : table().descriptors) ::close(fd);
  table().descriptors.clear();
  table().mutex.unlock();
}

Table& table() {
  static Table* const instance = [] {
    auto* made = new Table;  // never destroyed: the handlers outlive every static destructor
    made->descriptors.reserve(64);
    return made;
  }();
  static const int registered = ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  static_cast<void>(registered);
  return *instance;
}

}  // namespace

ForkLock::ForkLock() : lock_(table().mutex) {}

Descriptor::Descriptor(const ForkLock& /*lock*/, int fd) : fd_(fd), born_(core::fork_generation()) {
  if (fd_ >= 0) table().descriptors.push_back(fd_);
}

void Descriptor::reset() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || born_ != core::fork_generation()) return;
  const std::lock_guard lock(table().mutex);
  auto& all = table().descriptors;
  if (auto found = std::find(all.begin(), all.end(), fd); found != all.end()) {
    *found = all.back();
    all.pop_back();
  }
  ::close(fd);
}

}  // namespace hybridps::core
