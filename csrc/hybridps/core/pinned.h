// hybridps/core/pinned.h: base of objects with an address that is their identity.
#pragma once

namespace hybridps::core {

/// Neither copyable nor movable.
struct Pinned {
  Pinned() = default;
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
};

}  // namespace hybridps::core
