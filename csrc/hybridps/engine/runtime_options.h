// hybridps/engine/runtime_options.h: the options of a Runtime, and the size of the send pool that they need.
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
  std::size_t eager_bytes = 512 * 1024;           // our allowance for each peer
  std::size_t far_bytes = std::size_t{64} << 20;  // the same over a path of long delay (schedule/far_window.h)
  std::size_t chunk_bytes = 64 * 1024;            // the largest chunk of any group
  std::uint32_t grant_chunks = 4;
  std::uint64_t retained_bytes = worker::WorkerOptions().retained_bytes;
  std::size_t local_peers = 7;            // the pool sets slots aside for so many ranks of the node
  bool keep_early = true;                 // keep messages of groups that are not open yet; a dedicated server does not
  std::size_t window_bytes = 128 * 1024;  // see schedule/group_windows.h
  std::size_t cards = 1;                  // network cards for data
  double warn_seconds = 10;
  std::size_t early_messages_max = std::size_t{1} << 20;  // worker::WorkerOptions
  UnopenedGroups::KeepLimits unopened;
  // Small operations, and credit and grants of far peers, take the control transport: they never wait behind bulk.
  bool urgent_by_control = false;
  bool urgent_always = false;  // with urgent_by_control: small operations do so without bulk under way, too
  bool may_nap = false;        // data may wait in the kernel's buffers: nothing urgent comes with data
  bool find_rates = true;      // shares follow the measured rates of the network
  bool tune = false;           // tune the groups in which this engine is rank 0 (schedule/tuner.h)
  double heartbeat_seconds = 1;
  double dead_seconds = 20;
  double quick_dead_seconds = 5;  // for peers without which their groups can go on

  /// The options from the settings, for an engine without other ranks on its node.
  static RuntimeOptions of(const core::Config& config, core::EngineId self);
  /// The size classes of a send pool with `bytes_max` bytes.
  std::vector<transport::BufferPool::SizeClass> pool_classes(std::size_t bytes_max) const;
  /// The smallest memory that the pool needs.
  std::size_t pool_bytes() const;
  /// How many slots of a size class the local peers may hold at most.
  std::size_t local_slots(std::size_t class_bytes) const;
};

}  // namespace hybridps::engine
