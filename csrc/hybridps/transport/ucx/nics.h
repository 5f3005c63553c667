// hybridps/transport/ucx/nics.h: the network cards for data, and what is known of each.
//
// Threads  any; reads sysfs and the kernel's tables.
// Errors   what cannot be read counts as not known; validate_device() says what is wrong with a name.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/core/status.h"
#include "hybridps/transport/ucx/locality.h"

namespace hybridps::transport {

struct LocalNic {
  std::string name;     // "eth0", "mlx5_0:1"
  std::string address;  // the first IPv4 address, else IPv6: what UCX listens on; empty for RDMA ports
  std::string network;  // "10.1.0.0/24"
  double gbps = 0;      // rate of a physical card's link, if the kernel knows it; else 0
  int distance = -1;    // distance_to(); -1: not known
  bool loopback = false;
};

/// Splits a list such as "eth0, eth1" into names.
std::vector<std::string> device_names(std::string_view list);

/// In the order of `names`. RDMA ports get only name and distance.
std::vector<LocalNic> describe_nics(const std::vector<std::string>& names, const Locality& from,
                                    const std::filesystem::path& sysfs = "/sys");

/// kInvalidArgument if cards that all exist do not fit together: a card twice, loopback beside others, IP beside RDMA.
core::Status check_together(const std::vector<LocalNic>& nics);

/// Link rate of an interface as the kernel reports it, Gbit/s. 0: not known, or the interface is virtual. A virtual
/// interface's rate says nothing about the network below.
double link_gbps(const std::string& interface, const std::filesystem::path& sysfs = "/sys");

}  // namespace hybridps::transport
