#include "hybridps/engine/records.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/build_info.h"
#include "hybridps/core/text.h"
#include "hybridps/engine/data_transport.h"
#include "hybridps/schedule/level_shares.h"
#include "hybridps/schedule/shares.h"

namespace hybridps::engine {
namespace {

template <typename To, typename From>
To bytes_as(const From& from) {
  static_assert(sizeof(typename To::value_type) == 1 && sizeof(typename From::value_type) == 1);
  const auto* begin = reinterpret_cast<const typename To::value_type*>(from.data());
  return To(begin, begin + from.size());
}

constexpr double kWeightMin = 1e-9;
constexpr double kUplinkGbpsMax = 1e6;

/// The rank's part of the card rates of its node. Ranks that use the same card share its rate equally.
double card_part(const schedule::NicLayout& layout, std::size_t rank) {
  std::vector<int> users(layout.rates.size(), 0);
  for (const std::vector<int>& cards : layout.cards_of)
    for (const int card : cards) ++users[static_cast<std::size_t>(card)];
  double own = 0.0;
  double all = 0.0;
  for (std::size_t other = 0; other < layout.cards_of.size(); ++other) {
    if (layout.node_of[other] != layout.node_of[rank]) continue;
    for (const int card : layout.cards_of[other]) {
      const double part = layout.rates[static_cast<std::size_t>(card)] / users[static_cast<std::size_t>(card)];
      all += part;
      if (other == rank) own += part;
    }
  }
  return own / all;
}

}  // namespace

bootstrap::Bytes to_record(const std::vector<std::byte>& address) { return bytes_as<bootstrap::Bytes>(address); }

std::vector<std::byte> to_transport(const bootstrap::Bytes& address) {
  return bytes_as<std::vector<std::byte>>(address);
}

bootstrap::MemberRecord own_record(const core::Config& config, const Interfaces& interfaces,
                                   const RuntimeOptions& options, const transport::Transport& data,
                                   const transport::Transport& control) {
  bootstrap::MemberRecord record;
  record.build = std::string("hybridps ") + build_info::kVersion +
                 (config.checksum && !config.tls ? " HYBRIDPS_CHECKSUM=1" : "") +
                 (config.tls && config.certificate_paths.any() ? " HYBRIDPS_SECURITY=tls by certificates" : "");
  record.engine = options.self;
  record.node_identity = bootstrap::node_identity(config, options.self);
  record.host_name = bootstrap::host_name();
  record.machine = bootstrap::machine_id();
  record.pid = static_cast<std::uint32_t>(getpid());
  record.loopback = interfaces.loopback.substr(0, bootstrap::kTextBytesMax);
  record.data_address = to_record(data.address());
  record.control_address = to_record(control.address());
  record.control = to_record(std::vector{interfaces.control_nic})[0];
  record.nics = to_record(interfaces.nics);
  record.node_gbps = interfaces.node_gbps;
  record.eager_bytes = options.eager_bytes;
  record.far_bytes = options.far_bytes;
  record.region = config.region;
  record.chunk_bytes = config.chunk_bytes;
  record.chunk_bytes_max = options.chunk_bytes;
  return record;
}

std::string process_text(const bootstrap::MemberRecord& member) {
  return member.host_name + " pid " + std::to_string(member.pid);
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
  peer.far_bytes = member.far_bytes;
  return peer;
}

namespace {

/// The rate of each dedicated server's cards. The shards of one server program share the program's cards. A server
/// counts with `usual` for each card if the nodes' rates (`known`) or its own rates are not known.
std::vector<double> server_rates(const bootstrap::Roster& roster, bool known, double usual) {
  using Card = std::tuple<std::string, std::uint32_t, std::string>;
  const auto cards = [](const bootstrap::MemberRecord& server) {
    std::vector<Card> of_server;
    for (const bootstrap::Nic& nic : server.nics) of_server.emplace_back(server.host_name, server.pid, nic.name);
    if (of_server.empty()) of_server.emplace_back(server.host_name, server.pid, "");
    return of_server;
  };
  std::map<Card, int> shards;
  for (const auto& server : roster.servers)
    for (const Card& card : cards(server)) ++shards[card];
  std::vector<double> rates;
  for (const auto& server : roster.servers) {
    double links = 0.0;
    double parts = 0.0;  // the shard's parts of its cards, summed
    for (const bootstrap::Nic& nic : server.nics) links += nic.gbps / shards[{server.host_name, server.pid, nic.name}];
    for (const Card& card : cards(server)) parts += 1.0 / shards[card];
    const bool has_links = !server.nics.empty() && std::all_of(server.nics.begin(), server.nics.end(),
                                                               [](const auto& n) { return n.gbps > 0; });
    if (known && server.node_gbps > 0.0)
      rates.push_back(server.node_gbps);
    else if (known && has_links)
      rates.push_back(links);
    else
      rates.push_back(usual * parts);
  }
  return rates;
}

}  // namespace

schedule::NicLayout nic_layout(const bootstrap::Roster& roster) {
  std::map<std::string, std::set<int>> nodes_on;  // the nodes with a card on a network; servers are negative
  for (std::size_t rank = 0; rank < roster.members.size(); ++rank)
    for (const bootstrap::Nic& nic : roster.members[rank].nics) nodes_on[nic.network].insert(roster.node_of[rank]);
  int other = -1;
  for (const auto& server : roster.servers) {
    for (const bootstrap::Nic& nic : server.nics) nodes_on[nic.network].insert(other);
    --other;
  }
  const auto shared = [&](const bootstrap::Nic& nic) {
    return !nic.network.empty() && nodes_on[nic.network].size() > 1;
  };

  schedule::NicLayout layout;
  layout.node_of = roster.node_of;
  std::map<std::pair<int, std::string>, int> numbers;
  std::vector<int> node_of_card;
  std::vector<double> node_gbps(static_cast<std::size_t>(roster.node_count()), 0.0);
  for (std::size_t rank = 0; rank < roster.members.size(); ++rank) {
    const bootstrap::MemberRecord& member = roster.members[rank];
    const int node = roster.node_of[rank];
    node_gbps[static_cast<std::size_t>(node)] = std::max(node_gbps[static_cast<std::size_t>(node)], member.node_gbps);
    std::vector<bootstrap::Nic> nics = member.nics;
    if (std::any_of(nics.begin(), nics.end(), shared))
      std::erase_if(nics, [&](const auto& nic) { return !shared(nic); });
    if (nics.empty()) nics.emplace_back();
    std::vector<int>& cards = layout.cards_of.emplace_back();
    for (const bootstrap::Nic& nic : nics) {
      const auto [at, fresh] = numbers.emplace(std::pair(node, nic.name), static_cast<int>(layout.rates.size()));
      if (fresh) {
        layout.rates.push_back(0.0);
        node_of_card.push_back(node);
      }
      double& rate = layout.rates[static_cast<std::size_t>(at->second)];
      rate = std::max(rate, nic.gbps);
      cards.push_back(at->second);
    }
    std::sort(cards.begin(), cards.end());
    cards.erase(std::unique(cards.begin(), cards.end()), cards.end());
  }
  // A machine's rate, given as one number, is the rate of all its cards together. The cards divide the rate in
  // proportion to their link rates if all are known, else equally.
  for (std::size_t node = 0; node < node_gbps.size(); ++node) {
    if (node_gbps[node] <= 0.0) continue;
    double links = 0.0;
    double count = 0.0;
    bool all = true;
    for (std::size_t card = 0; card < layout.rates.size(); ++card) {
      if (node_of_card[card] != static_cast<int>(node)) continue;
      links += layout.rates[card];
      count += 1.0;
      all = all && layout.rates[card] > 0.0;
    }
    for (std::size_t card = 0; card < layout.rates.size(); ++card)
      if (node_of_card[card] == static_cast<int>(node))
        layout.rates[card] = all ? node_gbps[node] * layout.rates[card] / links : node_gbps[node] / count;
  }
  layout.are_rates_known =
      std::all_of(layout.rates.begin(), layout.rates.end(), [](double rate) { return rate > 0.0; });
  if (!layout.are_rates_known) std::fill(layout.rates.begin(), layout.rates.end(), 1.0);
  layout.dedicated =
      server_rates(roster, layout.are_rates_known, *std::max_element(layout.rates.begin(), layout.rates.end()));
  return layout;
}

namespace {

/// HYBRIDPS_REGION: "east", or "east@0.5" with the rate of the region's uplink in Gbit/s; not given: 0. No value: no
/// such text.
struct RegionText {
  std::string name;
  double gbps = 0.0;
};
std::optional<RegionText> parse_region(const std::string& text) {
  const std::size_t at = text.rfind('@');
  if (at == std::string::npos) return RegionText{text};
  const std::optional<double> gbps = core::parse_double(std::string_view(text).substr(at + 1));
  if (at == 0 || !gbps || !(*gbps > 0.0) || *gbps > kUplinkGbpsMax) return std::nullopt;
  return RegionText{text.substr(0, at), *gbps};
}

/// By node, in [0, number of regions). `names`: of each region, in the order of nodes, so the same on all ranks; empty
/// where regions were found.
std::vector<int> regions_of(const bootstrap::Roster& roster, std::vector<std::string>& names) {
  if (!roster.region_of.empty()) return roster.region_of;
  std::vector<int> region_of(static_cast<std::size_t>(roster.node_count()), -1);
  for (std::size_t rank = 0; rank < roster.members.size(); ++rank) {
    int& region = region_of[static_cast<std::size_t>(roster.node_of[rank])];
    if (region >= 0) continue;
    const std::string name = parse_region(roster.members[rank].region).value_or(RegionText()).name;
    const auto found = std::find(names.begin(), names.end(), name);
    region = static_cast<int>(found - names.begin());
    if (found == names.end()) names.push_back(name);
  }
  return region_of;
}

// Between three regions or more, an uplink of rate r carries (1 + (R - 2) y) / r tensors in each direction, where y is
// what the region's nodes own: the formula of nodes and their cards. So regions get shares as nodes do (shares.h), and
// nodes keep their parts of their region's share. Without the rates of all uplinks, or where nodes have no rates,
// shares are those of a flat network. A region's dedicated servers keep their shares (`of_servers`, by region), and its
// nodes have the rest.
std::vector<double> weights_by_uplinks(const bootstrap::Roster& roster, const std::vector<int>& region_of,
                                       const std::vector<double>& of_servers, std::vector<double> weights) {
  const auto regions = static_cast<std::size_t>(*std::max_element(region_of.begin(), region_of.end()) + 1);
  if (regions < 3) return weights;
  std::vector<double> rates(regions, 0.0);
  std::vector<double> cards(regions, 0.0);
  std::vector<double> owned(regions, 0.0);
  for (std::size_t node = 0; node < weights.size(); ++node) {
    const auto on_node = std::find(roster.node_of.begin(), roster.node_of.end(), static_cast<int>(node));
    const bootstrap::MemberRecord& member = roster.members[static_cast<std::size_t>(on_node - roster.node_of.begin())];
    const auto region = static_cast<std::size_t>(region_of[node]);
    rates[region] = parse_region(member.region).value_or(RegionText()).gbps;
    cards[region] += member.node_gbps;
    owned[region] += weights[node];
  }
  for (std::size_t region = 0; region < regions; ++region) {
    if (!(rates[region] > 0.0)) return weights;
    if (cards[region] > 0.0) rates[region] = std::min(rates[region], cards[region]);
  }
  const std::vector<double> shares = schedule::optimal_shares(rates).worker;
  for (std::size_t node = 0; node < weights.size(); ++node) {
    const auto region = static_cast<std::size_t>(region_of[node]);
    const auto mates = static_cast<double>(std::count(region_of.begin(), region_of.end(), region_of[node]));
    const double part = owned[region] > kWeightMin ? weights[node] / owned[region] : 1.0 / mates;
    weights[node] = std::max(0.0, shares[region] - of_servers[region]) * part;
  }
  return weights;
}

}  // namespace

namespace {

/// Better shares, if there are any, than those of a flat network: gateways have more to do than other nodes. Uplinks
/// count only where all cards' rates are known too.
schedule::Topology relieve_gateways(const bootstrap::Roster& roster, const schedule::NicLayout& layout,
                                    const schedule::Topology& topology) {
  schedule::LevelRates rates;
  rates.nodes.assign(static_cast<std::size_t>(topology.nodes()), 0.0);
  rates.servers = layout.dedicated;
  rates.servers.resize(static_cast<std::size_t>(topology.servers()), 1.0);
  std::set<int> counted;
  for (std::size_t member = 0; member < layout.cards_of.size(); ++member)
    for (const int card : layout.cards_of[member])
      if (counted.insert(card).second)
        rates.nodes[static_cast<std::size_t>(layout.node_of[member])] += layout.rates[static_cast<std::size_t>(card)];
  for (int region = 0; region < topology.regions(); ++region) {
    const int rank = topology.ranks_of(topology.nodes_in(region).front()).front();
    const std::string& text = roster.members[static_cast<std::size_t>(rank)].region;
    const double gbps = parse_region(text).value_or(RegionText()).gbps;
    if (gbps > 0.0) rates.uplinks.push_back(gbps);
  }
  if (static_cast<int>(rates.uplinks.size()) != topology.regions()) rates.uplinks.clear();
  if (!rates.uplinks.empty() && !layout.are_rates_known) return topology;
  return topology.with_weights(schedule::level_weights(topology, rates));
}

}  // namespace

core::Status check_regions(const bootstrap::Roster& roster) {
  const auto said = [](const bootstrap::MemberRecord& member) {
    return bootstrap::describe(member) + (member.region.empty() ? " has none" : " has " + core::quoted(member.region));
  };
  std::map<std::string, const bootstrap::MemberRecord*> by_name;
  for (std::size_t rank = 0; rank < roster.members.size(); ++rank) {
    const bootstrap::MemberRecord& member = roster.members[rank];
    const bootstrap::MemberRecord& first = roster.members.front();
    if (member.region.empty() != first.region.empty())
      return core::Status(core::Code::kMismatch, "HYBRIDPS_REGION is not set on all ranks: " + said(first) + ", " +
                                                     said(member) + "; set it on all ranks or on none");
    const auto on_node = std::find(roster.node_of.begin(), roster.node_of.end(), roster.node_of[rank]);
    const bootstrap::MemberRecord& mate = roster.members[static_cast<std::size_t>(on_node - roster.node_of.begin())];
    if (mate.region != member.region)
      return core::Status(core::Code::kMismatch,
                          "ranks of one node have different HYBRIDPS_REGION: " + said(mate) + ", " + said(member));
    const std::optional<RegionText> region = parse_region(member.region);
    if (!region)
      return core::Status(
          core::Code::kInvalidArgument,
          "HYBRIDPS_REGION is NAME or NAME@RATE, with the rate of the region's uplink in Gbit/s: " + said(member));
    const auto [known, is_new] = by_name.emplace(region->name, &member);
    if (!is_new && known->second->region != member.region)
      return core::Status(core::Code::kMismatch, "ranks of one region give its uplink different rates in " +
                                                     std::string("HYBRIDPS_REGION: ") + said(*known->second) + ", " +
                                                     said(member));
  }
  return core::Status::ok();
}

int region_of_server(const bootstrap::Roster& roster, const bootstrap::MemberRecord& server) {
  std::vector<std::string> names;
  regions_of(roster, names);
  const std::string name = parse_region(server.region).value_or(RegionText()).name;
  const auto found = std::find(names.begin(), names.end(), name);
  return name.empty() || found == names.end() ? schedule::kNoRegion : static_cast<int>(found - names.begin());
}

schedule::Topology topology_of(const bootstrap::Roster& roster, int rank) {
  schedule::NicLayout layout = nic_layout(roster);
  const auto nodes = static_cast<std::size_t>(roster.node_count());
  const std::size_t servers = layout.dedicated.size();
  if (nodes < 3) layout.dedicated.clear();  // servers do not help below 3 nodes, so they get no share
  schedule::OwnerShares shares = schedule::optimal_owner_shares(layout);
  shares.dedicated.resize(servers, 0.0);

  std::vector<double> weights(nodes, 0.0);
  std::vector<double> ranks(nodes, 0.0);
  for (const int node : roster.node_of) ranks[static_cast<std::size_t>(node)] += 1.0;
  for (std::size_t member = 0; member < shares.worker.size(); ++member)
    weights[static_cast<std::size_t>(roster.node_of[member])] += shares.worker[member];
  schedule::CardUse use;
  use.ranks_per_card = schedule::ranks_per_card(layout);
  bool equal = true;
  for (std::size_t member = 0; member < shares.worker.size(); ++member) {
    const auto node = static_cast<std::size_t>(roster.node_of[member]);
    // A node that owns next to nothing may own more later. Its ranks then divide its share by their cards' rates.
    double part = shares.worker[member] / weights[node];
    if (weights[node] < kWeightMin) part = card_part(layout, member);
    use.parts.push_back(part);
    equal = equal && std::abs(part * ranks[node] - 1.0) < kWeightMin;
  }
  if (equal) use.parts.clear();
  std::vector<std::string> names;
  std::vector<int> region_of = regions_of(roster, names);
  std::vector<int> server_region;
  std::vector<double> of_servers(static_cast<std::size_t>(*std::max_element(region_of.begin(), region_of.end())) + 1);
  for (std::size_t server = 0; server < servers; ++server) {
    server_region.push_back(region_of_server(roster, roster.servers[server]));
    if (server_region.back() != schedule::kNoRegion)
      of_servers[static_cast<std::size_t>(server_region.back())] += shares.dedicated[server];
  }
  weights = weights_by_uplinks(roster, region_of, of_servers, std::move(weights));
  const schedule::Topology topology =
      schedule::Topology(roster.node_of, rank, std::move(weights), std::move(shares.dedicated), std::move(use))
          .with_regions(std::move(region_of))
          .with_server_regions(std::move(server_region));
  return topology.regions() == 1 ? topology : relieve_gateways(roster, layout, topology);
}

std::vector<double> weights_with(bootstrap::Roster roster, const std::vector<bool>& are_there) {
  std::vector<bootstrap::MemberRecord> servers;
  for (std::size_t server = 0; server < roster.servers.size() && server < are_there.size(); ++server)
    if (are_there[server]) servers.push_back(std::move(roster.servers[server]));
  roster.servers = std::move(servers);
  const schedule::Topology topology = topology_of(roster, 0);
  std::vector<double> weights;
  for (int node = 0; node < topology.nodes(); ++node) weights.push_back(topology.weight(node));
  int present = 0;
  for (const bool is_there : are_there) weights.push_back(is_there ? topology.server_weight(present++) : 0.0);
  return weights;
}

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

core::Result<PrivatePool> map_pool(std::size_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    return core::Status(core::Code::kOutOfResources, "cannot map " + std::to_string(bytes) + " bytes for messages");
  (void)madvise(mapped, bytes, MADV_DONTDUMP);  // gradients are nobody's business who reads a core dump
  return PrivatePool{{static_cast<std::byte*>(mapped), bytes},
                     std::shared_ptr<void>(mapped, [bytes](void* at) { munmap(at, bytes); })};
}

core::Status check_priorities(const bootstrap::Roster& roster) {
  const bootstrap::MemberRecord& first = roster.members.front();
  const auto text = [](const bootstrap::MemberRecord& member) {
    return member.priority.empty() ? std::string("0") : member.priority;
  };
  for (const bootstrap::MemberRecord& member : roster.members)
    if (member.priority != first.priority)
      return core::Status(core::Code::kMismatch,
                          "ranks give the group different priorities: " + bootstrap::describe(first) + " '" +
                              text(first) + "', " + bootstrap::describe(member) + " '" + text(member) +
                              "'; give all ranks the same Options(priority=...)");
  return core::Status::ok();
}

schedule::ChunkSizes chunk_sizes(const bootstrap::Roster& roster, const schedule::Topology& topology) {
  schedule::ChunkSizes sizes;
  sizes.coded = std::numeric_limits<std::uint64_t>::max();
  sizes.room = std::numeric_limits<std::int32_t>::max();
  for (const auto* members : {&roster.members, &roster.servers})
    for (const bootstrap::MemberRecord& member : *members) {
      const std::uint64_t room = std::max(member.chunk_bytes, member.chunk_bytes_max);
      sizes.coded = std::min(sizes.coded, std::max<std::uint64_t>(1, member.chunk_bytes));
      sizes.room = static_cast<std::uint32_t>(std::min<std::uint64_t>(sizes.room, room));
    }
  sizes.usual = schedule::chunk_bytes_for(topology, sizes.coded);
  return sizes;
}

std::uint64_t block_bytes(const compress::Codecs& codecs) {
  constexpr auto kDType = core::DType::kFloat32;
  return codecs.of(/*warming_up=*/false, kDType)->block_elements() * core::size_of(kDType);
}

core::Result<std::shared_ptr<const compress::Codecs>> codecs_of(const bootstrap::Roster& roster) {
  const bootstrap::MemberRecord& first = roster.members.front();
  const auto text = [](const bootstrap::MemberRecord& member) {
    return member.compress.empty() ? std::string("none") : member.compress;
  };
  for (const bootstrap::MemberRecord& member : roster.members)
    if (member.compress != first.compress)
      return core::Status(core::Code::kMismatch, "ranks ask for different compression: " + bootstrap::describe(first) +
                                                     " for '" + text(first) + "', " + bootstrap::describe(member) +
                                                     " for '" + text(member) +
                                                     "'; give all ranks the same HYBRIDPS_COMPRESS, or pg_options");
  core::Result<compress::Spec> spec = compress::parse_spec(first.compress);
  if (!spec.is_ok()) return spec.status();
  std::shared_ptr<const compress::Codecs> codecs;
  if (!spec.value().is_lossy()) return codecs;
  codecs = std::make_shared<compress::Codecs>(spec.value());
  const std::uint64_t room = block_bytes(*codecs);
  for (const bootstrap::MemberRecord& member : roster.members)
    if (member.chunk_bytes < room)
      return core::Status(core::Code::kInvalidArgument,
                          "compression '" + first.compress + "' has blocks of " + std::to_string(room) +
                              " bytes, but HYBRIDPS_LIMITS=chunk_bytes of " + bootstrap::describe(member) + " is " +
                              std::to_string(member.chunk_bytes) + "; raise it");
  return codecs;
}

flow::MayPack packing_of(const bootstrap::Roster& roster) {
  const core::Result<compress::Spec> spec = compress::parse_spec(roster.members.front().compress);
  if (!spec.is_ok() || !spec.value()) return flow::MayPack::kNever;
  return spec.value().is_lossy() || spec.value().decides ? flow::MayPack::kWhereItPays : flow::MayPack::kAlways;
}

}  // namespace hybridps::engine
