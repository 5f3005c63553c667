#include "hybridps/bootstrap/node_identity.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <sstream>

#include "hybridps/bootstrap/record.h"
#include "hybridps/core/text.h"

namespace hybridps::bootstrap {
namespace {

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string line;
  std::getline(file, line);
  const std::string_view id = core::trim(line);
  return id.empty() ? "unknown-boot@" + host_name() : std::string(id);
}

/// "ipc:[4026531839]", or "?" where the kernel does not tell.
std::string name_space(const char* path) {
  std::array<char, 128> target{};
  const ssize_t length = readlink(path, target.data(), target.size());
  return length <= 0 ? "?" : std::string(target.data(), static_cast<std::size_t>(length));
}

/// FNV-1a, to distinguish long texts that begin alike.
std::uint64_t hash(std::string_view text) {
  std::uint64_t value = 0xcbf29ce484222325;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return value;
}

}  // namespace

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "unknown";
  return core::printable(name.data());
}

std::uint64_t machine_id() { return hash(boot_id() + "/" + name_space("/proc/self/ns/net")); }

std::uint64_t wall_ms() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
}

std::uint64_t process_started_ms() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(')');  // the name may hold any character
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(line.substr(name_end + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  std::uint64_t ticks = 0;  // from boot to the process's start
  timespec since_boot{};
  const long ticks_per_second = sysconf(_SC_CLK_TCK);
  if (!(fields >> ticks) || ticks_per_second <= 0 || clock_gettime(CLOCK_BOOTTIME, &since_boot) != 0) return 0;
  const auto up_ms =
      static_cast<std::uint64_t>(since_boot.tv_sec) * 1000 + static_cast<std::uint64_t>(since_boot.tv_nsec) / 1'000'000;
  const std::uint64_t started_ms = (ticks + 1) * 1000 / static_cast<std::uint64_t>(ticks_per_second);  // round up
  return wall_ms() - (up_ms > started_ms ? up_ms - started_ms : 0);
}

std::string node_identity(const core::Config& config, core::EngineId engine) {
  std::string identity = config.node.empty() ? "host:" + boot_id() + "/" + name_space("/proc/self/ns/ipc") + "/" +
                                                   name_space("/proc/self/ns/net")
                                             : "node:" + core::printable(config.node);
  if (!config.shm) identity += "/engine:" + core::to_string(engine);
  if (identity.size() > kIdentityBytesMax) {
    char digits[18];
    std::snprintf(digits, sizeof digits, "#%016llx", static_cast<unsigned long long>(hash(identity)));
    identity.resize(kIdentityBytesMax - 17);
    identity += digits;
  }
  return identity;
}

}  // namespace hybridps::bootstrap
