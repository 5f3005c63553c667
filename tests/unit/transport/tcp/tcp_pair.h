// tests/unit/transport/tcp/tcp_pair.h: two TCP transports of this process over the loopback interface.
#pragma once

#include <memory>
#include <string>

#include "hybridps/transport/tcp/tcp_transport.h"
#include "tests/unit/transport/endpoint_contract.h"

namespace hybridps::transport {

inline TcpOptions test_options(const char* address = "127.0.0.1") {
  TcpOptions options;
  options.address = address;
  options.close_timeout = core::from_seconds(0.1);  // one thread runs both sides: the other does not read meanwhile
  return options;
}

/// The job that both sides belong to, where connections go in TLS.
inline std::shared_ptr<const tls::Authority> test_authority(const std::string& token = "the token of the tests") {
  auto made = tls::Authority::from_token(token);
  INFO(made.status().to_string());
  REQUIRE(made.is_ok());
  return std::move(made).value();
}
inline TcpOptions tls_options(const char* address = "127.0.0.1") {
  TcpOptions options = test_options(address);
  options.authority = test_authority();
  options.kernel_tls = true;  // where the kernel can
  return options;
}
inline TcpOptions checksum_options() {
  TcpOptions options = test_options();
  options.checksums = true;
  return options;
}

inline std::unique_ptr<contract::Pair> make_tcp_pair(const TcpOptions& options = test_options()) {
  auto pair = std::make_unique<contract::Pair>();
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    auto made = TcpTransport::create(options);
    INFO(made.status().to_string());
    REQUIRE(made.is_ok());
    side->transport = std::move(made).value();
  }
  pair->finish_setup();
  return pair;
}

inline TcpTransport& tcp(contract::Side& side) { return static_cast<TcpTransport&>(*side.transport); }

}  // namespace hybridps::transport
