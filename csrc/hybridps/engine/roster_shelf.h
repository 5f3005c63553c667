// hybridps/engine/roster_shelf.h: how a rank of a node hands the roster that it has read on to the other ranks.
//
// Model    The name is an abstract socket: one rank can have it, and it goes with that rank's process. The roster is in
//          memory without a name, whose descriptor the rank sends to each one that connects.
// Threads  one at a time.
// Trust    both ends check that the other one is a process of this user.
#pragma once

#include <memory>

#include "hybridps/bootstrap/node_shelf.h"

namespace hybridps::engine {

std::unique_ptr<bootstrap::NodeShelf> roster_shelf();

}  // namespace hybridps::engine
