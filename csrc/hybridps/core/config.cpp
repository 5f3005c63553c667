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
constexpr std::string_view kGlooTransport = "GLOO_DEVICE_TRANSPORT";
constexpr std::string_view kGlooPrefix = "GLOO_DEVICE_TRANSPORT_TCP_TLS_";
constexpr const char* kLimitsName = "HYBRIDPS_LIMITS";

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
  kPorts,
  kLimits
};

using Field = std::variant<std::monostate, std::string Config::*, bool Config::*, double Config::*,
                           std::vector<double> Config::*, std::int64_t Config::*, std::uint64_t Config::*,
                           LogLevel Config::*, DataTransport Config::*, PortRange Config::*>;

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

// The table. Order: identity and network, failure detection, memory, devices, logs, standing in for other backends.
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
      Setting{"TOKEN", SettingKind::kSecret, &Config::token, "", 0, 0,
              "Secret of a job and its dedicated servers, 16 bytes or more. Whoever sees the environment can read it."},
      Setting{"TOKEN_FILE", SettingKind::kText, &Config::token_file, "", 0, 0,
              "File whose first line is the token. Its owner must be this user (mode 0600 or 0400) or root (the group "
              "may read it: 0640 or 0440). ~/ is the home folder. HYBRIDPS_TOKEN wins."},
      Setting{
          "SECURITY", SettingKind::kSecurity, &Config::tls, "", 0, 0,
          "tls: connections between machines are encrypted. Needs the token (HYBRIDPS_TOKEN_FILE), or certificates by "
          "gloo's names (docs/security.md); TCP only. off: in clear. The same on all ranks and servers."},
      Setting{"CHECKSUM", SettingKind::kBool, &Config::checksum, "", 0, 0,
              "1: messages between machines carry a CRC32C, and a wrong one ends the connection as if its peer had "
              "died; over TCP, so RDMA is not used. TLS does it anyway. The same on all ranks and servers."},
      Setting{"INTERFACE", SettingKind::kText, &Config::interface, "", 0, 0,
              "Interface for control, and for data over TCP. Unset: the one that routes to MASTER_ADDR; if that is "
              "loopback here (127.0.1.1), the default route's, else the only one."},
      Setting{"PORTS", SettingKind::kPorts, &Config::ports, "", 0, 0,
              "Range of TCP ports that ranks listen on, as 20000-20099, for firewalls. A rank needs one, and one for "
              "each connection of each card: two as a rule. Unset: any free port."},
      Setting{"TCP_CONGESTION", SettingKind::kText, &Config::tcp_congestion, "", 0, 0,
              "Congestion control of hybridps' own TCP, not of UCX: bbr if the path loses packets. Unset: the "
              "kernel's (net.ipv4.tcp_congestion_control)."},
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
      Setting{"SHM", SettingKind::kBool, &Config::shm, "", 0, 0,
              "1: ranks on one node share memory. 0: every rank is a node of its own."},
      Setting{"DEAD_SECONDS", SettingKind::kNumber, &Config::dead_seconds, "seconds", 0.05, kDay,
              "A peer that is silent for so long is dead; a broken connection is tried again for so long. Unset: 5 "
              "where the group can go on without the peer."},
      Setting{"WARN_SECONDS", SettingKind::kNumber, &Config::warn_seconds, "seconds", 0, kDay,
              "Waiting time after which an operation is reported as slow. 0: never."},
      Setting{"POOL_BYTES", SettingKind::kBytes, &Config::pool_bytes, "bytes", kMiB, 1024 * kGiB,
              "Memory for network buffers per process. K, M and G are powers of 1024."},
      Setting{"COMPRESS", SettingKind::kText, &Config::compress, "", 0, 0,
              "exact: lossless, if the network is the limit. off: nothing. Or a lossy codec for gradients: bf16, "
              "fp16, int8, int4, onebit, topk, randomk, dithering. The same on all ranks. docs/compression.md."},
      Setting{"GPUDIRECT", SettingKind::kBool, &Config::gpudirect, "", 0, 0,
              "1: UCX sends CUDA tensors to other nodes from GPU memory, except sums. If that is not possible: a "
              "warning, and pinned memory."},
      Setting{"BLOCKING_WAIT", SettingKind::kBool, &Config::blocking_wait, "", 0, 0,
              "1: wait() of an operation on CUDA tensors blocks the host until the operation is complete."},
      Setting{"SPIN_MICROSECONDS", SettingKind::kCountOrAuto, &Config::spin_microseconds, "microseconds", 0, 1e6,
              "How long a waiting thread polls before sleeping. auto: 50 while most waits end within 200 and nobody "
              "else wants the core, else 0."},
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
              "Backends that hybridps replaces, separated by commas; with leave-side-groups, groups that name their "
              "backend in new_group() keep it. Read at import torch; `hybridps run --as` sets it."},
      Setting{"ADVISE", SettingKind::kText, &Config::advise, "", 0, 0,
              "File for figures of DDP models, which group rank 0 writes at the end, with advice. Read at the first "
              "group; `hybridps run --advise` sets it."},
      Setting{"LIMITS", SettingKind::kLimits, std::monostate{}, "", 0, 0,
              "Sizes that seldom need a change, as chunk_bytes=16K,grant_chunks=2; see below."},
  };
  return kSettings;
}

// The parts of HYBRIDPS_LIMITS. Each is also taken by the name that it had as a setting: HYBRIDPS_CHUNK_BYTES.
const auto& limits() {
  static const std::array kLimits = {
      Setting{"eager_bytes", SettingKind::kBytes, &Config::eager_bytes, "bytes", 0, kGiB,
              "What a peer may send before it is granted memory."},
      Setting{"far_bytes", SettingKind::kBytes, &Config::far_bytes, "bytes", 0, 64 * kGiB,
              "At round trips of 2 ms or more, eager_bytes grows to four times what arrives in one round trip, at most "
              "this."},
      Setting{"window_bytes", SettingKind::kBytes, &Config::window_bytes, "bytes", kKiB, kGiB,
              "What all peers together may have under way to one card before they ask; a peer's part is 32K or more. "
              "Windows grow from here by what the card carries."},
      Setting{"chunk_bytes", SettingKind::kBytes, &Config::chunk_bytes, "bytes", kKiB, 64 * kMiB,
              "Payload of one network message, at most. Groups of many nodes use less, 16K at the least. Above 64K, "
              "chunks stay at 64K."},
      Setting{"grant_chunks", SettingKind::kCount, &Config::grant_chunks, "chunks", 1, 65536,
              "Chunks that a process has granted and not finished, over all peers and operations: as owner, and again "
              "as its node's agent. The same on all ranks."},
      Setting{"data_threads", SettingKind::kCountOrAuto, &Config::data_threads, "threads", 0, 16,
              "Threads that move data, at most one per connection and card. 0: the summing thread does it. auto: 0 at "
              "first; over TCP, if that thread is too busy, as many as cores are free, up to 4."},
      Setting{"kernel_tls", SettingKind::kBool, &Config::kernel_tls, "", 0, 0,
              "1: with TLS, the kernel encrypts what is sent, where it can (Linux 6.14, its module tls)."},
      Setting{"tcp_gbps", SettingKind::kNumber, &Config::tcp_gbps, "Gbit/s", 0, 1e4,
              "Most that one connection of hybridps' own TCP sends; for networks shared with others. 0: no limit."},
      Setting{"compress_min_bytes", SettingKind::kBytes, &Config::compress_min_bytes, "bytes", 0, kGiB,
              "Smaller tensors are never compressed. The same on all ranks."},
      Setting{"compress_memory", SettingKind::kBytes, &Config::compress_memory, "bytes", 0, 1024 * kGiB,
              "What error feedback may remember per group. Tensors beyond it go without feedback."},
      Setting{"device_codecs", SettingKind::kBool, &Config::device_codecs, "", 0, 0,
              "1: int8 sums of CUDA tensors between nodes are encoded on the GPU, where it can. 0: by the CPU, with "
              "the same bits."},
      Setting{"local_nccl", SettingKind::kBool, &Config::local_nccl, "", 0, 0,
              "1: ranks of one node with a GPU each use NCCL among themselves. 0 on any rank of a group: shared "
              "memory."},
      Setting{"slice_bytes", SettingKind::kBytes, &Config::slice_bytes, "bytes", kKiB, kGiB,
              "CUDA tensors larger than this go through the network in slices of 64M at most. The same on all ranks."},
      Setting{"staging_bytes", SettingKind::kBytes, &Config::staging_bytes, "bytes", kMiB, 1024 * kGiB,
              "Pinned memory per group and GPU for CUDA tensors, at most; more only if one slice needs it."},
      Setting{"servers_retry_seconds", SettingKind::kNumber, &Config::servers_retry_seconds, "seconds", 0, kDay,
              "How soon an open group asks again for a server that it lacks; later up to 16 times as seldom. 0: "
              "never."},
  };
  return kLimits;
}

// Settings of earlier versions.
struct GoneSetting {
  std::string_view name;
  std::string_view instead;
};
constexpr std::array kGone = {
    GoneSetting{"HEARTBEAT_SECONDS", "it follows from HYBRIDPS_DEAD_SECONDS"},
    GoneSetting{"LINGER_SECONDS", "shutdown waits 5 s at most"},
    GoneSetting{"SMALL_FIRST", "small operations always pass larger ones"},
    GoneSetting{"LEAVE_SIDE_GROUPS", "add leave-side-groups to HYBRIDPS_AS, or to --as of `hybridps run`"},
};

std::string full_name(const Setting& setting) { return std::string(kPrefix) + std::string(setting.name); }

std::string limit_name(const Setting& limit) { return std::string(kLimitsName) + "=" + std::string(limit.name); }

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
    case SettingKind::kLimits: {
      std::string names;
      for (const Setting& limit : limits()) names += (names.empty() ? "" : ", ") + std::string(limit.name);
      return "name=value, separated by commas, with names of: " + names;
    }
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
    case SettingKind::kLimits: break;  // assign_limits()
  }
  return false;
}

/// Reads a value of HYBRIDPS_LIMITS. Returns what was expected if it is not valid; `config` is unchanged then.
std::string assign_limits(Config& config, const Setting& setting, std::string_view text) {
  Config read = config;
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find_first_of(",;");  // ';' where a launcher takes ',' for its own
    const std::string_view part = trim(rest.substr(0, comma));
    const std::size_t equals = part.find('=');
    const auto limit = std::find_if(limits().begin(), limits().end(), [&](const Setting& one) {
      return equals != std::string_view::npos && one.name == trim(part.substr(0, equals));
    });
    if (limit == limits().end()) return expected(setting) + "; not " + core::quoted(part);
    const std::string_view value = trim(part.substr(equals + 1));
    if (!assign(read, *limit, value))
      return "for " + std::string(limit->name) + " " + expected(*limit) + "; not " + core::quoted(value);
    if (!read.given.insert(limit_name(*limit)).second) return std::string(limit->name) + " once";
    if (comma == std::string_view::npos) break;
    rest = rest.substr(comma + 1);
  }
  config = std::move(read);
  return {};
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
    case SettingKind::kLimits: {
      std::string text;
      for (const Setting& limit : limits())
        if (config.given.contains(limit_name(limit)))
          text += (text.empty() ? "" : ",") + std::string(limit.name) + "=" + value_text(config, limit);
      return text;
    }
  }
  return {};
}

const Setting* find(std::string_view full) {
  for (const Setting& setting : settings()) {
    if (full.substr(kPrefix.size()) == setting.name) return &setting;
  }
  return nullptr;
}

/// The part of HYBRIDPS_LIMITS that was a setting of this name.
const Setting* find_renamed(std::string_view full) {
  for (const Setting& limit : limits()) {
    const std::string_view own = full.substr(kPrefix.size());
    if (std::equal(own.begin(), own.end(), limit.name.begin(), limit.name.end(),
                   [](char upper, char lower) { return upper == (lower == '_' ? '_' : lower - 'a' + 'A'); }))
      return &limit;
  }
  return nullptr;
}

/// Says what became of a setting of earlier versions. Otherwise names the nearest known setting.
std::string unknown_name_warning(const std::string& name) {
  for (const GoneSetting& gone : kGone)
    if (std::string_view(name).substr(kPrefix.size()) == gone.name)
      return name + " is ignored, it is no setting any more: " + std::string(gone.instead);
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
  const auto told = [](const std::string& name, std::string_view value, const std::string& wanted) {
    return name + "=" + core::quoted(value) + " is not valid: expected " + wanted;
  };
  std::size_t renamed = 0;
  std::string first_renamed;
  std::vector<std::pair<const Setting*, Config::Environment::const_iterator>> old_names;
  for (auto at = environment.lower_bound(std::string(kPrefix)); at != environment.end(); ++at) {
    const auto& [name, value] = *at;
    if (!name.starts_with(kPrefix)) break;
    if (name.starts_with(kUcxPrefix)) continue;
    const Setting* setting = find(name);
    const Setting* limit = setting == nullptr ? find_renamed(name) : nullptr;
    if (setting == nullptr && limit == nullptr) {
      config.warnings.push_back(unknown_name_warning(name));
      continue;
    }
    if (trim(value).empty()) continue;  // set but empty means unset, as is usual in job scripts
    if (limit != nullptr) {
      old_names.emplace_back(limit, at);
    } else if (setting->kind == SettingKind::kLimits) {
      const std::string wanted = assign_limits(config, *setting, value);
      if (!wanted.empty()) {
        refuse(name, value, told(name, value, wanted));
        continue;
      }
    } else if (!assign(config, *setting, value)) {
      refuse(name, value, told(name, value, expected(*setting)));
      continue;
    }
    if (limit == nullptr) config.given.insert(name);
  }
  for (const auto& [limit, at] : old_names) {
    const auto& [name, value] = *at;
    const bool twice = config.given.contains(limit_name(*limit));
    if (twice || !assign(config, *limit, value)) {
      refuse(kLimitsName, std::string(limit->name) + "=" + value,
             told(name, value, twice ? "only " + limit_name(*limit) + ", which is set too" : expected(*limit)));
      continue;
    }
    config.given.insert({kLimitsName, limit_name(*limit)});
    if (renamed++ == 0) first_renamed = name;
  }
  const auto of_gloo = [&](std::string_view prefix, std::string_view name) {
    const auto found = environment.find(std::string(prefix) + std::string(name));
    return found == environment.end() ? std::string() : expand_home(std::string(trim(found->second)));
  };
  const auto path = [&](std::string_view name) { return of_gloo(kGlooPrefix, name); };
  // A job that has gloo's certificates keeps its encryption by them alone.
  std::string transport = of_gloo(kGlooTransport, "");
  for (char& c : transport)
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  if (!config.given.contains("HYBRIDPS_SECURITY") && transport == "TCP_TLS" && !path("PKEY").empty() &&
      !path("CERT").empty())
    config.tls = true;
  if (config.tls) config.certificate_paths = {path("PKEY"), path("CERT"), path("CA_FILE"), path("CA_PATH")};
  if (renamed > 0)
    config.warnings.push_back(first_renamed + (renamed > 1 ? " and " + std::to_string(renamed - 1) + " more" : "") +
                              ": old names, which the next version will not know; write " + kLimitsName + "=" +
                              value_text(config, *find(kLimitsName)));
  return config;
}

Config::Environment own_environment() {
  Config::Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos || !(text.starts_with(kPrefix) || text.starts_with(kGlooTransport))) continue;
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

std::vector<SettingRow> Config::table_of_environment(std::vector<std::string>& warnings,
                                                     std::vector<SettingRow>& parts) {
  struct Refused {
    std::string value;
    std::string message;
  };
  std::map<std::string, Refused> refused;
  const Config config =
      read(own_environment(), [&](const std::string& name, const std::string& value, std::string message) {
        auto& known = refused[name];
        known.value += (known.value.empty() ? "" : ",") + value;
        known.message += (known.message.empty() ? "" : "; ") + message;
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
  parts = config.limits_table();
  return rows;
}

namespace {

SettingRow row_of(const Config& config, const Setting& setting, std::string name, bool is_given) {
  SettingRow row;
  row.name = std::move(name);
  row.value = printable(value_text(config, setting));
  row.default_value = value_text(Config(), setting);
  row.source = is_given ? "env" : "default";
  row.unit = setting.unit;
  row.doc = setting.doc;
  return row;
}

}  // namespace

std::vector<SettingRow> Config::table() const {
  std::vector<SettingRow> rows;
  for (const Setting& setting : settings())
    rows.push_back(row_of(*this, setting, full_name(setting), given.contains(full_name(setting))));
  return rows;
}

std::vector<SettingRow> Config::limits_table() const {
  std::vector<SettingRow> rows;
  for (const Setting& limit : limits())
    rows.push_back(row_of(*this, limit, std::string(limit.name), given.contains(limit_name(limit))));
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
