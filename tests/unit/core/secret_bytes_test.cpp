// Secrets are kept, shared by copies, and left out of core dumps.
#include "hybridps/core/secret_bytes.h"

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "tests/support/catch.h"

namespace hybridps::core {
namespace {

/// What Linux notes of the mapping that `at` lies in; "dd" stands for MADV_DONTDUMP.
std::string flags_of(const void* at) {
  std::ifstream maps("/proc/self/smaps");
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  bool is_inside = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) is_inside = begin <= address && address < end;
    if (is_inside && line.starts_with("VmFlags:")) return line;
  }
  return {};
}

}  // namespace

TEST_CASE("secret bytes: kept as they are, out of core dumps", "[core][fast]") {
  const std::string text = "a token of this test";
  SecretBytes secret(text);
  const SecretBytes copy = secret;
  CHECK(copy.text() == text);
  CHECK(copy.bytes().size() == text.size());
  CHECK(copy.bytes().data() == secret.bytes().data());
  secret = {};
  CHECK(secret.empty());
  CHECK(copy.text() == text);
  CHECK(SecretBytes("").empty());
  if (flags_of(text.data()).empty()) return;  // this system shows no flags
  CHECK(flags_of(copy.bytes().data()).find(" dd") != std::string::npos);
  CHECK(flags_of(text.data()).find(" dd") == std::string::npos);
}

}  // namespace hybridps::core
