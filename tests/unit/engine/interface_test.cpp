#include "hybridps/engine/interface.h"

#include <filesystem>
#include <fstream>
#include <string>

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
