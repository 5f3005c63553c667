#include "hybridps/membership/version.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hybridps::membership {

void Versions::add(std::uint64_t first, Version version, const schedule::Turns& turns, std::uint64_t oldest) {
  while (by_first_.size() > 1 && std::next(by_first_.begin())->first <= oldest) by_first_.erase(by_first_.begin());
  if (by_first_.begin()->first != 0) {
    auto before_all = by_first_.extract(by_first_.begin());
    before_all.key() = 0;
    by_first_.insert(std::move(before_all));
  }
  by_first_.erase(by_first_.lower_bound(first), by_first_.end());
  if (turns.pairs > 0) {
    Version other = version;
    other.number = version.number + 1;
    other.tuning = turns.b;
    for (std::uint64_t index = 0; index < turns.operations(); index += turns.block)
      if (index == 0 || turns.is_b(index) != turns.is_b(index - 1))
        by_first_.insert_or_assign(first + index, turns.is_b(index) ? other : version);
  }
  by_first_.insert_or_assign(first + turns.operations(), std::move(version));
}

std::optional<std::uint64_t> Versions::owns_nothing_from(int server) const {
  const auto last = std::find_if(by_first_.rbegin(), by_first_.rend(), [server](const auto& one) {
    const schedule::Topology& topology = one.second.topology;
    return server < topology.servers() && topology.server_weight(server) > 0.0;
  });
  if (last == by_first_.rend()) return 0;
  if (last == by_first_.rbegin()) return std::nullopt;
  return last.base()->first;
}

}  // namespace hybridps::membership
