// The endpoint contract over TCP and the loopback interface: driven by the test, and by a thread for each side.
#include <memory>

#include "hybridps/transport/threaded.h"

namespace hybridps::transport {
namespace contract {
struct Pair;
}
// What the kernel has taken is sent, without progress() of either side.
struct TcpBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
struct ThreadedTcpBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
}  // namespace hybridps::transport

#define HYBRIDPS_ENDPOINT_BACKENDS ::hybridps::transport::TcpBackend, ::hybridps::transport::ThreadedTcpBackend
#include "tests/unit/transport/tcp/tcp_pair.h"

namespace hybridps::transport {

std::unique_ptr<contract::Pair> TcpBackend::make_pair() { return make_tcp_pair(); }

std::unique_ptr<contract::Pair> ThreadedTcpBackend::make_pair() {
  auto pair = std::make_unique<contract::Pair>();
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    auto made = TcpTransport::create(test_options());
    INFO(made.status().to_string());
    REQUIRE(made.is_ok());
    auto thread = start_transport_thread({"test-data", {}});
    REQUIRE(thread.is_ok());
    auto threaded = make_threaded(std::move(made).value(), std::move(thread).value());
    REQUIRE(threaded.is_ok());
    side->transport = std::move(threaded).value();
  }
  pair->finish_setup();
  return pair;
}

}  // namespace hybridps::transport
