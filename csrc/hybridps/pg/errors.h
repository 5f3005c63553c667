// hybridps/pg/errors.h: the one place where a Status becomes an exception that torch knows.
//
//   kOk               nothing               kTimeout          DistBackendError, "... Timed out ..."
//   kPeerDead         DistNetworkError      kUnsupported      NotImplementedError
//   kInvalidArgument  ValueError            all others        DistBackendError
#pragma once

#include <exception>
#include <string>

#include "hybridps/core/status.h"

namespace hybridps::pg {

/// `what` says what failed: "all_reduce 17 of group 0 (rank 1 of 4)".
[[noreturn]] void throw_status(const core::Status& status, const std::string& what);
std::exception_ptr to_exception(const core::Status& status, const std::string& what);
/// what() as UTF-8, without the C++ stack that torch's exceptions carry.
std::string message_of(const std::exception& error);
/// Throws unless `status` is ok.
void check_status(const core::Status& status, const std::string& what);

}  // namespace hybridps::pg
