#include "hybridps/transport/ucx/rdma.h"

#include <sched.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace hybridps::transport {
namespace {

namespace fs = std::filesystem;

const std::string kNone = "0000:0000:0000:0000:0000:0000:0000:0000";
const std::string kLinkLocal = "fe80:0000:0000:0000:0000:00ff:fe00:0001";
const std::string kIpv4 = "0000:0000:0000:0000:0000:ffff:0a00:0001";  // 10.0.0.1

/// A tree with what the kernel would show in /sys.
class Sysfs {
 public:
  Sysfs() {
    char folder[] = "/tmp/hybridps-rdma-XXXXXX";
    REQUIRE(mkdtemp(folder) != nullptr);
    root_ = folder;
  }
  ~Sysfs() { fs::remove_all(root_); }
  const fs::path& root() const { return root_; }

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
  }
  void port(const std::string& device, const std::string& state, const std::string& layer,
            const std::vector<std::string>& gids, const std::string& node = "-1") const {
    const std::string folder = "class/infiniband/" + device;
    write(folder + "/device/numa_node", node);
    write(folder + "/ports/1/state", state);
    write(folder + "/ports/1/link_layer", layer);
    for (std::size_t i = 0; i < gids.size(); ++i) write(folder + "/ports/1/gids/" + std::to_string(i), gids[i]);
  }

 private:
  fs::path root_;
};

RdmaPort port(const std::string& name, int distance, bool active = true, const std::string& gid = kIpv4) {
  return {name, "Ethernet", gid, active, distance};
}

TEST_CASE("transport/rdma: a machine without the devices has no ports", "[transport][fast]") {
  const Sysfs sysfs;
  CHECK(list_rdma_ports({kIpv4}, sysfs.root()).empty());
  CHECK(nearest_ports({}, 0, 1).empty());
}

TEST_CASE("transport/rdma: a port counts when it is active and has an address of this host", "[transport][fast]") {
  const Sysfs sysfs;
  sysfs.port("mlx5_0", "4: ACTIVE", "Ethernet", {kLinkLocal, kNone, kIpv4});
  sysfs.port("mlx5_1", "1: DOWN", "Ethernet", {kIpv4});
  sysfs.port("mlx5_2", "4: ACTIVE", "InfiniBand", {"fe80:0000:0000:0000:b859:9f03:0009:3ee8"});
  sysfs.port("rxe7", "4: ACTIVE", "Ethernet", {"0000:0000:0000:0000:0000:ffff:0a00:0002"});  // of another namespace
  const auto ports = list_rdma_ports({kLinkLocal, kIpv4}, sysfs.root());
  REQUIRE(ports.size() == 4);
  CHECK(ports[0].name == "mlx5_0:1");
  CHECK(ports[0].usable());
  CHECK(ports[0].gid == kIpv4);
  CHECK(ports[0].describe() == "mlx5_0:1 (Ethernet, GID ::ffff:10.0.0.1)");
  CHECK_FALSE(ports[1].usable());
  CHECK(ports[1].describe().find("not active") != std::string::npos);
  CHECK(ports[2].usable());
  CHECK(ports[2].link_layer == "InfiniBand");
  CHECK_FALSE(ports[3].usable());
  CHECK(ports[3].describe().find("no address of this host") != std::string::npos);
}

TEST_CASE("transport/rdma: distance is the kernel's from this process's CPUs to the card", "[transport][fast]") {
  const Sysfs sysfs;
  const int cpu = sched_getcpu();
  REQUIRE(cpu >= 0);
  sysfs.write("devices/system/node/node0/cpulist", "0-4095");
  sysfs.write("devices/system/node/node0/distance", "10 21");
  sysfs.write("devices/system/node/node1/cpulist", "8192-8195,9000");
  sysfs.write("devices/system/node/node1/distance", "21 10");
  sysfs.port("near", "4: ACTIVE", "InfiniBand", {kLinkLocal}, "0");
  sysfs.port("far", "4: ACTIVE", "InfiniBand", {kLinkLocal}, "1");
  sysfs.port("unknown", "4: ACTIVE", "InfiniBand", {kLinkLocal}, "-1");
  const auto ports = list_rdma_ports({}, sysfs.root());
  REQUIRE(ports.size() == 3);
  CHECK(ports[0].distance == 21);
  CHECK(ports[1].distance == 10);
  CHECK(ports[2].distance == -1);
  CHECK(nearest_ports(ports, 0, 1) == "near:1");
}

TEST_CASE("transport/rdma: a lone process uses all near ports and several take turns", "[transport][fast]") {
  const std::vector<RdmaPort> ports = {port("a:1", 10), port("b:1", 20), port("c:1", 10), port("d:1", 10, false),
                                       port("e:1", 10, true, "")};
  CHECK(nearest_ports(ports, 0, 1) == "a:1,c:1");
  CHECK(nearest_ports(ports, 0, 4) == "a:1");
  CHECK(nearest_ports(ports, 1, 4) == "c:1");
  CHECK(nearest_ports(ports, 2, 4) == "a:1");
  CHECK(nearest_ports({port("x:1", -1), port("y:1", 40)}, 0, 1) == "y:1");
  CHECK(nearest_ports({port("d:1", 10, false)}, 0, 1).empty());
}

TEST_CASE("transport/rdma: verbs are there when the module lies beside the library", "[transport][fast]") {
  const Sysfs tree;
  tree.write("with/libucp.so.0", "");
  tree.write("with/ucx/libuct_ib.so.0", "");
  tree.write("without/libucp.so.0", "");
  tree.write("without/ucx/libuct_cma.so.0", "");
  CHECK(ucx_has_verbs(tree.root() / "with/libucp.so.0"));
  CHECK_FALSE(ucx_has_verbs(tree.root() / "without/libucp.so.0"));
  CHECK_FALSE(ucx_has_verbs(tree.root() / "nowhere/libucp.so.0"));
}

TEST_CASE("transport/rdma: too little locked memory is refused with both sizes", "[transport][fast]") {
  const std::uint64_t needed = locked_memory_needed(std::uint64_t{64} << 20);
  CHECK(needed > std::uint64_t{64} << 20);
  CHECK(check_locked_memory(needed, std::nullopt).is_ok());
  CHECK(check_locked_memory(needed, needed).is_ok());
  const core::Status status = check_locked_memory(std::uint64_t{128} << 20, std::uint64_t{64} << 10);
  CHECK(status.code() == core::Code::kOutOfResources);
  for (const char* part : {"128 MiB", "64 KiB", "ulimit -l", "HYBRIDPS_POOL_BYTES"})
    CHECK(status.message().find(part) != std::string::npos);
}

TEST_CASE("transport/rdma: RDMA ports are told from interfaces by their colon", "[transport][fast]") {
  CHECK(names_rdma("mlx5_0:1"));
  CHECK(names_rdma("eth0,mlx5_0:1"));
  CHECK_FALSE(names_rdma("eth0,lo"));
}

}  // namespace
}  // namespace hybridps::transport
