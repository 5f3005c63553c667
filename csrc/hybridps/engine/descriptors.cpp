#include "hybridps/engine/descriptors.h"

#include <sys/resource.h>

#include <algorithm>
#include <string>

#include "hybridps/core/log.h"
#include "hybridps/engine/data_transport.h"
#include "hybridps/schedule/tuning.h"

namespace hybridps::engine {
namespace {

constexpr std::uint64_t kSides = 2;        // both may dial; a moment later one of the two connections is left
constexpr std::uint64_t kOfLocalPeer = 2;  // a socket, and the peer's eventfd

}  // namespace

std::uint64_t descriptors_needed(const DescriptorUse& use) noexcept {
  return use.own + use.remote * kSides * (use.ways + 1) + use.local * kOfLocalPeer;
}

std::uint64_t data_ways(const core::Config& config, const Interfaces& interfaces, std::size_t cards) {
  if (interfaces.rdma) return 0;
  DataOptions options;
  if (config.tune) options.sockets_to_choose = schedule::kSocketsToChoose;
  const auto sockets = static_cast<std::uint64_t>(sockets_of(interfaces, options, config.data_sockets));
  return sockets * std::max<std::uint64_t>(1, std::max(cards, interfaces.nics.size()));
}

core::Status allow_descriptors(const DescriptorUse& use) {
  const std::uint64_t needed = descriptors_needed(use);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || needed <= limit.rlim_cur) return core::Status::ok();
  if (needed <= limit.rlim_max) {
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &limit) == 0) {
      core::log_info(needed, " file descriptors are needed: the limit of this process is ", limit.rlim_max,
                     " now, it was ", before);
      return core::Status::ok();
    }
    limit.rlim_max = before;
  }
  return {core::Code::kOutOfResources,
          "too few file descriptors: " + std::to_string(needed) + " are needed (" + std::to_string(use.own) +
              " for the process itself, " + std::to_string(kSides * (use.ways + 1)) + " for each of " +
              std::to_string(use.remote) + " ranks and servers on other nodes, " + std::to_string(kOfLocalPeer) +
              " for each of " + std::to_string(use.local) + " other ranks of its node), and this process may have " +
              std::to_string(limit.rlim_max) +
              "; raise the hard limit of the shell, container or service that starts it (`ulimit -Hn`, "
              "--ulimit nofile=, LimitNOFILE=)"};
}

}  // namespace hybridps::engine
