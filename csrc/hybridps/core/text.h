// hybridps/core/text.h: numbers and lists as people read and write them, in messages and settings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace hybridps::core {

/// "512 B", "64 KiB", "1.5 MiB".
std::string format_bytes(std::uint64_t bytes);
/// The shortest text that parse_bytes() reads back as the same number: "512", "64K", "1G".
std::string format_byte_setting(std::uint64_t bytes);
/// "65536", "64K", "64k", "64KiB", "1.5M", "2G": powers of 2^10. Empty: other texts, negative or too large numbers.
std::optional<std::uint64_t> parse_bytes(std::string_view text);
/// Whole text as a number; nothing for empty text, trailing characters, infinities and NaN.
std::optional<double> parse_double(std::string_view text);
std::optional<std::int64_t> parse_int(std::string_view text);
/// 1, 0, true, false, yes, no, on, off, in any case.
std::optional<bool> parse_bool(std::string_view text);
/// "5.2 s".
std::string format_seconds(double seconds);
/// "1.5", "10", "0.001": no trailing zeros.
std::string format_double(double value);
/// "[2, 3]"; at most `count_max` entries, then ", ... 12 more]".
std::string format_ranks(std::span<const int> ranks, std::size_t count_max = 16);
/// Replaces the tilde in "~/token" by HOME: the shell does so only where it sees a path begin. Keeps other texts.
std::string expand_home(std::string_view path);
/// Without white space at both ends.
std::string_view trim(std::string_view text) noexcept;
/// Levenshtein distance.
std::size_t edit_distance(std::string_view left, std::string_view right);
/// The text as UTF-8: bytes that are not UTF-8 become "\\xff". Host names, paths, variables and the C library's texts
/// may have any bytes, and Python takes no string but UTF-8. Not for texts that are compared or opened.
std::string printable(std::string_view text);
/// For texts of foreign origin in messages: control characters and quotes escaped, cut at `bytes_max`.
std::string quoted(std::string_view text, std::size_t bytes_max = 120);

}  // namespace hybridps::core
