// hybridps/engine/unopened_groups.h: messages of groups that are valid at other ranks and not open here yet.
//
// Bounded   in number, bytes and time. Over a bound, the group with the most messages or bytes loses all its messages.
//           So strangers and failed rendezvous take nothing from other groups. A group that lost messages must fail
//           when it opens: take() gives the reason.
// Threads   the progress thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/transport/transport.h"
#include "hybridps/wire/message.h"

namespace hybridps::engine {

/// Whom a message came from, as its transport knows it.
struct Origin {
  transport::Transport* by = nullptr;
  core::EngineId from;  // see transport::Receiver::on_message
};

class UnopenedGroups {
 public:
  struct KeepLimits {
    std::size_t messages = 65536;
    std::size_t bytes = std::size_t{256} << 20;
    /// Older messages are useless: operations with torch's usual timeout have failed by then.
    core::Duration keep_for = std::chrono::minutes(30);
  };
  struct KeptMessage {
    wire::Message message;
    transport::RxPayload payload;
    Origin origin;
  };
  using Messages = std::vector<KeptMessage>;
  struct TakenMessages {
    Messages messages;
    std::string why_incomplete;  // empty: nothing was dropped
  };

  explicit UnopenedGroups(KeepLimits limits) : limits_(limits) {}

  /// Keeps the message. Returns the messages that had to be dropped, of any group.
  Messages keep(KeptMessage kept, core::TimePoint now);
  /// Returns and forgets what is kept of a group. Call it when the group opens or is over.
  TakenMessages take(core::GroupUid uid);
  /// Returns the messages that have waited for too long, and forgets them.
  Messages expire(core::TimePoint now);
  /// Drops all kept messages.
  void clear() noexcept;
  /// The earliest time when expire() has something to do.
  core::TimePoint next_due() const noexcept { return next_due_; }

 private:
  struct KeptMessages {
    Messages messages;
    std::size_t bytes = 0;
    core::TimePoint since;
  };
  using AllKept = std::unordered_map<core::GroupUid, KeptMessages>;

  Messages drop(AllKept::iterator group, std::string why);
  void count_out(const KeptMessages& group) noexcept;

  const KeepLimits limits_;
  AllKept groups_;
  std::size_t messages_ = 0;
  std::size_t bytes_ = 0;
  core::TimePoint next_due_ = core::TimePoint::max();
  std::unordered_map<core::GroupUid, std::string> dropped_;  // the reason, by group
  std::deque<core::GroupUid> dropped_order_;
};

}  // namespace hybridps::engine
