#include "hybridps/server/result_streams.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hybridps::server {

ResultStreams::~ResultStreams() {
  for (const auto& stream : streams_) outbox_.cancel(*stream);
}

void ResultStreams::add(std::unique_ptr<flow::Stream> stream) {
  stream->source = this;
  streams_.push_back(std::move(stream));
}

std::size_t ResultStreams::end(wire::Stage stage) {
  std::size_t unsent = 0;
  std::erase_if(streams_, [&](const std::unique_ptr<flow::Stream>& stream) {
    if (stream->id.stage != stage) return false;
    outbox_.cancel(*stream);
    unsent += stream->all_sent() ? 0 : 1;
    return true;
  });
  return unsent;
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
  if (streams_.size() == 1) return maker_.make(stream, chunk, bytes);
  made_.resize(stream.chunks);
  Made& made = made_[chunk];
  // The path to another receiver may want the other form, unless the result can be made only once.
  const bool asks = outbox_.packs(stream, bytes);
  if (keep_ == Keep::kUntilAllSent || made.asked == asks)
    if (transport::Buffer buffer = outbox_.pool().revive(made.slot, made.life))
      return {std::move(buffer), made.bytes, made.packed};
  flow::Payload payload;
  if (made.aside.empty()) {
    payload = maker_.make(stream, chunk, bytes);
  } else if (payload = {maker_.room(wire_bytes_max(bytes)), made.aside.size(), made.packed}; payload.buffer) {
    std::memcpy(payload.buffer.data(), made.aside.data(), payload.bytes);
  }
  if (!payload.buffer) return payload;
  made.slot = payload.buffer.slot();
  made.life = payload.buffer.life();
  made.bytes = payload.bytes;
  made.packed = payload.packed;
  made.asked = asks;
  if (keep_ == Keep::kUntilAllSent && made.aside.empty()) {
    made.kept = payload.buffer;
    ++kept_;
  }
  return payload;
}

bool ResultStreams::set_aside() {
  if (kept_ == 0) return false;
  for (Made& made : made_) {
    if (!made.kept) continue;
    made.aside.assign(made.kept.data(), made.kept.data() + made.bytes);
    made.kept = {};
  }
  kept_ = 0;
  return true;
}

void ResultStreams::on_sent(flow::Stream& stream, std::uint32_t chunk) {
  if (keep_ == Keep::kUntilAllSent && !made_.empty()) {
    if (Made& made = made_[chunk]; ++made.sent == streams_.size()) {
      if (made.kept) --kept_;
      made.kept = {};
      made.aside = {};
    }
  }
  if (stream.all_sent()) maker_.on_stream_sent();
}

}  // namespace hybridps::server
