#include "hybridps/transport/ucx/ucx_config.h"

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/transport/envelope.h"
#include "tests/support/catch.h"

namespace hybridps::transport {
namespace {

using Version = std::pair<unsigned, unsigned>;

std::map<std::string, std::string> settings(const UcxOptions& options, const std::map<std::string, std::string>& users,
                                            Version version = {1, 22}) {
  std::map<std::string, std::string> result;
  for (const UcxSetting& setting : ucx_settings(options, version, [&](const std::string& name) {
         const auto found = users.find(name);
         return found == users.end() ? std::nullopt : std::optional(found->second);
       }))
    result[setting.name] = setting.value;
  return result;
}

TEST_CASE("transport/ucx: our settings keep data off shared memory", "[transport][fast]") {
  UcxOptions options;
  options.net_device = "eth0";
  options.tcp_user_timeout = core::from_seconds(7.5);
  const auto set = settings(options, {});
  CHECK(set.at("TLS") == "^shm,cuda");
  CHECK(set.at("NET_DEVICES") == "eth0");
  CHECK(set.at("TCP_TX_SEG_SIZE") == "256k");
  CHECK(set.at("TCP_RX_SEG_SIZE") == "256k");
  CHECK(set.at("TCP_USER_TIMEOUT") == "7500ms");
}

TEST_CASE("transport/ucx: CUDA is left to UCX only where memory of GPUs is to be sent", "[transport][fast]") {
  UcxOptions options;
  CHECK(settings(options, {}).at("TLS").find("cuda") != std::string::npos);
  options.device_memory = true;
  CHECK(settings(options, {}).at("TLS") == "^shm");
  options.tcp_only = true;  // names what it uses
  CHECK(settings(options, {}).at("TLS") == "tcp");
}

TEST_CASE("transport/ucx: over RDMA connections are cleaned up without events of the device", "[transport][fast]") {
  UcxOptions options;
  options.net_device = "mlx5_0:1";
  CHECK(settings(options, {}).at("IB_ASYNC_EVENTS") == "n");
  CHECK(settings(options, {{"UCX_IB_ASYNC_EVENTS", "y"}}).count("IB_ASYNC_EVENTS") == 0);
  options.net_device = "eth0";
  CHECK(settings(options, {}).count("IB_ASYNC_EVENTS") == 0);
}

TEST_CASE("transport/ucx: the user timeout is asked for from UCX 1.22 only", "[transport][fast]") {
  CHECK(settings({}, {}, {1, 21}).count("TCP_USER_TIMEOUT") == 0);
  CHECK(settings({}, {}, {1, 22}).count("TCP_USER_TIMEOUT") == 1);
  CHECK(settings({}, {}, {2, 0}).count("TCP_USER_TIMEOUT") == 1);
  UcxOptions off;
  off.tcp_user_timeout = {};
  CHECK(settings(off, {}).count("TCP_USER_TIMEOUT") == 0);
}

TEST_CASE("transport/ucx: settings of transports are left to UCX where it cannot take them", "[transport][fast]") {
  CHECK(settings({}, {}, {1, 13}).size() == 2);  // TLS and TCP_CONN_NB
  CHECK(settings({}, {}, {1, 16}).count("TCP_RX_SEG_SIZE") == 0);
  CHECK(settings({}, {}, {1, 17}).count("TCP_RX_SEG_SIZE") == 1);
}

TEST_CASE("transport/ucx: settings of the user win", "[transport][fast]") {
  UcxOptions options;
  options.net_device = "eth0";
  const auto set = settings(options, {{"UCX_TLS", "rc"},
                                      {"HYBRIDPS_UCX_NET_DEVICES", "eth1"},
                                      {"UCX_TCP_RX_SEG_SIZE", "64k"},
                                      {"UCX_TCP_USER_TIMEOUT", "1s"}});
  CHECK(set.count("TLS") == 0);
  CHECK(set.count("NET_DEVICES") == 0);
  CHECK(set.count("TCP_RX_SEG_SIZE") == 0);
  CHECK(set.count("TCP_USER_TIMEOUT") == 0);
  CHECK(set.at("TCP_TX_SEG_SIZE") == "256k");
}

TEST_CASE("transport/ucx: the control worker speaks TCP whatever the user set for data", "[transport][fast]") {
  UcxOptions options;
  options.net_device = "eth0";
  options.tcp_only = true;
  const auto rdma = settings(options, {{"UCX_TLS", "rc"}, {"UCX_NET_DEVICES", "mlx5_0:1,mlx5_1:1"}});
  CHECK(rdma.at("TLS") == "tcp");
  CHECK(rdma.at("NET_DEVICES") == "eth0");
  CHECK(rdma.count("TCP_RX_SEG_SIZE") == 0);
  CHECK(settings(options, {{"UCX_NET_DEVICES", "eth7"}}).count("NET_DEVICES") == 0);
  options.net_device.clear();
  CHECK(settings(options, {{"UCX_NET_DEVICES", "mlx5_0:1"}}).at("NET_DEVICES") == "all");
  CHECK(settings(options, {}).count("NET_DEVICES") == 0);
}

TEST_CASE("transport/ucx: validate_device accepts what can carry traffic and lists the rest", "[transport][fast]") {
  const std::vector<NetDevice> devices = {{"lo", false, true, true},      {"eth0", false, true, true},
                                          {"eth1", false, false, true},   {"eth2", false, true, false},
                                          {"mlx5_0:1", true, true, true}, {"mlx5_1:1", true, false, true}};
  CHECK(validate_device("eth0", devices).is_ok());
  CHECK(validate_device("lo, eth0", devices).is_ok());
  CHECK(validate_device("mlx5_0:1", devices).is_ok());
  CHECK(validate_device("mlx5_0", devices).is_ok());
  for (const char* bad : {"", " , ", "typo0", "eth1", "eth2", "mlx5_1:1", "mlx5_1", "eth0,typo0", "mlx5_0:2", "ETH0"}) {
    INFO("'" << bad << "'");
    const core::Status status = validate_device(bad, devices);
    CHECK(status.code() == core::Code::kInvalidArgument);
    CHECK(status.message().find("eth1 (down or without carrier)") != std::string::npos);
    CHECK(status.message().find("eth2 (without address)") != std::string::npos);
    CHECK(status.message().find("mlx5_1:1 (port not active)") != std::string::npos);
  }
  CHECK(validate_device("x", {}).message().find("none") != std::string::npos);
}

TEST_CASE("transport/ucx: this machine's loopback interface is valid and a typo is not", "[transport][fast]") {
  CHECK(validate_device("lo").is_ok());
  CHECK_FALSE(validate_device("typo0").is_ok());
}

TEST_CASE("transport/ucx: the library tells its version and its file", "[transport][fast]") {
  REQUIRE(need_ucx().is_ok());
  CHECK(ucx_version().find('.') != std::string::npos);
  CHECK(ucx_library_path().find("libucp") != std::string::npos);
}

TEST_CASE("transport/ucx: addresses survive their envelope and damage is noticed", "[transport][fast]") {
  std::vector<std::byte> inner(77);
  for (std::size_t i = 0; i < inner.size(); ++i) inner[i] = static_cast<std::byte>(i * 3);
  const auto wrapped = wrap(kUcxEnvelope, inner);
  const auto back = unwrap(kUcxEnvelope, wrapped);
  REQUIRE(back.is_ok());
  CHECK(std::vector<std::byte>(back.value().begin(), back.value().end()) == inner);
  for (std::size_t i = 0; i < wrapped.size() * 8; ++i) {
    auto changed = wrapped;
    changed[i / 8] ^= static_cast<std::byte>(1U << (i % 8));
    CHECK_FALSE(unwrap(kUcxEnvelope, changed).is_ok());
  }
  auto other_version = wrapped;
  other_version[7] = std::byte{2};
  CHECK(unwrap(kUcxEnvelope, other_version).status().message().find("version") != std::string::npos);
  CHECK_FALSE(unwrap(kUcxEnvelope, wrap(kUcxEnvelope, {})).is_ok());
  CHECK_FALSE(unwrap(kUcxEnvelope, wrap(kUcxEnvelope, std::vector<std::byte>(kUcxEnvelope.bytes_max + 1))).is_ok());
}

}  // namespace
}  // namespace hybridps::transport
