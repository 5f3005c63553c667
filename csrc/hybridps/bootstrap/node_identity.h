// hybridps/bootstrap/node_identity.h: which ranks may share memory, as a string to compare.
//
// Equal identities make a *candidate* node. The node is real once the ranks have proven it (RendezvousOptions::prove).
#pragma once

#include <cstdint>
#include <string>

#include "hybridps/core/config.h"
#include "hybridps/core/ids.h"

namespace hybridps::bootstrap {

/// HYBRIDPS_NODE ("node:<text>"), else "host:<boot id>/<ipc namespace>/<net namespace>": the kernel has shared memory
/// per IPC namespace, and abstract sockets per network namespace. With HYBRIDPS_SHM off, the engine id is added, so
/// every rank is a node of its own. At most kIdentityBytesMax (record.h) long: a longer text ends in its hash.
std::string node_identity(const core::Config& config, core::EngineId engine);

/// Stands for this machine's boot and this process's network namespace. Processes with equal values share a loopback
/// interface.
std::uint64_t machine_id();

/// Both in milliseconds since 1970, as RendezvousOptions wants them: the time now, and this process's start (0: not
/// known).
std::uint64_t wall_ms();
std::uint64_t process_started_ms();

/// This host's name, for messages only.
std::string host_name();

}  // namespace hybridps::bootstrap
