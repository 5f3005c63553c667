#include "hybridps/engine/interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

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

core::Result<Interfaces> choose_interfaces(const core::Config& config) {
  Interfaces chosen;
  chosen.control = config.interface;
  if (chosen.control.empty())
    if (const char* master = std::getenv("MASTER_ADDR"); master != nullptr && *master != '\0')
      chosen.control = interface_to(master);
  if (chosen.control.empty()) chosen.control = interface_to("192.0.2.1");  // TEST-NET: any address off this network
  if (chosen.control.empty()) chosen.control = "lo";
  chosen.data = config.data_interfaces.empty() ? chosen.control : config.data_interfaces;
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
