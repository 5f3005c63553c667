// hybridps/engine/settings.h: the settings of a process as a job checks them; `hybridps doctor` checks the same.
//
// Threads  any; reads files, the kernel's tables and names' addresses.
#pragma once

#include <string>
#include <vector>

#include "hybridps/core/config.h"
#include "hybridps/core/status.h"
#include "hybridps/door/door.h"
#include "hybridps/engine/interface.h"

namespace hybridps::engine {

/// What the settings come to.
struct CheckedSettings {
  std::vector<door::Address> servers;
  std::string token;
  Interfaces interfaces;
  /// What is wrong with them, each naming its setting. A job ends with the first one.
  std::vector<core::Status> problems;
};
CheckedSettings check_settings(const core::Config& config, LocalRank place = local_rank());

/// Asks all dedicated servers at the same time whether they would serve this job: what is wrong with each that would
/// not. Waits as long as a job does.
std::vector<core::Status> ask_servers(const CheckedSettings& settings);

}  // namespace hybridps::engine
