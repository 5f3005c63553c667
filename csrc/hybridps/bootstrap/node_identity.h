// hybridps/bootstrap/node_identity.h: which ranks may share memory, as a string to compare.
//
// Equal identities make a *candidate* node; the node is real once the ranks have proven it (rendezvous.h, Prove).
#pragma once

#include <cstdint>
#include <string>

#include "hybridps/core/config.h"
#include "hybridps/core/ids.h"

namespace hybridps::bootstrap {

/// HYBRIDPS_NODE ("node:<text>"), else "host:<boot id>/<ipc namespace>/<net namespace>": the kernel's shared memory
/// is per IPC namespace, abstract sockets are per network namespace. With HYBRIDPS_SHM off the engine id is added:
/// every rank is a node of its own. At most kIdentityBytesMax (record.h) long: longer text ends in its hash.
std::string node_identity(const core::Config& config, core::EngineId engine);

/// Of this machine's boot and this process's network namespace: processes with the same one have one loopback
/// interface.
std::uint64_t machine_id();

/// Milliseconds since 1970, as RendezvousOptions wants them: now, and when this process was started (0: not known).
std::uint64_t wall_ms();
std::uint64_t process_started_ms();

/// This host's name, for messages only.
std::string host_name();

}  // namespace hybridps::bootstrap
