// hybridps/membership/server_life.h: how far each dedicated server of a group is, as one rank knows it.
//
//            member --> reported --> gone        ranks but rank 0: it was found to be gone, and rank 0 was told
//            member --> leaving --> released --> gone     rank 0
//
// Model    A server never goes back: one that was given up and is alive joins as another member (engine/server_joins.h).
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
    kReported,  // this rank has told rank 0 that it is gone
    kLeaving,   // it has asked to leave
    kReleased,  // all that it owned is over here, and it was told so
    kGone,      // its group goes on without it
  };

  /// Members below `ranks` are ranks.
  explicit ServerLife(int ranks) : ranks_(ranks) {}

  LifePhase of(int member) const noexcept {
    const auto at = static_cast<std::size_t>(member - ranks_);
    return member >= ranks_ && at < phases_.size() ? phases_[at] : LifePhase::kMember;
  }
  bool is_gone(int member) const noexcept { return of(member) == LifePhase::kGone; }
  bool is_leaving(int member) const noexcept { return of(member) == LifePhase::kLeaving || of(member) == LifePhase::kReleased; }
  /// It is to own nothing in versions to come.
  bool is_out(int member) const noexcept { return of(member) >= LifePhase::kLeaving; }
  bool any(LifePhase phase) const noexcept { return std::find(phases_.begin(), phases_.end(), phase) != phases_.end(); }
  /// False: it is as far already. Of a rank nothing is kept.
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
