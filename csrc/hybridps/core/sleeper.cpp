#include "hybridps/core/sleeper.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cstdint>

namespace hybridps::core {

EventFd::~EventFd() {
  if (fd_ >= 0) ::close(fd_);
}

bool EventFd::open() noexcept {
  if (fd_ < 0) fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return fd_ >= 0;
}

void EventFd::signal() const noexcept {
  if (fd_ < 0) return;
  const std::uint64_t one = 1;
  (void)!::write(fd_, &one, sizeof one);  // a full eventfd is readable anyway
}

void EventFd::drain() const noexcept {
  if (fd_ < 0) return;
  std::uint64_t count = 0;
  (void)!::read(fd_, &count, sizeof count);
}

FdSet::~FdSet() {
  if (fd_ >= 0) ::close(fd_);
}

bool FdSet::open() noexcept {
  if (fd_ < 0) fd_ = ::epoll_create1(EPOLL_CLOEXEC);
  return fd_ >= 0;
}

bool FdSet::watch(int fd) const noexcept {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  return ::epoll_ctl(fd_, EPOLL_CTL_ADD, fd, &event) == 0;
}

void FdSet::unwatch(int fd) const noexcept { (void)::epoll_ctl(fd_, EPOLL_CTL_DEL, fd, nullptr); }

bool Sleeper::open() noexcept {
  if (fds_.open() && wake_.open() && !is_watched_) is_watched_ = fds_.watch(wake_.get());
  return is_watched_;
}

void Sleeper::sleep(int timeout_ms) const noexcept {
  std::array<epoll_event, 16> events;
  const int got = ::epoll_wait(fds_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  for (int i = 0; i < got; ++i)
    if (events[static_cast<std::size_t>(i)].data.fd == wake_.get()) wake_.drain();
}

}  // namespace hybridps::core
