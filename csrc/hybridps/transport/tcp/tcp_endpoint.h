// hybridps/transport/tcp/tcp_endpoint.h: the endpoint to one peer. Internal to this room.
//
//   kOpen ──close(kClosed)──> kDraining ──all has left──> kFlushing ──the peer's kernel has it, or late──┐
//     │                                                                                                  v
//     ├──its session ended, close(any other code)──> kDoomed ──next progress()──────────────────────> kGone
//     └──one of several sessions ended──> kEnding ──the others have, too, or late────────────────────> kGone
//
// Honest peers come to one session. A second one is the peer's mistake, and must not cut off what the first one brings.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/endpoint.h"
#include "hybridps/transport/tcp/tcp_wire.h"

namespace hybridps::transport {

class TcpTransportImpl;
struct TcpLink;

class TcpEndpoint final : public Endpoint {
 public:
  enum class EndpointState : std::uint8_t { kOpen, kDraining, kFlushing, kEnding, kDoomed, kGone };

  TcpEndpoint(TcpTransportImpl& transport, core::EngineId peer, TcpAddress address)
      : transport_(transport), peer_(peer), address_(std::move(address)) {}

  core::Status send(std::span<const std::byte> header, const Buffer& payload, std::size_t payload_bytes,
                    SendDone done) override;
  core::EngineId peer() const noexcept override { return peer_; }
  void close(core::Status cause) noexcept override;

 private:
  friend class TcpTransportImpl;
  bool is_open() const noexcept { return state_ == EndpointState::kOpen; }

  TcpTransportImpl& transport_;
  const core::EngineId peer_;
  const TcpAddress address_;
  TcpLink* out_ = nullptr;       // session for sending
  std::vector<TcpLink*> links_;  // all sessions with this peer
  EndpointState state_ = EndpointState::kOpen;
  bool report_ = false;  // on_peer_failed is due
  bool has_said_farewell_ = false;
  core::Status cause_;  // cause of the first failure or close
  core::Deadline close_deadline_;
  core::TimePoint queue_empty_since_{};  // of TCP, while the kernel encrypts and this endpoint closes
};

}  // namespace hybridps::transport
