// The endpoint contract over TCP and the loopback interface: driven by the test, by a thread for each side, and by both
// in turn.
#include <memory>
#include <optional>

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
/// In TLS.
struct TlsTcpBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
/// With a checksum in each message.
struct SummedTcpBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
struct ThreadedTcpBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
/// To and fro between the test's thread and another every few messages; both sides share the other one.
struct HandoverTcpBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
}  // namespace hybridps::transport

#define HYBRIDPS_ENDPOINT_BACKENDS                                                                                  \
  ::hybridps::transport::TcpBackend, ::hybridps::transport::TlsTcpBackend, ::hybridps::transport::SummedTcpBackend, \
      ::hybridps::transport::ThreadedTcpBackend, ::hybridps::transport::HandoverTcpBackend
#include "tests/unit/transport/tcp/tcp_pair.h"

namespace hybridps::transport {

std::unique_ptr<contract::Pair> TcpBackend::make_pair() { return make_tcp_pair(); }
std::unique_ptr<contract::Pair> TlsTcpBackend::make_pair() { return make_tcp_pair(tls_options()); }
std::unique_ptr<contract::Pair> SummedTcpBackend::make_pair() { return make_tcp_pair(checksum_options()); }

namespace {

std::unique_ptr<contract::Pair> make_threaded_pair(bool one_thread, const std::optional<HandoverOptions>& handover) {
  auto pair = std::make_unique<contract::Pair>();
  std::shared_ptr<TransportThread> thread;
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    auto made = TcpTransport::create(test_options());
    INFO(made.status().to_string());
    REQUIRE(made.is_ok());
    if (thread == nullptr || !one_thread)
      thread = start_transport_thread({.name = "test-data", .when_needed = one_thread}).value();
    auto threaded =
        make_threaded(std::move(made).value(), thread, handover ? std::make_shared<Handover>(*handover) : nullptr);
    REQUIRE(threaded.is_ok());
    side->transport = std::move(threaded).value();
  }
  pair->finish_setup();
  return pair;
}

}  // namespace

std::unique_ptr<contract::Pair> ThreadedTcpBackend::make_pair() {
  return make_threaded_pair(/*one_thread=*/false, std::nullopt);
}
std::unique_ptr<contract::Pair> HandoverTcpBackend::make_pair() {
  return make_threaded_pair(/*one_thread=*/true, HandoverOptions{core::Duration::zero(), 0, 1e30, 1, 1});
}

}  // namespace hybridps::transport
