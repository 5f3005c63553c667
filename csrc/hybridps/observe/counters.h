// hybridps/observe/counters.h: what the engine counts, readable from any thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace hybridps::observe {

/// Written by the progress thread with relaxed stores, read by anyone.
struct EngineCounters {
  std::atomic<std::uint64_t> net_tx_payload_bytes{0};  // between nodes, exact
  std::atomic<std::uint64_t> net_rx_payload_bytes{0};
  std::atomic<std::uint64_t> net_tx_device_bytes{0};  // of those sent, what lay in a GPU's memory
  std::atomic<std::uint64_t> net_tx_header_bytes{0};
  std::atomic<std::uint64_t> net_rx_header_bytes{0};
  std::atomic<std::uint64_t> shm_tx_payload_bytes{0};
  std::atomic<std::uint64_t> shm_rx_payload_bytes{0};
  std::atomic<std::uint64_t> operations{0};
  std::atomic<std::uint64_t> groups{0};
  std::atomic<std::uint64_t> endpoints{0};
  std::atomic<std::uint64_t> bad_messages{0};
};

}  // namespace hybridps::observe
