// hybridps/transport/ucx/nics.h: the network cards that data is to go through, and what is known of each.
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
  double gbps = 0;      // of the link, where the card is real and the kernel knows; else 0
  int distance = -1;    // distance_to(); -1: not known
  bool loopback = false;
};

/// "eth0, eth1" as names.
std::vector<std::string> device_names(std::string_view list);

/// In the order of `names`. RDMA ports get name and distance.
std::vector<LocalNic> describe_nics(const std::vector<std::string>& names, const Locality& from,
                                    const std::filesystem::path& sysfs = "/sys");

/// What cannot be right about a list of cards that all exist: one twice, loopback beside others, IP beside RDMA.
core::Status check_together(const std::vector<LocalNic>& nics);

/// Gbit/s of an interface as the kernel reports its link; 0 where it does not know, or it is virtual: what such report
/// says nothing about the network below.
double link_gbps(const std::string& interface, const std::filesystem::path& sysfs = "/sys");

}  // namespace hybridps::transport
