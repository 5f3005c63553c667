#include "hybridps/pg/errors.h"

#include <c10/util/Exception.h>

#include "hybridps/core/text.h"

namespace hybridps::pg {
namespace {

std::string text(const core::Status& status, const std::string& what) {
  // The engine's own messages already begin with the rank, the group and the operation.
  const bool complete = status.message().starts_with("hybridps[");
  std::string result = complete ? "hybridps: " : "hybridps: " + what + ": ";
  switch (status.code()) {
    case core::Code::kTimeout: result += "Timed out : "; break;  // people and torch's tests look for " Timed out "
    case core::Code::kClosed: result += "the group is closed : "; break;
    case core::Code::kInvalidArgument:
    case core::Code::kUnsupported: break;
    default: result += std::string(core::code_name(status.code())) + ": ";
  }
  return core::printable(result + std::string(status.message()));  // Python cannot raise text that is not UTF-8
}

}  // namespace

void throw_status(const core::Status& status, const std::string& what) {
  switch (status.code()) {
    case core::Code::kPeerDead: C10_THROW_ERROR(DistNetworkError, text(status, what));
    case core::Code::kInvalidArgument: C10_THROW_ERROR(ValueError, text(status, what));
    case core::Code::kUnsupported: C10_THROW_ERROR(NotImplementedError, text(status, what));
    default: C10_THROW_ERROR(DistBackendError, text(status, what));
  }
}

std::exception_ptr to_exception(const core::Status& status, const std::string& what) {
  try {
    throw_status(status, what);
  } catch (...) {
    return std::current_exception();
  }
}

std::string message_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return core::printable(of_torch != nullptr ? of_torch->what_without_backtrace() : error.what());
}

void check_status(const core::Status& status, const std::string& what) {
  if (!status.is_ok()) throw_status(status, what);
}

}  // namespace hybridps::pg
