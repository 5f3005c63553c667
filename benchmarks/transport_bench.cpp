// benchmarks/transport_bench.cpp: latency and bandwidth of one UCX connection between two processes.
//
//   cmake --build --preset release --target benchmarks
//   build/release/benchmarks/transport_bench [device] [seconds per line]        default: lo 0.5
//
// Two processes, forked before UCX starts. Two ways to wait: "event" sleeps on the event descriptor as an
// engine does, "spin" polls. Ping-pong: half a round trip, median and 99th percentile. Streaming: one way, 16
// messages in flight; the rate counts what the receiver got. CPU: seconds of both processes per GB streamed.
// Numbers on `lo` mislead about networks (UCX guesses its speed): compare versions with them, nothing else.
// On fewer free cores than two, spinning measures the scheduler.
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/transport/ucx/ucx_transport.h"

namespace {

using namespace hybridps;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kInFlight = 16;
constexpr std::size_t kSizes[] = {0, 64, 512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "transport_bench: %s\n", what.c_str());
  std::_Exit(1);
}

/// The first byte of a header: 'P' asks for an answer of the same size, 'S' for none, 'B' and 'E' begin and
/// end a stream, 'e' and 's' choose how to wait, 'Q' ends the run.
struct Node final : transport::Receiver {
  core::EngineId id = core::make_engine_id();
  std::unique_ptr<std::byte[], void (*)(std::byte*)> memory{
      new (std::align_val_t{4096}) std::byte[kPoolBytes],
      [](std::byte* p) { ::operator delete[](p, std::align_val_t{4096}); }};
  static constexpr std::size_t kPoolBytes = (std::size_t{1} << 20) * (kInFlight + 1);
  std::unique_ptr<transport::BufferPool> pool;
  std::unique_ptr<transport::UcxTransport> net;
  transport::Endpoint* peer = nullptr;
  bool spin = false;
  bool ending = false;

  std::size_t received = 0;
  std::size_t in_flight = 0;
  std::uint64_t peer_cpu_us = 0;
  std::function<void(char, std::size_t)> hook;

  void on_message(std::span<const std::byte> header, transport::RxPayload payload) noexcept override {
    ++received;
    const char kind = static_cast<char>(header[0]);
    if (header.size() == 1 + sizeof peer_cpu_us) std::memcpy(&peer_cpu_us, header.data() + 1, sizeof peer_cpu_us);
    const std::size_t bytes = payload.bytes();
    payload.reset();
    if (hook) hook(kind, bytes);
  }
  void on_peer_failed(core::EngineId, core::Status cause) noexcept override {
    if (!ending) die(cause.to_string());
  }

  void start(const std::string& device, int wire) {
    std::memset(memory.get(), 1, kPoolBytes);
    const transport::BufferPool::SizeClass classes[] = {{std::size_t{1} << 20, kInFlight + 1}};
    pool = std::make_unique<transport::BufferPool>(std::span(memory.get(), kPoolBytes), classes);
    transport::UcxOptions options;
    options.net_device = device;
    auto made = transport::UcxTransport::create(options);
    if (!made.is_ok()) die(made.status().to_string());
    net = std::move(made).value();
    net->set_receiver(this);
    if (auto status = net->attach({memory.get(), kPoolBytes}); !status.is_ok()) die(status.to_string());
    struct {
      std::uint64_t id;
      std::uint64_t bytes;
      std::byte address[1024];
    } card{};
    const auto address = net->address();
    card.id = id.value;
    card.bytes = address.size();
    std::memcpy(card.address, address.data(), address.size());
    if (::write(wire, &card, sizeof card) != sizeof card || ::read(wire, &card, sizeof card) != sizeof card)
      die("no exchange of addresses");
    auto endpoint = net->connect(core::EngineId{card.id}, std::span(card.address, card.bytes));
    if (!endpoint.is_ok()) die(endpoint.status().to_string());
    peer = endpoint.value();
  }

  void send(char kind, std::size_t bytes) {
    const std::byte header[64] = {static_cast<std::byte>(kind)};
    transport::Buffer buffer = bytes > 0 ? pool->allocate(bytes) : transport::Buffer();
    ++in_flight;
    const auto status = peer->send(header, buffer, bytes, [this](core::Status) { --in_flight; });
    if (!status.is_ok()) die(status.to_string());
  }

  void wait_for(const std::function<bool()>& condition) {
    for (;;) {
      while (net->progress() > 0) {
      }
      if (condition()) return;
      if (spin || !net->arm()) continue;
      pollfd event{net->event_fd(), POLLIN, 0};
      (void)::poll(&event, 1, 100);
    }
  }
};

/// Answers and swallows until told to stop; reports its CPU time at the end of a stream.
void serve(Node& node) {
  double cpu_before = cpu_seconds();
  bool quit = false;
  node.hook = [&](char kind, std::size_t bytes) {
    if (kind == 'P') node.send('P', bytes);
    if (kind == 'B') cpu_before = cpu_seconds();
    if (kind == 'E') {
      const auto cpu_us = static_cast<std::uint64_t>((cpu_seconds() - cpu_before) * 1e6);
      std::byte header[9] = {std::byte{'E'}};
      std::memcpy(header + 1, &cpu_us, sizeof cpu_us);
      ++node.in_flight;
      const auto status = node.peer->send(header, {}, 0, [&node](core::Status) { --node.in_flight; });
      if (!status.is_ok()) die(status.to_string());
    }
    if (kind == 'e' || kind == 's') node.spin = kind == 's';
    quit = quit || kind == 'Q';
  };
  node.wait_for([&] { return quit; });
}

void measure(Node& node, double seconds) {
  std::printf("%-6s %10s %12s %12s %12s %12s\n", "wait", "bytes", "p50 us", "p99 us", "GB/s", "CPU s/GB");
  for (const bool spin : {false, true}) {
    node.spin = spin;
    node.send(spin ? 's' : 'e', 0);
    for (const std::size_t bytes : kSizes) {
      std::vector<double> rounds;
      const auto ping = [&] {
        const std::size_t before = node.received;
        node.send('P', bytes);
        node.wait_for([&] { return node.received > before && node.in_flight == 0; });
      };
      for (int i = 0; i < 20; ++i) ping();
      for (const auto start = Clock::now(); seconds_since(start) < seconds;) {
        const auto sent = Clock::now();
        ping();
        rounds.push_back(seconds_since(sent) / 2 * 1e6);
      }
      std::sort(rounds.begin(), rounds.end());
      const double p50 = rounds[rounds.size() / 2];
      const double p99 = rounds[rounds.size() * 99 / 100];
      if (bytes == 0) {
        std::printf("%-6s %10zu %12.1f %12.1f %12s %12s\n", spin ? "spin" : "event", bytes, p50, p99, "-", "-");
        continue;
      }
      // The end is confirmed by the receiver, so what is counted has arrived.
      node.send('B', 0);
      std::uint64_t sent_bytes = 0;
      const double cpu_before = cpu_seconds();
      const auto start = Clock::now();
      while (seconds_since(start) < seconds) {
        while (node.in_flight < kInFlight) {
          node.send('S', bytes);
          sent_bytes += bytes;
        }
        node.wait_for([&] { return node.in_flight < kInFlight; });
      }
      node.wait_for([&] { return node.in_flight == 0; });
      const std::size_t before = node.received;
      node.send('E', 0);
      node.wait_for([&] { return node.received > before; });
      const double took = seconds_since(start);
      const double cpu = cpu_seconds() - cpu_before + 1e-6 * static_cast<double>(node.peer_cpu_us);
      const double gigabytes = static_cast<double>(sent_bytes) / 1e9;
      std::printf("%-6s %10zu %12.1f %12.1f %12.3f %12.3f\n", spin ? "spin" : "event", bytes, p50, p99,
                  gigabytes / took, cpu / gigabytes);
      std::fflush(stdout);
    }
  }
  node.ending = true;  // the other side may go first
  node.send('Q', 0);
  node.wait_for([&] { return node.in_flight == 0; });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string device = argc > 1 ? argv[1] : "lo";
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.5;
  int wire[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, wire) != 0) die("no socket pair");
  const pid_t child = ::fork();
  if (child < 0) die("cannot fork");
  {
    Node node;
    node.start(device, wire[child == 0 ? 1 : 0]);
    if (child == 0) {
      serve(node);
      return 0;
    }
    std::printf("UCX %s on %s, %s\n", transport::ucx_version().c_str(), device.c_str(),
                transport::ucx_library_path().c_str());
    measure(node, seconds);
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  }
}
