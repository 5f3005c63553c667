// hybridps/schedule/group_windows.h: how many bytes may be under way to each member of the groups of an engine.
//
// Model    All members that send to one card at a time share one window: the window that is set, or more, up to what
//          the card carries in 2 ms. More bytes than the card's queue holds only make the switch drop packets. Chunks
//          that owners grant one by one come on top.
//          - An uplink between regions that carries few streams has four windows.
//          - A group divides the window among its members by what an allreduce sends to each (windows_bytes()).
//          - A plan version may have a wider or narrower window (Tuning::window_step).
//          - Threads that nap read later: windows grow by the bytes that arrive meanwhile.
//          - A member of several groups gets its smallest window: operations of all groups may meet at one card.
// Source   figures: docs/decisions/flow-control.md (decisions 7, 8, 16, 20).
// Threads  not thread-safe: one thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/config.h"
#include "hybridps/core/ids.h"
#include "hybridps/schedule/members.h"
#include "hybridps/schedule/plan.h"

namespace hybridps::schedule {

class GroupWindows {
 public:
  struct Settings {
    std::uint64_t window_bytes = core::Config::kWindowBytesUsual;
    std::uint64_t eager_bytes = 512 * 1024;  // allowance of each member, whatever the window
    std::size_t cards = 1;
    std::uint64_t nap_bytes = 0;  // bytes that arrive while both sides nap
  };
  struct WindowGroup {
    Members members;
    Topology topology;
    std::uint16_t step = 0;              // Tuning::window_step
    std::vector<std::uint64_t> bytes{};  // by member; 0: on the same node
    bool has_servers = false;            // when `bytes` was reckoned
  };
  struct Window {
    std::uint64_t bytes = 0;
    bool beside_servers = false;  // the member is in a group with dedicated servers
  };

  explicit GroupWindows(Settings settings) : settings_(settings) {}

  const std::map<core::GroupUid, WindowGroup>& groups() const noexcept { return groups_; }
  bool naps() const noexcept { return naps_; }

  void open(core::GroupUid uid, Members members, const Topology& topology);
  /// Servers have joined. They get windows with the next set_shares().
  void set_members(core::GroupUid uid, Members members) { groups_.at(uid).members = std::move(members); }
  void close(core::GroupUid uid);

  // These return true if the windows may have changed.
  bool set_shares(core::GroupUid uid, const Topology& topology);
  bool set_step(core::GroupUid uid, std::uint16_t step);
  /// Adapts windows to `rate`, bytes/s through all cards, and to naps.
  bool follow(double rate, bool naps);

  std::unordered_map<core::EngineId, Window> by_member() const;

 private:
  /// The windows of one member, in all its groups.
  struct OfMember {
    std::map<std::uint64_t, std::size_t> groups;  // by window
    std::size_t beside_servers = 0;               // groups with dedicated servers
  };

  void divide(WindowGroup& group);
  /// Adds the group's windows to those of its members, or takes them out.
  void add(const WindowGroup& group);
  void take_out(const WindowGroup& group);

  const Settings settings_;
  std::map<core::GroupUid, WindowGroup> groups_;
  std::unordered_map<core::EngineId, OfMember> members_;
  std::uint64_t set_windows_ = 1;    // factor of the window that is set
  std::uint64_t usual_windows_ = 1;  // factor of the usual window, for groups with a tuned window
  bool naps_ = false;
};

}  // namespace hybridps::schedule
