#include "hybridps/core/status.h"

namespace hybridps::core {

std::string_view code_name(Code code) noexcept {
  switch (code) {
    case Code::kOk: return "ok";
    case Code::kInvalidArgument: return "invalid argument";
    case Code::kMismatch: return "mismatch";
    case Code::kTimeout: return "timeout";
    case Code::kPeerDead: return "peer dead";
    case Code::kAborted: return "aborted";
    case Code::kBusy: return "busy";
    case Code::kClosed: return "closed";
    case Code::kUnsupported: return "unsupported";
    case Code::kOutOfResources: return "out of resources";
    case Code::kInternal: return "internal error";
  }
  return "unknown";
}

Status::Status(Code code, std::string message)
    : code_(code), message_(std::make_shared<const std::string>(std::move(message))) {}

std::string Status::to_string() const {
  if (is_ok()) return "ok";
  return std::string(code_name(code_)) + ": " + std::string(message());
}

}  // namespace hybridps::core
