#include "hybridps/membership/server_life.h"

namespace hybridps::membership {

std::optional<int> ServerLife::find_newcomer(core::EngineId engine) const {
  for (int member = newcomers_begin(); member < newcomers_end(); ++member)
    if (of(member) != LifePhase::kAbsent && engine_of(member) == engine) return member;
  return std::nullopt;
}

bool ServerLife::on_echo(int newcomer, EchoPath path) {
  Row& one = row(newcomer);
  one.echoes |= path;
  if (one.phase != LifePhase::kAsked || one.echoes != (kData | kControl)) return false;
  one.phase = LifePhase::kMet;
  return are_all_met();
}

std::vector<schedule::Member> ServerLife::admit() {
  std::vector<schedule::Member> joined;
  for (; members_ < rows_.size(); ++members_) joined.push_back(std::exchange(rows_[members_], Row{}).who);
  return joined;
}

std::vector<core::EngineId> ServerLife::part() {
  std::vector<core::EngineId> parted;
  for (int member = newcomers_begin(); member < newcomers_end(); ++member)
    if (of(member) != LifePhase::kAbsent) parted.push_back(engine_of(member));
  rows_.resize(members_);
  lost_.clear();
  return parted;
}

}  // namespace hybridps::membership
