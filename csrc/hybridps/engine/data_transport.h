// hybridps/engine/data_transport.h: the data transport of a process, over all of its network cards, and the one for control.
//
// Threads  as UcxTransport and TcpTransport; with DataThreads as make_threaded().
// Errors   those of UcxTransport::create(), TcpTransport::create(), join_cards() and start_transport_thread().
#pragma once

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
#include "hybridps/transport/threaded.h"
#include "hybridps/transport/transport.h"

namespace hybridps::engine {

/// HYBRIDPS_DATA_THREADS: threads that are made when transports come to them, in turn, and end with these.
class DataThreads {
 public:
  DataThreads(const DataThreadsPlan& plan, core::Spinning spinning) : plan_(plan), spinning_(spinning) {}

  /// Driven by one of the threads from now on, or when `handover`, which is of all transports of an engine, says so; as it is
  /// where there are none. The thread runs near the network card (its device in sysfs) of the first that comes to it, where
  /// there are CPUs for all such threads of the machine.
  core::Result<std::unique_ptr<transport::Transport>> drive(std::unique_ptr<transport::Transport> transport,
                                                            const std::shared_ptr<transport::Handover>& handover = nullptr,
                                                            const std::filesystem::path& card = {});
  /// For an engine's transports; none where the threads drive from the start.
  std::shared_ptr<transport::Handover> make_handover() const;
  /// Says so where transports were too few for all threads that were asked for.
  void warn_of_idle() const;

 private:
  const DataThreadsPlan plan_;
  const core::Spinning spinning_;
  std::vector<std::shared_ptr<transport::TransportThread>> threads_;
  std::size_t next_ = 0;
};

struct DataOptions {
  core::Duration close_timeout = core::from_seconds(1);
  /// Of unacknowledged data, over TCP: above HYBRIDPS_DEAD_SECONDS, whose verdict comes first.
  core::Duration user_timeout = core::from_seconds(10);
  bool device_memory = false;  // UCX may be given some (HYBRIDPS_GPUDIRECT)
  /// So many sockets at least are made, of which those asked for are used to begin with.
  std::int64_t sockets_to_choose = 1;
};

core::Duration user_timeout(const core::Config& config);

/// Over TCP a transport uses one card, and one connection to each peer, so each card has `sockets` transports of its own
/// (kCardsMax in all); RDMA ports share one, and so does what the user's UCX_NET_DEVICES names.
core::Result<std::unique_ptr<transport::Transport>> make_data_transport(const Interfaces& interfaces,
                                                                        const DataOptions& options,
                                                                        std::int64_t sockets, DataThreads& threads);
/// What control goes through: as data TCP or UCX, over one interface, in the thread of who drives it.
core::Result<std::unique_ptr<transport::Transport>> make_control_transport(const Interfaces& interfaces,
                                                                           const DataOptions& options);
/// How many sockets of each card that transport has to choose from (Transport::use_sockets).
std::int64_t sockets_of(const Interfaces& interfaces, const DataOptions& options, std::int64_t sockets);

/// For a member's record.
std::vector<bootstrap::Nic> to_record(const std::vector<transport::LocalNic>& nics);

/// "data=eth0,eth1 control=eth0 rate=25+25Gbit/s".
std::string text_of(const Interfaces& interfaces);

}  // namespace hybridps::engine
