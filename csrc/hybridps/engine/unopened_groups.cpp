#include "hybridps/engine/unopened_groups.h"

#include <algorithm>

#include "hybridps/core/log.h"
#include "hybridps/core/text.h"

namespace hybridps::engine {
namespace {

// The number of groups to remember as having lost messages.
constexpr std::size_t kDroppedKept = 65536;

}  // namespace

UnopenedGroups::Messages UnopenedGroups::keep(KeptMessage kept, core::TimePoint now) {
  Messages dropped;
  if (dropped_.count(kept.message.from.uid) > 0) {
    dropped.push_back(std::move(kept));
    return dropped;
  }
  const auto [found, is_new] = groups_.try_emplace(kept.message.from.uid);
  KeptMessages& group = found->second;
  if (is_new) {
    group.since = now;
    next_due_ = std::min(next_due_, now + limits_.keep_for);
  }
  ++messages_;
  bytes_ += kept.payload.bytes();
  group.bytes += kept.payload.bytes();
  group.messages.push_back(std::move(kept));
  if (messages_ <= limits_.messages && bytes_ <= limits_.bytes) return dropped;
  const bool by_number = messages_ > limits_.messages;
  const auto largest = std::max_element(groups_.begin(), groups_.end(), [by_number](const auto& a, const auto& b) {
    return by_number ? a.second.messages.size() < b.second.messages.size() : a.second.bytes < b.second.bytes;
  });
  return drop(largest, "more than " + std::to_string(limits_.messages) + " messages or " +
                           std::to_string(limits_.bytes) + " bytes had come for groups that were not open there yet");
}

UnopenedGroups::TakenMessages UnopenedGroups::take(core::GroupUid uid) {
  TakenMessages taken;
  if (const auto why = dropped_.find(uid); why != dropped_.end()) {
    taken.why_incomplete = std::move(why->second);
    dropped_.erase(why);
    std::erase(dropped_order_, uid);
  }
  if (const auto found = groups_.find(uid); found != groups_.end()) {
    count_out(found->second);
    taken.messages = std::move(found->second.messages);
    groups_.erase(found);
  }
  return taken;
}

UnopenedGroups::Messages UnopenedGroups::expire(core::TimePoint now) {
  Messages dropped;
  if (now < next_due_) return dropped;
  next_due_ = core::TimePoint::max();
  for (auto at = groups_.begin(); at != groups_.end();) {
    const auto group = at++;
    const core::TimePoint due = group->second.since + limits_.keep_for;
    if (due > now) {
      next_due_ = std::min(next_due_, due);
      continue;
    }
    Messages old = drop(group, "they had waited for " + core::format_seconds(core::to_seconds(limits_.keep_for)) +
                                   " for the group to open there");
    std::move(old.begin(), old.end(), std::back_inserter(dropped));
  }
  return dropped;
}

UnopenedGroups::Messages UnopenedGroups::drop(AllKept::iterator group, std::string why) {
  static core::LogRate rate(core::from_seconds(10));
  if (const auto others = rate.permit())
    core::log_warn("dropped ", group->second.messages.size(), " messages of group ", core::to_string(group->first),
                   ", which is not open here: ", why, ". The group fails if it opens later",
                   *others > 0 ? ". The same of " + std::to_string(*others) + " groups before it" : std::string());
  count_out(group->second);
  Messages messages = std::move(group->second.messages);
  if (dropped_.emplace(group->first, std::move(why)).second) dropped_order_.push_back(group->first);
  if (dropped_order_.size() > kDroppedKept) {
    dropped_.erase(dropped_order_.front());
    dropped_order_.pop_front();
  }
  groups_.erase(group);
  return messages;
}

void UnopenedGroups::clear() noexcept {
  groups_.clear();
  messages_ = bytes_ = 0;
  next_due_ = core::TimePoint::max();
}

void UnopenedGroups::count_out(const KeptMessages& group) noexcept {
  messages_ -= group.messages.size();
  bytes_ -= group.bytes;
}

}  // namespace hybridps::engine
