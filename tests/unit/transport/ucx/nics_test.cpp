#include "hybridps/transport/ucx/nics.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/catch.h"

namespace hybridps::transport {
namespace {

namespace fs = std::filesystem;

/// A sysfs of a machine with two sockets, whose only CPU of ours, whichever it is, is on node 0.
class FakeSysfs {
 public:
  FakeSysfs() {
    char name[] = "/tmp/hybridps-nics-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    root_ = name;
    write("devices/system/node/node0/cpulist", "0-1023");
    write("devices/system/node/node1/cpulist", "1024-2047");
    write("devices/system/node/node0/distance", "10 21");
    write("devices/system/node/node1/distance", "21 10");
    fs::create_directories(root_ / "class/net");
    fs::create_directories(root_ / "bus/pci/devices");
  }
  ~FakeSysfs() {
    std::error_code error;
    fs::remove_all(root_, error);
    unsetenv("CUDA_VISIBLE_DEVICES");
  }
  void write(const fs::path& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
  }
  void device(const std::string& root, const std::string& address, int node) {
    write("devices/" + root + "/" + address + "/numa_node", std::to_string(node));
  }
  void card(const std::string& name, const std::string& root, const std::string& address, int node,
            const std::string& speed) {
    device(root, address, node);
    write("class/net/" + name + "/speed", speed);
    fs::create_directory_symlink(root_ / "devices" / root / address, root_ / "class/net" / name / "device");
  }
  void gpu(const std::string& root, const std::string& address, int node) {
    device(root, address, node);
    write("devices/" + root + "/" + address + "/vendor", "0x10de");
    write("devices/" + root + "/" + address + "/class", "0x030200");
    fs::create_directory_symlink(root_ / "devices" / root / address, root_ / "bus/pci/devices" / address);
  }
  const fs::path& root() const { return root_; }

 private:
  fs::path root_;
};

std::vector<int> distances(const FakeSysfs& sysfs, int rank, int size) {
  std::vector<int> found;
  for (const LocalNic& nic :
       describe_nics({"eth0", "eth1", "veth"}, own_locality(rank, size, sysfs.root()), sysfs.root()))
    found.push_back(nic.distance);
  return found;
}

using Chosen = std::vector<std::size_t>;

}  // namespace

TEST_CASE("transport/locality: CPUs near a card are those of its NUMA node, where there are several",
          "[transport][fast]") {
  FakeSysfs sysfs;
  sysfs.card("eth0", "pci0000:00", "0000:01:00.0", 0, "25000");
  sysfs.card("eth1", "pci0000:80", "0000:81:00.0", 1, "25000");
  sysfs.write("devices/system/node/node1/cpulist", "4-6,12");
  const auto near = [&](const std::string& card) {
    return cpus_near(sysfs.root() / "class/net" / card / "device", sysfs.root());
  };
  CHECK(near("eth1").empty());  // it does not say which nodes there are
  sysfs.write("devices/system/node/online", "0");
  CHECK(near("eth1").empty());
  sysfs.write("devices/system/node/online", "0-1");
  CHECK(near("eth1") == std::vector<int>{4, 5, 6, 12});
  CHECK_FALSE(near("eth0").empty());
  CHECK(near("veth").empty());
}

TEST_CASE("transport/nics: distance is from the CPUs of a process without GPU", "[transport][fast]") {
  FakeSysfs sysfs;
  sysfs.card("eth0", "pci0000:00", "0000:01:00.0", 0, "25000");
  sysfs.card("eth1", "pci0000:80", "0000:81:00.0", 1, "25000");
  sysfs.write("class/net/veth/speed", "10000");
  CHECK(distances(sysfs, 1, 2) == std::vector<int>{10, 21, -1});
  CHECK(own_locality(1, 2, sysfs.root()).text == "CPUs of NUMA node 0");
}

TEST_CASE("transport/nics: distance is from a rank's GPU where each rank has one", "[transport][fast]") {
  FakeSysfs sysfs;
  sysfs.card("eth0", "pci0000:00", "0000:01:00.0", 0, "25000");
  sysfs.card("eth1", "pci0000:80", "0000:81:00.0", 1, "25000");
  sysfs.gpu("pci0000:20", "0000:21:00.0", 0);
  sysfs.gpu("pci0000:80", "0000:82:00.0", 1);
  CHECK(distances(sysfs, 0, 2) == std::vector<int>{10, 21, -1});
  CHECK(distances(sysfs, 1, 2) == std::vector<int>{21, 0, -1});  // under one root
  CHECK(own_locality(1, 2, sysfs.root()).text == "GPU 0000:82:00.0");
  CHECK(distances(sysfs, 1, 4) == std::vector<int>{10, 21, -1});  // not a GPU each: it is the CPUs that work
  setenv("CUDA_VISIBLE_DEVICES", "1,0", 1);
  CHECK(distances(sysfs, 0, 2) == std::vector<int>{21, 0, -1});
  setenv("CUDA_VISIBLE_DEVICES", "1", 1);  // as some launchers set it, for each rank
  CHECK(distances(sysfs, 0, 2) == std::vector<int>{21, 0, -1});
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  CHECK(distances(sysfs, 1, 2) == std::vector<int>{10, 21, -1});
}

TEST_CASE("transport/nics: a machine that tells nothing", "[transport][fast]") {
  FakeSysfs sysfs;
  CHECK(distances(sysfs, 0, 2) == std::vector<int>{-1, -1, -1});
  const Locality nowhere = own_locality(0, 1, sysfs.root() / "absent");
  CHECK(nowhere.nodes.empty());
  CHECK(distance_to(nowhere, sysfs.root() / "absent/device", sysfs.root() / "absent") == -1);
}

TEST_CASE("transport/nics: each rank takes of the nearest cards in turn or its part", "[transport][fast]") {
  CHECK(nearest_of({}, 0, 4).empty());
  for (int rank = 0; rank < 4; ++rank) {
    CHECK(nearest_of({-1, -1}, rank, 4) == Chosen{static_cast<std::size_t>(rank % 2)});
    CHECK(nearest_of({10, 21}, rank, 4) == Chosen{0});
    CHECK(nearest_of({10, 10, 21, 21}, rank, 8) == Chosen{static_cast<std::size_t>(rank % 2)});
  }
  CHECK(nearest_of({10, 10, 10, 10}, 0, 2) == Chosen{0, 1});
  CHECK(nearest_of({10, 10, 10, 10}, 1, 2) == Chosen{2, 3});
  CHECK(nearest_of({-1, -1, -1}, 0, 2) == Chosen{0, 1});
  CHECK(nearest_of({-1, -1, -1}, 1, 2) == Chosen{2});
  // Two sockets, two ranks, four cards: each takes both of its socket.
  CHECK(nearest_of({10, 10, 21, 21}, 0, 2) == Chosen{0, 1});
  CHECK(nearest_of({21, 21, 10, 10}, 1, 2) == Chosen{2, 3});
  CHECK(nearest_of({10, 21, -1}, 0, 1) == Chosen{0});
  CHECK(nearest_of({10, 21, -1}, 0, 1, /*all_for_one=*/true) == Chosen{0, 1, 2});
}

TEST_CASE("transport/nics: a link's speed counts where the card is real and the kernel knows", "[transport][fast]") {
  FakeSysfs sysfs;
  sysfs.card("eth0", "pci0000:00", "0000:01:00.0", 0, "25000");
  sysfs.card("wifi", "pci0000:00", "0000:02:00.0", 0, "-1");
  sysfs.write("class/net/veth/speed", "10000");
  CHECK(link_gbps("eth0", sysfs.root()) == 25.0);
  CHECK(link_gbps("wifi", sysfs.root()) == 0.0);
  CHECK(link_gbps("veth", sysfs.root()) == 0.0);
  CHECK(link_gbps("absent", sysfs.root()) == 0.0);
}

TEST_CASE("transport/nics: an interface has its address and network", "[transport][fast]") {
  CHECK(device_names(" eth0 ,, eth1") == std::vector<std::string>{"eth0", "eth1"});
  const auto nics = describe_nics({"lo", "mlx5_0:1"}, {});
  REQUIRE(nics.size() == 2);
  CHECK(nics[0].address == "127.0.0.1");
  CHECK(nics[0].network == "127.0.0.0/8");
  CHECK(nics[0].loopback);
  CHECK(nics[1].address.empty());
}

TEST_CASE("transport/nics: cards that do not go together are refused", "[transport][fast]") {
  LocalNic lo{"lo", "127.0.0.1", "127.0.0.0/8", 0, -1, true};
  LocalNic eth0{"eth0", "10.0.0.1", "10.0.0.0/24", 0, -1, false};
  LocalNic ib{"mlx5_0:1", "", "", 0, -1, false};
  CHECK(check_together({lo}).is_ok());
  CHECK(check_together({eth0}).is_ok());
  CHECK_FALSE(check_together({eth0, lo}).is_ok());
  CHECK_FALSE(check_together({eth0, eth0}).is_ok());
  CHECK_FALSE(check_together({eth0, ib}).is_ok());
}

}  // namespace hybridps::transport
