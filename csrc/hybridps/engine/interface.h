// hybridps/engine/interface.h: which network interface control and data use.
//
// Threads  any; reads the environment and the kernel's tables.
#pragma once

#include <string>
#include <vector>

#include "hybridps/core/config.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/ucx/rdma.h"

namespace hybridps::engine {

struct Interfaces {
  std::string control;  // "eth0"
  std::string data;     // "eth0", "mlx5_0:1", or several with commas
  bool rdma = false;    // data goes over RDMA
};

/// HYBRIDPS_INTERFACE, else `hint`, else the interface that routes to MASTER_ADDR, else the one of the default route,
/// else "lo". Data: choose_data() with what this machine has; where RDMA cannot be used though it is here, that is said
/// once.
core::Result<Interfaces> choose_interfaces(const core::Config& config, const std::string& hint = {});

/// What data can use.
struct DataNetwork {
  core::DataTransport wanted = core::DataTransport::kAuto;
  std::string named;    // HYBRIDPS_DATA_INTERFACES, or UCX_NET_DEVICES
  std::string control;  // the control interface
  std::string ucx_tls;  // the user's UCX_TLS
  std::vector<transport::RdmaPort> ports;
  bool ucx_has_verbs = false;
  std::string ucx;  // "UCX 1.22.0 (/usr/lib/libucp.so.0)"
  int local_rank = 0;
  int local_size = 1;
};
struct DataChoice {
  std::string devices;
  bool rdma = false;
  std::string warning;  // empty: none
};
/// Named devices as they are; else the nearest usable RDMA ports where UCX has verbs; else the control interface.
/// kUnsupported: RDMA is asked for and cannot be had, with the reason and what to install or set.
core::Result<DataChoice> choose_data(const DataNetwork& network);

/// The interface whose address the kernel would use to reach `host` (a name or an address); empty if there is none.
std::string interface_to(const std::string& host);

/// Gbit/s of the interfaces (with commas) together, as the kernel reports their links; 0 where one does not know, or is
/// virtual: what those report says nothing about the network below. `root`: for tests.
double link_gbps(const std::string& interfaces, const std::string& root = "/sys/class/net");

}  // namespace hybridps::engine
