#include "hybridps/transport/tcp/tcp_session.h"

#include <algorithm>

namespace hybridps::transport {

bool TcpSession::acknowledge(std::uint32_t received_low) noexcept {
  const std::uint32_t more = received_low - static_cast<std::uint32_t>(acknowledged_);
  if (more > sent_ - acknowledged_) {
    // A count of before: messages that are sent again still tell what they told first.
    return static_cast<std::int32_t>(more) < 0;
  }
  acknowledged_ += more;
  return true;
}

TcpSession::Fit TcpSession::on_greeting(const SessionSide& theirs, bool is_greeted, bool goes_first) noexcept {
  if (theirs.attempt <= their_attempt_) return Fit::kStale;
  if (is_greeted && goes_first) return Fit::kOursGoes;
  if (!fits(theirs)) return Fit::kLost;
  go_on(theirs);
  return Fit::kGoesOn;
}

TcpSession::Fit TcpSession::on_answer(const SessionSide& theirs) noexcept {
  if (!fits(theirs)) return Fit::kLost;
  go_on(theirs);
  return Fit::kGoesOn;
}

void TcpSession::go_on(const SessionSide& theirs) noexcept {
  their_attempt_ = std::max(their_attempt_, theirs.attempt);
  sent_ = acknowledged_ = theirs.received;
}

}  // namespace hybridps::transport
