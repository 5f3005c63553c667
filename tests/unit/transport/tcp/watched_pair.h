// tests/unit/transport/tcp/watched_pair.h: two TCP transports of this process, and a relay before each that sees and
// may change what goes to it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/unit/transport/tcp/tcp_pair.h"
#include "tests/unit/transport/tcp/tcp_relay.h"

namespace hybridps::transport {

inline bool is_message(const contract::Recorder::Message& message, std::uint64_t number) {
  return contract::number_of(message.header) == number &&
         contract::matches(message.payload.data(), message.payload.bytes(), number);
}

/// Two transports, and a relay before each.
struct WatchedPair {
  explicit WatchedPair(const TcpOptions& options) : pair(make_tcp_pair(options)) {
    for (contract::Side* side : {&pair->a, &pair->b})
      relays.push_back(std::make_unique<TcpRelay>(side->transport->address()));
  }
  void connect() {
    auto to_b = pair->a.transport->connect(pair->b.id, relays[1]->address());
    REQUIRE(to_b.is_ok());
    pair->a.peer = to_b.value();
  }
  template <typename Done>
  bool run_until(Done done, double seconds = 10) {
    return pair->run_until(
        [&] {
          for (auto& relay : relays) relay->run();
          return done();
        },
        seconds);
  }
  std::unique_ptr<contract::Pair> pair;
  std::vector<std::unique_ptr<TcpRelay>> relays;
};

}  // namespace hybridps::transport
