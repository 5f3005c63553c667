#include "hybridps/engine/settings.h"

#include <string>

#include "hybridps/core/clock.h"
#include "tests/support/catch.h"

using namespace hybridps;

namespace {

std::string all_problems(const engine::CheckedSettings& checked) {
  std::string text;
  for (const core::Status& status : checked.problems) text += std::string(status.message()) + "\n";
  return text;
}

}  // namespace

TEST_CASE("engine/settings: all that is wrong is found, each with its setting", "[engine][fast]") {
  core::Config config;
  config.interface = "eth9";
  config.servers = "nonsense";
  config.token_file = "/nonexistent/token";
  const auto checked = engine::check_settings(config, {0, 1});
  CHECK(checked.problems.size() == 3);
  const std::string text = all_problems(checked);
  for (const char* part : {"HYBRIDPS_INTERFACE: there is no network device 'eth9'", "HYBRIDPS_SERVERS: 'nonsense'",
                           "HYBRIDPS_TOKEN_FILE /nonexistent/token"}) {
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
  }
}

TEST_CASE("engine/settings: settings of our own TCP are named where data or control goes through UCX",
          "[engine][fast]") {
  core::Config config;
  config.interface = "lo";
  config.data_transport = core::DataTransport::kUcx;
  CHECK(engine::check_settings(config, {0, 1}).warnings.empty());
  config.tcp_congestion = "reno";
  config.tcp_gbps = 1;
  config.dscp = 10;
  const auto checked = engine::check_settings(config, {0, 1});
  REQUIRE(checked.warnings.size() == 1);
  CHECK(checked.warnings[0].starts_with(
      "HYBRIDPS_TCP_CONGESTION, HYBRIDPS_LIMITS=tcp_gbps, HYBRIDPS_DSCP: no effect on data and control "
      "messages, which go through UCX"));

  config.data_transport = core::DataTransport::kTcp;
  CHECK(engine::check_settings(config, {0, 1}).warnings.empty());
  engine::Interfaces interfaces;
  interfaces.control_ucx = true;
  config.tcp_gbps = 0;
  CHECK(engine::without_effect(config, interfaces)
            .starts_with("HYBRIDPS_TCP_CONGESTION, HYBRIDPS_DSCP: no effect on control messages, "));
}

TEST_CASE("engine/settings: TLS needs a token, and our own TCP", "[engine][fast]") {
  core::Config config;
  config.interface = "lo";
  config.tls = true;
  auto checked = engine::check_settings(config, {0, 1});
  CHECK(all_problems(checked).find("HYBRIDPS_SECURITY=tls needs a token") != std::string::npos);
  CHECK_FALSE(checked.secret.authority);
  config.token = "a secret of this test";
  checked = engine::check_settings(config, {0, 1});
  CHECK(checked.problems.empty());
  CHECK(checked.secret.authority);
  CHECK_FALSE(checked.interfaces.ucx);
  for (const auto transport : {core::DataTransport::kUcx, core::DataTransport::kRdma}) {
    config.data_transport = transport;
    CHECK(all_problems(engine::check_settings(config, {0, 1}))
              .find("HYBRIDPS_SECURITY=tls encrypts hybridps's own TCP") != std::string::npos);
  }
  config.tls = false;
  config.data_transport = core::DataTransport::kTcp;
  CHECK_FALSE(engine::check_settings(config, {0, 1}).secret.authority);
}

TEST_CASE("engine/settings: TLS takes certificates instead of a token, if all files are named", "[engine][fast]") {
  core::Config config;
  config.interface = "lo";
  config.tls = true;
  config.certificate_paths = {"/none.key", "/none.pem", "", ""};
  for (const char* const token : {"", "a secret of this test"}) {
    config.token = token;
    CHECK(all_problems(engine::check_settings(config, {0, 1})).find("_CA_PATH, and one of them is not set") !=
          std::string::npos);
  }
  config.certificate_paths.folder = "/";
  CHECK(all_problems(engine::check_settings(config, {0, 1})).find("'/none.key' cannot be read") != std::string::npos);
}

TEST_CASE("engine/settings: servers are asked, and who does not serve is named", "[engine][fast]") {
  const auto admission =
      admission::AdmissionServer::open({"127.0.0.1", 0}, "a secret of this test", [](const admission::Bytes&) {
        return core::Result<admission::Bytes>(core::Status(core::Code::kClosed, "it is about to stop"));
      }).value();
  core::Config config;
  config.interface = "lo";
  config.token = "a secret of this test";
  config.servers = "127.0.0.1:1,127.0.0.1:" + std::to_string(admission->port());
  const auto checked = engine::check_settings(config, {0, 1});
  CHECK(checked.problems.empty());
  const auto answers = engine::ask_servers(checked);
  REQUIRE(answers.size() == 2);
  CHECK(answers[0].message().find("127.0.0.1:1 cannot be reached") != std::string_view::npos);
  CHECK(answers[1].message().find("it is about to stop") != std::string_view::npos);
}
