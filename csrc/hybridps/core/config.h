// hybridps/core/config.h: every setting, in one table; read from the environment once per engine.
//
// The setting HYBRIDPS_X is the field x. Its default is the initializer below. Its meaning is the `doc` in config.cpp.
// `hybridps env --all` prints both. To add a setting: a field here, a row in config.cpp. Only settings that the code
// reads belong here. What seldom needs a change is a part of HYBRIDPS_LIMITS: a row in limits(). Names that begin with
// HYBRIDPS_UCX_ are not settings: they are handed to UCX.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/core/log.h"
#include "hybridps/core/status.h"

namespace hybridps::core {

/// One line of `hybridps env --all`.
struct SettingRow {
  std::string name;           // "HYBRIDPS_POOL_BYTES"; of a part of HYBRIDPS_LIMITS: "chunk_bytes"
  std::string value;          // as it would be written in the environment
  std::string default_value;  // in the same form; empty: "not set"
  std::string source;         // "env" or "default"
  std::string unit;           // "bytes", "seconds", "Gbit/s", ... or empty
  std::string doc;            // a sentence or two
  std::string problem;        // why the value in the environment cannot be used; empty: no problem
};

/// HYBRIDPS_DATA_TRANSPORT.
enum class DataTransport : std::uint8_t { kAuto = 0, kRdma = 1, kTcp = 2, kUcx = 3 };

/// TCP ports to listen on. 0: whatever the kernel gives.
struct PortRange {
  std::uint16_t first = 0;
  std::uint16_t last = 0;

  std::size_t size() const noexcept { return first == 0 ? 0 : std::size_t{last} - first + 1; }
};

struct Config {
  std::string node;
  std::string servers;
  bool servers_required = false;
  std::string token;
  std::string token_file;
  bool tls = false;  // HYBRIDPS_SECURITY
  /// gloo's names for files of certificates, GLOO_DEVICE_TRANSPORT_TCP_TLS_*. Read only with `tls`.
  struct CertificatePaths {
    std::string key;
    std::string certificates;
    std::string authorities;
    std::string folder;
    bool any() const noexcept { return !(key + certificates + authorities + folder).empty(); }
  };
  CertificatePaths certificate_paths;
  bool checksum = false;
  std::string interface;
  PortRange ports;
  std::string tcp_congestion;
  double tcp_gbps = 0;
  std::int64_t dscp = 0;
  std::string data_interfaces;
  DataTransport data_transport = DataTransport::kAuto;
  std::vector<double> nic_gbps = {0};  // one value: of the whole machine; else one value for each data interface
  bool find_rates = true;
  bool tune = false;
  double dead_seconds = 20;
  std::uint64_t pool_bytes = std::uint64_t{64} << 20;
  std::int64_t data_sockets = 1;
  std::int64_t cores = -1;  // "auto"
  std::string region;
  std::string compress = "exact";
  bool local_nccl = true;
  bool gpudirect = false;
  bool blocking_wait = false;
  std::int64_t spin_microseconds = -1;  // "auto"
  LogLevel log_level = LogLevel::kWarn;
  std::string status;          // folder of the local socket; "off": none; empty: the usual one
  std::string metrics_file;    // as written, %p included: see metrics_path()
  std::string metrics_listen;  // host:port; the local rank is added to the port
  std::string trace;           // folder
  double warn_seconds = 10;
  bool shm = true;
  std::string as;      // only python/hybridps reads as and advise;
  std::string advise;  // this table documents them, and makes their names known

  // The parts of HYBRIDPS_LIMITS.
  std::uint64_t eager_bytes = std::uint64_t{512} << 10;
  std::uint64_t far_bytes = std::uint64_t{64} << 20;
  static constexpr std::uint64_t kWindowBytesUsual = std::uint64_t{128} << 10;
  std::uint64_t window_bytes = kWindowBytesUsual;
  std::uint64_t chunk_bytes = std::uint64_t{64} << 10;
  std::int64_t grant_chunks = 4;
  std::int64_t data_threads = -1;  // "auto"
  bool kernel_tls = false;
  std::uint64_t compress_min_bytes = std::uint64_t{64} << 10;
  std::uint64_t compress_memory = std::uint64_t{4} << 30;
  bool device_codecs = true;
  std::uint64_t slice_bytes = std::uint64_t{4} << 20;
  std::uint64_t staging_bytes = std::uint64_t{256} << 20;
  double servers_retry_seconds = 2;

  /// Names found in the environment, as "HYBRIDPS_NODE"; parts of HYBRIDPS_LIMITS as "HYBRIDPS_LIMITS=chunk_bytes".
  std::set<std::string> given;
  /// Complaints that are not errors (unknown and old names). The reader must report them; in a job rank 0 does so,
  /// once.
  std::vector<std::string> warnings;

  using Environment = std::map<std::string, std::string>;

  /// Reads this process's environment; logs nothing. kInvalidArgument names the variable, its value and what is
  /// expected.
  static Result<Config> from_environment();
  /// The same from given variables.
  static Result<Config> from(const Environment& environment);
  /// The table of this process's environment, for tools that show it. A value that from_environment() would refuse has
  /// the reason in the `problem` of its row. `parts`: those of HYBRIDPS_LIMITS.
  static std::vector<SettingRow> table_of_environment(std::vector<std::string>& warnings,
                                                      std::vector<SettingRow>& parts);

  /// All settings, in the order of the documentation.
  std::vector<SettingRow> table() const;
  /// All parts of HYBRIDPS_LIMITS, in the order of the documentation.
  std::vector<SettingRow> limits_table() const;
  /// metrics_file with `~/` and each %p (the process id) replaced; empty when not set.
  std::string metrics_path() const;
};

}  // namespace hybridps::core
