// hybridps/bootstrap/node_shelf.h: where one member of a node puts what it has read from the store, for the others.
//
// Threads  one at a time.
// Errors   none: a member that finds nothing reads the store itself.
// Trust    files of this user only. A reader checks what it finds, as it does with values of the store.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "hybridps/bootstrap/key_value.h"
#include "hybridps/core/pinned.h"

namespace hybridps::bootstrap {

class NodeShelf : core::Pinned {
 public:
  virtual ~NodeShelf() = default;
  /// kOurs, for one caller on the node: it should read the value and put() it. kNone: there is no shelf.
  enum class ShelfClaim { kOurs, kOthers, kNone };
  virtual ShelfClaim claim(std::uint64_t name) = 0;
  /// After a claim. Without room it puts no bytes, so that the others need not wait.
  virtual void put(std::uint64_t name, std::span<const std::uint8_t> value) = 0;
  virtual std::optional<Bytes> look(std::uint64_t name) = 0;
  /// After a claim: takes away what is there.
  virtual void clear(std::uint64_t name) = 0;
};

/// Files in `folder`, which should be in memory. Files that a killed process has left are removed after ten minutes.
std::unique_ptr<NodeShelf> folder_shelf(std::string folder = "/dev/shm");

}  // namespace hybridps::bootstrap
