#include "hybridps/transport/ucx/rdma.h"

#include <arpa/inet.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>

#include "hybridps/core/files.h"
#include "hybridps/transport/interfaces.h"

namespace hybridps::transport {
namespace {

namespace fs = std::filesystem;

constexpr int kGidsRead = 64;  // the tables have up to 1024 rows, filled from the front
constexpr std::string_view kNoGid = "0000:0000:0000:0000:0000:0000:0000:0000";
constexpr std::string_view kIpv4Gid = "0000:0000:0000:0000:0000:ffff:";
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
/// For UCX's queues and bounce buffers, and for receive slots of 4 MiB at a time. Above tests/rdma's "pinned".
constexpr std::uint64_t kLockedBesidePool = 128 * kMiB;
constexpr int kCapIpcLock = 14;

std::string gid_text(const std::array<unsigned char, 16>& bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (i > 0 && i % 2 == 0) text += ':';
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

/// As people write it: "::ffff:10.0.0.1", "fe80::1".
std::string short_gid(const std::string& gid) {
  in6_addr address{};
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (inet_pton(AF_INET6, gid.c_str(), &address) != 1) return gid;
  return inet_ntop(AF_INET6, &address, text.data(), text.size()) != nullptr ? std::string(text.data()) : gid;
}

std::string gid_of(const fs::path& port, bool ethernet, const std::vector<std::string>& own) {
  std::string found;
  for (int i = 0; i < kGidsRead; ++i) {
    const std::string gid = core::first_line_of(port / "gids" / std::to_string(i));
    if (gid.empty() || gid == kNoGid) continue;
    if (!ethernet) return gid;
    if (std::find(own.begin(), own.end(), gid) == own.end()) continue;
    if (std::string_view(gid).substr(0, kIpv4Gid.size()) == kIpv4Gid) return gid;
    if (found.empty()) found = gid;
  }
  return found;
}

bool may_lock_anything() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.compare(0, 7, "CapEff:") == 0)
      return (std::strtoull(line.c_str() + 7, nullptr, 16) >> kCapIpcLock & 1) != 0;
  return false;
}

std::string mebibytes(std::uint64_t bytes) {
  return bytes < kMiB ? std::to_string(bytes >> 10) + " KiB" : std::to_string((bytes + kMiB - 1) / kMiB) + " MiB";
}

}  // namespace

std::string RdmaPort::describe() const {
  std::string text = name + " (" + link_layer;
  if (!active) text += ", not active";
  text += gid.empty() ? ", no address of this host" : ", GID " + short_gid(gid);
  if (distance >= 0) text += ", distance " + std::to_string(distance);
  return text + ")";
}

std::vector<std::string> own_gids() {
  std::vector<std::string> gids;
  for (const InterfaceAddress& at : interface_addresses()) {
    std::array<unsigned char, 16> bytes{};
    if (at.address.empty() || at.address.size() > bytes.size()) continue;
    if (at.address.size() == 4) bytes[10] = bytes[11] = 0xff;
    std::copy(at.address.rbegin(), at.address.rend(), bytes.rbegin());
    gids.push_back(gid_text(bytes));
  }
  return gids;
}

std::vector<RdmaPort> list_rdma_ports(const std::vector<std::string>& own, const fs::path& sysfs) {
  return list_rdma_ports(own, own_locality(0, std::numeric_limits<int>::max(), sysfs), sysfs);
}

std::vector<RdmaPort> list_rdma_ports(const std::vector<std::string>& own, const Locality& from,
                                      const fs::path& sysfs) {
  std::vector<RdmaPort> ports;
  for (const fs::path& device : core::entries_of(sysfs / "class/infiniband")) {
    const int distance = distance_to(from, device / "device", sysfs);
    for (const fs::path& port : core::entries_of(device / "ports")) {
      RdmaPort found;
      found.name = device.filename().string() + ":" + port.filename().string();
      found.link_layer = core::first_line_of(port / "link_layer");
      found.active = core::first_line_of(port / "state").find("ACTIVE") != std::string::npos;
      found.gid = gid_of(port, found.link_layer == "Ethernet", own);
      found.distance = distance;
      ports.push_back(std::move(found));
    }
  }
  std::sort(ports.begin(), ports.end(), [](const RdmaPort& a, const RdmaPort& b) { return a.name < b.name; });
  return ports;
}

std::string nearest_ports(const std::vector<RdmaPort>& ports, int local_rank, int local_size) {
  std::vector<const RdmaPort*> usable;
  std::vector<int> distances;
  for (const RdmaPort& port : ports) {
    if (!port.usable()) continue;
    usable.push_back(&port);
    distances.push_back(port.distance);
  }
  std::string names;
  for (const std::size_t at : nearest_of(distances, local_rank, local_size))
    names += (names.empty() ? "" : ",") + usable[at]->name;
  return names;
}

bool names_rdma(const std::string& devices) { return devices.find(':') != std::string::npos; }

bool ucx_has_verbs(const fs::path& libucp) {
  const char* given = std::getenv("UCX_MODULE_DIR");
  const fs::path modules = given != nullptr && *given != '\0' ? fs::path(given) : libucp.parent_path() / "ucx";
  const std::vector<fs::path> files = core::entries_of(modules);
  return std::any_of(files.begin(), files.end(), [](const fs::path& file) {
    return file.filename().string().starts_with("libuct_ib.so.") || file.filename() == "libuct_ib.so";
  });
}

std::optional<std::uint64_t> locked_memory_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || may_lock_anything())
    return std::nullopt;
  return limit.rlim_cur;
}

std::uint64_t locked_memory_needed(std::uint64_t pool_bytes) { return pool_bytes + kLockedBesidePool; }

core::Status check_locked_memory(std::uint64_t needed, std::optional<std::uint64_t> limit) {
  if (!limit || *limit >= needed) return core::Status::ok();
  return {
      core::Code::kOutOfResources,
      "RDMA needs " + mebibytes(needed) +
          " of locked memory (HYBRIDPS_POOL_BYTES and UCX's queues), but `ulimit -l` allows " + mebibytes(*limit) +
          "; raise it (`ulimit -l unlimited`, memlock in limits.conf, LimitMEMLOCK= in systemd, --ulimit memlock=-1 in "
          "Docker), lower HYBRIDPS_POOL_BYTES, or set HYBRIDPS_DATA_TRANSPORT=tcp"};
}

}  // namespace hybridps::transport
