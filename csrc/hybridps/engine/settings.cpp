#include "hybridps/engine/settings.h"

#include <thread>
#include <utility>

#include "hybridps/engine/server_request.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::engine {

using core::Code;
using core::Status;

CheckedSettings check_settings(const core::Config& config, LocalRank place) {
  CheckedSettings checked;
  const auto refuse = [&](const Status& status, const std::string& setting = {}) {
    if (!status.is_ok()) checked.problems.emplace_back(status.code(), setting + std::string(status.message()));
  };
  core::Result<std::vector<admission::Address>> servers = admission::parse_addresses(config.servers);
  refuse(servers.status(), "HYBRIDPS_SERVERS: ");
  if (servers.is_ok()) checked.servers = std::move(servers).value();
  core::Result<std::string> token = admission::read_token(config.token, config.token_file);
  refuse(token.status());
  if (token.is_ok()) checked.token = std::move(token).value();
  core::Result<Interfaces> interfaces = choose_interfaces(config, {}, place);
  refuse(interfaces.status());
  if (interfaces.is_ok()) checked.interfaces = std::move(interfaces).value();
  if (!config.metrics_listen.empty())
    refuse(admission::parse_address(config.metrics_listen).status(), "HYBRIDPS_METRICS_LISTEN: ");
  if (!config.interface.empty()) refuse(transport::validate_device(config.interface), "HYBRIDPS_INTERFACE: ");
  return checked;
}

std::vector<Status> ask_servers(const CheckedSettings& settings) {
  std::vector<Status> answers(settings.servers.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < settings.servers.size(); ++i)
    threads.emplace_back([&, i] { answers[i] = find_server(settings.servers[i], settings.token).status(); });
  for (std::thread& thread : threads) thread.join();
  std::erase_if(answers, [](const Status& status) { return status.is_ok(); });
  return answers;
}

}  // namespace hybridps::engine
