#include "hybridps/core/log.h"

#include <unistd.h>

#include <cerrno>

#include "hybridps/core/text.h"

namespace hybridps::core {
namespace {

std::atomic<LogLevel> current_level{LogLevel::kWarn};  // NOLINT: the one global, see log.h

}  // namespace

std::string_view name_of(LogLevel level) noexcept {
  switch (level) {
    case LogLevel::kError: return "error";
    case LogLevel::kWarn: return "warn";
    case LogLevel::kInfo: return "info";
    case LogLevel::kDebug: return "debug";
  }
  return "unknown";
}

std::optional<LogLevel> parse_log_level(std::string_view text) {
  std::string word(text);
  for (char& c : word) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  if (word == "warning") return LogLevel::kWarn;
  for (const LogLevel level : {LogLevel::kError, LogLevel::kWarn, LogLevel::kInfo, LogLevel::kDebug}) {
    if (word == name_of(level)) return level;
  }
  return std::nullopt;
}

void set_log_level(LogLevel level) noexcept { current_level.store(level, std::memory_order_relaxed); }

LogLevel log_level() noexcept { return current_level.load(std::memory_order_relaxed); }

std::string format_log_line(LogLevel level, std::string_view text) {
  std::string line = "hybridps[" + std::to_string(getpid()) + "] ";
  line += name_of(level);
  line += ": ";
  while (text.ends_with('\n')) text.remove_suffix(1);
  for (const char c : printable(text)) {
    line += c;
    if (c == '\n') line += "    ";
  }
  line += '\n';
  return line;
}

void write_log_line(LogLevel level, std::string_view text) noexcept {
  try {
    const std::string line = format_log_line(level, text);
    std::string_view rest = line;
    while (!rest.empty()) {
      const ssize_t written = ::write(STDERR_FILENO, rest.data(), rest.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return;  // nobody reads stderr: nothing better to do
      rest.remove_prefix(static_cast<std::size_t>(written));
    }
  } catch (...) {  // out of memory: drop the line
  }
}

std::optional<std::uint64_t> LogRate::permit(TimePoint now) noexcept {
  const Duration::rep at = now.time_since_epoch().count();
  Duration::rep next = next_.load(std::memory_order_relaxed);
  while (at >= next) {
    if (next_.compare_exchange_weak(next, at + interval_.count(), std::memory_order_relaxed)) {
      return refused_.exchange(0, std::memory_order_relaxed);
    }
  }
  refused_.fetch_add(1, std::memory_order_relaxed);
  return std::nullopt;
}

}  // namespace hybridps::core
