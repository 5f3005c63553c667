#include "hybridps/transport/ucx/ucx_endpoint.h"

#include <string>
#include <utility>

#include "hybridps/transport/ucx/ucx_transport_impl.h"

namespace hybridps::transport {

core::Status UcxEndpoint::send(std::span<const std::byte> header, const Buffer& payload, std::size_t payload_bytes,
                               SendDone done) {
  return transport_.send(*this, header, payload, payload_bytes, std::move(done));
}

void UcxEndpoint::close(core::Status cause) noexcept { transport_.close(*this, std::move(cause)); }

void UcxEndpoint::on_error(void* endpoint, ucp_ep_h /*ep*/, ucs_status_t status) {
  auto* self = static_cast<UcxEndpoint*>(endpoint);
  std::string what = status == UCS_ERR_CONNECTION_RESET
                         ? std::string(kEndedWithoutClosing)
                         : "the connection (" + std::string(self->transport_.name()) + ") to engine " +
                               core::to_string(self->peer_) + " broke: " + text_of(status);
  self->fail(core::Status(core::Code::kPeerDead, std::move(what)));
}

void UcxEndpoint::fail(core::Status cause) {
  switch (state_) {
    case UcxState::kOpen:
      cause_ = std::move(cause);
      report_ = true;
      break;
    case UcxState::kDraining:
    case UcxState::kFlushing: break;  // closing already: now by force
    case UcxState::kDoomed:
    case UcxState::kGone: return;
  }
  state_ = UcxState::kDoomed;
  transport_.needs_attention(*this);
}

}  // namespace hybridps::transport
