// hybridps/core/status.h: the outcome of an operation, copyable and safe to pass between threads.
//
// Rooms below pg/ return Status and never throw; pg/ translates it to c10d's exceptions, once. A message says what
// happened, to whom and what to do. Only the first function that knows an error's meaning logs the error.
#pragma once

#include <cassert>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace hybridps::core {

enum class Code {
  kOk,
  kInvalidArgument,  // the caller's mistake: wrong size, dtype, root, setting
  kMismatch,         // ranks disagree about an operation
  kTimeout,          // a deadline passed
  kPeerDead,         // a peer died or cannot be reached
  kAborted,          // the user aborted or destroyed the group
  kBusy,             // try again after progress; nothing was done
  kClosed,           // the object is shut down
  kUnsupported,      // not available in this build or on this machine
  kOutOfResources,   // memory, descriptors, locked memory
  kInternal,         // a broken invariant of hybridps
};

/// Short stable name of a code, e.g. "timeout".
std::string_view code_name(Code code) noexcept;

/// kOk carries nothing; an error shares one immutable message between its copies.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  // Cold: the compiler moves what leads to an error out of the way of what does not.
  [[gnu::cold]] Status(Code code, std::string message);

  static Status ok() noexcept { return {}; }

  bool is_ok() const noexcept { return code_ == Code::kOk; }
  Code code() const noexcept { return code_; }
  std::string_view message() const noexcept { return message_ ? std::string_view(*message_) : std::string_view(); }
  /// "timeout: push timed out ..." or "ok".
  std::string to_string() const;

 private:
  Code code_ = Code::kOk;
  std::shared_ptr<const std::string> message_;
};

/// Either a value or an error Status.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool is_ok() const noexcept { return value_.has_value(); }
  const Status& status() const noexcept { return status_; }
  /// Call only if is_ok().
  T& value() & {
    assert(is_ok());
    return *value_;
  }
  const T& value() const& {
    assert(is_ok());
    return *value_;
  }
  T&& value() && {
    assert(is_ok());
    return *std::move(value_);
  }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace hybridps::core
