#include "hybridps/bootstrap/node_identity.h"

#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <fstream>

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

/// FNV-1a: to tell apart long texts that begin alike.
std::uint64_t hash(std::string_view text) {
  std::uint64_t value = 0xcbf29ce484222325;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return value;
}

}  // namespace

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "unknown";
  return name.data();
}

std::string node_identity(const core::Config& config, core::EngineId engine) {
  std::string identity = config.node.empty() ? "host:" + boot_id() + "/" + name_space("/proc/self/ns/ipc") + "/" +
                                                   name_space("/proc/self/ns/net")
                                             : "node:" + config.node;
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
