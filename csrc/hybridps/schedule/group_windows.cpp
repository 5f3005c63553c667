#include "hybridps/schedule/group_windows.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "hybridps/schedule/tuning.h"

namespace hybridps::schedule {
namespace {

// Bytes under way to a card: what the card carries in kWindowSeconds, at most kWindowsMax windows.
constexpr double kWindowSeconds = 0.002;
constexpr double kWindowsMax = 32;

// Steps are powers of two. Windows shrink only by two steps or more, because rates are never still.
void follow_carried(std::uint64_t& windows, double bytes_carried, std::uint64_t window_bytes) {
  const double carried = bytes_carried / static_cast<double>(window_bytes);
  const std::uint64_t step = std::bit_floor(static_cast<std::uint64_t>(std::clamp(carried, 1.0, kWindowsMax)));
  if (step > windows || 4 * step <= windows) windows = step;
}

}  // namespace

void GroupWindows::open(core::GroupUid uid, Members members, const Topology& topology) {
  close(uid);
  divide(groups_.emplace(uid, WindowGroup{std::move(members), topology}).first->second);
}

void GroupWindows::close(core::GroupUid uid) {
  const auto found = groups_.find(uid);
  if (found == groups_.end()) return;
  take_out(found->second);
  groups_.erase(found);
}

bool GroupWindows::set_shares(core::GroupUid uid, const Topology& topology) {
  const auto found = groups_.find(uid);
  if (found == groups_.end()) return false;
  found->second.topology = topology;
  divide(found->second);
  return true;
}

bool GroupWindows::set_step(core::GroupUid uid, std::uint16_t step) {
  const auto found = groups_.find(uid);
  if (found == groups_.end() || found->second.step == step) return false;
  found->second.step = step;
  divide(found->second);
  return true;
}

bool GroupWindows::follow(double rate, bool naps) {
  const auto before = std::make_pair(set_windows_, usual_windows_);
  const double carried = rate / static_cast<double>(settings_.cards) * kWindowSeconds;
  follow_carried(set_windows_, carried, settings_.window_bytes);
  follow_carried(usual_windows_, carried, core::Config::kWindowBytesUsual);
  const bool napped = std::exchange(naps_, naps);
  if (napped == naps && before == std::make_pair(set_windows_, usual_windows_)) return false;
  for (auto& [uid, group] : groups_) divide(group);
  return true;
}

void GroupWindows::add(const WindowGroup& group) {
  for (std::size_t member = 0; member < group.bytes.size(); ++member) {
    if (group.bytes[member] == 0) continue;
    OfMember& all = members_[group.members.engine(member)];
    ++all.groups[group.bytes[member]];
    all.beside_servers += group.has_servers ? 1 : 0;
  }
}

void GroupWindows::take_out(const WindowGroup& group) {
  for (std::size_t member = 0; member < group.bytes.size(); ++member) {
    if (group.bytes[member] == 0) continue;
    const auto found = members_.find(group.members.engine(member));
    OfMember& all = found->second;
    const auto window = all.groups.find(group.bytes[member]);
    if (--window->second == 0) all.groups.erase(window);
    all.beside_servers -= group.has_servers ? 1 : 0;
    if (all.groups.empty()) members_.erase(found);
  }
}

void GroupWindows::divide(WindowGroup& group) {
  take_out(group);
  std::uint64_t bytes =
      group.step == 0 ? settings_.window_bytes * set_windows_ : core::Config::kWindowBytesUsual * usual_windows_;
  // With dedicated servers, owners with unequal shares also wait for each other.
  if (naps_) bytes += (group.topology.servers() > 0 ? 2 : 1) * settings_.nap_bytes;
  if (group.step != 0) {
    // Doublings begin at the bytes that can be used: half of a window above all allowances would have no effect.
    bytes = std::min<std::uint64_t>(bytes, settings_.eager_bytes * group.topology.fan());
    bytes = group.step >= kWindowStepUsual ? bytes << (group.step - kWindowStepUsual)
                                           : bytes >> (kWindowStepUsual - group.step);
  }
  group.bytes = windows_bytes(bytes, group.topology);
  group.has_servers = group.topology.servers() > 0;
  add(group);
}

std::unordered_map<core::EngineId, GroupWindows::Window> GroupWindows::by_member() const {
  std::unordered_map<core::EngineId, Window> windows;
  for (const auto& [engine, all] : members_)
    windows.emplace(engine, Window{all.groups.begin()->first, all.beside_servers > 0});
  return windows;
}

}  // namespace hybridps::schedule
