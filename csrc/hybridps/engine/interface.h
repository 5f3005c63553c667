// hybridps/engine/interface.h: which network interface control and data use.
//
// Threads  any; reads the environment and the kernel's tables.
#pragma once

#include <string>
#include <vector>

#include "hybridps/core/config.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/ucx/nics.h"
#include "hybridps/transport/ucx/rdma.h"

namespace hybridps::engine {

/// Which of the ranks of its machine a process is.
struct LocalRank {
  int rank = 0;
  int size = 1;
};
/// LOCAL_RANK and LOCAL_WORLD_SIZE.
LocalRank local_rank();

struct Interfaces {
  transport::LocalNic control_nic;  // what control goes through
  std::string control;              // its name, "eth0"
  std::string control_why;          // "HYBRIDPS_INTERFACE", "it routes to MASTER_ADDR=boxa"
  std::string loopback;             // why no other machine can reach this process: what of it uses lo, and for what reason
  std::vector<transport::LocalNic> nics;  // what this process's data goes through; their rates where they are known
  double node_gbps = 0;                   // of all the machine's cards for data together; 0: not known
  bool rdma = false;                      // data goes over RDMA
  bool ucx = false;                       // data goes through UCX: RDMA, or its TCP
  bool control_ucx = false;               // control does: with data, or its interface has no address that means the same elsewhere
  bool users = false;                     // the user's UCX_NET_DEVICES, not ours
  bool with_control = false;              // data of this machine goes through the control interface, too
  std::string why;                        // "nearest of eth0, eth1 to the CPUs of NUMA node 0", "HYBRIDPS_DATA_INTERFACES"

  std::string data() const;  // "eth0,eth1"
};

/// Control: choose_control() with what this machine has. Data: choose_data() with what this machine has; where RDMA
/// cannot be used though it is here, that is said once. kInvalidArgument: a data interface that is not there, down,
/// without carrier or address, or does not go with the others, and which there are; rates that do not fit.
core::Result<Interfaces> choose_interfaces(const core::Config& config, const std::string& hint = {},
                                           LocalRank place = local_rank());

/// What control can use.
struct ControlNetwork {
  std::string named;           // HYBRIDPS_INTERFACE
  std::string hint;            // the interface of the address that a server listens on
  std::string master;          // MASTER_ADDR as it is given
  std::string master_address;  // the first address that its name has here; empty: none
  std::string to_master;       // the interface that routes there; empty: none
  std::string to_default;      // the interface of the default route; empty: none
  bool one_machine = false;    // the launcher says that all ranks are here (WORLD_SIZE, LOCAL_WORLD_SIZE)
  std::vector<std::string> loopbacks{"lo"};
  std::vector<std::string>
      others;  // the interfaces that are up and have an address that is of use elsewhere, no loopback
};
struct ControlChoice {
  std::string name;
  std::string why;
};
/// The named one, else the hint, else the one that routes to MASTER_ADDR. Where MASTER_ADDR is a name that stands for
/// this machine itself (Debian's /etc/hosts: "127.0.1.1 boxa") that is the loopback interface, which nobody else can
/// reach: unless all ranks are here it is then, as without MASTER_ADDR, the one of the default route, else the only
/// one that there is, else loopback.
ControlChoice choose_control(const ControlNetwork& network);

/// What data can use.
struct DataNetwork {
  core::DataTransport wanted = core::DataTransport::kAuto;
  std::string named;    // HYBRIDPS_DATA_INTERFACES, or UCX_NET_DEVICES
  bool users = false;   // `named` is UCX_NET_DEVICES
  std::string control;  // the control interface
  std::string ucx_tls;  // the user's UCX_TLS
  std::vector<transport::RdmaPort> ports;
  std::vector<transport::LocalNic> nics;  // what is known of those named and of the control interface
  bool ucx_has_verbs = false;
  std::string ucx;  // "UCX 1.22.0 (/usr/lib/libucp.so.0)"
  LocalRank place;
  std::string nearest_to = "this process";  // Locality::text
};
struct DataChoice {
  std::vector<transport::LocalNic> nics;
  bool rdma = false;
  std::string why;
  std::string warning;  // empty: none

  std::string devices() const;  // "eth0,eth1"
};
/// Of named devices those nearest to this rank; all of the user's own; else of the usable RDMA ports where UCX has verbs;
/// else the control interface. kUnsupported: RDMA is asked for and cannot be had, with the reason and what to do.
core::Result<DataChoice> choose_data(const DataNetwork& network);

/// The interface whose address the kernel would use to reach `host` (a name or an address); empty if there is none.
/// `address`: where the first of its addresses goes, as text.
std::string interface_to(const std::string& host, std::string* address = nullptr);

}  // namespace hybridps::engine
