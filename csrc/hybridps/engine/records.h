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
#include "hybridps/core/status.h"
#include "hybridps/engine/runtime.h"
#include "hybridps/schedule/shares.h"

namespace hybridps::engine {

bootstrap::Bytes to_record(const std::vector<std::byte>& address);
std::vector<std::byte> to_transport(const bootstrap::Bytes& address);
/// `local`: memory proven to be shared.
PeerRecord peer_record(const bootstrap::MemberRecord& member, std::string where, bool local);

/// What each node and each dedicated server owns of a tensor. Rates count when every node has a member that knows its
/// card's (HYBRIDPS_NIC_GBPS); else all cards are taken to be alike.
schedule::Shares shares_of(const bootstrap::Roster& roster);

struct PrivatePool {
  std::span<std::byte> memory;
  std::shared_ptr<void> keep;  // unmaps it
};
std::size_t whole_pages(std::size_t bytes);
/// Memory of this process alone, claimed as it is touched.
core::Result<PrivatePool> map_pool(std::size_t bytes);

}  // namespace hybridps::engine
