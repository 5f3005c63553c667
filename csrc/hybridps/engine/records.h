// hybridps/engine/records.h: turns members' published records into a Runtime's inputs: peers, shares, pool memory.
//
// Threads  pure functions. own_record() also reads host facts, and map_pool() asks the kernel for memory.
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
#include "hybridps/flow/stream.h"
#include "hybridps/schedule/chunk_sizes.h"
#include "hybridps/schedule/nic_shares.h"
#include "hybridps/schedule/plan.h"

namespace hybridps::engine {

bootstrap::Bytes to_record(const std::vector<std::byte>& address);
std::vector<std::byte> to_transport(const bootstrap::Bytes& address);
/// The part of this process's record that is the same in all groups.
bootstrap::MemberRecord own_record(const core::Config& config, const Interfaces& interfaces,
                                   const RuntimeOptions& options, const transport::Transport& data,
                                   const transport::Transport& control);
/// "host7 pid 4121"
std::string process_text(const bootstrap::MemberRecord& member);
/// `local`: shared memory with this member is proven.
PeerRecord peer_record(const bootstrap::MemberRecord& member, std::string where, bool local);

/// The cards that each rank's data goes through, and their rates. If a rank has cards on networks with other nodes, the
/// layout leaves out its cards on networks of its own node alone. A card's rate comes from its link, from
/// HYBRIDPS_NIC_GBPS for each card, or as a part of the machine's rate (HYBRIDPS_NIC_GBPS as one number). Rates count
/// only if the rates of all cards of the nodes are known. Otherwise all cards count as equal.
schedule::NicLayout nic_layout(const bootstrap::Roster& roster);

/// The lossy codecs that all members ask for; null: none. kMismatch: members ask for different codecs; the text says
/// who asks for what. kInvalidArgument: a member's chunk_bytes (HYBRIDPS_LIMITS) has no room for a block of the codec.
core::Result<std::shared_ptr<const compress::Codecs>> codecs_of(const bootstrap::Roster& roster);
/// Whether data that no codec has goes packed between nodes (flow/packing.h).
flow::MayPack packing_of(const bootstrap::Roster& roster);
/// The size of a codec block, in bytes of float32. A chunk holds at least one block.
std::uint64_t block_bytes(const compress::Codecs& codecs);
/// The chunk sizes for which all members and servers of the roster have room.
schedule::ChunkSizes chunk_sizes(const bootstrap::Roster& roster, const schedule::Topology& topology);
/// kMismatch: members give the group different priorities.
core::Status check_priorities(const bootstrap::Roster& roster);

/// kMismatch: not all members have a region, those of one node have different ones, or those of one region give its
/// uplink different rates. kInvalidArgument: a region is no such text.
core::Status check_regions(const bootstrap::Roster& roster);

/// The owners' shares, as seen from `rank`, with those of regions where the rates of their uplinks are declared. A
/// `rank` of size() + d is dedicated server d.
schedule::Topology topology_of(const bootstrap::Roster& roster, int rank);

/// The region of the group's nodes that the dedicated server declares; schedule::kNoRegion: none of them, or these were
/// found and not declared.
int region_of_server(const bootstrap::Roster& roster, const bootstrap::MemberRecord& server);

/// Weights of the nodes, followed by weights of the roster's dedicated servers. `are_there`, by server: true if the
/// server takes part. A server that does not take part has weight 0.
std::vector<double> weights_with(bootstrap::Roster roster, const std::vector<bool>& are_there);

struct PrivatePool {
  std::span<std::byte> memory;
  std::shared_ptr<void> keep;  // the last reference unmaps the memory
};
std::size_t whole_pages(std::size_t bytes);
/// Private memory of this process. The kernel provides the pages when they are touched. kOutOfResources: cannot map.
core::Result<PrivatePool> map_pool(std::size_t bytes);

}  // namespace hybridps::engine
