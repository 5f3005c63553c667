#include "hybridps/engine/settings.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>

#include <array>
#include <thread>
#include <utility>

#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/core/text.h"
#include "hybridps/engine/server_request.h"
#include "hybridps/tls/sealed_store.h"
#include "hybridps/transport/interfaces.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::engine {

using core::Code;
using core::Status;

namespace {

/// The names and addresses of this machine. Those of loopback are on all machines, and count where control uses it.
std::vector<std::string> own_hosts(const std::string& control) {
  std::vector<std::string> hosts{bootstrap::host_name()};
  for (const transport::InterfaceAddress& one : transport::interface_addresses()) {
    if ((one.flags & IFF_LOOPBACK) != 0 && one.interface != control) continue;
    std::array<char, INET6_ADDRSTRLEN> text{};
    const int family = one.address.size() == 4 ? AF_INET : AF_INET6;
    if (!one.address.empty() && ::inet_ntop(family, one.address.data(), text.data(), text.size()) != nullptr)
      hosts.emplace_back(text.data());
  }
  return hosts;
}

/// The name with its domain, as this machine's resolver knows it. May take seconds.
std::string full_host_name() {
  addrinfo hints{};
  hints.ai_flags = AI_CANONNAME;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(bootstrap::host_name().c_str(), nullptr, &hints, &found) != 0) return {};
  std::string name = found->ai_canonname != nullptr ? found->ai_canonname : "";
  ::freeaddrinfo(found);
  return name;
}

/// Peers do not make this check: they find a rank by what the Store says of it, and its name is only a part of that.
Status check_host(const tls::Authority& authority, const std::string& control) {
  std::vector<std::string> hosts = own_hosts(control);
  if (authority.is_for_one_of(hosts)) return Status::ok();
  hosts.push_back(full_host_name());
  if (authority.is_for_one_of(hosts)) return Status::ok();
  std::string names;
  for (const std::string& host : hosts)
    if (!host.empty()) names += (names.empty() ? "" : ", ") + host;
  return {Code::kInvalidArgument, "the certificate in GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT is of another host (" +
                                      authority.text() + "); this host is " + names +
                                      "; give it one for a name or an address of these, or one without subjectAltName"};
}

}  // namespace

CheckedSettings check_settings(const core::Config& config, LocalRank place) {
  CheckedSettings checked;
  const auto refuse = [&](const Status& status, const std::string& setting = {}) {
    if (!status.is_ok()) checked.problems.emplace_back(status.code(), setting + std::string(status.message()));
  };
  core::Result<std::vector<admission::Address>> servers = admission::parse_addresses(config.servers);
  refuse(servers.status(), "HYBRIDPS_SERVERS: ");
  if (servers.is_ok()) checked.servers = std::move(servers).value();
  core::Result<admission::Secret> secret = read_secret(config);
  refuse(secret.status());
  if (secret.is_ok()) checked.secret = std::move(secret).value();
  core::Result<Interfaces> interfaces = choose_interfaces(config, {}, place);
  refuse(interfaces.status());
  if (interfaces.is_ok()) {
    checked.interfaces = std::move(interfaces).value();
    if (std::string text = without_effect(config, checked.interfaces); !text.empty())
      checked.warnings.push_back(std::move(text));
  }
  if (checked.secret.authority) refuse(check_host(*checked.secret.authority, checked.interfaces.control));
  if (checked.secret.authority && !checked.secret.authority->warning().empty())
    checked.warnings.push_back(checked.secret.authority->warning());
  if (!config.metrics_listen.empty())
    refuse(admission::parse_address(config.metrics_listen).status(), "HYBRIDPS_METRICS_LISTEN: ");
  if (!config.interface.empty()) refuse(transport::validate_device(config.interface), "HYBRIDPS_INTERFACE: ");
  return checked;
}

core::Result<admission::Secret> read_secret(const core::Config& config, bool serves) {
  core::SecretBytes second;
  core::Result<core::SecretBytes> token =
      admission::read_token(config.token, config.token_file, serves ? &second : nullptr);
  if (!token.is_ok()) return token.status();
  admission::Secret secret(std::move(token).value());
  secret.second = std::move(second);
  if (!secret.second.empty() && config.tls && config.certificate_paths.any())
    return Status(
        Code::kInvalidArgument,
        "HYBRIDPS_TOKEN_FILE has a second token, and with certificates a server takes one: leave one of them out");
  if (!config.tls) return secret;
  const core::Config::CertificatePaths& paths = config.certificate_paths;
  if (secret.token.empty() && !paths.any())
    return Status(
        Code::kInvalidArgument,
        "HYBRIDPS_SECURITY=tls needs a token, the same on all machines; make one with: (umask 077; openssl rand "
        "-hex 32 > FILE), and set HYBRIDPS_TOKEN_FILE=FILE; or certificates (docs/security.md)");
  if (paths.any() && (paths.key.empty() || paths.certificates.empty() || (paths.authorities + paths.folder).empty()))
    return Status(
        Code::kInvalidArgument,
        "HYBRIDPS_SECURITY=tls with certificates needs GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY, _CERT, and _CA_FILE "
        "or _CA_PATH, and one of them is not set");
  core::Result<std::shared_ptr<const tls::Authority>> authority =
      paths.any() ? tls::Authority::from_certificates({paths.key, paths.certificates, paths.authorities, paths.folder},
                                                      secret.token)
                  : tls::Authority::from_token(secret.token, secret.second);
  if (!authority.is_ok()) return authority.status();
  core::Result<std::shared_ptr<const tls::Identity>> identity = authority.value()->make_identity();
  if (!identity.is_ok()) return identity.status();
  secret.authority = std::move(authority).value();
  secret.identity = std::move(identity).value();
  return secret;
}

std::shared_ptr<bootstrap::KeyValueStore> seal_as_set(std::shared_ptr<bootstrap::KeyValueStore> store) {
  const core::Result<core::Config> config = core::Config::from_environment();
  if (!config.is_ok()) return store;
  core::Result<admission::Secret> secret = read_secret(config.value());
  return secret.is_ok() && secret.value().authority ? tls::seal(std::move(store), secret.value().authority) : store;
}

std::string without_effect(const core::Config& config, const Interfaces& interfaces) {
  if (!interfaces.ucx && !interfaces.control_ucx) return {};
  std::string names;
  const auto name = [&](bool is_set, const char* setting) {
    if (is_set) names += (names.empty() ? "" : ", ") + std::string(setting);
  };
  name(!config.tcp_congestion.empty(), "HYBRIDPS_TCP_CONGESTION");
  name(config.tcp_gbps > 0, "HYBRIDPS_LIMITS=tcp_gbps");
  name(config.dscp > 0, "HYBRIDPS_DSCP");
  if (names.empty()) return {};
  return names + ": no effect on " + (interfaces.ucx ? "data and control messages" : "control messages") +
         ", which go through UCX; only hybridps's own TCP goes by it";
}

std::vector<Status> ask_servers(const CheckedSettings& settings) {
  std::vector<Status> answers(settings.servers.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < settings.servers.size(); ++i)
    threads.emplace_back([&, i] { answers[i] = find_server(settings.servers[i], settings.secret).status(); });
  for (std::thread& thread : threads) thread.join();
  std::erase_if(answers, [](const Status& status) { return status.is_ok(); });
  return answers;
}

}  // namespace hybridps::engine
