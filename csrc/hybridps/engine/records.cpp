#include "hybridps/engine/records.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

namespace hybridps::engine {
namespace {

template <typename To, typename From>
To bytes_as(const From& from) {
  static_assert(sizeof(typename To::value_type) == 1 && sizeof(typename From::value_type) == 1);
  const auto* begin = reinterpret_cast<const typename To::value_type*>(from.data());
  return To(begin, begin + from.size());
}

}  // namespace

bootstrap::Bytes to_record(const std::vector<std::byte>& address) { return bytes_as<bootstrap::Bytes>(address); }

std::vector<std::byte> to_transport(const bootstrap::Bytes& address) {
  return bytes_as<std::vector<std::byte>>(address);
}

PeerRecord peer_record(const bootstrap::MemberRecord& member, std::string where, bool local) {
  PeerRecord peer;
  peer.engine = member.engine;
  peer.local = local;
  peer.data_address = to_transport(member.data_address);
  peer.control_address = to_transport(member.control_address);
  peer.shm_address = to_transport(member.shm_address);
  peer.where = std::move(where);
  peer.eager_bytes = member.eager_bytes;
  return peer;
}

schedule::Shares shares_of(const bootstrap::Roster& roster) {
  std::vector<double> rates(static_cast<std::size_t>(roster.node_count()), 0.0);
  for (std::size_t rank = 0; rank < roster.members.size(); ++rank) {
    double& rate = rates[static_cast<std::size_t>(roster.node_of[rank])];
    rate = std::max(rate, roster.members[rank].nic_gbps);
  }
  const bool known = std::all_of(rates.begin(), rates.end(), [](double rate) { return rate > 0.0; });
  if (!known) std::fill(rates.begin(), rates.end(), 1.0);
  const double usual = *std::max_element(rates.begin(), rates.end());
  // The shards of one server program share its card.
  std::map<std::pair<std::string, std::uint32_t>, int> shards;
  for (const auto& server : roster.servers) ++shards[{server.host_name, server.pid}];
  std::vector<double> dedicated;
  for (const auto& server : roster.servers)
    dedicated.push_back(known && server.nic_gbps > 0.0 ? server.nic_gbps
                                                       : usual / shards[{server.host_name, server.pid}]);
  schedule::Shares shares = schedule::optimal_shares(rates, dedicated);
  if (rates.size() < 3) {  // nothing to gain, so nothing goes there
    shares = schedule::optimal_shares(rates);
    shares.dedicated.assign(dedicated.size(), 0.0);
  }
  return shares;
}

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

core::Result<PrivatePool> map_pool(std::size_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    return core::Status(core::Code::kOutOfResources, "cannot map " + std::to_string(bytes) + " bytes for messages");
  return PrivatePool{{static_cast<std::byte*>(mapped), bytes},
                     std::shared_ptr<void>(mapped, [bytes](void* at) { munmap(at, bytes); })};
}

}  // namespace hybridps::engine
