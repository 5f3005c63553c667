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
  // What tuners did, of groups that this rank is the first of.
  std::atomic<std::uint64_t> tuner_trials{0};
  std::atomic<std::uint64_t> tuner_kept{0};
  // What codecs did on this rank.
  std::atomic<std::uint64_t> compress_operations{0};
  std::atomic<std::uint64_t> compress_bytes{0};       // of elements, encoded
  std::atomic<std::uint64_t> compress_wire_bytes{0};  // what they became
  std::atomic<std::uint64_t> compress_not_finite{0};  // blocks
  std::atomic<std::uint64_t> compress_encode_ns{0};
  std::atomic<std::uint64_t> compress_decode_ns{0};
};

}  // namespace hybridps::observe
