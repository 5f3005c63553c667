// hybridps/transport/ucx/ucx_config.h: what we ask of UCX, and what this machine and this library offer.
//
// Policy   a user's UCX_X or HYBRIDPS_UCX_X wins over our choice of X. One exception: the control worker (tcp_only)
//          speaks TCP whatever UCX_TLS says, and ignores a UCX_NET_DEVICES that names no IP interface.
// Threads  any. The functions read the environment, so no other thread may change it at the same time.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/status.h"

namespace hybridps::transport {

struct UcxOptions {
  /// "eth0", "mlx5_0:1", or several with commas. Empty: UCX's default, all of them.
  std::string net_device;
  /// The control worker: TCP and nothing else.
  bool tcp_only = false;
  /// Sends GPU memory too (HYBRIDPS_GPUDIRECT). If false, UCX makes no call to CUDA once it has started.
  bool device_memory = false;
  /// Used in names, logs and errors: "data", "control".
  std::string label = "data";
  /// A friendly close and the destructor wait this long for data in flight.
  core::Duration close_timeout = core::from_seconds(1);
  /// The kernel gives up on unacknowledged TCP data after this time (UCX 1.22 and later); 0: the kernel's default.
  core::Duration tcp_user_timeout = core::from_seconds(10);
  /// Larger incoming payloads are dropped as malformed.
  std::size_t payload_bytes_max = std::size_t{64} << 20;
  /// Limit of registered receive memory. Beyond the limit, large messages wait at their sender.
  std::size_t receive_bytes_max = std::size_t{256} << 20;
};

/// Looks a variable up; nothing when it is not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;
Environment process_environment();
/// Whether the environment chooses UCX's transports or tunes its TCP: UCX_TLS, UCX_TCP_*, also with HYBRIDPS_ before.
bool tcp_is_tuned_by_user();

/// A setting for ucp_config_modify(). ucx_settings() lists our settings in order, without those that the user has set.
struct UcxSetting {
  std::string name;
  std::string value;
  bool required = true;  // false: this UCX may not know the setting
};
std::vector<UcxSetting> ucx_settings(const UcxOptions& options, std::pair<unsigned, unsigned> version,
                                     const Environment& environment);

/// One device that UCX may be told to use.
struct NetDevice {
  std::string name;  // "eth0", "mlx5_0:1"
  bool rdma = false;
  bool up = false;      // interface up with carrier, or active port
  bool address = true;  // has an IP address
};
std::vector<NetDevice> list_net_devices();

/// Whether every device of a comma-separated list exists, is up, has carrier and an address. The error lists the
/// devices of this machine. UCX itself would only warn and fail later with "Destination is unreachable".
core::Status validate_device(std::string_view names);
core::Status validate_device(std::string_view names, const std::vector<NetDevice>& devices);

/// Loads libucp into the process, after setting what UCX needs. Returns the path of libucp's file, or its soname.
using UcxLoader = std::function<core::Result<std::string>()>;
/// The first call that needs UCX runs `loader`, in the calling thread. `loader` never runs twice at once. Default:
/// "libucp.so.0", where the system's loader finds it.
void set_ucx_loader(UcxLoader loader);
/// Loads UCX if it is not loaded yet. Errors: those of the loader, or kUnsupported for an unusable library.
core::Status need_ucx();
/// "1.22.0": the version of the libucp in this process, not of the one compiled against. Empty: not loaded yet.
std::string ucx_version();
/// The file of the loaded libucp. Empty: not loaded yet.
std::string ucx_library_path();

}  // namespace hybridps::transport
