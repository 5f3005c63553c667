// hybridps/engine/unopened_groups.h: messages of groups that are valid elsewhere and not open here yet.
//
// Bounded   in number, bytes and time. What is over a bound costs the group with the most messages all of them, so that
//           strangers and failed rendezvous take nothing from others. Such a group must fail when it opens: take() says why.
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

class UnopenedGroups {
 public:
  struct KeepLimits {
    std::size_t messages = 65536;
    std::size_t bytes = std::size_t{256} << 20;
    /// What is older waits for nobody: operations with torch's usual timeout have failed by then.
    core::Duration keep_for = std::chrono::minutes(30);
  };
  using Messages = std::vector<std::pair<wire::Message, transport::RxPayload>>;
  struct TakenMessages {
    Messages messages;
    std::string why_incomplete;  // empty: nothing was dropped
  };

  explicit UnopenedGroups(KeepLimits limits) : limits_(limits) {}

  /// Keeps it; returns what had to be dropped, of whichever group.
  Messages keep(wire::Message message, transport::RxPayload payload, core::TimePoint now);
  /// The group opens, or is over: forgets it.
  TakenMessages take(core::GroupUid uid);
  /// Drops what has waited for too long.
  Messages expire(core::TimePoint now);
  /// Lets go of everything.
  void clear() noexcept;
  /// When expire() has something to do at the earliest.
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
  std::unordered_map<core::GroupUid, std::string> dropped_;  // why
  std::deque<core::GroupUid> dropped_order_;
};

}  // namespace hybridps::engine
