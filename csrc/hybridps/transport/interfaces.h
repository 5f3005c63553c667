// hybridps/transport/interfaces.h: the network interfaces of this machine and their IP addresses.
//
// Threads  any; reads the kernel's tables.
// Errors   what cannot be read is left out; `missing` says why nothing was found.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

namespace hybridps::transport {

/// 4 or 16 bytes in network byte order. Empty: no IP address.
using IpBytes = std::vector<unsigned char>;
IpBytes ip_bytes(const sockaddr* address);

struct InterfaceAddress {
  std::string interface;  // "eth0"
  unsigned flags = 0;     // IFF_UP, IFF_LOOPBACK, ...
  IpBytes address;        // empty: the entry only says that the interface exists
  IpBytes mask;
};

/// One entry for each address, at least one for each interface. A sandbox may forbid netlink sockets (systemd's
/// RestrictAddressFamilies=, seccomp). getifaddrs() fails then, and the entries come from ioctl, /proc and /sys.
/// `missing`: empty, or why no IP address can be seen.
std::vector<InterfaceAddress> interface_addresses(std::string* missing = nullptr);
/// Only the fallback: ioctl, /proc and /sys.
std::vector<InterfaceAddress> interface_addresses_without_netlink();

}  // namespace hybridps::transport
