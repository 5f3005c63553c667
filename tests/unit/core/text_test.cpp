#include "hybridps/core/text.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/catch.h"

using namespace hybridps::core;

TEST_CASE("core/text: bytes are parsed with their suffix", "[core][fast]") {
  CHECK(parse_bytes("65536") == 65536u);
  CHECK(parse_bytes(" 64K ") == 65536u);
  CHECK(parse_bytes("64 kib") == 65536u);
  CHECK(parse_bytes("1.5M") == 1572864u);
  CHECK(parse_bytes("2G") == 2147483648u);
  CHECK(parse_bytes("0") == 0u);
  for (const char* bad : {"", "K", "-1", "1.5", "1e3", "64Kx", "64KB", "0x10", "1..2M", "99999999999999999999",
                          "18446744073709551615G", "nan", "infG"}) {
    INFO(bad);
    CHECK_FALSE(parse_bytes(bad).has_value());
  }
}

TEST_CASE("core/text: bytes are formatted for people and for settings", "[core][fast]") {
  CHECK(format_bytes(512) == "512 B");
  CHECK(format_bytes(65536) == "64 KiB");
  CHECK(format_bytes(1536) == "1.5 KiB");
  CHECK(format_bytes(UINT64_MAX) == "16 EiB");
  for (const std::uint64_t bytes : {0ull, 1ull, 1000ull, 1024ull, 65536ull, 1536ull, 1ull << 40}) {
    CHECK(parse_bytes(format_byte_setting(bytes)) == bytes);
  }
  CHECK(format_byte_setting(65536) == "64K");
}

TEST_CASE("core/text: numbers must be the whole text", "[core][fast]") {
  CHECK(parse_double("2.5") == 2.5);
  CHECK(parse_int("-1") == -1);
  CHECK_FALSE(parse_double("2.5s").has_value());
  CHECK_FALSE(parse_double("nan").has_value());
  CHECK_FALSE(parse_double("inf").has_value());
  CHECK_FALSE(parse_double("").has_value());
  CHECK_FALSE(parse_int("1.0").has_value());
  CHECK(parse_bool("Off") == false);
  CHECK(parse_bool("yes") == true);
  CHECK_FALSE(parse_bool("2").has_value());
  CHECK(format_double(5) == "5");
  CHECK(format_double(0.25) == "0.25");
}

TEST_CASE("core/text: ranks are listed and cut", "[core][fast]") {
  CHECK(format_ranks(std::vector<int>{}) == "[]");
  CHECK(format_ranks(std::vector<int>{2, 3}) == "[2, 3]");
  CHECK(format_ranks(std::vector<int>{0, 1, 2, 3}, 2) == "[0, 1, ... 2 more]");
}

TEST_CASE("core/text: edit distance counts changes", "[core][fast]") {
  CHECK(edit_distance("", "abc") == 3);
  CHECK(edit_distance("abc", "") == 3);
  CHECK(edit_distance("kitten", "sitting") == 3);
  CHECK(edit_distance("same", "same") == 0);
}

TEST_CASE("core/text: foreign text is escaped and cut", "[core][fast]") {
  CHECK(quoted("a'b\n") == "'a\\x27b\\x0a'");
  CHECK(quoted("abcdef", 3) == "'abc...'");
}

TEST_CASE("core/text: what is no UTF-8 is escaped, and all else stays", "[core][fast]") {
  for (const char* text : {"", "host-a", "b\xc3\xbc", "\xe2\x82\xac \xf0\x9f\x98\x80\n", "\xf4\x8f\xbf\xbf"})
    CHECK(printable(text) == text);
  CHECK(printable("caf\xe9.local") == "caf\\xe9.local");
  CHECK(printable("\xff\xfe") == "\\xff\\xfe");
  CHECK(printable("\xc3") == "\\xc3");             // cut
  CHECK(printable("\xe2\x82|") == "\\xe2\\x82|");  // cut in the middle
  CHECK(printable("\xc0\xaf") == "\\xc0\\xaf");    // longer than need be
  CHECK(printable("\xe0\x80\xaf") == "\\xe0\\x80\\xaf");
  CHECK(printable("\xed\xa0\x80") == "\\xed\\xa0\\x80");           // half a pair
  CHECK(printable("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");  // beyond the last
}

TEST_CASE("core/text: a tilde in front of a path is the home folder", "[core][fast]") {
  const char* before = std::getenv("HOME");
  const std::string kept = before != nullptr ? before : "";
  REQUIRE(setenv("HOME", "/srv/somebody", 1) == 0);
  CHECK(expand_home("~/token") == "/srv/somebody/token");
  CHECK(expand_home("~") == "/srv/somebody");
  for (const char* other : {"", "/a/~/b", "~other/token", "a~"}) CHECK(expand_home(other) == other);
  REQUIRE(setenv("HOME", kept.c_str(), 1) == 0);
}
