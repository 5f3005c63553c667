// hybridps/schedule/group_windows.h: how many bytes may be under way to each member of the groups of an engine.
//
// Model    All members that send to one card at a time share one window: the one that is set, or what the card carries in 2 ms. Beyond
//          what the card's queue holds, more only makes the switch drop. What owners grant chunk by chunk comes on top.
//          - A group divides the window among its members by what an allreduce sends to each (windows_bytes()).
//          - A plan version may have a wider or narrower window (Tuning::window_step).
//          - Threads that nap read later: windows are wider by what arrives meanwhile.
//          - Of several groups with one member the least counts: operations of all may meet at one card.
// Source   figures: docs/decisions/0007, 0008, 0016, 0020.
// Threads  one at a time.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "hybridps/core/config.h"
#include "hybridps/core/ids.h"
#include "hybridps/schedule/plan.h"

namespace hybridps::schedule {

class GroupWindows {
 public:
  struct Settings {
    std::uint64_t window_bytes = core::Config::kWindowBytesUsual;
    std::uint64_t eager_bytes = 512 * 1024;  // that each member allows, whatever the window
    std::size_t cards = 1;
    std::uint64_t nap_bytes = 0;  // that arrive while both sides nap
  };
  struct Members {
    std::vector<core::EngineId> engines;  // by group rank, then the dedicated servers
    Topology topology;
    std::uint16_t step = 0;              // Tuning::window_step
    std::vector<std::uint64_t> bytes{};  // by member; 0: on the same node
  };
  struct Window {
    std::uint64_t bytes = 0;
    bool beside_servers = false;  // dedicated servers have a part in a group with it
  };

  explicit GroupWindows(Settings settings) : settings_(settings) {}

  const std::map<core::GroupUid, Members>& groups() const noexcept { return groups_; }
  bool naps() const noexcept { return naps_; }

  void open(core::GroupUid uid, std::vector<core::EngineId> members, const Topology& topology);
  /// They get windows with the next set_shares().
  void add_members(core::GroupUid uid, const std::vector<core::EngineId>& servers);
  void close(core::GroupUid uid) { groups_.erase(uid); }

  // True: windows are not what they were.
  bool set_shares(core::GroupUid uid, const Topology& topology);
  bool set_step(core::GroupUid uid, std::uint16_t step);
  /// `rate`: bytes/s through all cards.
  bool follow(double rate, bool naps);

  std::unordered_map<core::EngineId, Window> by_member() const;

 private:
  void divide(Members& group) const;

  const Settings settings_;
  std::map<core::GroupUid, Members> groups_;
  std::uint64_t set_windows_ = 1;    // times the window that is set
  std::uint64_t usual_windows_ = 1;  // times the usual one, for groups whose window is tuned
  bool naps_ = false;
};

}  // namespace hybridps::schedule
