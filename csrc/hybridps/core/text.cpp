#include "hybridps/core/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <system_error>
#include <vector>

namespace hybridps::core {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

void append_escaped(std::string& out, char byte) {
  char escape[5];
  std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
  out += escape;
}

/// The bytes of the UTF-8 character at the beginning of the text; 0: there is none.
std::size_t character_bytes(std::string_view text) noexcept {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = at(0);
  if (first < 0x80) return 1;
  const std::size_t bytes = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (bytes == 0 || bytes > text.size()) return 0;
  for (std::size_t i = 1; i < bytes; ++i)
    if ((at(i) & 0xc0) != 0x80) return 0;
  // Overlong forms, surrogates of UTF-16, and values beyond the last character (U+10FFFF).
  const bool wrong = (first == 0xe0 && at(1) < 0xa0) || (first == 0xed && at(1) >= 0xa0) ||
                     (first == 0xf0 && at(1) < 0x90) || (first == 0xf4 && at(1) >= 0x90);
  return wrong ? 0 : bytes;
}

}  // namespace

std::string format_bytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 6> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return std::to_string(bytes) + " B";
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  char text[40];
  std::snprintf(text, sizeof text, "%.1f", value);
  std::string out = text;
  if (out.ends_with(".0")) out.resize(out.size() - 2);
  return out + " " + kUnits[unit];
}

std::string format_byte_setting(std::uint64_t bytes) {
  constexpr std::array<const char*, 4> kSuffixes = {"", "K", "M", "G"};
  std::size_t unit = 0;
  while (bytes != 0 && bytes % 1024 == 0 && unit + 1 < kSuffixes.size()) {
    bytes /= 1024;
    ++unit;
  }
  return std::to_string(bytes) + kSuffixes[unit];
}

std::optional<double> parse_double(std::string_view text) {
  text = trim(text);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<std::int64_t> parse_int(std::string_view text) {
  text = trim(text);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  text = trim(text);
  const std::size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string suffix = lower(trim(text.substr(digits)));
  std::uint64_t factor = 0;
  if (suffix.empty() || suffix == "b") factor = 1;
  if (suffix == "k" || suffix == "kib") factor = std::uint64_t{1} << 10;
  if (suffix == "m" || suffix == "mib") factor = std::uint64_t{1} << 20;
  if (suffix == "g" || suffix == "gib") factor = std::uint64_t{1} << 30;
  if (factor == 0) return std::nullopt;
  const std::string_view number = text.substr(0, digits);
  std::uint64_t whole = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), whole);
  if (error == std::errc() && end == number.data() + number.size()) {
    if (whole > UINT64_MAX / factor) return std::nullopt;
    return whole * factor;
  }
  const std::optional<double> fraction = parse_double(number);  // "1.5M"
  if (!fraction || factor == 1) return std::nullopt;
  const double bytes = *fraction * static_cast<double>(factor);
  if (bytes < 0 || bytes >= 9.0e18) return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

std::optional<bool> parse_bool(std::string_view text) {
  const std::string word = lower(trim(text));
  if (word == "1" || word == "true" || word == "yes" || word == "on") return true;
  if (word == "0" || word == "false" || word == "no" || word == "off") return false;
  return std::nullopt;
}

std::string format_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

std::string format_double(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.10g", value);
  return text;
}

std::string format_ranks(std::span<const int> ranks, std::size_t count_max) {
  std::string out = "[";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i != 0) out += ", ";
    if (i == count_max) {
      out += "... " + std::to_string(ranks.size() - i) + " more";
      break;
    }
    out += std::to_string(ranks[i]);
  }
  return out + "]";
}

std::string expand_home(std::string_view path) {
  const char* home = std::getenv("HOME");  // NOLINT(concurrency-mt-unsafe): read only
  if (home == nullptr || *home == '\0' || !(path == "~" || path.starts_with("~/"))) return std::string(path);
  return home + std::string(path.substr(1));
}

std::string_view trim(std::string_view text) noexcept {
  constexpr std::string_view kSpace = " \t\r\n\v\f";
  const std::size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

std::size_t edit_distance(std::string_view left, std::string_view right) {
  std::vector<std::size_t> row(right.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < left.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < right.size(); ++j) {
      const std::size_t above = row[j + 1];
      row[j + 1] = std::min(std::min(above, row[j]) + 1, diagonal + (left[i] == right[j] ? 0 : 1));
      diagonal = above;
    }
  }
  return row.back();
}

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    if (bytes > 0)
      out += text.substr(0, bytes);
    else
      append_escaped(out, text.front());
    text.remove_prefix(std::max<std::size_t>(bytes, 1));
  }
  return out;
}

std::string quoted(std::string_view text, std::size_t bytes_max) {
  std::string out = "'";
  for (const char c : text.substr(0, bytes_max)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f || c == '\'' || c == '\\')
      append_escaped(out, c);
    else
      out += c;
  }
  if (text.size() > bytes_max) out += "...";
  return out + "'";
}

}  // namespace hybridps::core
