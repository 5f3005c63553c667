// hybridps/schedule/members.h: the members of a group.
//
// Model    Members are numbered: first the ranks, then the dedicated servers. A value never changes. When servers join,
//          with() makes a new value, and the holders of the old value take the new one. Copies share memory.
// Threads  constant: any thread.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/core/ids.h"

namespace hybridps::schedule {

struct Member {
  core::EngineId engine;
  std::string host;  // for messages: "host7 pid 4121"
  int region = -1;   // of a dedicated server that joins (schedule::kNoRegion: none)
};

class Members {
 public:
  Members() = default;
  explicit Members(std::vector<Member> all) {
    auto lists = std::make_shared<Lists>();
    for (Member& member : all) lists->add(std::move(member));
    lists_ = std::move(lists);
  }

  std::size_t size() const noexcept { return lists_->engines.size(); }
  core::EngineId engine(std::integral auto member) const { return engines()[static_cast<std::size_t>(member)]; }
  const std::string& host(std::integral auto member) const { return lists_->hosts[static_cast<std::size_t>(member)]; }
  /// By member.
  const std::vector<core::EngineId>& engines() const noexcept { return lists_->engines; }
  std::optional<int> find(core::EngineId engine) const {
    const auto at = std::find(engines().begin(), engines().end(), engine);
    return at == engines().end() ? std::nullopt : std::optional(static_cast<int>(at - engines().begin()));
  }
  /// These members, and then `joined`.
  Members with(const std::vector<Member>& joined) const {
    auto lists = std::make_shared<Lists>(*lists_);
    for (const Member& member : joined) lists->add(member);
    Members result;
    result.lists_ = std::move(lists);
    return result;
  }

 private:
  struct Lists {
    std::vector<core::EngineId> engines;
    std::vector<std::string> hosts;
    void add(Member member) {
      engines.push_back(member.engine);
      hosts.push_back(std::move(member.host));
    }
  };
  std::shared_ptr<const Lists> lists_ = std::make_shared<const Lists>();
};

}  // namespace hybridps::schedule
