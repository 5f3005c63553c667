// hybridps/engine/interface.h: which network interface control and data use.
//
// Threads  any; reads the environment and the kernel's tables.
#pragma once

#include <string>

#include "hybridps/core/config.h"
#include "hybridps/core/status.h"

namespace hybridps::engine {

struct Interfaces {
  std::string control;  // "eth0"
  std::string data;     // "eth0", or several with commas
};

/// HYBRIDPS_INTERFACE, else the interface that routes to MASTER_ADDR, else the one of the default route, else "lo".
/// Data: HYBRIDPS_DATA_INTERFACES, else the control interface.
core::Result<Interfaces> choose_interfaces(const core::Config& config);

/// The interface whose address the kernel would use to reach `host` (a name or an address); empty if there is none.
std::string interface_to(const std::string& host);

/// Gbit/s of the interfaces (with commas) together, as the kernel reports their links; 0 where one does not know, or is
/// virtual: what those report says nothing about the network below. `root`: for tests.
double link_gbps(const std::string& interfaces, const std::string& root = "/sys/class/net");

}  // namespace hybridps::engine
