#include "hybridps/core/spinning.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace hybridps::core {

std::optional<CoreTime> core_time_of_this_thread() noexcept {
  const int fd = ::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  std::array<char, 96> text{};
  const ssize_t got = ::read(fd, text.data(), text.size() - 1);
  ::close(fd);
  long long ran = 0;
  long long in_line = 0;
  if (got <= 0 || std::sscanf(text.data(), "%lld %lld", &ran, &in_line) != 2) return std::nullopt;
  if (ran == 0) return std::nullopt;  // the file is there, but the kernel does not count
  return CoreTime{static_cast<int>(syscall(SYS_gettid)), std::chrono::nanoseconds(ran),
                  std::chrono::nanoseconds(in_line)};
}

bool Spinning::look_again(TimePoint now) noexcept {
  if (idle_since_ == TimePoint::max()) idle_since_ = now;
  if (chooses_ && now - looked_at_ >= kLookAtCoresEvery) look_at_cores(now);
  return spins_ && now - idle_since_ < most_;
}

void Spinning::end_wait(TimePoint now) noexcept {
  const Duration waited = now - idle_since_;
  idle_since_ = TimePoint::max();
  if (!chooses_) return;
  ++waits_;
  short_ += waited <= kShort * most_ ? 1 : 0;
  if (waits_ < kWaits) return;
  const bool pays = 4 * short_ >= 3 * waits_;
  waits_ = short_ = 0;
  if (spins_ && !pays) {
    stop(now);
  } else if (!spins_ && pays && core_is_free_ && now >= may_spin_at_) {
    spins_ = true;
    spins_since_ = now;
  }
}

void Spinning::look_at_cores(TimePoint now) noexcept {
  looked_at_ = now;
  const std::optional<CoreTime> seen = read_();
  if (!seen) {
    core_is_free_ = false;
  } else if (seen->thread == seen_.thread) {  // else there are no earlier values to compare with
    const Duration ran = seen->ran - seen_.ran;
    const Duration in_line = seen->stood_in_line - seen_.stood_in_line;
    if (ran + in_line >= kCountedLeast) core_is_free_ = to_seconds(in_line) <= kInLineMost * to_seconds(ran + in_line);
  }
  seen_ = seen.value_or(CoreTime{});
  if (spins_ && !core_is_free_) stop(now);
}

void Spinning::stop(TimePoint now) noexcept {
  if (now - spins_since_ >= kPauseMost) pause_ = kPauseLeast;
  spins_ = false;
  waits_ = short_ = 0;
  may_spin_at_ = now + pause_;
  pause_ = std::min(2 * pause_, kPauseMost);
}

}  // namespace hybridps::core
