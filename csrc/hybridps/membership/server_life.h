// hybridps/membership/server_life.h: the life of each dedicated server of a group, as one rank knows it.
//
//            absent --> asked --> met --> member --> reported --> gone             on ranks other than rank 0
//            absent --> asked --> met --> member --> leaving --> released --> gone on rank 0
//
// Model    One row per server, by member number. A server that is no member yet is a newcomer: the newcomers of one
//          attempt have the numbers behind those of the members. They become members together, or they are all
//          forgotten, and the numbers are given again. A member never goes back to an earlier phase. A server that was
//          given up but is alive joins again, with a new member number (engine/server_joins.h).
// Threads  the engine's progress thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/schedule/members.h"

namespace hybridps::membership {

class ServerLife {
 public:
  enum class LifePhase : unsigned char {
    kAbsent,  // expected in the attempt under way; this rank has no record of the server yet
    kAsked,   // this rank has sent the server an echo on each path
    kMet,     // both echoes have come back
    kMember,
    kReported,  // this rank has found that the server is gone, and has told rank 0
    kLeaving,   // the server has asked to leave
    kReleased,  // all operations in which the server owned a span are over here, and the server was told
    kGone,      // the group goes on without the server
  };
  enum EchoPath : unsigned { kData = 1, kControl = 2 };

  /// Members below `ranks` are ranks. The `servers` servers behind them are members.
  ServerLife(int ranks, int servers)
      : ranks_(ranks), rows_(static_cast<std::size_t>(servers)), members_(rows_.size()) {}

  /// A rank is a member.
  LifePhase of(int member) const noexcept {
    const auto at = static_cast<std::size_t>(member - ranks_);
    return member < ranks_ ? LifePhase::kMember : at < rows_.size() ? rows_[at].phase : LifePhase::kAbsent;
  }
  bool is_gone(int member) const noexcept { return of(member) == LifePhase::kGone; }
  bool is_leaving(int member) const noexcept {
    return of(member) == LifePhase::kLeaving || of(member) == LifePhase::kReleased;
  }
  /// The server must own nothing in new versions.
  bool is_out(int member) const noexcept { return of(member) >= LifePhase::kLeaving; }
  /// Nobody waits for an answer of this member or newcomer.
  bool is_missing(int member) const noexcept { return is_gone(member) || lost_.count(member) > 0; }
  bool any(LifePhase phase) const noexcept {
    return std::any_of(rows_.begin(), rows_.end(), [phase](const Row& row) { return row.phase == phase; });
  }
  /// For members. False: the server is in this phase or a later phase already, or is no dedicated server.
  bool advance(int member, LifePhase to) {
    if (member < ranks_ || member >= newcomers_begin() || of(member) >= to) return false;
    row(member).phase = to;
    return true;
  }

  // Newcomers have the member numbers from newcomers_begin() to newcomers_end().
  int newcomers_begin() const noexcept { return ranks_ + static_cast<int>(members_); }
  int newcomers_end() const noexcept { return ranks_ + static_cast<int>(rows_.size()); }
  std::size_t newcomers() const noexcept { return rows_.size() - members_; }
  bool are_all_met() const noexcept {
    return members_ < rows_.size() && std::all_of(
                                          rows_.begin() + static_cast<std::ptrdiff_t>(members_), rows_.end(),
                                          [](const Row& row) { return row.phase == LifePhase::kMet; });
  }
  /// The first newcomer that this rank has not met; newcomers_end() if it has met all.
  int first_not_met() const noexcept {
    const auto from = rows_.begin() + static_cast<std::ptrdiff_t>(members_);
    return ranks_ + static_cast<int>(
                        std::find_if(from, rows_.end(), [](const Row& row) { return row.phase != LifePhase::kMet; }) -
                        rows_.begin());
  }
  /// An attempt begins.
  void expect(std::size_t newcomers) { rows_.resize(members_ + newcomers, Row{.phase = LifePhase::kAbsent}); }
  /// Whether this is the first newcomer without a record.
  bool is_next(int member) const noexcept {
    return member >= newcomers_begin() && member < newcomers_end() && of(member) == LifePhase::kAbsent &&
           (member == newcomers_begin() || of(member - 1) != LifePhase::kAbsent);
  }
  void ask(int member, schedule::Member who) { row(member) = {LifePhase::kAsked, std::move(who)}; }
  core::EngineId engine_of(int newcomer) const { return rows_[static_cast<std::size_t>(newcomer - ranks_)].who.engine; }
  std::optional<int> find_newcomer(core::EngineId engine) const;
  /// True: with this echo, all newcomers are met.
  bool on_echo(int newcomer, EchoPath path);
  /// This rank has found that the newcomer is gone. False: known already.
  bool lose(int newcomer, core::Status cause) { return lost_.try_emplace(newcomer, std::move(cause)).second; }
  /// The newcomers become members: who they are.
  std::vector<schedule::Member> admit();
  /// The newcomers that were lost before they became members, and why. Call this after admit(), once.
  std::map<int, core::Status> take_lost() { return std::exchange(lost_, {}); }
  /// Forgets all newcomers: the engines of those with a record.
  std::vector<core::EngineId> part();

 private:
  struct Row {
    LifePhase phase = LifePhase::kMember;
    schedule::Member who{};  // of a newcomer
    unsigned echoes = 0;     // EchoPath bits of the echoes that have come back
  };
  Row& row(int member) { return rows_[static_cast<std::size_t>(member - ranks_)]; }

  int ranks_;
  std::vector<Row> rows_;             // members, then newcomers
  std::size_t members_;               // how many rows are of members
  std::map<int, core::Status> lost_;  // newcomers
};

}  // namespace hybridps::membership
