// hybridps/transport/ucx/rdma.h: the RDMA ports of this machine, the ports for data, and the memory that RDMA locks.
//
// Threads  any; reads sysfs, the environment and this process's limits.
// Errors   what cannot be read counts as not there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "hybridps/core/status.h"
#include "hybridps/transport/ucx/locality.h"

namespace hybridps::transport {

struct RdmaPort {
  std::string name;        // "mlx5_0:1", as UCX wants it
  std::string link_layer;  // "InfiniBand", "Ethernet"
  /// The address by which peers reach the port. InfiniBand: the first GID. Ethernet: the first GID that is an IP
  /// address of this network namespace, IPv4 before others. Empty: there is none, and the port cannot be used here.
  std::string gid;
  bool active = false;
  int distance = -1;  // distance of the card (locality.h); -1: not known

  bool usable() const noexcept { return active && !gid.empty(); }
  std::string describe() const;  // "mlx5_0:1 (Ethernet, GID ::ffff:10.0.0.1, distance 10)"
};

/// Sorted by name. `own`: the addresses of this host as GIDs (own_gids()). Distances are from `from`. Without `from`,
/// distances are from the one GPU of several that CUDA_VISIBLE_DEVICES shows, else from this process's CPUs.
std::vector<RdmaPort> list_rdma_ports(const std::vector<std::string>& own, const Locality& from,
                                      const std::filesystem::path& sysfs = "/sys");
std::vector<RdmaPort> list_rdma_ports(const std::vector<std::string>& own, const std::filesystem::path& sysfs = "/sys");
/// IP addresses of this network namespace, in sysfs's notation of a GID.
std::vector<std::string> own_gids();

/// The usable ports that this rank takes (nearest_of()), joined by commas. Empty: none.
std::string nearest_ports(const std::vector<RdmaPort>& ports, int local_rank, int local_size);

/// Whether a list of devices names RDMA ports.
bool names_rdma(const std::string& devices);

/// Whether the UCX at `libucp` has verbs (its module libuct_ib.so). Most packages have verbs, wheels do not.
bool ucx_has_verbs(const std::filesystem::path& libucp);

/// The `ulimit -l` of this process, bytes. Nothing: there is no limit (unlimited, or CAP_IPC_LOCK, which root has).
std::optional<std::uint64_t> locked_memory_limit();
/// Bytes that a data transport over RDMA locks in memory: the send pool, receive slots, and UCX's own queues.
std::uint64_t locked_memory_needed(std::uint64_t pool_bytes);
/// kOutOfResources if `limit` is below `needed` (bytes). Check before UCX starts: below 64 KiB UCX hangs.
core::Status check_locked_memory(std::uint64_t needed, std::optional<std::uint64_t> limit);

}  // namespace hybridps::transport
