// hybridps/bootstrap/node_shelf.h: where one member of a node puts what it has read from the store, for the others.
//
// Threads  one at a time. Nothing waits.
// Errors   none: a member that finds nothing reads the store itself.
// Trust    a shelf is not the store: a reader takes only what has the digest that the store names (Head).
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "hybridps/bootstrap/key_value.h"
#include "hybridps/core/pinned.h"

namespace hybridps::bootstrap {

class NodeShelf : core::Pinned {
 public:
  virtual ~NodeShelf() = default;
  /// At most kDigestBytesMax bytes. Nobody can find another value with the same digest.
  virtual Bytes digest_of(std::span<const std::uint8_t> value) const = 0;
  /// kOurs, for one caller on the node: it should read the value, put() it, and call serve() again and again. kNone:
  /// there is no shelf.
  enum class ShelfClaim { kOurs, kOthers, kNone };
  virtual ShelfClaim claim(std::uint64_t name) = 0;
  /// After a claim.
  virtual void put(std::uint64_t name, std::span<const std::uint8_t> value) = 0;
  virtual void serve() {}
  /// After somebody else's claim. Nothing: perhaps later. No bytes: never.
  virtual std::optional<Bytes> look(std::uint64_t name) = 0;
  /// After a claim: takes away what is there.
  virtual void clear(std::uint64_t name) = 0;
};

}  // namespace hybridps::bootstrap
