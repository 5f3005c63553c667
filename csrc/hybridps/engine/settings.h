// hybridps/engine/settings.h: the checks that a job makes on its settings. `hybridps doctor` makes the same checks.
//
// Threads  any; reads files and the kernel's tables, and resolves host names.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hybridps/core/config.h"
#include "hybridps/core/status.h"
#include "hybridps/admission/admission_server.h"
#include "hybridps/engine/interface.h"
#include "hybridps/tls/authority.h"

namespace hybridps::engine {

/// The result of the checks.
struct CheckedSettings {
  std::vector<admission::Address> servers;
  admission::Secret secret;
  Interfaces interfaces;
  /// The errors in the settings. Each names its setting. A job ends with the first error.
  std::vector<core::Status> problems;
  std::vector<std::string> warnings;  // settings that have no effect
};
CheckedSettings check_settings(const core::Config& config, LocalRank place = local_rank());

/// The token, and with HYBRIDPS_SECURITY=tls the authority that follows from it, or from the user's certificates.
/// kInvalidArgument: the token or a certificate cannot be used, or TLS has neither. `serves`: of a server, which takes
/// the second token of the file, too.
core::Result<admission::Secret> read_secret(const core::Config& config, bool serves = false);

/// A store for the notes of a process that cannot make an engine: sealed, if the settings ask for it and allow it.
std::shared_ptr<bootstrap::KeyValueStore> seal_as_set(std::shared_ptr<bootstrap::KeyValueStore> store);

/// Names the settings of our own TCP that are set while data or control goes through UCX. Empty: there are none.
std::string without_effect(const core::Config& config, const Interfaces& interfaces);

/// Asks all dedicated servers, all at the same time, whether they would serve this job. Returns one error for each
/// server that would not. Waits for answers as long as a job does (kServerAnswersWithin).
std::vector<core::Status> ask_servers(const CheckedSettings& settings);

}  // namespace hybridps::engine
