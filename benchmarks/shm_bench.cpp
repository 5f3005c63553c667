// shm_bench: the shared memory transport between two processes, beside memcpy in the same run.
//
//   cmake --build --preset release --target benchmarks
//   build/release/benchmarks/shm_bench [seconds per figure]           default: 1
//
// Latency  half of a round trip; best and median of many batches of 200. "spin": both sides call progress()
// without
//          pause; "event": both sleep in poll() on event_fd() between messages.
// Stream   8 messages in flight. "carry": the sender copies in, the receiver copies out, as a job does.
// "lend": the
//          sender sends a full buffer again, the receiver looks at its first byte, which is the cost of the
//          transport. GB/s counts each payload byte once. memcpy: one process, one thread, between the same
//          sizes of buffers.
// The two processes are bound to the first and the last core they may use. 1 GB = 1e9 B.
#include <poll.h>
#include <sched.h>
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
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "hybridps/intranode/shm/shm_transport.h"
#include "hybridps/transport/buffer_pool.h"

namespace {

using hybridps::core::EngineId;
using hybridps::core::Status;
using hybridps::intranode::shm::ProofState;
using hybridps::intranode::shm::ShmOptions;
using hybridps::intranode::shm::ShmTransport;
using hybridps::transport::Buffer;
using hybridps::transport::BufferPool;
using hybridps::transport::Endpoint;
using hybridps::transport::RxPayload;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kLargestBytes = std::size_t{1} << 20;
constexpr std::size_t kSlots = 32;
constexpr std::size_t kHeaderBytes = 64;
constexpr std::size_t kInFlightMax = 8;

enum class Command : std::uint8_t { kPing, kCarry, kLend, kAnswer, kStop };

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "shm_bench: %s\n", what);
  std::exit(1);
}

/// One process's end. The child echoes pings and takes streams until told to stop.
struct End final : hybridps::transport::Receiver {
  EngineId id = hybridps::core::make_engine_id();
  std::unique_ptr<ShmTransport> shm;
  std::shared_ptr<void> memory;
  std::unique_ptr<BufferPool> pool;
  Endpoint* peer = nullptr;
  std::uint64_t answers = 0;
  std::uint64_t taken_bytes = 0;
  bool stop = false;
  bool sleeps = false;
  std::vector<std::byte> outside = std::vector<std::byte>(64 * kLargestBytes);
  std::size_t place = 0;

  ~End() override {
    shm.reset();
    pool.reset();
  }

  void open() {
    ShmOptions options;
    options.self = id;
    options.pool_bytes = kSlots * kLargestBytes;
    auto made = ShmTransport::create(options);
    if (!made.is_ok()) fail(made.status().to_string().c_str());
    shm = std::move(made).value();
    memory = shm->keep_pool_memory();
    const BufferPool::SizeClass classes[] = {{kLargestBytes, kSlots}};
    pool = std::make_unique<BufferPool>(shm->pool_memory(), classes);
    if (!shm->attach(shm->pool_memory()).is_ok()) fail("attach");
    shm->set_receiver(this);
  }
  void meet(int channel) {
    std::vector<std::byte> bytes = shm->address();
    const std::size_t address_bytes = bytes.size();
    bytes.resize(address_bytes + sizeof id.value);
    std::memcpy(bytes.data() + address_bytes, &id.value, sizeof id.value);
    if (::send(channel, bytes.data(), bytes.size(), 0) < 0) fail("send");
    std::vector<std::byte> theirs(1024);
    const ssize_t got = ::recv(channel, theirs.data(), theirs.size(), 0);
    if (got < static_cast<ssize_t>(sizeof id.value)) fail("recv");
    EngineId other;
    theirs.resize(static_cast<std::size_t>(got));
    std::memcpy(&other.value, theirs.data() + theirs.size() - sizeof other.value, sizeof other.value);
    theirs.resize(theirs.size() - sizeof other.value);
    auto endpoint = shm->connect(other, theirs);
    if (!endpoint.is_ok()) fail(endpoint.status().to_string().c_str());
    peer = endpoint.value();
    while (shm->proof(other).state != ProofState::kProven) shm->progress();
  }

  void say(Command command, const Buffer& payload = {}, std::size_t bytes = 0,
           hybridps::transport::SendDone done = {}) {
    std::byte header[kHeaderBytes] = {};
    header[0] = static_cast<std::byte>(command);
    header[1] = static_cast<std::byte>(sleeps);
    if (!peer->send(header, payload, bytes, std::move(done)).is_ok()) fail("send");
  }
  void on_message(std::span<const std::byte> header, RxPayload payload) noexcept override {
    const auto command = static_cast<Command>(header[0]);
    switch (command) {
      case Command::kPing: sleeps = header[1] != std::byte{0}; return say(Command::kAnswer);
      case Command::kAnswer: ++answers; return;
      case Command::kStop: stop = true; return;
      case Command::kCarry:
        sleeps = header[1] != std::byte{0};
        place = place + payload.bytes() > outside.size() - kLargestBytes ? 0 : place + payload.bytes();
        std::memcpy(outside.data() + place, payload.data(), payload.bytes());
        break;
      case Command::kLend:
        sleeps = header[1] != std::byte{0};
        outside[0] = payload.data()[0];
        break;
    }
    taken_bytes += payload.bytes();
  }
  void on_peer_failed(EngineId, Status) noexcept override { stop = true; }

  void turn() {
    if (shm->progress() > 0 || !sleeps || !shm->arm()) return;
    pollfd event{shm->event_fd(), POLLIN, 0};
    ::poll(&event, 1, 1000);
  }
};

void latency(End& end, const char* name, bool sleeps, double seconds) {
  end.sleeps = sleeps;
  constexpr int kBatch = 200;
  std::vector<double> batches;
  const auto start = Clock::now();
  const auto wakeups = end.shm->counters().wakeups_sent;
  const auto answers = end.answers;
  while (seconds_since(start) < seconds || batches.size() < 3) {
    const auto batch = Clock::now();
    for (int i = 0; i < kBatch; ++i) {
      const std::uint64_t target = end.answers + 1;
      end.say(Command::kPing);
      while (end.answers < target) end.turn();
    }
    batches.push_back(seconds_since(batch) / kBatch / 2 * 1e6);
  }
  std::sort(batches.begin(), batches.end());
  std::printf("latency 64 B, %-5s  best %7.2f us   median %7.2f us   wake-ups per message %.2f\n", name,
              batches.front(), batches[batches.size() / 2],
              double(end.shm->counters().wakeups_sent - wakeups) / double(end.answers - answers));
  end.sleeps = false;
  const std::uint64_t target = end.answers + 1;
  end.say(Command::kPing);  // tells the other side too
  while (end.answers < target) end.turn();
}

double stream(End& end, Command command, bool sleeps, std::size_t bytes, double seconds) {
  end.sleeps = sleeps;
  std::size_t in_flight = 0;
  std::uint64_t finished = 0;
  std::size_t place = 0;
  std::vector<Buffer> full;
  for (std::size_t i = 0; i < kInFlightMax; ++i) {
    full.push_back(end.pool->allocate(bytes));
    std::memset(full.back().data(), 1, bytes);
  }
  std::size_t next = 0;
  const auto done = [&](Status) { --in_flight, ++finished; };
  const auto start = Clock::now();
  while (seconds_since(start) < seconds) {
    while (in_flight < kInFlightMax) {
      if (command == Command::kCarry) {
        Buffer buffer = end.pool->allocate(bytes);
        if (!buffer) break;
        place = place + bytes > end.outside.size() - kLargestBytes ? 0 : place + bytes;
        std::memcpy(buffer.data(), end.outside.data() + place, bytes);
        end.say(command, buffer, bytes, done);
      } else {
        end.say(command, full[next++ % kInFlightMax], bytes, done);
      }
      ++in_flight;
    }
    end.turn();
  }
  const double rate = double(finished) * double(bytes) / seconds_since(start) / 1e9;
  while (in_flight > 0) end.turn();
  full.clear();
  end.sleeps = false;
  const std::uint64_t target = end.answers + 1;
  end.say(Command::kPing);
  while (end.answers < target) end.turn();
  return rate;
}

double copy_rate(End& end, std::size_t bytes, double seconds) {
  std::vector<std::byte> slots(kSlots * kLargestBytes);
  std::size_t place = 0;
  std::size_t slot = 0;
  std::uint64_t count = 0;
  std::memset(slots.data(), 1, slots.size());
  const auto start = Clock::now();
  while (seconds_since(start) < seconds) {
    for (int i = 0; i < 8; ++i, ++count) {
      place = place + bytes > end.outside.size() - kLargestBytes ? 0 : place + bytes;
      std::memcpy(slots.data() + (slot++ % kInFlightMax) * kLargestBytes, end.outside.data() + place, bytes);
    }
  }
  return double(count) * double(bytes) / seconds_since(start) / 1e9;
}

void bind_to_core(bool last) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ::sched_getaffinity(0, sizeof allowed, &allowed);
  int chosen = -1;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed) && (last || chosen < 0)) chosen = core;
  }
  CPU_ZERO(&allowed);
  CPU_SET(chosen, &allowed);
  ::sched_setaffinity(0, sizeof allowed, &allowed);
}

int serve(int channel) {
  End end;
  end.open();
  end.meet(channel);
  while (!end.stop) end.turn();
  return 0;
}

}  // namespace

int main(int argc, char* argv[]) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) fail("socketpair");
  const pid_t child = ::fork();
  bind_to_core(child == 0);
  if (child == 0) ::_exit(serve(ends[1]));
  End end;
  end.open();
  end.meet(ends[0]);
  std::memset(end.outside.data(), 1, end.outside.size());

  latency(end, "spin", false, seconds);
  latency(end, "event", true, seconds);
  std::printf("\n%10s %10s %12s %12s %12s %12s\n", "bytes", "memcpy", "carry spin", "carry event", "lend spin",
              "of memcpy");
  for (const std::size_t bytes : {std::size_t{64} << 10, std::size_t{256} << 10, std::size_t{1} << 20}) {
    const double copy = copy_rate(end, bytes, seconds);
    const double spin = stream(end, Command::kCarry, false, bytes, seconds);
    const double event = stream(end, Command::kCarry, true, bytes, seconds);
    const double lend = stream(end, Command::kLend, false, bytes, seconds);
    std::printf("%10zu %10.2f %12.2f %12.2f %12.2f %11.0f%%\n", bytes, copy, spin, event, lend,
                100 * std::max(spin, event) / copy);
  }
  end.say(Command::kStop);
  for (int i = 0; i < 100; ++i) end.shm->progress();
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
