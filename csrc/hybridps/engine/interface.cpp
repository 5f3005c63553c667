#include "hybridps/engine/interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::engine {
namespace {

bool same_address(const sockaddr* a, const sockaddr* b) {
  if (a == nullptr || a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET)
    return std::memcmp(&reinterpret_cast<const sockaddr_in*>(a)->sin_addr,
                       &reinterpret_cast<const sockaddr_in*>(b)->sin_addr, sizeof(in_addr)) == 0;
  if (a->sa_family == AF_INET6)
    return std::memcmp(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                       &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr, sizeof(in6_addr)) == 0;
  return false;
}

std::string interface_with(const sockaddr* address) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  std::string name;
  for (const ifaddrs* at = list; at != nullptr && name.empty(); at = at->ifa_next)
    if (same_address(at->ifa_addr, address)) name = at->ifa_name;
  freeifaddrs(list);
  return name;
}

std::string text_of(const char* name, std::string otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? std::string(value) : otherwise;
}

/// Whether the user's UCX_TLS leaves a transport that speaks verbs.
bool allows_rdma(const std::string& tls) {
  if (tls.empty() || tls.front() == '^') return true;
  for (const char* name : {"all", "ib", "rc", "dc", "ud"})
    if (("," + tls).find(std::string(",") + name) != std::string::npos) return true;
  return false;
}

}  // namespace

std::string interface_to(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return {};
  std::string name;
  for (const addrinfo* at = found; at != nullptr && name.empty(); at = at->ai_next) {
    // Connecting a datagram socket sends nothing: it only asks the routing table.
    const int fd = socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    if (connect(fd, at->ai_addr, at->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0)
      name = interface_with(reinterpret_cast<const sockaddr*>(&own));
    close(fd);
  }
  freeaddrinfo(found);
  return name;
}

core::Result<DataChoice> choose_data(const DataNetwork& network) {
  DataChoice choice;
  choice.devices = network.control;
  std::string seen;
  for (const transport::RdmaPort& port : network.ports) seen += (seen.empty() ? "" : ", ") + port.describe();
  const std::string nearest = transport::nearest_ports(network.ports, network.local_rank, network.local_size);
  const std::string no_verbs = network.ucx +
                               " has no verbs; install one that has (Debian, Ubuntu: libucx0 with ibverbs-providers, "
                               "docs/rdma.md)";
  const auto refuse = [](std::string why) { return core::Status(core::Code::kUnsupported, std::move(why)); };

  if (!network.named.empty()) {
    choice.devices = network.named;
    choice.rdma = transport::names_rdma(network.named);
    for (const transport::RdmaPort& port : network.ports)
      if (network.named == port.name.substr(0, port.name.rfind(':'))) choice.rdma = true;
    if (choice.rdma && network.wanted == core::DataTransport::kTcp)
      return refuse("HYBRIDPS_DATA_TRANSPORT=tcp, but the data interfaces name RDMA ports (" + network.named + ")");
    if (!choice.rdma && network.wanted == core::DataTransport::kRdma)
      return refuse("HYBRIDPS_DATA_TRANSPORT=rdma, but the data interfaces name none of the RDMA ports (" +
                    network.named + "); here are: " + (seen.empty() ? "none" : seen));
    if (choice.rdma && !network.ucx_has_verbs)
      return refuse("data is to go over RDMA (" + network.named + "), but " + no_verbs + ", or name an IP interface");
    return choice;
  }
  if (network.wanted == core::DataTransport::kTcp) return choice;
  if (nearest.empty()) {
    if (network.wanted == core::DataTransport::kRdma)
      return refuse(
          "HYBRIDPS_DATA_TRANSPORT=rdma, but this machine has no RDMA port that is active and has an address; "
          "here are: " +
          (seen.empty() ? "none" : seen));
    return choice;
  }
  if (!network.ucx_has_verbs) {
    if (network.wanted == core::DataTransport::kRdma)
      return refuse("HYBRIDPS_DATA_TRANSPORT=rdma and RDMA is here (" + seen + "), but " + no_verbs);
    choice.warning = "this machine has RDMA (" + seen + "), but data goes over TCP on " + network.control + ": " +
                     no_verbs + ", or set HYBRIDPS_DATA_TRANSPORT=tcp";
    return choice;
  }
  if (network.wanted == core::DataTransport::kAuto && !allows_rdma(network.ucx_tls)) return choice;
  choice.devices = nearest;
  choice.rdma = true;
  return choice;
}

core::Result<Interfaces> choose_interfaces(const core::Config& config, const std::string& hint) {
  Interfaces chosen;
  chosen.control = config.interface.empty() ? hint : config.interface;
  if (chosen.control.empty())
    if (const char* master = std::getenv("MASTER_ADDR"); master != nullptr && *master != '\0')
      chosen.control = interface_to(master);
  if (chosen.control.empty()) chosen.control = interface_to("192.0.2.1");  // TEST-NET: any address off this network
  if (chosen.control.empty()) chosen.control = "lo";

  DataNetwork network;
  network.wanted = config.data_transport;
  network.control = chosen.control;
  network.named = text_of("HYBRIDPS_UCX_NET_DEVICES", text_of("UCX_NET_DEVICES", config.data_interfaces));
  if (network.named == "all") network.named.clear();
  network.ucx_tls = text_of("HYBRIDPS_UCX_TLS", text_of("UCX_TLS", ""));
  network.ports = transport::list_rdma_ports(transport::own_gids());
  network.ucx_has_verbs = transport::ucx_has_verbs(transport::ucx_library_path());
  network.ucx = "UCX " + transport::ucx_version() + " (" + transport::ucx_library_path() + ")";
  network.local_rank = std::atoi(text_of("LOCAL_RANK", "0").c_str());
  network.local_size = std::atoi(text_of("LOCAL_WORLD_SIZE", "1").c_str());
  core::Result<DataChoice> data = choose_data(network);
  if (!data.is_ok()) return data.status();
  chosen.data = data.value().devices;
  chosen.rdma = data.value().rdma;
  static std::atomic<bool> warned{false};
  if (!data.value().warning.empty() && network.local_rank == 0 && !warned.exchange(true))
    core::log_warn(data.value().warning);
  if (chosen.rdma) {
    std::string ports;
    for (const transport::RdmaPort& port : network.ports)
      if (("," + chosen.data + ",").find("," + port.name + ",") != std::string::npos) ports += " " + port.describe();
    core::log_info("data over RDMA:", ports, ", ", network.ucx);
  }
  return chosen;
}

double link_gbps(const std::string& interfaces, const std::string& root) {
  double total = 0.0;
  std::istringstream names(interfaces);
  for (std::string name; std::getline(names, name, ',');) {
    const std::string folder = root + "/" + name;
    double mbit = 0.0;
    std::ifstream speed(folder + "/speed");  // Mbit/s, or -1
    if (access((folder + "/device").c_str(), F_OK) != 0 || !(speed >> mbit) || mbit <= 0.0) return 0.0;
    total += mbit / 1000.0;
  }
  return total;
}

}  // namespace hybridps::engine
