// hybridps/engine/records.h: from what members publish to what a Runtime takes, and memory for its pool.
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

namespace hybridps::engine {

bootstrap::Bytes to_record(const std::vector<std::byte>& address);
std::vector<std::byte> to_transport(const bootstrap::Bytes& address);
/// `local`: memory proven to be shared.
PeerRecord peer_record(const bootstrap::MemberRecord& member, std::string where, bool local);

struct PrivatePool {
  std::span<std::byte> memory;
  std::shared_ptr<void> keep;  // unmaps it
};
std::size_t whole_pages(std::size_t bytes);
/// Memory of this process alone, claimed as it is touched.
core::Result<PrivatePool> map_pool(std::size_t bytes);

}  // namespace hybridps::engine
