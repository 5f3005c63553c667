// hybridps-server: computes sums for training jobs, on a machine that has no rank of these jobs.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/build_info.h"
#include "hybridps/core/config.h"
#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/admission/admission_server.h"
#include "hybridps/engine/server_host.h"
#include "hybridps/engine/settings.h"
#include "hybridps/observe/metrics.h"
#include "hybridps/observe/outlet.h"

namespace {

using hybridps::core::Result;
using hybridps::engine::ServerHost;
using hybridps::engine::ServerHostOptions;
using hybridps::engine::ServerHostStats;

constexpr const char* kUsage =
    R"(usage: hybridps-server --listen HOST:PORT [--no-token] [--threads N] [--memory SIZE] [--jobs N]
                       [--metrics FILE] [--metrics-listen HOST:PORT] [--status-seconds S] [--drain-seconds S]

A dedicated server for hybridps jobs (HYBRIDPS_SERVERS=HOST:PORT there). Run it on machines without ranks.

  --listen HOST:PORT    address for requests of jobs; port 0: the kernel chooses, and the line "listening on" shows it
  --no-token            serve every job that reaches HOST:PORT; without a token and without --no-token, HOST must be
                        loopback
  --threads N           engines that sum, each with a core of its own (default 1)
  --memory SIZE         most memory for data, as 512M or 4G (default 1G); jobs beyond it are refused
  --jobs N              at most N jobs at a time, each with an equal part of the memory (default: any number; they share it)
  --metrics FILE        counters in Prometheus' text format, replaced every second
  --metrics-listen HOST:PORT  the same by HTTP, GET /metrics; port 0 lets the kernel choose
  --status-seconds S    a status line this often, 0: never (default 60)
  --drain-seconds S     after SIGTERM, the server serves its jobs for at most S seconds more (default 0); the jobs then
                        go on without the server

Settings: HYBRIDPS_TOKEN or HYBRIDPS_TOKEN_FILE (the jobs' token), HYBRIDPS_SECURITY, HYBRIDPS_INTERFACE,
HYBRIDPS_DATA_INTERFACES, HYBRIDPS_TRACE, HYBRIDPS_NIC_GBPS, HYBRIDPS_DATA_SOCKETS, HYBRIDPS_CORES, HYBRIDPS_LOG_LEVEL,
HYBRIDPS_LIMITS (data_threads: of all engines together). Jobs may also have the token of a second line "also TOKEN" of
HYBRIDPS_TOKEN_FILE.
)";

volatile sig_atomic_t signals_seen = 0;

void on_signal(int) { signals_seen = signals_seen + 1; }

int wrong(const std::string& why) {
  std::fprintf(stderr, "hybridps-server: %s; `hybridps-server --help` explains the arguments\n", why.c_str());
  return 2;
}

/// Writes one whole line with the time of day to stdout. Thread-safe.
void say(const std::string& text) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  char clock[16] = "";
  if (localtime_r(&now, &local) != nullptr) (void)std::strftime(clock, sizeof clock, "%H:%M:%S", &local);
  std::printf("%s %s\n", clock, hybridps::core::printable(text).c_str());
  std::fflush(stdout);
}

struct Arguments {
  ServerHostOptions options;
  std::string metrics;
  hybridps::admission::Address metrics_listen;
  double status_seconds = 60;
  double drain_seconds = 0;
  bool no_token = false;
};

/// Returns what is wrong; empty: nothing.
std::string parse(const std::vector<std::string_view>& words, Arguments& out) {
  bool listens = false;
  for (std::size_t i = 0; i < words.size(); ++i) {
    std::string_view name = words[i];
    std::string_view value;
    if (name == "--no-token") {
      out.no_token = true;
      continue;
    }
    if (const std::size_t equals = name.find('='); equals != std::string_view::npos) {
      value = name.substr(equals + 1);
      name = name.substr(0, equals);
    } else if (i + 1 < words.size()) {
      value = words[++i];
    } else {
      return std::string(name) + " needs a value, or is not known";
    }
    if (name == "--listen") {
      Result<hybridps::admission::Address> address = hybridps::admission::parse_address(std::string(value));
      if (!address.is_ok()) return "--listen: " + std::string(address.status().message());
      out.options.listen = std::move(address).value();
      listens = true;
    } else if (name == "--threads") {
      const auto number = hybridps::core::parse_int(value);
      if (!number || *number < 1 || *number > 256) return "--threads is a number from 1 to 256";
      out.options.threads = static_cast<int>(*number);
    } else if (name == "--memory") {
      const auto bytes = hybridps::core::parse_bytes(value);
      if (!bytes || *bytes < (16 << 20)) return "--memory is a size of at least 16M, such as 512M or 4G";
      out.options.memory_bytes = *bytes;
    } else if (name == "--jobs") {
      const auto number = hybridps::core::parse_int(value);
      if (!number || *number < 1 || *number > 64) return "--jobs is a number from 1 to 64";
      out.options.jobs = static_cast<int>(*number);
    } else if (name == "--metrics") {
      out.metrics = hybridps::core::expand_home(value);
    } else if (name == "--metrics-listen") {
      Result<hybridps::admission::Address> address = hybridps::admission::parse_address(std::string(value));
      if (!address.is_ok()) return "--metrics-listen: " + std::string(address.status().message());
      out.metrics_listen = std::move(address).value();
    } else if (name == "--status-seconds" || name == "--drain-seconds") {
      const auto number = hybridps::core::parse_double(value);
      if (!number || *number < 0) return std::string(name) + " is a number of seconds";
      (name == "--status-seconds" ? out.status_seconds : out.drain_seconds) = *number;
    } else {
      return "unknown argument " + std::string(name);
    }
  }
  return listens ? "" : "--listen HOST:PORT is needed";
}

std::string metrics_of(const ServerHostStats& s) {
  const auto number = [](std::uint64_t value) { return static_cast<double>(value); };
  const std::vector<hybridps::observe::Sample> samples = {
      {"server_groups", {}, number(s.groups)},
      {"server_groups_total", {}, number(s.groups_total)},
      {"server_engines", {}, number(s.engines)},
      {"server_chunks", {}, number(s.chunks)},
      {"server_summed_bytes", {}, number(s.bytes_summed)},
      {"server_received_bytes", {}, number(s.rx_payload_bytes)},
      {"server_sent_bytes", {}, number(s.tx_payload_bytes)},
      {"server_refused_messages", {}, number(s.refused_messages)},
      {"server_admission_accepted", {}, number(s.admission_accepted)},
      {"server_admission_refused", {}, number(s.admission_refused)},
  };
  return hybridps::observe::prometheus_text(samples, {});
}

// Serves until the server is stopped and has drained.
void serve(ServerHost& host, const Arguments& arguments) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point then) {
    return std::chrono::duration<double>(Clock::now() - then).count();
  };
  Clock::time_point status_at = Clock::now();
  Clock::time_point drained_at{};
  std::uint64_t summed = 0;
  for (;;) {
    usleep(20'000);
    const ServerHostStats s = host.stats();
    if (arguments.status_seconds > 0 && seconds_since(status_at) >= arguments.status_seconds) {
      const double mb = static_cast<double>(s.bytes_summed - summed) / 1e6 / seconds_since(status_at);
      char line[160];
      std::snprintf(line, sizeof line,
                    "%" PRIu64 " group%s of %" PRIu64 " process%s, %.1f MB/s summed, %" PRIu64 " MB in all", s.groups,
                    s.groups == 1 ? "" : "s", s.engines, s.engines == 1 ? "" : "es", mb, s.bytes_summed / 1'000'000);
      say(line);
      summed = s.bytes_summed;
      status_at = Clock::now();
    }
    if (signals_seen == 0) continue;
    if (drained_at == Clock::time_point{}) {
      drained_at = Clock::now();
      host.drain();
      say("stopping: " + std::to_string(s.groups) + (s.groups == 1 ? " group is open" : " groups are open") +
          (s.groups > 0 && arguments.drain_seconds > 0 ? "; a second signal leaves them" : ""));
    }
    if (s.groups == 0 || signals_seen > 1 || seconds_since(drained_at) > arguments.drain_seconds) break;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string_view> words(argv + 1, argv + argc);
  for (const std::string_view word : words) {
    if (word == "--help" || word == "-h") return std::fputs(kUsage, stdout) < 0;
    if (word == "--version") return std::printf("hybridps-server %s\n", hybridps::build_info::kVersion) < 0;
  }
  Arguments arguments;
  if (const std::string why = parse(words, arguments); !why.empty()) return wrong(why);

  Result<hybridps::core::Config> config = hybridps::core::Config::from_environment();
  if (!config.is_ok()) return wrong(std::string(config.status().message()));
  hybridps::core::set_log_level(config.value().log_level);
  for (const std::string& warning : config.value().warnings) hybridps::core::log_warn(warning);
  Result<hybridps::admission::Secret> secret = hybridps::engine::read_secret(config.value(), /*serves=*/true);
  if (!secret.is_ok()) return wrong(std::string(secret.status().message()));
  arguments.options.secret = std::move(secret).value();
  if (const auto& authority = arguments.options.secret.authority; authority && !authority->warning().empty())
    hybridps::core::log_warn(authority->warning());
  const std::string place = arguments.options.listen.text();
  if (!arguments.options.secret.second.empty())
    std::fprintf(stderr, "hybridps-server: jobs with the second token of HYBRIDPS_TOKEN_FILE are served, too\n");
  if (arguments.no_token && !arguments.options.secret.token.empty())
    return wrong("--no-token, and there is a token: leave one of them out");
  // Certificates say which jobs may come, as a token does.
  if (arguments.options.secret.token.empty() && !config.value().certificate_paths.any()) {
    if (!arguments.no_token && !hybridps::admission::is_loopback(arguments.options.listen))
      return wrong("there is no token (HYBRIDPS_TOKEN_FILE): whoever reaches " + place +
                   " could use this server; give it the jobs' token, or --no-token where the network is trusted");
    std::fprintf(stderr, "hybridps-server: no HYBRIDPS_TOKEN: whoever reaches %s may use this server\n", place.c_str());
  }

  struct sigaction action{};
  action.sa_handler = on_signal;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  signal(SIGPIPE, SIG_IGN);

  arguments.options.say = say;
  Result<std::unique_ptr<ServerHost>> started = ServerHost::start(arguments.options, config.value());
  if (!started.is_ok()) {
    std::fprintf(stderr, "hybridps-server: %s\n", std::string(started.status().message()).c_str());
    return 1;
  }
  ServerHost& host = *started.value();
  std::printf("hybridps-server %s listening on %s:%d, %d threads, %" PRIu64 " MiB, pid %d\n",
              hybridps::build_info::kVersion, arguments.options.listen.host.c_str(), host.port(),
              arguments.options.threads, arguments.options.memory_bytes >> 20, static_cast<int>(getpid()));
  std::fflush(stdout);

  std::unique_ptr<hybridps::observe::Outlet> outlet;
  if (!arguments.metrics.empty() || !arguments.metrics_listen.host.empty()) {
    hybridps::observe::OutletOptions o;
    o.file = arguments.metrics;
    o.listen_host = arguments.metrics_listen.host;
    o.listen_port = arguments.metrics_listen.port;
    o.metrics = [&host] { return metrics_of(host.stats()); };
    auto opened = hybridps::observe::Outlet::open(std::move(o));
    if (!opened.is_ok()) {
      std::fprintf(stderr, "hybridps-server: %s\n", std::string(opened.status().message()).c_str());
      return 1;
    }
    outlet = std::move(opened).value();
    if (outlet->port() > 0)
      say("metrics at http://" + arguments.metrics_listen.host + ":" + std::to_string(outlet->port()) + "/metrics");
  }

  serve(host, arguments);
  host.dismiss("it was stopped");
  outlet.reset();  // writes the metrics file once more
  say("stopped");
  return 0;
}
