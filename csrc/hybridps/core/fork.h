// hybridps/core/fork.h: whether an object was made in this process or came here by fork.
//
// Threads  any.
#pragma once

#include <cstdint>

namespace hybridps::core {

/// How many forks lie between this process and the one of the first call: an object that was made at another count belongs
/// to the parent, whose threads are not here. As good as comparing getpid(), without the system call.
std::uint64_t fork_generation() noexcept;

}  // namespace hybridps::core
