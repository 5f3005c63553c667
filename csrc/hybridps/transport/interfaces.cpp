#include "hybridps/transport/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "hybridps/core/descriptor.h"
#include "hybridps/core/files.h"
#include "hybridps/core/log.h"

namespace hybridps::transport {
namespace {

/// A socket of any IP family. The queries do not depend on the family, and one family may be forbidden.
core::Descriptor any_ip_socket() {
  const core::ForkLock lock;
  const int v4 = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  return {lock, v4 >= 0 ? v4 : ::socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
}

ifreq request_for(const std::string& interface) {
  ifreq request{};
  interface.copy(request.ifr_name, sizeof request.ifr_name - 1);
  return request;
}

unsigned flags_of(int socket, const std::string& interface) {
  ifreq request = request_for(interface);
  return ::ioctl(socket, SIOCGIFFLAGS, &request) == 0 ? static_cast<unsigned short>(request.ifr_flags) : 0;
}

void add_ipv4(int socket, std::vector<InterfaceAddress>& all) {
  std::vector<ifreq> requests(32);
  ifconf listed{};
  do {  // SIOCGIFCONF does not tell the full count, only how many entries fitted
    requests.resize(2 * requests.size());
    listed.ifc_len = static_cast<int>(requests.size() * sizeof(ifreq));
    listed.ifc_req = requests.data();
    if (::ioctl(socket, SIOCGIFCONF, &listed) != 0) return;
  } while (static_cast<std::size_t>(listed.ifc_len) > (requests.size() - 1) * sizeof(ifreq) && requests.size() < 65536);
  requests.resize(static_cast<std::size_t>(listed.ifc_len) / sizeof(ifreq));
  for (ifreq& request : requests) {
    InterfaceAddress& entry = all.emplace_back();
    entry.interface.assign(request.ifr_name, strnlen(request.ifr_name, sizeof request.ifr_name));
    entry.flags = flags_of(socket, entry.interface);
    entry.address = ip_bytes(&request.ifr_addr);
    // With an address in the request, the kernel returns the mask of this address.
    if (::ioctl(socket, SIOCGIFNETMASK, &request) == 0) entry.mask = ip_bytes(&request.ifr_netmask);
  }
}

/// Lines such as "fe800000000000000011223344556677 02 40 20 80 eth0": address, index, prefix length, scope, flags,
/// name. All fields but the name are hex.
void add_ipv6(int socket, std::vector<InterfaceAddress>& all) {
  std::ifstream file("/proc/net/if_inet6");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string digits;
    std::string name;
    unsigned index = 0;
    unsigned prefix = 0;
    unsigned scope = 0;
    unsigned flags = 0;
    if (!(fields >> digits >> std::hex >> index >> prefix >> scope >> flags >> name) || digits.size() != 32 ||
        prefix > 128 || digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos)
      continue;
    InterfaceAddress& entry = all.emplace_back();
    entry.interface = name;
    entry.flags = flags_of(socket, name);
    for (std::size_t i = 0; i < 16; ++i) {
      entry.address.push_back(static_cast<unsigned char>(std::stoul(digits.substr(2 * i, 2), nullptr, 16)));
      const unsigned bits = std::min(8U, prefix - std::min<unsigned>(prefix, static_cast<unsigned>(8 * i)));
      entry.mask.push_back(static_cast<unsigned char>(0xff00U >> bits));
    }
  }
}

}  // namespace

IpBytes ip_bytes(const sockaddr* address) {
  const auto copy_of = [](const auto& bytes) {
    const auto* first = reinterpret_cast<const unsigned char*>(&bytes);
    return IpBytes(first, first + sizeof bytes);
  };
  if (address != nullptr && address->sa_family == AF_INET)
    return copy_of(reinterpret_cast<const sockaddr_in*>(address)->sin_addr);
  if (address != nullptr && address->sa_family == AF_INET6)
    return copy_of(reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
  return {};
}

std::vector<InterfaceAddress> interface_addresses_without_netlink() {
  std::vector<InterfaceAddress> all;
  const core::Descriptor socket = any_ip_socket();
  if (!socket) return all;
  add_ipv4(socket.get(), all);
  add_ipv6(socket.get(), all);
  for (const std::filesystem::path& folder : core::entries_of("/sys/class/net")) {
    const std::string name = folder.filename().string();
    const auto known = [&](const InterfaceAddress& entry) { return entry.interface == name; };
    std::error_code error;
    if (std::filesystem::is_directory(folder, error) && std::none_of(all.begin(), all.end(), known))
      all.push_back({name, flags_of(socket.get(), name), {}, {}});
  }
  return all;
}

std::vector<InterfaceAddress> interface_addresses(std::string* missing) {
  std::vector<InterfaceAddress> all;
  if (missing != nullptr) missing->clear();
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) == 0) {
    for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next)
      if (at->ifa_name != nullptr)
        all.push_back({at->ifa_name, at->ifa_flags, ip_bytes(at->ifa_addr), ip_bytes(at->ifa_netmask)});
    ::freeifaddrs(list);
    return all;
  }
  const std::string why = std::strerror(errno);
  all = interface_addresses_without_netlink();
  static std::atomic<bool> said{false};
  if (!said.exchange(true))
    core::log_info("netlink sockets cannot be used here (", why,
                   "): network interfaces are read from ioctl and /proc instead");
  if (missing != nullptr &&
      std::all_of(all.begin(), all.end(), [](const auto& entry) { return entry.address.empty(); }))
    *missing =
        "the kernel does not tell this process the network interfaces of this machine: netlink sockets (AF_NETLINK) "
        "fail with \"" +
        why + "\", and ioctl(SIOCGIFCONF) and /proc/net/if_inet6 name none; allow one of them in its sandbox";
  return all;
}

}  // namespace hybridps::transport
