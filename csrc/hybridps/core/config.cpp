#include "hybridps/core/config.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>
#include <variant>

#include "hybridps/core/text.h"

namespace hybridps::core {
namespace {

constexpr std::string_view kPrefix = "HYBRIDPS_";
constexpr std::string_view kUcxPrefix = "HYBRIDPS_UCX_";

enum class SettingKind {
  kText,
  kSecret,
  kBool,
  kNumber,
  kNumbers,
  kCount,
  kCountOrAuto,
  kBytes,
  kLevel,
  kTransport,
  kSecurity,
  kPorts
};

using Field = std::variant<std::string Config::*, bool Config::*, double Config::*, std::vector<double> Config::*,
                           std::int64_t Config::*, std::uint64_t Config::*, LogLevel Config::*, DataTransport Config::*,
                           PortRange Config::*>;

struct Setting {
  std::string_view name;  // without the prefix
  SettingKind kind;
  Field field;
  std::string_view unit;
  double value_min;
  double value_max;
  std::string_view doc;
};

constexpr std::array<std::string_view, 4> kTransportNames = {"auto", "rdma", "tcp", "ucx"};  // order of DataTransport

constexpr double kKiB = 1024;
constexpr double kMiB = 1024 * kKiB;
constexpr double kGiB = 1024 * kMiB;
constexpr double kDay = 86400;

// The table. Order: identity and network, failure detection, memory and flow, logs, standing in for other backends.
const auto& settings() {
  static const std::array kSettings = {
      Setting{"NODE", SettingKind::kText, &Config::node, "", 0, 0,
              "Name of this rank's node; ranks with one name share memory. Unset: from the host's boot id and "
              "namespaces. Different names emulate nodes on one machine."},
      Setting{"REGION", SettingKind::kText, &Config::region, "", 0, 0,
              "Rack or site of this node: a name, or east@0.5 with its uplink in Gbit/s. On all ranks or on none; on "
              "servers as on ranks near them. One name on all: no regions. Unset: found if over 1 ms apart."},
      Setting{"SERVERS", SettingKind::kText, &Config::servers, "", 0, 0,
              "Dedicated servers to use, host:port separated by commas. Groups of 3 nodes or more use them."},
      Setting{"SERVERS_REQUIRED", SettingKind::kBool, &Config::servers_required, "", 0, 0,
              "1: a dedicated server that cannot be used ends the job. 0: it is reported and left out."},
      Setting{"SERVERS_RETRY_SECONDS", SettingKind::kNumber, &Config::servers_retry_seconds, "seconds", 0, kDay,
              "How soon an open group asks again for a server that it lacks; later up to 16 times as seldom. 0: "
              "never."},
      Setting{"TOKEN", SettingKind::kSecret, &Config::token, "", 0, 0,
              "Secret of a job and its dedicated servers, 16 bytes or more. Whoever sees the environment can read it."},
      Setting{"TOKEN_FILE", SettingKind::kText, &Config::token_file, "", 0, 0,
              "File whose first line is the token. Its owner must be this user (mode 0600 or 0400) or root (the group "
              "may read it: 0640 or 0440). ~/ is the home folder. HYBRIDPS_TOKEN wins."},
      Setting{"SECURITY", SettingKind::kSecurity, &Config::tls, "", 0, 0,
              "tls: connections between machines are encrypted, and need the job's token (HYBRIDPS_TOKEN_FILE); TCP "
              "only. off: in clear. The same on all ranks and servers."},
      Setting{"CHECKSUM", SettingKind::kBool, &Config::checksum, "", 0, 0,
              "1: messages between machines carry a CRC32C, and a wrong one ends the connection as if its peer had "
              "died; over TCP, so RDMA is not used. TLS does it anyway. The same on all ranks and servers."},
      Setting{"INTERFACE", SettingKind::kText, &Config::interface, "", 0, 0,
              "Interface for control, and for data over TCP. Unset: the one that routes to MASTER_ADDR; if that is "
              "loopback here (127.0.1.1), the default route's, else the only one."},
      Setting{"PORTS", SettingKind::kPorts, &Config::ports, "", 0, 0,
              "Range of TCP ports that ranks listen on, as 20000-20099, for firewalls. A machine needs two per rank, "
              "and one more per further card and connection. Unset: any free port."},
      Setting{"TCP_CONGESTION", SettingKind::kText, &Config::tcp_congestion, "", 0, 0,
              "Congestion control of hybridps' own TCP, not of UCX: bbr if the path loses packets. Unset: the "
              "kernel's (net.ipv4.tcp_congestion_control)."},
      Setting{"TCP_GBPS", SettingKind::kNumber, &Config::tcp_gbps, "Gbit/s", 0, 1e4,
              "Most that one connection of hybridps' own TCP sends; for networks shared with others. 0: no limit."},
      Setting{"DSCP", SettingKind::kCount, &Config::dscp, "", 0, 63,
              "Class of all packets of hybridps' own TCP, for routers and switches (RFC 2474)."},
      Setting{"DATA_INTERFACES", SettingKind::kText, &Config::data_interfaces, "", 0, 0,
              "Interfaces or RDMA ports (mlx5_0:1) for data, separated by commas; each local rank takes the nearest. "
              "Unset: see HYBRIDPS_DATA_TRANSPORT."},
      Setting{"DATA_TRANSPORT", SettingKind::kTransport, &Config::data_transport, "", 0, 0,
              "auto: RDMA if a port is active and UCX has verbs, else TCP. rdma: an error instead of TCP. tcp: no "
              "RDMA. ucx: TCP through UCX; auto takes it if UCX_TCP_* is set. The same on all ranks."},
      Setting{"DATA_SOCKETS", SettingKind::kCount, &Config::data_sockets, "connections", 1, 16,
              "TCP connections for data to each peer and card. More than one if one does not fill the card: long "
              "distances, limits of clouds."},
      Setting{"DATA_THREADS", SettingKind::kCountOrAuto, &Config::data_threads, "threads", 0, 16,
              "Threads that move data, at most one per connection and card. 0: the summing thread does it. auto: 0 at "
              "first; over TCP, if that thread is too busy, as many as cores are free, up to 4."},
      Setting{"CORES", SettingKind::kCountOrAuto, &Config::cores, "cores", 1, 65536,
              "Cores that each process may use; they decide how many threads move data. auto: the process's cores or "
              "its container's quota, divided by the ranks on the machine. Set less if jobs share cores."},
      Setting{"NIC_GBPS", SettingKind::kNumbers, &Config::nic_gbps, "Gbit/s", 0, 1e6,
              "Rate of this machine's network, a weight between unequal machines; or one for each of "
              "HYBRIDPS_DATA_INTERFACES, separated by commas. 0: not set."},
      Setting{"FIND_RATES", SettingKind::kBool, &Config::find_rates, "", 0, 0,
              "1: shares follow the rates that are measured, beyond HYBRIDPS_NIC_GBPS; in groups of 3 nodes or more."},
      Setting{"TUNE", SettingKind::kBool, &Config::tune, "", 0, 0,
              "1: chunk sizes, windows, connections and pace are tried out while the job runs, and the faster ones "
              "kept. Results are the same. Set it on all ranks."},
      Setting{"SMALL_FIRST", SettingKind::kBool, &Config::small_first, "", 0, 0,
              "1: operations of up to 4 KiB pass larger ones. 0: they wait in line, for comparisons."},
      Setting{"SHM", SettingKind::kBool, &Config::shm, "", 0, 0,
              "1: ranks on one node share memory. 0: every rank is a node of its own."},
      Setting{"HEARTBEAT_SECONDS", SettingKind::kNumber, &Config::heartbeat_seconds, "seconds", 0.01, kDay,
              "A watched peer is asked twice in this time whether it lives."},
      Setting{"DEAD_SECONDS", SettingKind::kNumber, &Config::dead_seconds, "seconds", 0.05, kDay,
              "A peer that is silent for so long is dead; a broken connection is tried again for so long. More than "
              "HYBRIDPS_HEARTBEAT_SECONDS. Unset: 5 where the group can go on without the peer."},
      Setting{"LINGER_SECONDS", SettingKind::kNumber, &Config::linger_seconds, "seconds", 0, kDay,
              "How long shutdown keeps serving peers that have not said goodbye."},
      Setting{"WARN_SECONDS", SettingKind::kNumber, &Config::warn_seconds, "seconds", 0, kDay,
              "Waiting time after which an operation is reported as slow. 0: never."},
      Setting{"POOL_BYTES", SettingKind::kBytes, &Config::pool_bytes, "bytes", kMiB, 1024 * kGiB,
              "Memory for network buffers per process. K, M and G are powers of 1024."},
      Setting{"EAGER_BYTES", SettingKind::kBytes, &Config::eager_bytes, "bytes", 0, kGiB,
              "What a peer may send before it is granted memory."},
      Setting{"FAR_BYTES", SettingKind::kBytes, &Config::far_bytes, "bytes", 0, 64 * kGiB,
              "The same for a peer whose round trip is 2 ms or more: four times what the path holds, at most this."},
      Setting{"WINDOW_BYTES", SettingKind::kBytes, &Config::window_bytes, "bytes", kKiB, kGiB,
              "What all peers together may have under way to one card before they ask; a peer's part is 32K or more. "
              "Windows grow from here by what the card carries."},
      Setting{"CHUNK_BYTES", SettingKind::kBytes, &Config::chunk_bytes, "bytes", kKiB, 64 * kMiB,
              "Payload of one network message, at most. Groups of many nodes use less, 16K at the least. Above 64K, "
              "chunks stay at 64K."},
      Setting{"GRANT_CHUNKS", SettingKind::kCount, &Config::grant_chunks, "chunks", 1, 65536,
              "Chunks that a process has granted and not finished, over all peers and operations: as owner, and again "
              "as its node's agent. The same on all ranks."},
      Setting{"COMPRESS", SettingKind::kText, &Config::compress, "", 0, 0,
              "exact: lossless, if the network is the limit. off: nothing. Or a lossy codec for gradients: bf16, "
              "fp16, int8, int4, onebit, topk, randomk, dithering. The same on all ranks. docs/compression.md."},
      Setting{"COMPRESS_MIN_BYTES", SettingKind::kBytes, &Config::compress_min_bytes, "bytes", 0, kGiB,
              "Smaller tensors are never compressed. The same on all ranks."},
      Setting{"COMPRESS_MEMORY", SettingKind::kBytes, &Config::compress_memory, "bytes", 0, 1024 * kGiB,
              "What error feedback may remember per group. Tensors beyond it go without feedback."},
      Setting{"DEVICE_CODECS", SettingKind::kBool, &Config::device_codecs, "", 0, 0,
              "1: int8 sums of CUDA tensors between nodes are encoded on the GPU, where it can. 0: by the CPU, with "
              "the same bits."},
      Setting{"SLICE_BYTES", SettingKind::kBytes, &Config::slice_bytes, "bytes", kKiB, kGiB,
              "CUDA tensors larger than this go through the network in slices, 8 at most. The same on all ranks."},
      Setting{"STAGING_BYTES", SettingKind::kBytes, &Config::staging_bytes, "bytes", kMiB, 1024 * kGiB,
              "Pinned memory per group and GPU for CUDA tensors, at most; more only if one slice needs it."},
      Setting{"LOCAL_NCCL", SettingKind::kBool, &Config::local_nccl, "", 0, 0,
              "1: ranks of one node with a GPU each use NCCL among themselves. 0 on any rank of a group: shared "
              "memory."},
      Setting{"GPUDIRECT", SettingKind::kBool, &Config::gpudirect, "", 0, 0,
              "1: UCX sends CUDA tensors to other nodes from GPU memory, except sums. If that is not possible: a "
              "warning, and pinned memory."},
      Setting{"BLOCKING_WAIT", SettingKind::kBool, &Config::blocking_wait, "", 0, 0,
              "1: wait() of an operation on CUDA tensors blocks the host until the operation is complete."},
      Setting{"SPIN_MICROSECONDS", SettingKind::kCountOrAuto, &Config::spin_microseconds, "microseconds", 0, 1e6,
              "How long a waiting thread polls before it sleeps. auto: 50 while waits are that short and nobody else "
              "wants the core, else 0."},
      Setting{"LOG_LEVEL", SettingKind::kLevel, &Config::log_level, "", 0, 0,
              "error, warn, info or debug, on stderr. info: rank 0 says what the job does. debug: each rank says how "
              "long its start took."},
      Setting{"STATUS", SettingKind::kText, &Config::status, "", 0, 0,
              "Folder of the socket that `hybridps status` asks, for this user alone; off: none. Unset: hybridps in "
              "XDG_RUNTIME_DIR, else hybridps-UID in TMPDIR or /tmp."},
      Setting{"METRICS_FILE", SettingKind::kText, &Config::metrics_file, "", 0, 0,
              "File for metrics in Prometheus' text format, replaced every second. %p becomes the process id, ~/ the "
              "home folder."},
      Setting{"METRICS_LISTEN", SettingKind::kText, &Config::metrics_listen, "", 0, 0,
              "host:port for the same by HTTP (GET /metrics); the local rank is added to the port. Whoever reaches it "
              "may read it."},
      Setting{"TRACE", SettingKind::kText, &Config::trace, "", 0, 0,
              "Folder for a trace of this process or server, for `hybridps trace`. Unset: none, until `hybridps "
              "status --trace` asks."},
      Setting{"AS", SettingKind::kText, &Config::as, "", 0, 0,
              "Backends that hybridps replaces, separated by commas. Read at import torch; `hybridps run --as` sets "
              "it."},
      Setting{"ADVISE", SettingKind::kText, &Config::advise, "", 0, 0,
              "File for figures of DDP models, which group rank 0 writes at the end, with advice. Read at the first "
              "group; `hybridps run --advise` sets it."},
      Setting{"LEAVE_SIDE_GROUPS", SettingKind::kBool, &Config::leave_side_groups, "", 0, 0,
              "With HYBRIDPS_AS: groups that name their backend in new_group() get that backend."},
  };
  return kSettings;
}

std::string full_name(const Setting& setting) { return std::string(kPrefix) + std::string(setting.name); }

std::string format_bound(const Setting& setting, double bound) {
  return setting.kind == SettingKind::kBytes ? format_byte_setting(static_cast<std::uint64_t>(bound))
                                             : format_double(bound);
}

std::string expected(const Setting& setting) {
  const std::string range =
      " from " + format_bound(setting, setting.value_min) + " to " + format_bound(setting, setting.value_max);
  switch (setting.kind) {
    case SettingKind::kText:
    case SettingKind::kSecret: return "text";
    case SettingKind::kBool: return "1 or 0 (also on, off, true, false, yes, no)";
    case SettingKind::kNumber: return "a number" + range;
    case SettingKind::kNumbers: return "numbers separated by commas, each" + range;
    case SettingKind::kCount: return "a whole number" + range;
    case SettingKind::kCountOrAuto: return "'auto' or a whole number" + range;
    case SettingKind::kBytes: return "a number of bytes" + range + ", such as 65536, 64K, 1.5M, 2G";
    case SettingKind::kLevel: return "error, warn, info or debug";
    case SettingKind::kTransport: return "auto, rdma, tcp or ucx";
    case SettingKind::kSecurity: return "off or tls";
    case SettingKind::kPorts: return "the first and the last of a range of ports, such as 20000-20099";
  }
  return {};
}

bool in_range(const Setting& setting, double value) { return value >= setting.value_min && value <= setting.value_max; }

/// False when `text` is not what the setting expects; `config` is unchanged then.
bool assign(Config& config, const Setting& setting, std::string_view text) {
  text = trim(text);
  switch (setting.kind) {
    case SettingKind::kText:
    case SettingKind::kSecret: config.*std::get<std::string Config::*>(setting.field) = std::string(text); return true;
    case SettingKind::kBool: {
      const auto value = parse_bool(text);
      if (value) config.*std::get<bool Config::*>(setting.field) = *value;
      return value.has_value();
    }
    case SettingKind::kNumber: {
      const auto value = parse_double(text);
      if (!value || !in_range(setting, *value)) return false;
      config.*std::get<double Config::*>(setting.field) = *value;
      return true;
    }
    case SettingKind::kNumbers: {
      std::vector<double> values;
      for (std::string_view rest = text; !rest.empty() || values.empty();) {
        const std::size_t comma = rest.find(',');
        const auto value = parse_double(trim(rest.substr(0, comma)));
        if (!value || !in_range(setting, *value)) return false;
        values.push_back(*value);
        if (comma == std::string_view::npos) break;
        rest = rest.substr(comma + 1);
        if (rest.empty()) return false;
      }
      config.*std::get<std::vector<double> Config::*>(setting.field) = std::move(values);
      return true;
    }
    case SettingKind::kCountOrAuto:
      if (text == "auto" || text == "-1") {
        config.*std::get<std::int64_t Config::*>(setting.field) = -1;
        return true;
      }
      [[fallthrough]];
    case SettingKind::kCount: {
      const auto value = parse_int(text);
      if (!value || !in_range(setting, static_cast<double>(*value))) return false;
      config.*std::get<std::int64_t Config::*>(setting.field) = *value;
      return true;
    }
    case SettingKind::kBytes: {
      const auto value = parse_bytes(text);
      if (!value || !in_range(setting, static_cast<double>(*value))) return false;
      config.*std::get<std::uint64_t Config::*>(setting.field) = *value;
      return true;
    }
    case SettingKind::kLevel: {
      const auto value = parse_log_level(text);
      if (value) config.*std::get<LogLevel Config::*>(setting.field) = *value;
      return value.has_value();
    }
    case SettingKind::kTransport: {
      for (std::size_t i = 0; i < kTransportNames.size(); ++i)
        if (text == kTransportNames[i]) {
          config.*std::get<DataTransport Config::*>(setting.field) = static_cast<DataTransport>(i);
          return true;
        }
      return false;
    }
    case SettingKind::kSecurity: {
      config.*std::get<bool Config::*>(setting.field) = text == "tls";
      return text == "tls" || text == "off";
    }
    case SettingKind::kPorts: {
      const std::size_t dash = text.find('-');
      const auto first = parse_int(trim(text.substr(0, dash)));
      const auto last = dash == std::string_view::npos ? first : parse_int(trim(text.substr(dash + 1)));
      if (!first || !last || *first < 1 || *last < *first || *last > 65535) return false;
      config.*std::get<PortRange Config::*>(setting.field) = {static_cast<std::uint16_t>(*first),
                                                              static_cast<std::uint16_t>(*last)};
      return true;
    }
  }
  return false;
}

std::string text_of(const PortRange& ports) {
  return ports.first == 0 ? std::string() : std::to_string(ports.first) + "-" + std::to_string(ports.last);
}

std::string value_text(const Config& config, const Setting& setting) {
  switch (setting.kind) {
    case SettingKind::kText: return config.*std::get<std::string Config::*>(setting.field);
    case SettingKind::kSecret: return (config.*std::get<std::string Config::*>(setting.field)).empty() ? "" : "(given)";
    case SettingKind::kBool: return config.*std::get<bool Config::*>(setting.field) ? "1" : "0";
    case SettingKind::kSecurity: return config.*std::get<bool Config::*>(setting.field) ? "tls" : "off";
    case SettingKind::kNumber: return format_double(config.*std::get<double Config::*>(setting.field));
    case SettingKind::kNumbers: {
      std::string text;
      for (const double value : config.*std::get<std::vector<double> Config::*>(setting.field))
        text += (text.empty() ? "" : ",") + format_double(value);
      return text;
    }
    case SettingKind::kCount: return std::to_string(config.*std::get<std::int64_t Config::*>(setting.field));
    case SettingKind::kCountOrAuto: {
      const std::int64_t value = config.*std::get<std::int64_t Config::*>(setting.field);
      return value < 0 ? "auto" : std::to_string(value);
    }
    case SettingKind::kBytes: return format_byte_setting(config.*std::get<std::uint64_t Config::*>(setting.field));
    case SettingKind::kLevel: return std::string(name_of(config.*std::get<LogLevel Config::*>(setting.field)));
    case SettingKind::kTransport:
      return std::string(
          kTransportNames[static_cast<std::size_t>(config.*std::get<DataTransport Config::*>(setting.field))]);
    case SettingKind::kPorts: return text_of(config.*std::get<PortRange Config::*>(setting.field));
  }
  return {};
}

const Setting* find(std::string_view full) {
  for (const Setting& setting : settings()) {
    if (full.substr(kPrefix.size()) == setting.name) return &setting;
  }
  return nullptr;
}

/// Names the nearest known setting, if it is near enough for a misspelling.
std::string unknown_name_warning(const std::string& name) {
  std::string nearest;
  std::size_t distance_min = std::numeric_limits<std::size_t>::max();
  const std::string_view own = std::string_view(name).substr(kPrefix.size());
  for (const Setting& setting : settings()) {
    // The distance is at least the difference of the lengths.
    const std::size_t longer = std::max(own.size(), setting.name.size()) - std::min(own.size(), setting.name.size());
    if (longer >= distance_min) continue;
    const std::size_t distance = edit_distance(own, setting.name);
    if (distance < distance_min) {
      distance_min = distance;
      nearest = full_name(setting);
    }
  }
  return "unknown setting " + printable(name) + " is ignored; did you mean " + nearest +
         "? `hybridps env --all` lists all settings";
}

/// Reads all valid settings; calls `refuse(name, value, message)` for each other setting.
template <typename Refuse>
Config read(const Config::Environment& environment, const Refuse& refuse) {
  Config config;
  for (auto at = environment.lower_bound(std::string(kPrefix)); at != environment.end(); ++at) {
    const auto& [name, value] = *at;
    if (!name.starts_with(kPrefix)) break;
    if (name.starts_with(kUcxPrefix)) continue;
    const Setting* setting = find(name);
    if (setting == nullptr) {
      config.warnings.push_back(unknown_name_warning(name));
      continue;
    }
    if (trim(value).empty()) continue;  // set but empty means unset, as is usual in job scripts
    if (!assign(config, *setting, value)) {
      refuse(name, value, name + "=" + core::quoted(value) + " is not valid: expected " + expected(*setting));
      continue;
    }
    config.given.insert(name);
  }
  if (config.dead_seconds <= config.heartbeat_seconds) {
    const std::string value = format_double(config.dead_seconds);
    refuse("HYBRIDPS_DEAD_SECONDS", value,
           "HYBRIDPS_DEAD_SECONDS=" + value +
               " is not valid: expected more than HYBRIDPS_HEARTBEAT_SECONDS, which is " +
               format_double(config.heartbeat_seconds));
  }
  return config;
}

Config::Environment own_environment() {
  Config::Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos || !text.starts_with(kPrefix)) continue;
    environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

}  // namespace

Result<Config> Config::from(const Environment& environment) {
  Status first;
  Config config =
      read(environment, [&](const std::string& /*name*/, const std::string& /*value*/, std::string message) {
        if (first.is_ok()) first = Status(Code::kInvalidArgument, std::move(message));
      });
  if (!first.is_ok()) return first;
  return config;
}

Result<Config> Config::from_environment() { return from(own_environment()); }

std::vector<SettingRow> Config::table_of_environment(std::vector<std::string>& warnings) {
  struct Refused {
    std::string value;
    std::string message;
  };
  std::map<std::string, Refused> refused;
  const Config config =
      read(own_environment(), [&](const std::string& name, const std::string& value, std::string message) {
        refused.emplace(name, Refused{value, std::move(message)});
      });
  std::vector<SettingRow> rows = config.table();
  for (SettingRow& row : rows) {
    const auto found = refused.find(row.name);
    if (found == refused.end()) continue;
    row.value = printable(found->second.value);
    row.source = "env";
    row.problem = found->second.message;
  }
  warnings = config.warnings;
  return rows;
}

std::vector<SettingRow> Config::table() const {
  const Config defaults;
  std::vector<SettingRow> rows;
  for (const Setting& setting : settings()) {
    SettingRow row;
    row.name = full_name(setting);
    row.value = printable(value_text(*this, setting));
    row.default_value = value_text(defaults, setting);
    row.source = given.contains(row.name) ? "env" : "default";
    row.unit = setting.unit;
    row.doc = setting.doc;
    rows.push_back(std::move(row));
  }
  return rows;
}

namespace {

std::string with_pid(const std::string& text) {
  std::string path = expand_home(text);
  const std::string pid = std::to_string(getpid());
  for (std::size_t at = path.find("%p"); at != std::string::npos; at = path.find("%p", at + pid.size())) {
    path.replace(at, 2, pid);
  }
  return path;
}

}  // namespace

std::string Config::metrics_path() const { return with_pid(metrics_file); }

}  // namespace hybridps::core
