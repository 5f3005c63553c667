// hybridps/engine/roster_shelf.h: how a rank of a node hands the roster that it has read on to the other ranks.
//
// Model    An abstract socket: one rank can have it, and it goes with that rank's process. The roster is in memory
//          without a name, whose descriptor the rank sends to each one that connects.
// Threads  one at a time.
// Trust    The other end is a process of this user, perhaps of another container. Before the descriptor is passed,
//          both ends prove that they know the roster's nonce, which only the Store tells. The socket's name is a hash.
//          It differs between hosts and network namespaces, so that nobody can pass a proof on to another node.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "hybridps/bootstrap/node_shelf.h"

namespace hybridps::engine {

std::unique_ptr<bootstrap::NodeShelf> roster_shelf();
/// Of the roster with this nonce, on this node.
std::string roster_socket_name(std::uint64_t nonce);

}  // namespace hybridps::engine
