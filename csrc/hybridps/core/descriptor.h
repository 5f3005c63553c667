// hybridps/core/descriptor.h: file descriptors that a forked child does not keep.
//
// Problem  A socket is closed only with its last copy. DataLoader children inherit copies, so a killed parent
//          would look alive to its peers for as long as a child lives.
// Model    A process-wide table of descriptors; a pthread_atfork handler closes all of them in every forked
//          child and counts the fork, so that objects copied into the child know that they own nothing there.
// Threads  any. Descriptors are made under the table's lock, which fork() takes too: none slips into a child
//          untracked.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

namespace hybridps::core {

/// Holds fork() off while descriptors are made and adopted. Keep it short, never fork inside.
class ForkLock {
 public:
  ForkLock();

 private:
  std::unique_lock<std::mutex> lock_;
};

/// Owner of one descriptor; the destructor closes it, but not in a forked child, where it is closed already.
class Descriptor {
 public:
  Descriptor() = default;
  /// Takes `fd` (negative: holds nothing), made under the same lock.
  Descriptor(const ForkLock& lock, int fd);
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), born_(other.born_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      born_ = other.born_;
    }
    return *this;
  }
  ~Descriptor() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
  std::uint64_t born_ = 0;
};

}  // namespace hybridps::core
