// hybridps/engine/data_transport.h: the data transport of a process, over all of its network cards.
//
// Threads  as UcxTransport.
// Errors   those of UcxTransport::create() and make_rails().
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/interface.h"
#include "hybridps/transport/transport.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::engine {

/// UCX over TCP uses one card per worker, and one connection to each peer, so each card has `sockets` transports of its own
/// (kRailsMax in all); RDMA ports share one, and so does what the user's UCX_NET_DEVICES names. `options` apart from
/// net_device and label.
core::Result<std::unique_ptr<transport::Transport>> make_data_transport(const Interfaces& interfaces,
                                                                        transport::UcxOptions options,
                                                                        std::int64_t sockets);

/// For a member's record.
std::vector<bootstrap::Nic> to_record(const std::vector<transport::Nic>& nics);

/// "data=eth0,eth1 control=eth0 rate=25+25Gbit/s".
std::string text_of(const Interfaces& interfaces);

}  // namespace hybridps::engine
