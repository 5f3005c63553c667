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

/// The place of a process among the ranks of its machine.
struct LocalRank {
  int rank = 0;
  int size = 1;
};
/// From LOCAL_RANK and LOCAL_WORLD_SIZE.
LocalRank local_rank();

struct Interfaces {
  transport::LocalNic control_nic;  // the interface for control
  std::string control;              // the name of control_nic, "eth0"
  std::string control_why;          // "HYBRIDPS_INTERFACE", "it routes to MASTER_ADDR=boxa"
  std::string loopback;  // why other machines cannot reach this process: control or data uses lo, and the reason
  std::vector<transport::LocalNic> nics;  // the interfaces for this process's data, with their rates if known
  double node_gbps = 0;                   // rate of all data cards of the machine together; 0: not known
  bool rdma = false;                      // data goes over RDMA
  bool ucx = false;                       // data goes through UCX: over RDMA, or over UCX's TCP
  bool control_ucx = false;   // control goes through UCX: data does, or control_nic has no address valid on other hosts
  bool users = false;         // the data interfaces are from the user's UCX_NET_DEVICES
  bool with_control = false;  // data of this machine may use the control interface, too
  std::string why;            // "nearest of eth0, eth1 to the CPUs of NUMA node 0", "HYBRIDPS_DATA_INTERFACES"

  std::string data() const;  // "eth0,eth1"
};

/// Calls choose_control() and choose_data() with what this machine has. If the machine has RDMA that cannot be used,
/// warns once. kInvalidArgument: a data interface does not exist, is down, has no carrier or no address, or does not
/// fit the other data interfaces (the text lists the interfaces that exist); or the number of rates does not fit.
core::Result<Interfaces> choose_interfaces(const core::Config& config, const std::string& hint = {},
                                           LocalRank place = local_rank());

/// What control can use.
struct ControlNetwork {
  std::string named;           // HYBRIDPS_INTERFACE
  std::string hint;            // the interface of the address that a server listens on
  std::string master;          // MASTER_ADDR as given
  std::string master_address;  // the first address of MASTER_ADDR on this machine; empty: none
  std::string to_master;       // the interface that routes to MASTER_ADDR; empty: none
  std::string to_default;      // the interface of the default route; empty: none
  bool one_machine = false;    // WORLD_SIZE equals LOCAL_WORLD_SIZE: all ranks are on this machine
  std::vector<std::string> loopbacks{"lo"};
  std::vector<std::string>
      others;  // interfaces that are up, are no loopback, and have an address that is valid beyond their own link
};
struct ControlChoice {
  std::string name;
  std::string why;
};
/// Takes the named interface, else the hint, else the interface that routes to MASTER_ADDR.
/// MASTER_ADDR may be a name of this machine itself (Debian's /etc/hosts: "127.0.1.1 boxa"). Then the route leads to
/// loopback, and no other machine can reach loopback. Loopback is taken only if all ranks are on this machine, or if
/// MASTER_ADDR is "localhost", "127.0.0.1" or "::1". Otherwise, and without MASTER_ADDR, the choice is the interface of
/// the default route, else the only other interface, else loopback.
ControlChoice choose_control(const ControlNetwork& network);

/// What data can use.
struct DataNetwork {
  core::DataTransport wanted = core::DataTransport::kAuto;
  std::string named;    // HYBRIDPS_DATA_INTERFACES, or UCX_NET_DEVICES
  bool users = false;   // `named` is UCX_NET_DEVICES
  std::string control;  // the control interface
  std::string ucx_tls;  // the user's UCX_TLS
  std::vector<transport::RdmaPort> ports;
  std::vector<transport::LocalNic> nics;  // the named interfaces and the control interface, as far as known
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
/// Takes the first of these that applies: all devices of the user's UCX_NET_DEVICES; the devices of
/// HYBRIDPS_DATA_INTERFACES that are nearest to this rank; the nearest usable RDMA ports, if UCX has verbs; the control
/// interface. kUnsupported: the settings ask for RDMA, and RDMA cannot be used, or they contradict each other. The text
/// gives the reason and what to do.
core::Result<DataChoice> choose_data(const DataNetwork& network);

/// The interface that the kernel would send from to reach `host` (a name or an address); empty: none.
/// `address`: receives the first address of `host` as text. May be null.
std::string interface_to(const std::string& host, std::string* address = nullptr);

}  // namespace hybridps::engine
