// hybridps/intranode/shm/shm_endpoint.h: one peer of a ShmTransport: its socket, its views of memory, its rings.
//
// Internal to this folder. The life of an endpoint:
//
//   kConnecting -> kMeeting -> kHelloSent -> kProving -> kOpen -> kEnded      we connect
//                      |  \-> kYielded -^                         both connect: the smaller engine id's socket is used
//                  (accepted) ----------^                         the peer connects
//
// kEnded keeps socket, rings and views until neither side holds a payload of the other, or the peer is gone.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/intranode/shm/handshake.h"
#include "hybridps/intranode/shm/ring.h"
#include "hybridps/intranode/shm/segment.h"
#include "hybridps/transport/endpoint.h"
#include "hybridps/transport/transport.h"

namespace hybridps::intranode::shm {

class ShmTransport;

class ShmEndpoint final : public transport::Endpoint {
 public:
  ShmEndpoint(ShmTransport& owner, core::EngineId peer, std::uint32_t index) noexcept
      : owner_(owner), peer_(peer), index_(index) {}

  core::Status send(std::span<const std::byte> header, const transport::Buffer& payload, std::size_t payload_bytes,
                    transport::SendDone done) override;
  core::EngineId peer() const noexcept override { return peer_; }
  void close(core::Status cause) noexcept override;

 private:
  friend class ShmTransport;
  enum class ConnectionState { kConnecting, kMeeting, kHelloSent, kYielded, kProving, kOpen, kEnded };

  struct Queued {
    std::array<std::byte, transport::kHeaderBytesMax> header;
    std::size_t header_bytes;
    transport::Buffer payload;
    std::size_t payload_bytes;
    transport::SendDone done;
  };
  /// A payload that the peer may be reading.
  struct Lent {
    transport::Buffer payload;
    transport::SendDone done;
    std::uint16_t life = 0;  // distinguishes uses of the same place
    bool in_use = false;
  };

  // Handshake, called by the transport.
  void open_slot(std::unique_ptr<Segment> slot);
  void dial();
  void retry(std::chrono::steady_clock::time_point now);
  void accept(core::Descriptor socket, const Packet& hello, std::array<core::Descriptor, kDescriptorsMax>& descriptors);
  void on_socket();
  void on_packet(const Packet& packet, std::array<core::Descriptor, kDescriptorsMax>& descriptors);
  core::Status map_peer(const Packet& hello, std::array<core::Descriptor, kDescriptorsMax>& descriptors);
  bool say_hello(const Nonce& echo, const tls::Mac& mac = {});
  void say_proof();
  void check_proof(const Packet& packet);
  void watch_socket(core::Descriptor socket);

  // Messages.
  bool is_usable() const noexcept { return state_ != ConnectionState::kEnded && !closing_; }
  bool is_inline(std::size_t payload_bytes) const noexcept { return payload_bytes <= kInlineBytesMax; }
  /// False: there is no room now, or the endpoint has just ended.
  bool try_post(std::span<const std::byte> header, const transport::Buffer& payload, std::size_t payload_bytes,
                transport::SendDone& done);
  std::size_t step();
  std::size_t take_releases();
  std::size_t take_messages(std::size_t messages_max);
  std::size_t flush_queue();
  bool may_lend() const noexcept;
  bool nothing_queued() const noexcept { return queue_.empty() && parked_.empty(); }
  bool post_front(std::deque<Queued>& queue);
  bool has_work();
  void wake() noexcept;
  static void release_held(void* context, void* token, std::uint64_t extra) noexcept;

  // End.
  /// `gone`: the peer no longer reads our memory, or its word is not trusted. `report`: tell the receiver.
  void end(core::Status cause, bool gone, bool report);
  void on_peer_gone();
  void let_go_all();
  /// Delivers what the peer wrote before its end, then ends the endpoint.
  void drain_and_end(core::Status cause);
  /// Gives up socket, views and slot when neither side needs them. Idempotent.
  bool finish();
  bool can_finish_more() const noexcept;
  std::string who() const;
  core::Status corrupt(const char* what) const;

  ShmTransport& owner_;
  const core::EngineId peer_;
  const std::uint32_t index_;
  ConnectionState state_ = ConnectionState::kConnecting;
  bool requested_ = false;  // connect() was called
  bool was_open_ = false;
  bool closing_ = false;    // close(kClosed): accepted messages go out first
  bool peer_gone_ = false;  // end of file was read
  bool write_shut_ = false;
  bool finished_ = false;
  core::Status cause_;
  ShmAddress address_;                                // the peer's, if we connected
  std::chrono::steady_clock::time_point deadline_{};  // kConnecting: next try; kYielded: the peer must have connected
  int pid_ = 0;

  core::Descriptor socket_;
  core::Descriptor wake_;  // the peer's eventfd
  std::unique_ptr<Segment> peer_front_;
  std::unique_ptr<Segment> peer_slot_;
  std::unique_ptr<Segment> peer_pool_;
  std::unique_ptr<Segment> own_slot_;  // of its own, so that no other peer can write into it
  Nonce session_nonce_{};
  Nonce peer_session_nonce_{};
  Nonce memory_nonce_{};

  MessageReader messages_in_;
  ReleaseReader releases_in_;
  MessageWriter messages_out_;
  ReleaseWriter releases_out_;
  std::deque<Queued> queue_;   // in order; wait for the connection or for room in the ring
  std::deque<Queued> parked_;  // payloads by reference beyond release_entries; wait until the peer gives some back
  std::vector<Lent> lent_;     // grows to release_entries
  std::vector<std::uint32_t> lent_free_;
  std::size_t lent_count_ = 0;
  std::size_t held_ = 0;  // payloads of the peer that our engine has not given back
};

}  // namespace hybridps::intranode::shm
