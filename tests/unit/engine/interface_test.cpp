#include "hybridps/engine/interface.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/engine/records.h"
#include "tests/support/catch.h"

namespace {

using hybridps::core::DataTransport;
using hybridps::engine::choose_data;

hybridps::engine::DataNetwork machine(bool ports, bool verbs) {
  hybridps::engine::DataNetwork network;
  network.control = "eth0";
  if (ports) network.ports = {{"mlx5_0:1", "InfiniBand", "fe80::1", true, 10}};
  network.ucx_has_verbs = verbs;
  network.ucx = "UCX 1.22.0 (/somewhere/libucp.so.0)";
  return network;
}

bool mentions(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

}  // namespace

TEST_CASE("engine/interface: data uses RDMA where the machine and UCX have it", "[engine][fast]") {
  const auto found = choose_data(machine(true, true));
  REQUIRE(found.is_ok());
  CHECK(found.value().devices() == "mlx5_0:1");
  CHECK(found.value().rdma);
  CHECK(found.value().warning.empty());
  for (const auto& network : {machine(false, true), machine(false, false)}) {
    const auto without = choose_data(network);
    REQUIRE(without.is_ok());
    CHECK(without.value().devices() == "eth0");
    CHECK_FALSE(without.value().rdma);
    CHECK(without.value().warning.empty());
  }
}

TEST_CASE("engine/interface: RDMA that UCX cannot use is a warning with package and setting", "[engine][fast]") {
  const auto found = choose_data(machine(true, false));
  REQUIRE(found.is_ok());
  CHECK(found.value().devices() == "eth0");
  CHECK_FALSE(found.value().rdma);
  for (const char* part : {"mlx5_0:1", "/somewhere/libucp.so.0", "libucx0", "HYBRIDPS_DATA_TRANSPORT=tcp", "eth0"})
    CHECK(mentions(found.value().warning, part));
}

TEST_CASE("engine/interface: what the user asks for is done or refused", "[engine][fast]") {
  auto network = machine(true, true);
  network.wanted = DataTransport::kTcp;
  CHECK(choose_data(network).value().devices() == "eth0");
  network.wanted = DataTransport::kRdma;
  CHECK(choose_data(network).value().rdma);
  network = machine(true, false);
  network.wanted = DataTransport::kRdma;
  CHECK(mentions(choose_data(network).status().message(), "has no verbs"));
  network = machine(false, true);
  network.wanted = DataTransport::kRdma;
  CHECK(mentions(choose_data(network).status().message(), "here are: none"));

  network = machine(true, true);
  network.named = "eth1";
  CHECK(choose_data(network).value().devices() == "eth1");
  CHECK_FALSE(choose_data(network).value().rdma);
  network.wanted = DataTransport::kRdma;
  CHECK(mentions(choose_data(network).status().message(), "mlx5_0:1"));
  network.named = "mlx5_0";
  CHECK(choose_data(network).value().rdma);
  network.wanted = DataTransport::kTcp;
  CHECK_FALSE(choose_data(network).is_ok());
  network = machine(true, false);
  network.named = "mlx5_0:1";
  CHECK(choose_data(network).status().code() == hybridps::core::Code::kUnsupported);

  network = machine(true, true);
  network.ucx_tls = "tcp,self";
  CHECK_FALSE(choose_data(network).value().rdma);
  for (const char* tls : {"rc,ud", "^shm", "all", "rc_verbs,ud_verbs"}) {
    network.ucx_tls = tls;
    CHECK(choose_data(network).value().rdma);
  }
}

namespace {

hybridps::engine::DataNetwork with_nics(const std::vector<std::pair<std::string, int>>& distances, int rank, int size) {
  auto network = machine(false, false);
  for (const auto& [name, distance] : distances) {
    hybridps::transport::LocalNic nic;
    nic.name = name;
    nic.distance = distance;
    nic.address = "10.0.0.1";
    network.nics.push_back(nic);
    network.named += (network.named.empty() ? "" : ", ") + name;
  }
  network.place = {rank, size};
  network.nearest_to = "GPU 0000:3b:00.0";
  return network;
}

}  // namespace

TEST_CASE("engine/interface: of several named interfaces a rank takes the nearest", "[engine][fast]") {
  const auto two = choose_data(with_nics({{"eth0", 20}, {"eth1", 10}}, 0, 2)).value();
  CHECK(two.devices() == "eth1");
  CHECK(two.nics[0].address == "10.0.0.1");
  CHECK(two.why == "nearest to GPU 0000:3b:00.0 (distances: eth0 20, eth1 10)");
  const auto alike = choose_data(with_nics({{"eth0", -1}, {"eth1", -1}}, 3, 4)).value();
  CHECK(alike.devices() == "eth1");
  CHECK(alike.why == "local rank 3's of eth0, eth1, all as near");
  // Alone on the machine: what is named is used.
  CHECK(choose_data(with_nics({{"eth0", 20}, {"eth1", 10}}, 0, 1)).value().devices() == "eth0,eth1");
  CHECK(choose_data(with_nics({{"e0", -1}, {"e1", -1}, {"e2", -1}, {"e3", -1}}, 1, 2)).value().devices() == "e2,e3");
  // What the user tells UCX is not ours to divide.
  auto users = with_nics({{"eth0", 20}, {"eth1", 10}}, 0, 2);
  users.users = true;
  CHECK(choose_data(users).value().devices() == "eth0,eth1");
  CHECK(choose_data(users).value().why == "UCX_NET_DEVICES");
}

namespace {

using hybridps::engine::choose_interfaces;
using hybridps::engine::interface_to;

/// What decides about interfaces is as these say, and unset where they say nothing; then as it was.
class Environment {
 public:
  using Values = std::map<std::string, std::string>;
  explicit Environment(const Values& values) {
    std::vector<std::string> names = {"MASTER_ADDR",      "UCX_NET_DEVICES", "HYBRIDPS_UCX_NET_DEVICES", "UCX_TLS",
                                      "HYBRIDPS_UCX_TLS", "LOCAL_RANK",      "LOCAL_WORLD_SIZE"};
    for (const auto& [name, value] : values) names.push_back(name);
    for (const std::string& name : names) {
      const char* value = std::getenv(name.c_str());
      before_.emplace(name, value != nullptr ? std::optional<std::string>(value) : std::nullopt);
      unsetenv(name.c_str());
    }
    for (const auto& [name, value] : values) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() {
    for (const auto& [name, value] : before_) {
      if (value)
        setenv(name.c_str(), value->c_str(), 1);
      else
        unsetenv(name.c_str());
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::map<std::string, std::optional<std::string>> before_;
};

/// Without RDMA, whether this machine has some or not.
hybridps::core::Config config_of(const std::string& interface, const std::string& data = {}) {
  hybridps::core::Config config;
  config.data_transport = DataTransport::kTcp;
  config.interface = interface;
  config.data_interfaces = data;
  return config;
}

}  // namespace

TEST_CASE("engine/interface: TCP goes through UCX where that is asked for, or its settings are the user's",
          "[engine][fast]") {
  const auto through_ucx = [](DataTransport wanted) {
    hybridps::core::Config config = config_of("lo");
    config.data_transport = wanted;
    const auto chosen = choose_interfaces(config, {}, {});
    REQUIRE(chosen.is_ok());
    return chosen.value().rdma || chosen.value().ucx;
  };
  const Environment nothing(Environment::Values{});
  CHECK_FALSE(through_ucx(DataTransport::kTcp));
  CHECK(through_ucx(DataTransport::kUcx));
  for (const char* name : {"UCX_TCP_PORT_RANGE", "HYBRIDPS_UCX_TCP_TX_SEG_SIZE", "UCX_TLS"}) {
    const Environment users(Environment::Values{{name, "tcp"}});
    CHECK(through_ucx(DataTransport::kAuto));
    CHECK_FALSE(through_ucx(DataTransport::kTcp));
  }
}

TEST_CASE("engine/interface: the interface to an address of this machine is the one that has it", "[engine][fast]") {
  CHECK(interface_to("127.0.0.1") == "lo");
  CHECK(interface_to("").empty());
  CHECK(interface_to(std::string(300, 'x')).empty());
  ifaddrs* list = nullptr;
  REQUIRE(getifaddrs(&list) == 0);
  std::map<std::string, std::string> first_with;  // address -> interface
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || (at->ifa_flags & IFF_UP) == 0) continue;
    const int family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char text[NI_MAXHOST];
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(at->ifa_addr, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) continue;
    first_with.emplace(text, at->ifa_name);
  }
  freeifaddrs(list);
  for (const auto& [address, name] : first_with) {
    INFO(address);
    CHECK(interface_to(address) == name);
  }
}

TEST_CASE("engine/interface: control is what is set, else the hint, else what leads to the master", "[engine][fast]") {
  const auto control = [](const std::string& set, const std::string& hint) {
    return choose_interfaces(config_of(set), hint, {0, 1}).value().control;
  };
  const Environment environment(Environment::Values{{"MASTER_ADDR", "127.0.0.1"}});
  CHECK(control("set0", "hint0") == "set0");
  CHECK(control("", "hint0") == "hint0");
  CHECK(control("", "") == "lo");
  const Environment without(Environment::Values{{"MASTER_ADDR", ""}});
  const std::string away = interface_to("192.0.2.1");
  if (!away.empty()) CHECK(control("", "") == away);
}

namespace {

hybridps::engine::ControlNetwork towards(const std::string& master, const std::string& interface,
                                         const std::string& address) {
  hybridps::engine::ControlNetwork network;
  network.master = master;
  network.to_master = interface;
  network.master_address = address;
  return network;
}

}  // namespace

TEST_CASE("engine/interface: control follows MASTER_ADDR where it is of use to others", "[engine][fast]") {
  using hybridps::engine::choose_control;
  auto network = towards("boxa", "eth1", "10.0.0.1");
  network.to_default = "eth0";
  network.others = {"eth0", "eth1"};
  CHECK(choose_control(network).name == "eth1");
  network.named = "eth7";
  CHECK(choose_control(network).name == "eth7");
  for (const char* here : {"localhost", "127.0.0.1", "::1"}) {
    network = towards(here, "lo", here);
    network.to_default = "eth0";
    CHECK(choose_control(network).name == "lo");
  }
}

TEST_CASE("engine/interface: where the master's name is this machine itself control takes what leads away",
          "[engine][fast]") {
  using hybridps::engine::choose_control;
  auto network = towards("boxa", "lo", "127.0.1.1");  // as Debian writes /etc/hosts
  network.to_default = "eth0";
  network.others = {"eth0", "eth1"};
  CHECK(choose_control(network).name == "eth0");
  CHECK(mentions(choose_control(network).why, "MASTER_ADDR=boxa resolves to 127.0.1.1"));
  network.to_default.clear();
  network.others = {"eth1"};
  CHECK(choose_control(network).name == "eth1");
  network.others = {"eth0", "eth1"};
  CHECK(choose_control(network).name == "lo");
  CHECK(mentions(choose_control(network).why, "cannot be told (eth0, eth1)"));
  network.others.clear();
  CHECK(choose_control(network).name == "lo");
  CHECK(mentions(choose_control(network).why, "there is no other interface"));
  network.to_default = "eth0";
  network.one_machine = true;  // what may go away while the job runs is not needed
  CHECK(choose_control(network).name == "lo");
}

TEST_CASE("engine/interface: without a master control takes what leads away", "[engine][fast]") {
  using hybridps::engine::choose_control;
  auto network = towards("", "", "");
  network.others = {"eth1"};
  CHECK(choose_control(network).name == "eth1");
  network.to_default = "eth0";
  CHECK(choose_control(network).name == "eth0");
  network = towards("boxb", "", "");
  CHECK(choose_control(network).name == "lo");
  CHECK(mentions(choose_control(network).why, "MASTER_ADDR=boxb has no address, or no route to it"));
}

TEST_CASE("engine/interface: loopback is told with its reason", "[engine][fast]") {
  const Environment environment(Environment::Values{{"MASTER_ADDR", "127.0.0.1"}});
  CHECK(choose_interfaces(config_of("lo"), "", {0, 1}).value().loopback == "its control uses lo: HYBRIDPS_INTERFACE");
  CHECK(choose_interfaces(config_of(""), "", {0, 1}).value().loopback == "its control uses lo: MASTER_ADDR=127.0.0.1");
  CHECK(choose_interfaces(config_of("eth7", "lo"), "", {0, 1}).value().loopback ==
        "its data uses lo: HYBRIDPS_DATA_INTERFACES");
}

TEST_CASE("engine/interface: data goes through the control interface if nothing else is named", "[engine][fast]") {
  const Environment environment(Environment::Values{});
  auto config = config_of("lo");
  config.nic_gbps = {10};
  const auto chosen = choose_interfaces(config, "hint0", {0, 1}).value();
  CHECK(chosen.data() == "lo");
  CHECK(chosen.nics[0].address == "127.0.0.1");
  CHECK(chosen.with_control);
  CHECK(chosen.node_gbps == 10);
  CHECK_FALSE(chosen.rdma);
  CHECK_FALSE(chosen.users);
}

TEST_CASE("engine/interface: named data interfaces are checked and have a rate each", "[engine][fast]") {
  const Environment environment(Environment::Values{});
  const auto named = choose_interfaces(config_of("eth7", "lo"), "", {0, 1}).value();
  CHECK(named.data() == "lo");
  CHECK(named.why == "HYBRIDPS_DATA_INTERFACES");
  CHECK_FALSE(named.with_control);
  CHECK(choose_interfaces(config_of("lo", "lo"), "", {0, 1}).value().with_control);
  for (const char* bad : {"typo0", "lo,lo"}) {
    const auto refused = choose_interfaces(config_of("lo", bad), "", {0, 1});
    REQUIRE_FALSE(refused.is_ok());
    CHECK(refused.status().code() == hybridps::core::Code::kInvalidArgument);
    CHECK(mentions(refused.status().message(), "HYBRIDPS_DATA_INTERFACES: "));
  }

  auto config = config_of("lo", "lo");
  config.nic_gbps = {10, 20};
  const auto refused = choose_interfaces(config, "", {0, 1});
  REQUIRE_FALSE(refused.is_ok());
  CHECK(mentions(refused.status().message(), "2 rates for 1 data interfaces"));
  config.nic_gbps = {10};
  CHECK(choose_interfaces(config, "", {0, 1}).value().node_gbps == 10);
}

TEST_CASE("engine/interface: the user's own UCX_NET_DEVICES wins and is not checked", "[engine][fast]") {
  {
    const Environment environment(Environment::Values{{"UCX_NET_DEVICES", "eth8,eth9"}});
    auto config = config_of("eth9", "lo,lo");
    config.nic_gbps = {10, 20};
    const auto chosen = choose_interfaces(config, "", {0, 4}).value();
    CHECK(chosen.data() == "eth8,eth9");
    CHECK(chosen.users);
    CHECK(chosen.with_control);
    CHECK(chosen.why == "UCX_NET_DEVICES");
    CHECK(chosen.nics[0].gbps == 10);
    CHECK(chosen.nics[1].gbps == 20);
    CHECK(chosen.node_gbps == 0);
  }
  {
    const Environment environment(
        Environment::Values{{"UCX_NET_DEVICES", "eth8"}, {"HYBRIDPS_UCX_NET_DEVICES", "eth9"}});
    CHECK(choose_interfaces(config_of("lo"), "", {0, 1}).value().data() == "eth9");
  }
  {
    const Environment environment(Environment::Values{{"UCX_NET_DEVICES", "all"}});
    const auto chosen = choose_interfaces(config_of("lo"), "", {0, 1}).value();
    CHECK(chosen.data() == "lo");
    CHECK(chosen.users);
  }
}

TEST_CASE("engine/interface: the place on the machine is what the launcher says", "[engine][fast]") {
  const Environment environment(Environment::Values{{"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "8"}});
  CHECK(hybridps::engine::local_rank().rank == 3);
  CHECK(hybridps::engine::local_rank().size == 8);
  const Environment without(Environment::Values{{"LOCAL_RANK", ""}});
  CHECK(hybridps::engine::local_rank().rank == 0);
  CHECK(hybridps::engine::local_rank().size == 1);
}

namespace {

using hybridps::bootstrap::Nic;

/// ranks[node][local rank]: their cards.
hybridps::bootstrap::Roster roster_of(const std::vector<std::vector<std::vector<Nic>>>& ranks,
                                      const std::vector<double>& node_gbps = {}) {
  hybridps::bootstrap::Roster roster;
  for (std::size_t node = 0; node < ranks.size(); ++node) {
    for (const auto& nics : ranks[node]) {
      hybridps::bootstrap::MemberRecord member;
      member.nics = nics;
      member.host_name = "host" + std::to_string(node);
      if (!node_gbps.empty()) member.node_gbps = node_gbps[node];
      roster.members.push_back(member);
      roster.node_of.push_back(static_cast<int>(node));
    }
  }
  return roster;
}

const Nic kA{"eth0", "10.0.0.0/24", 0};
const Nic kB{"eth1", "10.0.1.0/24", 0};

Nic at(Nic nic, double gbps) {
  nic.gbps = gbps;
  return nic;
}

}  // namespace

TEST_CASE("engine/records: shares belong to cards", "[engine][fast]") {
  using hybridps::engine::nic_layout;
  using hybridps::engine::topology_of;
  // Nothing known: cards are alike, and a node with two has twice the weight in the floor's distribution.
  const auto uneven = roster_of({{{kA}, {kB}}, {{kA}, {kA}}, {{kB}, {kB}}});
  CHECK(nic_layout(uneven).rates == std::vector<double>(4, 1.0));
  CHECK(topology_of(uneven, 0).weight(0) > 0.98);
  CHECK(topology_of(uneven, 0).ranks_per_card() == 2.0);

  // Rails of 25 and 10: the part of each rank follows its card, on every node.
  const std::vector<std::vector<Nic>> node = {{at(kA, 25)}, {at(kB, 10)}};
  const auto rails = topology_of(roster_of({node, node, node}), 1);
  for (int rank = 0; rank < 6; ++rank)
    CHECK(std::abs(rails.owner_weight(rank) - (rank % 2 == 0 ? 25.0 : 10.0) / 35 / 3) < 1e-9);
  CHECK(rails.with_weights({1, 1, 2}).owner_weight(4) == 2.0 * rails.with_weights({1, 1, 1}).owner_weight(4));

  // One card's rate is not known: none counts. The machine's rate is divided among its cards.
  CHECK(nic_layout(roster_of({node, {{kA}, {at(kB, 10)}}})).rates == std::vector<double>(4, 1.0));
  CHECK(nic_layout(roster_of({node, {{kA}, {kB}}}, {0, 50})).rates == std::vector<double>{25, 10, 25, 25});
  CHECK(nic_layout(roster_of({node}, {70})).rates == std::vector<double>{50, 20});

  // A card that leads to no other node is not used where there is one that does.
  const auto idle = nic_layout(roster_of({{{kA, kB}}, {{kA}}}));
  CHECK(idle.cards_of == std::vector<std::vector<int>>{{0}, {1}});
  const auto routed = nic_layout(roster_of({{{Nic{"e", "10.1.0.0/31", 0}, Nic{"f", "10.2.0.0/31", 0}}}, {{kA}}}));
  CHECK(routed.cards_of[0].size() == 2);
}

TEST_CASE("engine/records: shards of a dedicated server share its cards", "[engine][fast]") {
  auto roster = roster_of({{{at(kA, 10)}}, {{at(kA, 10)}}, {{at(kA, 10)}}});
  hybridps::bootstrap::MemberRecord shard;
  shard.host_name = "server";
  shard.nics = {at(kA, 40)};
  roster.servers = {shard, shard};
  CHECK(hybridps::engine::nic_layout(roster).dedicated == std::vector<double>{20, 20});
  roster.servers[1].nics = {at(kB, 10)};
  CHECK(hybridps::engine::nic_layout(roster).dedicated == std::vector<double>{40, 10});
  roster.servers[0].nics = {kA};
  roster.servers[1].nics = {kA};
  CHECK(hybridps::engine::nic_layout(roster).dedicated == std::vector<double>{5, 5});
  roster.servers[0].node_gbps = 30;
  CHECK(hybridps::engine::nic_layout(roster).dedicated == std::vector<double>{30, 5});
}
