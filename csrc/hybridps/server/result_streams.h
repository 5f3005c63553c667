// hybridps/server/result_streams.h: results on their way to all who want them.
//
// Model    One stream per receiver, and one buffer for all of them, made when the first of them may send the chunk.
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
  /// Where the bytes come from.
  class Maker {
   public:
    virtual ~Maker() = default;
    /// The chunk's result as it goes out; no buffer: no slot is free.
    virtual flow::Payload make(std::uint32_t chunk, std::size_t bytes) = 0;
    /// A buffer for what was set aside; none: no slot is free. Only of what can be made once.
    virtual transport::Buffer room(std::size_t) { return {}; }
    virtual void on_stream_sent() = 0;
  };
  enum class Keep {
    kWhileSent,     // shared as long as one of the sends is under way: whoever comes later has it made again
    kUntilAllSent,  // it can be made only once; set_aside() lets go of the slots
  };

  /// `codec`: of what goes out; null: none.
  ResultStreams(flow::Outbox& outbox, Maker& maker, Keep keep, const compress::Codec* codec)
      : outbox_(outbox), maker_(maker), keep_(keep), codec_(codec) {}
  ~ResultStreams() override;

  bool empty() const noexcept { return streams_.empty(); }
  void add(std::unique_ptr<flow::Stream> stream);
  /// The chunk's result is there.
  void offer(std::uint32_t chunk);
  void on_grant(core::EngineId peer, const wire::Grant& grant);
  bool all_sent() const noexcept;
  /// Copies what is kept out of its slots, so that one receiver that is behind does not hold those that others need. Whether
  /// anything was.
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
    transport::Buffer kept;
    std::vector<std::byte> aside;
    std::size_t sent = 0;  // streams that have
  };

  flow::Outbox& outbox_;
  Maker& maker_;
  const Keep keep_;
  const compress::Codec* const codec_;
  std::vector<std::unique_ptr<flow::Stream>> streams_;
  std::vector<Made> made_;  // per chunk, where there are several streams
  std::size_t kept_ = 0;    // of these, in slots
};

}  // namespace hybridps::server
