// hybridps/engine/records.h: from what members publish to what a Runtime takes: peers, shares, memory for its pool.
//
// Threads  pure functions, but for map_pool(), which asks the kernel.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/compress/codec.h"
#include "hybridps/core/status.h"
#include "hybridps/core/config.h"
#include "hybridps/engine/interface.h"
#include "hybridps/engine/peers.h"
#include "hybridps/engine/runtime_options.h"
#include "hybridps/schedule/chunk_sizes.h"
#include "hybridps/schedule/nic_shares.h"
#include "hybridps/schedule/plan.h"

namespace hybridps::engine {

bootstrap::Bytes to_record(const std::vector<std::byte>& address);
std::vector<std::byte> to_transport(const bootstrap::Bytes& address);
/// Of this process, as far as it is the same in all groups.
bootstrap::MemberRecord own_record(const core::Config& config, const Interfaces& interfaces, const RuntimeOptions& options,
                                   const transport::Transport& data, const transport::Transport& control);
/// `local`: memory proven to be shared.
PeerRecord peer_record(const bootstrap::MemberRecord& member, std::string where, bool local);

/// Which cards each rank's data goes through, and what they carry. A rank that has a card on a network with other nodes
/// does not use one on a network of its own node alone. Rates count when those of every card of the nodes are known: of
/// the card (its link, or HYBRIDPS_NIC_GBPS for each), or its part of its machine's (HYBRIDPS_NIC_GBPS as one number);
/// else all cards are taken to be alike.
schedule::NicLayout nic_layout(const bootstrap::Roster& roster);

/// What all members of the group ask for; null: nothing. kMismatch: they do not agree; says who asks for what.
/// kInvalidArgument: a member's HYBRIDPS_CHUNK_BYTES has no room for a block of the codec.
core::Result<std::shared_ptr<const compress::Codecs>> codecs_of(const bootstrap::Roster& roster);
/// The bytes of float32 that the codec compresses as one: a chunk holds one block at least.
std::uint64_t block_bytes(const compress::Codecs& codecs);
/// For which all members and servers of the roster have room.
schedule::ChunkSizes chunk_sizes(const bootstrap::Roster& roster, const schedule::Topology& topology);
/// kMismatch: members give the group different priorities.
core::Status check_priorities(const bootstrap::Roster& roster);

/// Who owns how much, as seen from `rank` (size() + d: dedicated server d).
schedule::Topology topology_of(const bootstrap::Roster& roster, int rank);

/// Weights of the nodes and then of the dedicated servers, of which only those are there of which it says so.
std::vector<double> weights_with(bootstrap::Roster roster, const std::vector<bool>& are_there);

struct PrivatePool {
  std::span<std::byte> memory;
  std::shared_ptr<void> keep;  // unmaps it
};
std::size_t whole_pages(std::size_t bytes);
/// Memory of this process alone, claimed as it is touched.
core::Result<PrivatePool> map_pool(std::size_t bytes);

}  // namespace hybridps::engine
