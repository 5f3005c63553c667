#include "hybridps/server/result_streams.h"

#include <algorithm>
#include <utility>

namespace hybridps::server {

ResultStreams::~ResultStreams() {
  for (const auto& stream : streams_) outbox_.cancel(*stream);
}

void ResultStreams::add(std::unique_ptr<flow::Stream> stream) {
  stream->source = this;
  streams_.push_back(std::move(stream));
}

void ResultStreams::offer(std::uint32_t chunk) {
  for (const auto& stream : streams_) outbox_.offer(*stream, chunk);
}

void ResultStreams::on_grant(core::EngineId peer, const wire::Grant& grant) {
  for (const auto& stream : streams_)
    if (stream->peer == peer && stream->id.stage == grant.chunk.stage)
      return outbox_.granted(*stream, grant.chunk.number);
}

bool ResultStreams::all_sent() const noexcept {
  return std::all_of(streams_.begin(), streams_.end(), [](const auto& stream) { return stream->all_sent(); });
}

flow::Payload ResultStreams::payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) {
  if (streams_.size() == 1) return maker_.make(chunk, bytes);
  made_.resize(stream.chunks);
  Made& made = made_[chunk];
  if (transport::Buffer buffer = outbox_.pool().revive(made.slot, made.life)) return {std::move(buffer), made.bytes};
  flow::Payload payload = maker_.make(chunk, bytes);
  if (!payload.buffer) return payload;
  made.slot = payload.buffer.slot();
  made.life = payload.buffer.life();
  made.bytes = payload.bytes;
  if (keep_ == Keep::kUntilAllSent) made.kept = payload.buffer;
  return payload;
}

void ResultStreams::on_sent(flow::Stream& stream, std::uint32_t chunk) {
  if (keep_ == Keep::kUntilAllSent && !made_.empty() && ++made_[chunk].sent == streams_.size()) made_[chunk].kept = {};
  if (stream.all_sent()) maker_.on_stream_sent();
}

}  // namespace hybridps::server
