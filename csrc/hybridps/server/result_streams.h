// hybridps/server/result_streams.h: results on their way to all their receivers.
//
// Model    One stream per receiver. All streams share one buffer per chunk, made when the first of them may send it.
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "hybridps/compress/codec.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/flow/outbox.h"

namespace hybridps::server {

class ResultStreams final : public flow::Source, core::Pinned {
 public:
  /// Makes the bytes of results.
  class Maker {
   public:
    virtual ~Maker() = default;
    /// The chunk's result as it goes on the wire, to `stream` first; no buffer: no slot is free.
    virtual flow::Payload make(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) = 0;
    /// A buffer for a result that was set aside; no buffer: no slot is free. Needed only with Keep::kUntilAllSent.
    virtual transport::Buffer room(std::size_t) { return {}; }
    virtual void on_stream_sent() = 0;
  };
  enum class Keep {
    kWhileSent,     // shared while a send is under way: a later stream has the result made again
    kUntilAllSent,  // the result can be made only once; set_aside() frees the slots
  };

  /// `codec`: the codec of the results on the wire; null: none.
  ResultStreams(flow::Outbox& outbox, Maker& maker, Keep keep, const compress::Codec* codec)
      : outbox_(outbox), maker_(maker), keep_(keep), codec_(codec) {}
  ~ResultStreams() override;

  bool empty() const noexcept { return streams_.empty(); }
  void add(std::unique_ptr<flow::Stream> stream);
  /// Ends the streams of this stage. Returns how many of these had not sent all.
  std::size_t end(wire::Stage stage);
  /// The chunk's result is available.
  void offer(std::uint32_t chunk);
  void on_grant(core::EngineId peer, const wire::Grant& grant);
  bool all_sent() const noexcept;
  /// Copies kept results out of slots that other receivers need. False: there were none.
  bool set_aside();

  std::size_t wire_bytes_max(std::size_t bytes) const noexcept override {
    return codec_ == nullptr ? bytes : codec_->bytes_max(bytes);
  }
  flow::Payload payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override;
  void on_sent(flow::Stream& stream, std::uint32_t chunk) override;
  void on_permitted(flow::Stream&, std::uint32_t) override {}

 private:
  struct Made {
    std::uint32_t slot = 0;
    std::uint64_t life = 0;
    std::size_t bytes = 0;
    std::uint8_t packed = wire::kNotPacked;
    bool asked = false;  // for a packed form, which may have been refused
    transport::Buffer kept;
    std::vector<std::byte> aside;
    std::size_t sent = 0;  // streams that have sent the chunk
  };

  flow::Outbox& outbox_;
  Maker& maker_;
  const Keep keep_;
  const compress::Codec* const codec_;
  std::vector<std::unique_ptr<flow::Stream>> streams_;
  std::vector<Made> made_;  // per chunk, where there are several streams
  std::size_t kept_ = 0;    // entries of made_ that hold a slot
};

}  // namespace hybridps::server
