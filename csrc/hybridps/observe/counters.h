// hybridps/observe/counters.h: what the engine counts, exactly.
//
// Names    each counter is a metric, explained in metrics.cpp. To add a counter: here, there, and where it counts.
// Threads  any thread reads; one thread writes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hybridps::observe {

enum class Counter : std::uint8_t {
  kOperations,
  kGroups,
  kEndpoints,
  kNetTxPayloadBytes,
  kNetRxPayloadBytes,
  kNetTxDeviceBytes,
  kNetTxHeaderBytes,
  kNetRxHeaderBytes,
  kNetRxDamaged,
  kShmTxPayloadBytes,
  kShmRxPayloadBytes,
  kBadMessages,
  kTunerTrials,
  kTunerKept,
  kCompressOperations,
  kCompressBytes,
  kCompressWireBytes,
  kCompressNotFinite,
  kCompressEncodeNs,
  kCompressDecodeNs,
  kPackedBytes,
  kPackedWireBytes,
  kPackRefused,
  kPackNs,
  kUnpackNs,
};
inline constexpr std::size_t kCounterCount = 25;

class Counters {
 public:
  std::uint64_t operator[](Counter counter) const noexcept { return at(counter).load(std::memory_order_relaxed); }
  void set(Counter counter, std::uint64_t value) noexcept {
    values_[static_cast<std::size_t>(counter)].store(value, std::memory_order_relaxed);
  }
  void add(Counter counter, std::uint64_t count) noexcept {
    values_[static_cast<std::size_t>(counter)].fetch_add(count, std::memory_order_relaxed);
  }

 private:
  const std::atomic<std::uint64_t>& at(Counter counter) const noexcept {
    return values_[static_cast<std::size_t>(counter)];
  }

  std::array<std::atomic<std::uint64_t>, kCounterCount> values_{};
};

}  // namespace hybridps::observe
