// hybridps/engine/runtime_options.h: what a Runtime is made with, and the send pool that it needs for it.
//
// Threads  plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridps/core/config.h"
#include "hybridps/core/ids.h"
#include "hybridps/engine/unopened_groups.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/worker/worker.h"

namespace hybridps::engine {

struct RuntimeOptions {
  core::EngineId self;
  std::size_t eager_bytes = 512 * 1024;  // what we allow each peer
  std::size_t chunk_bytes = 64 * 1024;   // largest chunk of any group
  std::uint32_t grant_chunks = 4;
  std::uint64_t retained_bytes = worker::WorkerOptions().retained_bytes;
  std::size_t local_peers = 7;            // for which the pool has room to be generous
  bool keep_early = true;                 // messages of groups that are not open yet; a dedicated server needs none
  std::size_t window_bytes = 128 * 1024;  // see schedule/group_windows.h
  std::size_t cards = 1;                  // that data comes through
  double warn_seconds = 10;
  std::size_t early_messages_max = std::size_t{1} << 20;  // worker::WorkerOptions
  UnopenedGroups::KeepLimits unopened;
  bool urgent_by_control = false;  // small operations take the control transport, where they wait behind no bulk
  bool urgent_always = false;      // with it: also where no bulk is under way
  bool may_nap = false;            // data waits in the kernel's buffers, and nothing urgent comes with it
  bool find_rates = true;          // shares follow what the network is found to carry
  bool tune = false;               // of groups that this engine is rank 0 of (schedule/tuner.h)
  double heartbeat_seconds = 1;
  double dead_seconds = 5;

  /// As the settings say, of an engine that has no other rank on its node.
  static RuntimeOptions of(const core::Config& config, core::EngineId self);
  /// Classes of the send pool, for so much memory.
  std::vector<transport::BufferPool::SizeClass> pool_classes(std::size_t bytes_max) const;
  /// The least that the pool needs.
  std::size_t pool_bytes() const;
  /// Of a class, that local peers may hold at the worst.
  std::size_t local_slots(std::size_t class_bytes) const;
};

}  // namespace hybridps::engine
