// hybridps/transport/ucx/ucx_endpoint.h: one ucp_ep and its sends in flight. Internal to this room.
//
//   kOpen ──close(kClosed)──> kDraining ──nothing in flight, or late──> kFlushing ──flushed, or late──┐
//     │                                                                                              v
//     └──error of UCX, close(any other code)──> kDoomed ──next progress()───────────────────────> kGone
//
// The ucp_ep is always released by a forced close. UCX allows one close per endpoint, so a friendly close that hangs
// could not be forced later.
#pragma once

#include <ucp/api/ucp.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "hybridps/core/clock.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/endpoint.h"

namespace hybridps::transport {

class UcxTransportImpl;
class UcxEndpoint;

/// One accepted send, from send() until its `done` has run. Recycled.
struct SendRequest {
  UcxEndpoint* endpoint = nullptr;
  Buffer payload;
  SendDone done;
  SendRequest* previous = nullptr;  // in the transport's list while UCX holds the request
  SendRequest* next = nullptr;
  std::array<std::byte, kHeaderBytesMax> header;  // UCX reads it until completion
};

class UcxEndpoint final : public Endpoint {
 public:
  enum class UcxState : std::uint8_t { kOpen, kDraining, kFlushing, kDoomed, kGone };

  UcxEndpoint(UcxTransportImpl& transport, core::EngineId peer) : transport_(transport), peer_(peer) {}

  core::Status send(std::span<const std::byte> header, const Buffer& payload, std::size_t payload_bytes,
                    SendDone done) override;
  core::EngineId peer() const noexcept override { return peer_; }
  void close(core::Status cause) noexcept override;

  /// UCX's error handler; `endpoint` is a UcxEndpoint.
  static void on_error(void* endpoint, ucp_ep_h ep, ucs_status_t status);

 private:
  friend class UcxTransportImpl;

  bool is_open() const noexcept { return state_ == UcxState::kOpen; }
  /// The connection broke: no more sends, close by force, report.
  void fail(core::Status cause);

  UcxTransportImpl& transport_;
  const core::EngineId peer_;
  ucp_ep_h ep_ = nullptr;
  UcxState state_ = UcxState::kOpen;
  bool report_ = false;        // on_peer_failed is due
  bool used_ = false;          // something was sent
  bool flush_done_ = false;    // the flush is done or has failed
  std::size_t in_flight_ = 0;  // sends that UCX holds
  core::Status cause_;         // cause of the first failure or close
  core::Deadline close_deadline_;
};

}  // namespace hybridps::transport
