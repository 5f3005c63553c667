#include "hybridps/transport/ucx/ucx_config.h"

#include <net/if.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "hybridps/core/files.h"
#include "hybridps/transport/interfaces.h"
#include "hybridps/transport/ucx/rdma.h"

namespace hybridps::transport {
namespace {

/// UCX's name for posix, sysv, xpmem, cma and knem. Naming them one by one would warn about the missing ones.
constexpr std::string_view kAllButSharedMemory = "^shm";
/// Also without GPU transports: "cuda" is UCX's name for cuda_copy, cuda_ipc and gdr_copy. With any of them UCX asks
/// CUDA's driver about memory in progress calls. The driver may wait for the device, and the device for what progress
/// brings.
constexpr std::string_view kNeitherSharedMemoryNorCuda = "^shm,cuda";
/// From this version on, ucp_config_modify() takes the settings of transports.
constexpr std::pair<unsigned, unsigned> kTransportSettingsSince = {1, 17};

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    std::string_view part = text.substr(0, comma);
    while (!part.empty() && part.front() == ' ') part.remove_prefix(1);
    while (!part.empty() && part.back() == ' ') part.remove_suffix(1);
    if (!part.empty()) parts.emplace_back(part);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
  }
  return parts;
}

std::optional<std::string> users(const Environment& environment, const std::string& name) {
  if (auto value = environment("HYBRIDPS_UCX_" + name)) return value;
  return environment("UCX_" + name);
}

/// Whether some entry may be an IP interface: any name except that of an RDMA port ("mlx5_0:1").
bool may_name_interfaces(const std::string& devices) {
  for (const std::string& name : split(devices))
    if (name.find(':') == std::string::npos) return true;
  return false;
}

}  // namespace

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
}

bool tcp_is_tuned_by_user() {
  for (char** at = environ; at != nullptr && *at != nullptr; ++at) {
    std::string_view name(*at);
    name = name.substr(0, name.find('='));
    if (name.starts_with("HYBRIDPS_")) name.remove_prefix(std::string_view("HYBRIDPS_").size());
    if (name == "UCX_TLS" || name.starts_with("UCX_TCP_")) return true;
  }
  return false;
}

std::vector<UcxSetting> ucx_settings(const UcxOptions& options, std::pair<unsigned, unsigned> version,
                                     const Environment& environment) {
  std::vector<UcxSetting> settings;
  const auto set_unless_given = [&](const char* name, std::string value, bool required = true) {
    if (!users(environment, name)) settings.push_back({name, std::move(value), required});
  };
  if (options.tcp_only) {
    settings.push_back({"TLS", "tcp", true});
    const auto given = users(environment, "NET_DEVICES");
    if (given && !may_name_interfaces(*given))
      settings.push_back({"NET_DEVICES", options.net_device.empty() ? "all" : options.net_device, true});
    else if (!given && !options.net_device.empty())
      settings.push_back({"NET_DEVICES", options.net_device, true});
  } else {
    set_unless_given("TLS", std::string(options.device_memory ? kAllButSharedMemory : kNeitherSharedMemoryNorCuda));
    if (!options.net_device.empty()) set_unless_given("NET_DEVICES", options.net_device);
    if (version >= kTransportSettingsSince) {
      // UCX's default of 8 KiB costs 1.7 times the CPU per byte.
      set_unless_given("TCP_TX_SEG_SIZE", "256k", false);
      set_unless_given("TCP_RX_SEG_SIZE", "256k", false);
      // UCX 1.22 frees the state of a closed connection at the event "last work request reached". UCX crashes if a
      // device raises the event twice, as Soft-RoCE does. Without events the state is freed with the worker.
      if (names_rdma(options.net_device)) set_unless_given("IB_ASYNC_EVENTS", "n", false);
    }
  }
  // A blocking connect() to a silent host would stop the engine for as long as the kernel tries. Heartbeats would stop,
  // and others would take this process for dead.
  set_unless_given("TCP_CONN_NB", "y", false);
  const double user_timeout_s = core::to_seconds(options.tcp_user_timeout);
  if (user_timeout_s > 0 && version >= std::pair<unsigned, unsigned>{1, 22})
    set_unless_given("TCP_USER_TIMEOUT", std::to_string(static_cast<long>(std::ceil(user_timeout_s * 1000))) + "ms",
                     false);
  return settings;
}

std::vector<NetDevice> list_net_devices() {
  std::vector<NetDevice> devices;
  for (const InterfaceAddress& entry : interface_addresses()) {
    auto found = std::find_if(devices.begin(), devices.end(),
                              [&](const NetDevice& device) { return device.name == entry.interface; });
    if (found == devices.end()) {
      const bool up = (entry.flags & IFF_UP) != 0 && (entry.flags & IFF_RUNNING) != 0;
      found = devices.insert(devices.end(), {entry.interface, false, up, false});
    }
    found->address = found->address || !entry.address.empty();
  }
  for (const auto& device : core::entries_of("/sys/class/infiniband"))
    for (const auto& port : core::entries_of(device / "ports")) {
      const bool active = core::first_line_of(port / "state").find("ACTIVE") != std::string::npos;
      devices.push_back({device.filename().string() + ":" + port.filename().string(), true, active, true});
    }
  return devices;
}

core::Status validate_device(std::string_view names) { return validate_device(names, list_net_devices()); }

core::Status validate_device(std::string_view names, const std::vector<NetDevice>& devices) {
  const std::vector<std::string> wanted = split(names);
  std::string there;
  for (const NetDevice& device : devices) {
    if (!there.empty()) there += ", ";
    there += device.name;
    if (!device.up)
      there += device.rdma ? " (port not active)" : " (down or without carrier)";
    else if (!device.address)
      there += " (without address)";
  }
  const auto bad = [&](const std::string& what) {
    return core::Status(core::Code::kInvalidArgument,
                        what + "; this machine has: " + (there.empty() ? std::string("none") : there));
  };
  if (wanted.empty()) return bad("no network device named");
  for (const std::string& name : wanted) {
    const auto found = std::find_if(devices.begin(), devices.end(), [&](const NetDevice& device) {
      return device.name == name || (device.rdma && device.name.substr(0, device.name.rfind(':')) == name);
    });
    if (found == devices.end()) return bad("there is no network device '" + name + "'");
    if (!found->up)
      return bad("network device '" + name + (found->rdma ? "' has no active port" : "' is down or has no carrier"));
    if (!found->address) return bad("network device '" + name + "' has no IP address");
  }
  return core::Status::ok();
}

}  // namespace hybridps::transport
