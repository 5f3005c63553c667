// hybridps/core/fork.h: whether an object was made in this process or came here by fork.
//
// Threads  any.
#pragma once

#include <cstdint>

namespace hybridps::core {

/// The number of forks between the process of the first call and this process. An object made at another number belongs
/// to the parent, and the parent's threads are not here. As good as comparing getpid(), without the system call.
std::uint64_t fork_generation() noexcept;

}  // namespace hybridps::core
