// hybridps/membership/server_life.h: the phase of each dedicated server of a group, as one rank knows it.
//
//            member --> reported --> gone                 on ranks other than rank 0
//            member --> leaving --> released --> gone     on rank 0
//
// Model    A server never goes back to an earlier phase. A server that was given up but is alive joins again, with a
//          new member number (engine/server_joins.h).
// Threads  the engine's progress thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace hybridps::membership {

class ServerLife {
 public:
  enum class LifePhase : unsigned char {
    kMember,
    kReported,  // this rank has found that the server is gone, and has told rank 0
    kLeaving,   // the server has asked to leave
    kReleased,  // all operations in which the server owned a span are over here, and the server was told
    kGone,      // the group goes on without the server
  };

  /// Members below `ranks` are ranks.
  explicit ServerLife(int ranks) : ranks_(ranks) {}

  LifePhase of(int member) const noexcept {
    const auto at = static_cast<std::size_t>(member - ranks_);
    return member >= ranks_ && at < phases_.size() ? phases_[at] : LifePhase::kMember;
  }
  bool is_gone(int member) const noexcept { return of(member) == LifePhase::kGone; }
  bool is_leaving(int member) const noexcept {
    return of(member) == LifePhase::kLeaving || of(member) == LifePhase::kReleased;
  }
  /// The server must own nothing in new versions.
  bool is_out(int member) const noexcept { return of(member) >= LifePhase::kLeaving; }
  bool any(LifePhase phase) const noexcept { return std::find(phases_.begin(), phases_.end(), phase) != phases_.end(); }
  /// False: the server is in this phase or a later phase already, or `member` is a rank.
  bool advance(int member, LifePhase to) {
    if (member < ranks_ || of(member) >= to) return false;
    const auto at = static_cast<std::size_t>(member - ranks_);
    if (phases_.size() <= at) phases_.resize(at + 1, LifePhase::kMember);
    phases_[at] = to;
    return true;
  }

 private:
  int ranks_;
  std::vector<LifePhase> phases_;  // by server
};

}  // namespace hybridps::membership
