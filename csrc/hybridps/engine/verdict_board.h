// hybridps/engine/verdict_board.h: verdicts on groups in their Stores, for members that control messages do not reach.
//
// Owner    the engine, one for all groups.
// Threads  post() and look() from the loop; they never wait. The Store is asked on a thread of its own, made when first
//          needed, for its host may be the very one that is cut off: a call that hangs holds up nobody. A thread that is
//          still in such a call when the board goes is left behind, and touches nothing of the board's any more.
// Errors   a Store that fails is no verdict: the board stays silent, deadlines and heartbeats remain.
// Trust    what is read has been written by anyone who may write to the Store; it is decoded as foreign bytes.
#pragma once

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

/// Texts are cut to 4 KiB.
bootstrap::Bytes encode_verdict(const core::Status& verdict);
/// Nothing when the bytes are no verdict.
std::optional<core::Status> decode_verdict(std::span<const std::uint8_t> bytes);

class VerdictBoard : core::Pinned {
 public:
  struct Location {
    std::shared_ptr<bootstrap::KeyValueStore> store;
    std::string key;  // of one group, the same on all members
    core::GroupUid uid;
  };
  /// `found` runs in the board's thread, for each look() that found a verdict; never after the destructor began.
  explicit VerdictBoard(std::function<void(core::GroupUid, const core::Status&)> found);
  ~VerdictBoard();

  /// Writes it down unless there is one already: the first stays.
  void post(Location location, const core::Status& verdict);
  void look(Location location);

 private:
  struct BoardState;
  void ask(Location location, std::optional<core::Status> verdict);

  const std::shared_ptr<BoardState> state_;
};

}  // namespace hybridps::engine
