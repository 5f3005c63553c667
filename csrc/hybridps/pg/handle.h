// hybridps/pg/handle.h: what a process group gives to those that are to be in its next life: torch's reconfigure handle.
//
// Format   fields joined by '|', in the order of Handle; torch hands it on as it is, and people may read it.
// Order    sorted as texts, handles are in the order of the ranks that the groups were made with.
// Trust    a text of foreign origin: parse_handle() validates it.
// Threads  any.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"

namespace hybridps::pg {

struct Handle {
  int made_as_rank = 0;  // at the making of the process group; stays
  core::EngineId engine;
  std::uint64_t instance = 0;  // of the process group, random
  std::uint32_t protocol_version = 0;
  std::string torch;  // "2.15"
  std::string where;  // "host-b pid 812"
  std::string group;  // as torch names it

  bool operator==(const Handle&) const = default;
};

std::string to_text(const Handle& handle);
/// kInvalidArgument: none of hybridps.
core::Result<Handle> parse_handle(std::string_view text);

/// Whether they can make a group: all are handles, none is there twice, and protocol and torch's minor version are the same as
/// `ours`, as is the group's name. By rank.
core::Result<std::vector<Handle>> parse_members(const std::vector<std::string>& texts, const Handle& ours);
/// The same for the same members in the same order, else most certainly another: 16 hexadecimal digits.
std::string digest(const std::vector<std::string>& texts);

}  // namespace hybridps::pg
