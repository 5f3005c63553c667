// hybridps/core/log.h: leveled lines on stderr, `hybridps[pid] level: text`.
//
// Threads  any. One line is one write(2), so lines of several threads and processes do not mix.
// Errors   only the first function that knows an error's meaning logs the error.
// State    one atomic level, the only global of this room.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "hybridps/core/clock.h"

namespace hybridps::core {

enum class LogLevel : std::uint8_t { kError = 0, kWarn = 1, kInfo = 2, kDebug = 3 };

/// "error", "warn", "info", "debug".
std::string_view name_of(LogLevel level) noexcept;
/// The inverse of name_of(), in any case; nothing for any other text.
std::optional<LogLevel> parse_log_level(std::string_view text);

/// Lines above this level are dropped; kWarn until set.
void set_log_level(LogLevel level) noexcept;
LogLevel log_level() noexcept;
inline bool log_enabled(LogLevel level) noexcept { return level <= log_level(); }

/// `hybridps[pid] level: text\n`; line feeds inside become indented continuation lines.
std::string format_log_line(LogLevel level, std::string_view text);
/// Writes the line whatever the level; log() below checks it.
void write_log_line(LogLevel level, std::string_view text) noexcept;

/// log(LogLevel::kWarn, "rank ", rank, " is late"): parts are formatted only when the level is on.
template <typename... Parts>
void log(LogLevel level, const Parts&... parts) {
  if (!log_enabled(level)) return;
  std::ostringstream text;
  (text << ... << parts);
  write_log_line(level, text.str());
}
template <typename... Parts>
[[gnu::cold]] void log_error(const Parts&... parts) {
  log(LogLevel::kError, parts...);
}
template <typename... Parts>
[[gnu::cold]] void log_warn(const Parts&... parts) {
  log(LogLevel::kWarn, parts...);
}
template <typename... Parts>
[[gnu::cold]] void log_info(const Parts&... parts) {
  log(LogLevel::kInfo, parts...);
}
template <typename... Parts>
[[gnu::cold]] void log_debug(const Parts&... parts) {
  log(LogLevel::kDebug, parts...);
}

/// Lets one line through per interval. Thread-safe; a member or a local static of the place that logs.
///   if (auto dropped = rate_.permit()) log_warn("late chunk", *dropped ? " (and others)" : "");
class LogRate {
 public:
  explicit LogRate(Duration interval) noexcept : interval_(interval) {}

  /// The number of calls refused since the last permitted one, or nothing when this call is refused.
  std::optional<std::uint64_t> permit(TimePoint now = Clock::now()) noexcept;

 private:
  const Duration interval_;
  std::atomic<Duration::rep> next_{Duration::min().count()};
  std::atomic<std::uint64_t> refused_{0};
};

}  // namespace hybridps::core
