#include "hybridps/admission/messages.h"

#include <openssl/rand.h>

#include <algorithm>
#include <utility>

#include "hybridps/core/log.h"

namespace hybridps::admission {

using core::Code;
using core::Status;

Mac mac_of(std::string_view token, std::string_view role, const std::uint8_t* job_nonce,
           const std::uint8_t* server_nonce, const Bytes& body) {
  return tls::hmac(tls::bytes_of(token),
                   {tls::bytes_of(role), {job_nonce, kNonceBytes}, {server_nonce, kNonceBytes}, body});
}

void put_u32(Bytes& out, std::uint32_t value) {
  for (int i = 0; i < 4; ++i) out.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

std::uint32_t get_u32(const std::uint8_t* at) {
  return static_cast<std::uint32_t>(at[0]) | static_cast<std::uint32_t>(at[1]) << 8 |
         static_cast<std::uint32_t>(at[2]) << 16 | static_cast<std::uint32_t>(at[3]) << 24;
}

core::Result<Bytes> hello() {
  Bytes out;
  put_u32(out, kMagic);
  put_u32(out, kVersion);
  out.resize(kHelloBytes);
  if (RAND_bytes(out.data() + 8, static_cast<int>(kNonceBytes)) != 1)
    return Status(Code::kInternal, "the system has no random numbers");
  return out;
}

bool Visit::input(std::span<const std::uint8_t> bytes) {
  if (bytes.size() > wanted()) return false;
  if (state_ == VisitState::kTooLarge)
    wanted_ -= bytes.size();
  else
    in_.insert(in_.end(), bytes.begin(), bytes.end());
  return wanted() > 0 || understand();
}

bool Visit::understand() {
  switch (state_) {
    case VisitState::kHello: {
      if (get_u32(in_.data()) != kMagic) return false;
      core::Result<Bytes> mine = hello();
      if (!mine.is_ok()) return false;
      job_nonce_.assign(in_.begin() + 8, in_.end());
      server_nonce_.assign(mine.value().begin() + 8, mine.value().end());
      out_ = std::move(mine).value();
      for (std::size_t i = 0; i < kTokensMax; ++i) {
        const core::SecretBytes& token = tokens_[std::min(i, tokens_.size() - 1)];
        const Mac mac = mac_of(token.text(), "server", job_nonce_.data(), server_nonce_.data());
        out_.insert(out_.end(), mac.begin(), mac.end());
      }
      // A job of another version learns our version and can report the mismatch.
      state_ = VisitState::kProof;
      wanted_ = get_u32(in_.data() + 4) == kVersion ? 2 * kMacBytes + 4 : 0;
      break;
    }
    case VisitState::kProof: {
      for (const core::SecretBytes& token : tokens_)
        if (tls::is_equal(mac_of(token.text(), "job", job_nonce_.data(), server_nonce_.data()), in_.data()))
          token_ = &token;
      if (token_ == nullptr) return false;
      std::copy_n(in_.begin() + kMacBytes, kMacBytes, seal_.begin());
      const std::uint32_t length = get_u32(in_.data() + 2 * kMacBytes);
      if (length > body_bytes_max_)
        core::log_warn("refused a request of ", length, " bytes: this server takes ", body_bytes_max_,
                       " at most; start it with more --memory");
      if (length < 1 || length > kBodyBytesMax) return false;
      state_ = length > body_bytes_max_ ? VisitState::kTooLarge : VisitState::kBody;
      wanted_ = length;
      break;
    }
    case VisitState::kBody: {
      if (!tls::is_equal(mac_of(token_->text(), "request", job_nonce_.data(), server_nonce_.data(), in_), seal_.data()))
        return false;
      answer(handler_(in_));
      break;
    }
    case VisitState::kTooLarge:
      answer(Status(Code::kOutOfResources, "it takes requests of " + std::to_string(body_bytes_max_) +
                                               " bytes at most; start it with more --memory"));
      break;
    case VisitState::kAnswered: return false;
  }
  in_.clear();
  return true;
}

void Visit::answer(const core::Result<Bytes>& result) {
  Bytes said;
  if (result.is_ok()) {
    said.push_back(0);
    said.insert(said.end(), result.value().begin(), result.value().end());
  } else {
    const std::string text(result.status().message());
    said.push_back(static_cast<std::uint8_t>(result.status().code()));
    said.insert(said.end(), text.begin(), text.end());
  }
  const Mac mac = mac_of(token_->text(), "answer", job_nonce_.data(), server_nonce_.data(), said);
  out_.insert(out_.end(), mac.begin(), mac.end());
  put_u32(out_, static_cast<std::uint32_t>(said.size()));
  out_.insert(out_.end(), said.begin(), said.end());
  state_ = VisitState::kAnswered;
  wanted_ = 0;
}

}  // namespace hybridps::admission
