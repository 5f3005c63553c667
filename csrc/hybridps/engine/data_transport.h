// hybridps/engine/data_transport.h: the transports of a process: data over all its network cards, and control.
//
// Threads  as UcxTransport and TcpTransport; with DataThreads as make_threaded().
// Errors   those of UcxTransport::create(), TcpTransport::create(), join_cards() and start_transport_thread().
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/cores.h"
#include "hybridps/engine/interface.h"
#include "hybridps/tls/authority.h"
#include "hybridps/transport/threaded.h"
#include "hybridps/transport/transport.h"

namespace hybridps::engine {

/// The data threads (engine/cores.h), which take transports in turn. A thread lives while it has transports.
class DataThreads {
 public:
  DataThreads(const DataThreadsPlan& plan, core::Spinning spinning) : plan_(plan), spinning_(spinning) {}

  /// One of the threads drives `transport` from now on or, with `handover`, when `handover` says so. All transports of
  /// an engine share one `handover`. If the plan has no threads, `transport` is returned unchanged. `card`: the device
  /// of the network card in sysfs. A thread runs near the card of its first transport, if there are CPUs for all data
  /// threads of the machine. Errors: start_transport_thread()'s and make_threaded()'s.
  core::Result<std::unique_ptr<transport::Transport>> drive(
      std::unique_ptr<transport::Transport> transport, const std::shared_ptr<transport::Handover>& handover = nullptr,
      const std::filesystem::path& card = {});
  /// A handover for the transports of one engine. Null: the threads drive from the start, or there are none.
  std::shared_ptr<transport::Handover> make_handover() const;
  /// Warns if there are fewer transports than requested threads.
  void warn_of_idle() const;

 private:
  const DataThreadsPlan plan_;
  const core::Spinning spinning_;
  std::vector<std::shared_ptr<transport::TransportThread>> threads_;
  std::size_t next_ = 0;
};

/// No message but a chunk has more payload: texts, records, weights.
inline constexpr std::size_t kTextBytesMax = std::size_t{256} << 10;

struct DataOptions {
  core::Duration close_timeout = core::from_seconds(1);
  /// UCX's limit for unacknowledged data over TCP. Longer than HYBRIDPS_DEAD_SECONDS: the verdict of heartbeats first.
  core::Duration user_timeout = core::from_seconds(10);
  core::PortRange ports;  // of our own TCP, as are the next four
  std::string tcp_congestion;
  double tcp_gbps = 0;
  int dscp = 0;
  std::shared_ptr<const tls::Authority> authority;  // null: in clear
  bool kernel_tls = false;
  std::shared_ptr<std::atomic<std::uint64_t>> damaged;  // counts wrong checksums; null: there are none to count
  /// How long our own TCP tries to make a broken connection again.
  core::Duration patience = core::from_seconds(5);
  bool device_memory = false;  // attach_device() may give UCX device memory (HYBRIDPS_GPUDIRECT)
  /// No message that comes has more payload. A group's chunks fit the slots of all its members, so none is larger here
  /// than our own slots.
  std::size_t payload_bytes_max = kTextBytesMax;
  /// Each card gets at least this many sockets, over our own TCP. At first only the requested sockets are used.
  std::int64_t sockets_to_choose = 1;
};

/// On how many ports an engine listens over our own TCP: for data and for control.
std::size_t listeners_of(const Interfaces& interfaces, const DataOptions& options, std::int64_t sockets);
/// kInvalidArgument: `ports` has fewer ports than the ranks of a machine listen on. The text says how many.
core::Status check_ports(const core::PortRange& ports, std::size_t ranks, std::size_t of_each);

/// The limits that follow from the settings. `authority`: of HYBRIDPS_SECURITY=tls; else null.
DataOptions data_options(const core::Config& config, core::Duration close_timeout,
                         std::shared_ptr<const tls::Authority> authority);

/// A TCP transport uses one card and one connection to each peer. So each card gets `sockets` transports, kCardsMax at
/// most for all cards. One transport serves all RDMA ports, and one serves all devices of the user's UCX_NET_DEVICES.
core::Result<std::unique_ptr<transport::Transport>> make_data_transport(const Interfaces& interfaces,
                                                                        const DataOptions& options,
                                                                        std::int64_t sockets, DataThreads& threads);
/// The transport for control: TCP or UCX, over one interface. The thread that drives the Runtime drives this transport.
core::Result<std::unique_ptr<transport::Transport>> make_control_transport(const Interfaces& interfaces,
                                                                           const DataOptions& options);
/// How many sockets the data transport makes for each card (Transport::use_sockets() chooses among them).
std::int64_t sockets_of(const Interfaces& interfaces, const DataOptions& options, std::int64_t sockets);

/// The cards in the form of a member's record.
std::vector<bootstrap::Nic> to_record(const std::vector<transport::LocalNic>& nics);

/// "data=eth0,eth1 control=eth0 rate=25+25Gbit/s".
std::string text_of(const Interfaces& interfaces);
/// "RDMA", "TCP", "TCP with TLS", "TCP with TLS by certificates", "TCP with checksums", "TCP through UCX".
std::string text_of_transport(const Interfaces& interfaces, const core::Config& config);

}  // namespace hybridps::engine
