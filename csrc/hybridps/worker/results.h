// hybridps/worker/results.h: roles from a sum or source to the ranks that want it (see span_view.h): Results, Consumer.
//
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "hybridps/core/pinned.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/server/result_streams.h"
#include "hybridps/wire/message.h"
#include "hybridps/worker/span_view.h"

namespace hybridps::worker {

/// Results for other nodes, if these may have another form there than in the node: a codec's, or packed.
class NetResults final : public server::ResultStreams::Maker, core::Pinned {
 public:
  NetResults(const SpanView& span, ResultMemory& memory);
  server::ResultStreams& streams() noexcept { return streams_; }
  /// With a codec: encodes the chunk, once, when its sum is ready. Then the decoded values replace the sum, so the
  /// owner's rank and node get the same values as the others.
  void encode(std::uint32_t chunk);

  flow::Payload make(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override;
  void on_stream_sent() override;

 private:
  const SpanView& span_;
  ResultMemory& memory_;
  std::unordered_map<std::uint32_t, std::vector<std::byte>>
      encoded_;  // kept until the span is over: a later receiver gets a copy
  server::ResultStreams streams_;
};

class Results final : public server::ResultStreams::Maker, core::Pinned {
 public:
  Results(const SpanView& span, ResultMemory& memory);
  /// The chunk's result is in memory.
  void offer(std::uint32_t chunk);
  void on_grant(core::EngineId peer, const wire::Grant& grant);
  /// The span's owner is lost, and its heir serves the other nodes.
  void leave_nodes();

  flow::Payload make(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override;
  void on_stream_sent() override;

 private:
  const SpanView& span_;
  ResultMemory& memory_;
  bool serves_locals_ = false;
  std::optional<NetResults> net_;
  server::ResultStreams streams_;
};

class Consumer : core::Pinned {
 public:
  explicit Consumer(const SpanView& span) : span_(span) {}
  /// Writes the chunk into the output. False: the chunk has landed before.
  bool on_data(const wire::Data& data, flow::Delivery payload);
  /// Grants all chunks. This rank has started the operation, so data goes straight into the output.
  void on_announce(const wire::From& from, const wire::Announce& announce);
  bool has_landed(std::uint32_t chunk) const noexcept { return !landed_.empty() && landed_[chunk] != 0; }
  /// The chunk was made here instead of received. False: the chunk has landed before.
  bool mark(std::uint32_t chunk);

 private:
  const SpanView& span_;
  std::vector<std::uint8_t> landed_;  // per chunk
};

}  // namespace hybridps::worker
