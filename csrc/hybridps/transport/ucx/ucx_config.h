// hybridps/transport/ucx/ucx_config.h: what we ask of UCX, and what this machine and this library offer.
//
// Policy   a user's UCX_X or HYBRIDPS_UCX_X wins over our choice of X. One exception: the control worker
// (tcp_only)
//          speaks TCP whatever UCX_TLS says, and ignores a UCX_NET_DEVICES that names no IP interface.
// Threads  any, but they read the environment: not while another thread changes it.
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
  /// Of GPUs too (HYBRIDPS_GPUDIRECT). Without it UCX makes no call to CUDA once it has started.
  bool device_memory = false;
  /// In names, logs and errors: "data", "control".
  std::string label = "data";
  /// How long a friendly close, and the destructor, wait for what is on its way.
  core::Duration close_timeout = core::from_seconds(1);
  /// The kernel gives up on unacknowledged TCP data after this (UCX 1.22 and later); 0: its own default.
  core::Duration tcp_user_timeout = core::from_seconds(10);
  /// Larger incoming payloads are dropped as malformed.
  std::size_t payload_bytes_max = std::size_t{64} << 20;
  /// Receive memory registered at most; beyond it large messages wait at their sender.
  std::size_t receive_bytes_max = std::size_t{256} << 20;
};

/// Looks a variable up; nothing when it is not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;
Environment process_environment();
/// Whether the environment has settings of UCX for its TCP, or for which of its transports there are: UCX_TLS, UCX_TCP_*.
bool tcp_is_tuned_by_user();

/// What we set by ucp_config_modify, in order, after the user's settings have been taken out.
struct UcxSetting {
  std::string name;
  std::string value;
  bool required = true;  // false: this UCX may not know it
};
std::vector<UcxSetting> ucx_settings(const UcxOptions& options, std::pair<unsigned, unsigned> version,
                                     const Environment& environment);

/// One device that UCX may be told to use.
struct NetDevice {
  std::string name;  // "eth0", "mlx5_0:1"
  bool rdma = false;
  bool up = false;      // and has carrier, or its port is active
  bool address = true;  // has an IP address
};
std::vector<NetDevice> list_net_devices();

/// Every device of a comma-separated list exists, is up, has carrier and an address. The error lists what
/// there is: UCX itself would only warn and fail later with "Destination is unreachable".
core::Status validate_device(std::string_view names);
core::Status validate_device(std::string_view names, const std::vector<NetDevice>& devices);

/// Brings libucp into the process, with what must be set before, and says which file it is (or its soname).
using UcxLoader = std::function<core::Result<std::string>()>;
/// Called when UCX is needed for the first time, in the thread that needs it, one at a time. Unset: "libucp.so.0", where the
/// system's loader finds it.
void set_ucx_loader(UcxLoader loader);
/// Loads UCX, if that has not been done. kUnsupported: the loader's error, or a library that is none.
core::Status need_ucx();
/// "1.22.0": the libucp in this process, not the one compiled against; empty: it has not been needed.
std::string ucx_version();
/// The file it was loaded from; empty likewise.
std::string ucx_library_path();

}  // namespace hybridps::transport
