// Receiving over UCX: eager messages, and payloads that are fetched by rendezvous.
#include <algorithm>
#include <cstring>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/transport/envelope.h"
#include "hybridps/transport/ucx/ucx_transport_impl.h"

namespace hybridps::transport {

ucs_status_t UcxTransportImpl::on_active_message(void* transport, const void* header, std::size_t header_bytes,
                                                 void* data, std::size_t bytes, const ucp_am_recv_param_t* param) {
  auto& self = *static_cast<UcxTransportImpl*>(transport);
  if (self.receiver_ == nullptr) return UCS_OK;
  if (header_bytes == 0 || header_bytes > kHeaderBytesMax || bytes > self.options_.payload_bytes_max) {
    ++self.counters_.dropped_malformed;
    return UCS_OK;
  }
  const std::span<const std::byte> header_view(static_cast<const std::byte*>(header), header_bytes);
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) return self.receive_rendezvous(header_view, data, bytes);
  return self.receive_eager(header_view, data, bytes, (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0);
}

ucs_status_t UcxTransportImpl::receive_eager(std::span<const std::byte> header, void* data, std::size_t bytes,
                                             bool may_keep) {
  if (bytes == 0) {
    deliver(header, RxPayload());
    return UCS_OK;
  }
  if (may_keep) {
    ++counters_.receives_kept;
    data_in_callback_ = data;
    released_in_callback_ = false;
    deliver(header, RxPayload(static_cast<const std::byte*>(data), bytes, &release_kept, this, data));
    data_in_callback_ = nullptr;
    return released_in_callback_ ? UCS_OK : UCS_INPROGRESS;
  }
  RxSlot* slot = rx_pool_->allocate(bytes, /*past_cap=*/true);
  if (slot == nullptr) {
    // No memory at all. The loss must be logged, because the operation of a lost message would hang silently.
    core::log_error(name_, ": out of memory for a message of ", bytes, " bytes, dropped");
    ++counters_.receives_failed;
    return UCS_OK;
  }
  ++counters_.receives_copied;
  std::memcpy(slot->data, data, bytes);
  deliver(header, RxPayload(slot->data, bytes, &release_slot, this, slot));
  return UCS_OK;
}

ucs_status_t UcxTransportImpl::receive_rendezvous(std::span<const std::byte> header, void* descriptor,
                                                  std::size_t bytes) {
  ++counters_.receives_rendezvous;
  Receive* receive = nullptr;
  if (free_receives_.empty()) {
    receives_.push_back(std::make_unique<Receive>());
    free_receives_.reserve(receives_.size());
    receive = receives_.back().get();
    receive->transport = this;
  } else {
    receive = free_receives_.back();
    free_receives_.pop_back();
  }
  receive->descriptor = descriptor;
  receive->payload_bytes = bytes;
  receive->header_bytes = static_cast<std::uint32_t>(header.size());
  std::memcpy(receive->header.data(), header.data(), header.size());
  // Receives that wait already go first.
  receive->slot = waiting_.empty() ? rx_pool_->allocate(bytes) : nullptr;
  if (receive->slot == nullptr) {
    ++counters_.receives_waited;
    waiting_.push_back(receive);
  } else {
    start_receive(receive);
  }
  return UCS_INPROGRESS;
}

void UcxTransportImpl::start_receive(Receive* receive) {
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = &UcxTransportImpl::on_received;
  param.user_data = receive;
  param.memh = static_cast<ucp_mem_h>(receive->slot->handle);
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  receive->pending = true;
  ++receives_pending_;
  const ucs_status_ptr_t posted =
      api_.am_receive(worker_, receive->descriptor, receive->slot->data, receive->payload_bytes, &param);
  if (!UCS_PTR_IS_PTR(posted)) finish_receive(receive, UCS_PTR_STATUS(posted));
}

void UcxTransportImpl::on_received(void* ucp_request, ucs_status_t status, std::size_t /*bytes*/, void* user_data) {
  auto* receive = static_cast<Receive*>(user_data);
  UcxTransportImpl& self = *receive->transport;
  self.api_.request_free(ucp_request);
  self.finish_receive(receive, status);
}

void UcxTransportImpl::finish_receive(Receive* receive, ucs_status_t status) {
  receive->pending = false;
  --receives_pending_;
  RxSlot* slot = std::exchange(receive->slot, nullptr);
  if (status != UCS_OK || receiver_ == nullptr) {
    if (status != UCS_OK) ++counters_.receives_failed;
    rx_pool_->release(slot);
  } else {
    deliver({receive->header.data(), receive->header_bytes},
            RxPayload(slot->data, receive->payload_bytes, &release_slot, this, slot));
  }
  free_receives_.push_back(receive);
}

std::size_t UcxTransportImpl::start_waiting_receives() {
  std::size_t started = 0;
  while (!waiting_.empty()) {
    Receive* receive = waiting_.front();
    receive->slot = rx_pool_->allocate(receive->payload_bytes);
    if (receive->slot == nullptr) break;
    waiting_.pop_front();
    start_receive(receive);
    ++started;
  }
  return started;
}

void UcxTransportImpl::deliver(std::span<const std::byte> header, RxPayload payload) {
  ++stats_.rx_messages;
  stats_.rx_header_bytes += header.size();
  stats_.rx_payload_bytes += payload.bytes();
  // UCX tells of a message neither the connection nor the sender.
  receiver_->on_message({}, header, std::move(payload));
}

void UcxTransportImpl::release_kept(void* transport, void* data, std::uint64_t) noexcept {
  auto& self = *static_cast<UcxTransportImpl*>(transport);
  if (self.in_child()) return;
  if (data == self.data_in_callback_)
    self.released_in_callback_ = true;  // the callback's return value tells UCX
  else
    self.api_.am_data_release(self.worker_, data);
}

void UcxTransportImpl::release_slot(void* transport, void* slot, std::uint64_t) noexcept {
  auto& self = *static_cast<UcxTransportImpl*>(transport);
  if (!self.in_child()) self.rx_pool_->release(static_cast<RxSlot*>(slot));
}

}  // namespace hybridps::transport
