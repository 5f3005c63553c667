#include "hybridps/transport/interfaces.h"

#include <net/if.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"

namespace hybridps::transport {
namespace {

std::string hex_of(const IpBytes& bytes) {
  std::string text;
  for (const unsigned char byte : bytes) text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
  return text;
}

/// What callers ask for, in an order of its own.
std::vector<std::string> texts_of(const std::vector<InterfaceAddress>& entries) {
  std::vector<std::string> texts;
  for (const InterfaceAddress& entry : entries) {
    const unsigned flags = entry.flags & (IFF_UP | IFF_RUNNING | IFF_LOOPBACK);
    texts.push_back(entry.interface + " is there with flags " + std::to_string(flags));
    if (!entry.address.empty())
      texts.push_back(entry.interface + " " + hex_of(entry.address) + "/" + hex_of(entry.mask));
  }
  std::sort(texts.begin(), texts.end());
  texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
  return texts;
}

TEST_CASE("transport/interfaces: without netlink the same is found", "[transport][fast]") {
  std::vector<std::string> with;
  std::vector<std::string> without;
  for (int attempt = 0; attempt < 20; ++attempt) {  // interfaces come and go beside us
    std::string missing = "not asked";
    with = texts_of(interface_addresses(&missing));
    without = texts_of(interface_addresses_without_netlink());
    CHECK(missing.empty());
    if (with == without) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  CHECK(with == without);
  CHECK(std::find(with.begin(), with.end(), "lo 7f000001/ff000000") != with.end());
}

}  // namespace
}  // namespace hybridps::transport
