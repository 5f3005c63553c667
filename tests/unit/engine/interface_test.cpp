#include "hybridps/engine/interface.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "tests/support/catch.h"

TEST_CASE("engine/interface: a link's speed counts where the card is real and the kernel knows", "[engine][fast]") {
  char root[] = "/tmp/hybridps-sysfs-XXXXXX";
  REQUIRE(mkdtemp(root) != nullptr);
  const auto card = [&](const std::string& name, const std::string& speed, bool real) {
    const std::filesystem::path folder = std::filesystem::path(root) / name;
    std::filesystem::create_directories(folder);
    if (real) std::filesystem::create_directory(folder / "device");
    std::ofstream(folder / "speed") << speed << "\n";
  };
  card("eth0", "25000", true);
  card("eth1", "100000", true);
  card("veth", "10000", false);
  card("wifi", "-1", true);
  using hybridps::engine::link_gbps;
  CHECK(link_gbps("eth0", root) == 25.0);
  CHECK(link_gbps("eth0,eth1", root) == 125.0);
  CHECK(link_gbps("veth", root) == 0.0);
  CHECK(link_gbps("eth0,veth", root) == 0.0);
  CHECK(link_gbps("wifi", root) == 0.0);
  CHECK(link_gbps("absent", root) == 0.0);
  std::filesystem::remove_all(root);
}

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
  CHECK(found.value().devices == "mlx5_0:1");
  CHECK(found.value().rdma);
  CHECK(found.value().warning.empty());
  for (const auto& network : {machine(false, true), machine(false, false)}) {
    const auto without = choose_data(network);
    REQUIRE(without.is_ok());
    CHECK(without.value().devices == "eth0");
    CHECK_FALSE(without.value().rdma);
    CHECK(without.value().warning.empty());
  }
}

TEST_CASE("engine/interface: RDMA that UCX cannot use is a warning with package and setting", "[engine][fast]") {
  const auto found = choose_data(machine(true, false));
  REQUIRE(found.is_ok());
  CHECK(found.value().devices == "eth0");
  CHECK_FALSE(found.value().rdma);
  for (const char* part : {"mlx5_0:1", "/somewhere/libucp.so.0", "libucx0", "HYBRIDPS_DATA_TRANSPORT=tcp", "eth0"})
    CHECK(mentions(found.value().warning, part));
}

TEST_CASE("engine/interface: what the user asks for is done or refused", "[engine][fast]") {
  auto network = machine(true, true);
  network.wanted = DataTransport::kTcp;
  CHECK(choose_data(network).value().devices == "eth0");
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
  CHECK(choose_data(network).value().devices == "eth1");
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
