#include "hybridps/transport/ucx/nics.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <system_error>

#include "hybridps/transport/interfaces.h"
#include "hybridps/transport/ucx/rdma.h"

namespace hybridps::transport {
namespace {

namespace fs = std::filesystem;

std::string text_of(const IpBytes& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const int family = address.size() == sizeof(in_addr) ? AF_INET : AF_INET6;
  return inet_ntop(family, address.data(), text.data(), text.size()) != nullptr ? std::string(text.data())
                                                                                : std::string();
}

std::string network_of(IpBytes address, const IpBytes& mask) {
  if (mask.size() != address.size()) return {};
  int bits = 0;
  for (std::size_t i = 0; i < address.size(); ++i) {
    address[i] &= mask[i];
    for (unsigned byte = mask[i]; byte != 0; byte &= byte - 1) ++bits;
  }
  return text_of(address) + "/" + std::to_string(bits);
}

/// Smaller is better: IPv4 first, as in UCX, then IPv6 that is valid beyond the link, then link-local IPv6.
int rank_of(const IpBytes& address) {
  if (address.size() == sizeof(in_addr)) return 0;
  return address[0] == 0xfe && (address[1] & 0xc0) == 0x80 ? 2 : 1;
}

}  // namespace

std::vector<std::string> device_names(std::string_view list) {
  std::vector<std::string> names;
  std::istringstream parts{std::string(list)};
  for (std::string part; std::getline(parts, part, ',');) {
    const auto first = part.find_first_not_of(" \t");
    if (first == std::string::npos) continue;
    names.push_back(part.substr(first, part.find_last_not_of(" \t") - first + 1));
  }
  return names;
}

std::vector<LocalNic> describe_nics(const std::vector<std::string>& names, const Locality& from,
                                    const fs::path& sysfs) {
  std::vector<LocalNic> nics;
  const std::vector<InterfaceAddress> addresses = interface_addresses();
  for (const std::string& name : names) {
    LocalNic& nic = nics.emplace_back();
    nic.name = name;
    if (names_rdma(name)) {
      nic.distance = distance_to(from, sysfs / "class/infiniband" / name.substr(0, name.rfind(':')) / "device", sysfs);
      continue;
    }
    nic.gbps = link_gbps(name, sysfs);
    nic.distance = distance_to(from, sysfs / "class/net" / name / "device", sysfs);
    int best = 3;
    for (const InterfaceAddress& at : addresses) {
      if (at.interface != name) continue;
      nic.loopback = (at.flags & IFF_LOOPBACK) != 0;
      if (at.address.empty() || rank_of(at.address) >= best) continue;
      best = rank_of(at.address);
      nic.address = text_of(at.address);
      nic.network = best == 2 ? "" : network_of(at.address, at.mask);
    }
  }
  return nics;
}

core::Status check_together(const std::vector<LocalNic>& nics) {
  const auto bad = [](std::string what) { return core::Status(core::Code::kInvalidArgument, std::move(what)); };
  for (std::size_t i = 0; i < nics.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j)
      if (nics[j].name == nics[i].name) return bad("network device '" + nics[i].name + "' is named twice");
    if (nics[i].loopback && nics.size() > 1)
      return bad("'" + nics[i].name +
                 "' is the loopback interface, which reaches no other machine: name it alone or not");
    if (names_rdma(nics[i].name) != names_rdma(nics[0].name))
      return bad("'" + nics[0].name + "' and '" + nics[i].name +
                 "' are an IP interface and an RDMA port: data takes one kind");
  }
  return core::Status::ok();
}

double link_gbps(const std::string& interface, const fs::path& sysfs) {
  const fs::path folder = sysfs / "class/net" / interface;
  double mbit = 0.0;
  std::ifstream speed(folder / "speed");  // Mbit/s, or -1
  std::error_code error;
  if (!fs::exists(folder / "device", error) || !(speed >> mbit) || mbit <= 0.0) return 0.0;
  return mbit / 1000.0;
}

}  // namespace hybridps::transport
