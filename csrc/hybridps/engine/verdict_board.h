// hybridps/engine/verdict_board.h: verdicts on groups in their Stores, for members that control messages do not reach.
//
// Owner    the engine; one board for all groups.
// Threads  post() and look() from the loop; they never wait. A separate thread asks the Store, because the Store's host
//          may be the one that is cut off. So a call that hangs holds up nobody. The thread starts when needed and ends
//          after a second without work. If a call still hangs when the board is destroyed, the thread is left behind
//          and no longer calls `found`.
// Errors   a Store that fails is no verdict: the board stays silent, and deadlines and heartbeats remain.
// Trust    anyone who may write to the Store may have written a verdict. So verdicts are decoded as foreign bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "hybridps/bootstrap/key_value.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::engine {

struct StoredVerdict {
  core::Status status;
  core::GroupUid uid;         // of the group; 0: the writer had no roster
  std::uint64_t wall_ms = 0;  // when it was written, milliseconds since 1970; 0: not known

  /// Whether a process may believe the verdict. A restarted job uses the keys of its earlier life, whose groups had
  /// other uids. `own`: the reader's group; 0: it has no roster. `process_started_ms`: the reader's; 0: not known.
  bool is_of(core::GroupUid own, std::uint64_t process_started_ms) const noexcept;
};

/// Cuts the text to 4 KiB.
bootstrap::Bytes encode_verdict(const StoredVerdict& verdict);
/// Empty if the bytes are not a verdict.
std::optional<StoredVerdict> decode_verdict(std::span<const std::uint8_t> bytes);

class VerdictBoard : core::Pinned {
 public:
  struct Location {
    std::shared_ptr<bootstrap::KeyValueStore> store;
    std::string key;        // the group's key, the same on all members
    core::GroupUid uid;     // 0: this member has no roster
    bool is_named = false;  // the key is of one life only: no verdict there is older
  };
  /// `found` runs on the board's thread for each look() that finds a verdict, but not after the destructor began.
  explicit VerdictBoard(std::function<void(core::GroupUid, const core::Status&)> found);
  ~VerdictBoard();

  /// Writes the verdict to the Store, unless the Store has one of this life already: the first verdict stays.
  void post(Location location, const core::Status& verdict);
  /// Reads the verdict from the Store; see `found`.
  void look(Location location);

 private:
  struct BoardState;
  void ask(Location location, std::optional<core::Status> verdict);

  const std::shared_ptr<BoardState> state_;
};

}  // namespace hybridps::engine
