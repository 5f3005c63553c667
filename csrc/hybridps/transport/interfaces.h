// hybridps/transport/interfaces.h: the network interfaces of this machine and their IP addresses.
//
// Threads  any; reads the kernel's tables.
// Errors   what cannot be read is not there; `missing` says why nothing is.
#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

namespace hybridps::transport {

/// 4 or 16 of them, as they go over the wire; none: no IP address.
using IpBytes = std::vector<unsigned char>;
IpBytes ip_bytes(const sockaddr* address);

struct InterfaceAddress {
  std::string interface;  // "eth0"
  unsigned flags = 0;     // IFF_UP, IFF_LOOPBACK, ...
  IpBytes address;        // none: an entry that says that the interface is there
  IpBytes mask;
};

/// One entry for each address, at least one for each interface. Where a sandbox forbids netlink sockets (systemd's
/// RestrictAddressFamilies=, seccomp), getifaddrs() cannot tell: then from ioctl, /proc and /sys. `missing`: empty, or why no
/// interface can be seen.
std::vector<InterfaceAddress> interface_addresses(std::string* missing = nullptr);
/// Only the second way.
std::vector<InterfaceAddress> interface_addresses_without_netlink();

}  // namespace hybridps::transport
