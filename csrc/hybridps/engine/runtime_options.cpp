#include "hybridps/engine/runtime_options.h"

#include <algorithm>

#include "hybridps/schedule/tuning.h"

namespace hybridps::engine {
namespace {

// Size classes below the chunk: one for tiny operations and control texts, and one in between.
constexpr std::size_t kSmallBytes = 1024;
constexpr std::size_t kMiddleBytes = 8 * 1024;
// The least number of slots per class for messages between nodes.
constexpr std::size_t kNetSlotsMin = 4;

/// Several heartbeats fit into the time after which silence means death, also if that time is short.
double heartbeat_for(double dead_seconds) {
  return std::min(std::clamp(dead_seconds / 20, 0.2, std::max(1.0, dead_seconds / 120)), dead_seconds / 4);
}

}  // namespace

RuntimeOptions RuntimeOptions::of(const core::Config& config, core::EngineId self) {
  RuntimeOptions options;
  options.self = self;
  options.eager_bytes = config.eager_bytes;
  options.far_bytes = config.far_bytes;
  options.chunk_bytes = config.tune ? std::max(config.chunk_bytes, schedule::kChunkRoomBytes) : config.chunk_bytes;
  options.window_bytes = config.window_bytes;
  options.grant_chunks = static_cast<std::uint32_t>(config.grant_chunks);
  options.local_peers = 0;
  options.heartbeat_seconds = heartbeat_for(config.dead_seconds);
  options.dead_seconds = config.dead_seconds;
  if (config.given.count("HYBRIDPS_DEAD_SECONDS") > 0) options.quick_dead_seconds = config.dead_seconds;
  options.quick_dead_seconds = std::min(options.quick_dead_seconds, config.dead_seconds);
  return options;
}

// A local peer may hold slots for its allowance, and for the chunks that it grants as agent and as owner.
std::size_t RuntimeOptions::local_slots(std::size_t class_bytes) const {
  return local_peers * ((eager_bytes + class_bytes - 1) / class_bytes + 2 * std::size_t{grant_chunks} + 2);
}

std::vector<transport::BufferPool::SizeClass> RuntimeOptions::pool_classes(std::size_t bytes_max) const {
  std::vector<std::size_t> sizes;
  for (const std::size_t bytes : {kSmallBytes, kMiddleBytes})
    if (bytes < chunk_bytes) sizes.push_back(bytes);
  sizes.push_back(chunk_bytes);
  std::vector<transport::BufferPool::SizeClass> classes;
  std::size_t used = 0;
  for (const std::size_t bytes : sizes) {
    classes.push_back({bytes, local_slots(bytes) + kNetSlotsMin});
    used += bytes * classes.back().slot_count;
  }
  // The rest is for messages between nodes. Most of the rest becomes slots of chunk size.
  if (bytes_max > used) {
    const std::size_t rest = bytes_max - used;
    for (std::size_t c = 0; c + 1 < classes.size(); ++c) classes[c].slot_count += rest / 16 / classes[c].slot_bytes;
    classes.back().slot_count += (rest - (classes.size() - 1) * (rest / 16)) / classes.back().slot_bytes;
  }
  return classes;
}

std::size_t RuntimeOptions::pool_bytes() const {
  std::size_t bytes = 0;
  for (const auto& size_class : pool_classes(0)) bytes += size_class.slot_bytes * size_class.slot_count;
  return bytes;
}

}  // namespace hybridps::engine
