// The endpoint contract over UCX and the loopback interface: driven by the test, and by a thread for each side.
#include <memory>

#include "hybridps/transport/threaded.h"

namespace hybridps::transport {
namespace contract {
struct Pair;
}
struct UcxBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
};
struct ThreadedUcxBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
}  // namespace hybridps::transport

#define HYBRIDPS_ENDPOINT_BACKENDS ::hybridps::transport::UcxBackend, ::hybridps::transport::ThreadedUcxBackend
#include "tests/unit/transport/ucx/ucx_pair.h"

namespace hybridps::transport {

std::unique_ptr<contract::Pair> UcxBackend::make_pair() { return make_ucx_pair(); }

std::unique_ptr<contract::Pair> ThreadedUcxBackend::make_pair() {
  auto pair = std::make_unique<contract::Pair>();
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    auto made = UcxTransport::create(test_options());
    INFO(made.status().to_string());
    REQUIRE(made.is_ok());
    auto thread = start_transport_thread({"test-data"});
    REQUIRE(thread.is_ok());
    auto threaded = make_threaded(std::move(made).value(), std::move(thread).value());
    REQUIRE(threaded.is_ok());
    side->transport = std::move(threaded).value();
  }
  pair->finish_setup();
  return pair;
}

}  // namespace hybridps::transport
