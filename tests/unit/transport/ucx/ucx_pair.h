// tests/unit/transport/ucx/ucx_pair.h: two UCX transports of this process over the loopback interface.
#pragma once

#include <memory>

#include "hybridps/transport/ucx/ucp_api.h"
#include "hybridps/transport/ucx/ucx_transport.h"
#include "tests/unit/transport/endpoint_contract.h"

namespace hybridps::transport {

inline UcxOptions test_options(const char* label = "data") {
  UcxOptions options;
  options.net_device = "lo";
  options.label = label;
  options.close_timeout = core::from_seconds(0.1);  // one thread runs both sides: the other cannot answer a flush
  return options;
}

/// `api_a` null: the real one on both sides.
inline std::unique_ptr<contract::Pair> make_ucx_pair(const UcxOptions& options = test_options(),
                                                     UcpApi* api_a = nullptr) {
  auto pair = std::make_unique<contract::Pair>();
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    auto made =
        api_a != nullptr && side == &pair->a ? UcxTransport::create(options, *api_a) : UcxTransport::create(options);
    INFO(made.status().to_string());
    REQUIRE(made.is_ok());
    side->transport = std::move(made).value();
  }
  pair->finish_setup();
  return pair;
}

inline UcxTransport& ucx(contract::Side& side) { return static_cast<UcxTransport&>(*side.transport); }

}  // namespace hybridps::transport
