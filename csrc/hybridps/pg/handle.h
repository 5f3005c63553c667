// hybridps/pg/handle.h: torch's reconfigure handle: what a process group gives to the processes of its next life.
//
// Format   fields joined by '|', in the order of Handle. torch passes the text on unchanged, and people may read it.
// Order    handles that are sorted as texts are in the order of the ranks that the process groups were made with.
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
  int made_as_rank = 0;  // rank when the process group was made; never changes
  core::EngineId engine;
  std::uint64_t instance = 0;  // random number of the process group
  std::uint32_t protocol_version = 0;
  std::string torch;  // "2.15"
  std::string where;  // "host-b pid 812"
  std::string group;  // as torch names it

  bool operator==(const Handle&) const = default;
};

std::string to_text(const Handle& handle);
/// kInvalidArgument: not a handle of hybridps.
core::Result<Handle> parse_handle(std::string_view text);

/// The members of a group, by rank. kInvalidArgument: no text, a text that is no handle, two handles of one process, or
/// another protocol version, torch minor version or group name than in `ours`.
core::Result<std::vector<Handle>> parse_members(const std::vector<std::string>& texts, const Handle& ours);
/// 16 hexadecimal digits: the same for the same texts in the same order, else almost certainly different.
std::string digest(const std::vector<std::string>& texts);

}  // namespace hybridps::pg
