// UCX itself over the loopback interface: what the contract does not cover.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "hybridps/transport/ucx/fork_guard.h"
#include "tests/unit/transport/ucx/ucx_pair.h"

namespace hybridps::transport {
namespace {

using contract::numbered;

void warm_up(contract::Pair& pair) {
  for (auto [from, to] : {std::pair(&pair.a, &pair.b), std::pair(&pair.b, &pair.a)}) {
    REQUIRE(from->peer->send(numbered(0), {}, 0, {}).is_ok());
    REQUIRE(pair.run_until([to = to] { return to->receiver.messages.size() == 1; }));
  }
  pair.release_all();
  pair.settle();
}

std::size_t sockets_of_this_process() {
  std::size_t count = 0;
  for (const int fd : open_descriptors()) {
    int type = 0;
    socklen_t bytes = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0) ++count;
  }
  return count;
}

TEST_CASE("transport/ucx: the control worker carries messages", "[transport][fast]") {
  UcxOptions options = test_options("control");
  options.tcp_only = true;
  auto pair = make_ucx_pair(options);
  CHECK(pair->a.transport->name() == "ucx control");
  pair->connect();
  warm_up(*pair);
}

TEST_CASE("transport/ucx: eager and rendezvous messages both arrive", "[transport][fast]") {
  auto pair = make_ucx_pair();
  pair->connect();
  for (std::uint64_t i = 0; i < 8; ++i) {
    const std::size_t bytes = i % 2 == 0 ? 60000 : contract::kLargeBytes;
    Buffer payload = pair->a.filled(bytes, i);
    REQUIRE(payload);
    REQUIRE(pair->a.peer->send(numbered(i), payload, bytes, {}).is_ok());
    payload = Buffer();
    REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
    const std::byte* data = pair->b.receiver.messages[0].payload.data();
    CHECK(contract::matches(data, bytes, i));
    CHECK(reinterpret_cast<std::uintptr_t>(data) % 64 == 0);
    pair->release_all();
    pair->settle(20);
  }
  const UcxCounters counters = ucx(pair->b).counters();
  CHECK(counters.receives_kept + counters.receives_copied + counters.receives_rendezvous == 8);
  CHECK(counters.receives_failed == 0);
  CHECK(counters.dropped_malformed == 0);
  CHECK(counters.receive_slots_in_use == 0);
}

TEST_CASE("transport/ucx: a peer that sends before we connect is heard", "[transport][fast]") {
  auto pair = make_ucx_pair();
  contract::Pair::connect_one(pair->a, pair->b);
  REQUIRE(pair->a.peer->send(numbered(5), pair->a.filled(60000, 5), 60000, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  contract::Pair::connect_one(pair->b, pair->a);
  REQUIRE(pair->b.peer->send(numbered(6), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->a.receiver.messages.size() == 1; }));
}

TEST_CASE("transport/ucx: transports come and go in one process", "[transport][fast]") {
  for (int i = 0; i < 5; ++i) {
    auto pair = make_ucx_pair();
    pair->connect();
    warm_up(*pair);
  }
}

TEST_CASE("transport/ucx: destruction does not wait for its limit when the peer runs", "[transport][fast]") {
  UcxOptions options = test_options();
  options.close_timeout = core::from_seconds(30);
  auto pair = make_ucx_pair(options);
  pair->connect();
  warm_up(*pair);
  REQUIRE(pair->a.peer->send(numbered(1), pair->a.filled(60000, 1), 60000, {}).is_ok());
  const auto started = std::chrono::steady_clock::now();
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) pair->b.progress();
  });
  pair->a.transport.reset();
  stop = true;
  other.join();
  CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(15));
  CHECK(pair->b.receiver.messages.size() == 1);
  CHECK(pair->run_until([&] { return pair->b.receiver.failures.size() == 1; }));
}

TEST_CASE("transport/ucx: sockets are found and closed on exec", "[transport][fast]") {
  const std::size_t before = sockets_of_this_process();
  auto pair = make_ucx_pair();
  pair->connect();
  warm_up(*pair);
  if (open_descriptors().empty()) return;  // no /proc
  const std::size_t made = sockets_of_this_process() - before;
  CHECK(made >= 4);  // two listeners, one connection with two ends
  (void)pair->a.transport->arm();
  (void)pair->b.transport->arm();
  std::size_t close_on_exec = 0;
  for (const int fd : open_descriptors()) {
    int type = 0;
    socklen_t bytes = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0)
      ++close_on_exec;
  }
  CHECK(close_on_exec >= made);
}

/// In a forked child: exit code 0 when all is well.
int check_child(contract::Pair& pair, std::size_t sockets_before_ucx) {
  if (sockets_of_this_process() != sockets_before_ucx) return 10;
  if (!ucx_inherited_by_fork()) return 11;
  if (pair.a.transport->progress() != 0) return 12;
  if (!pair.a.transport->arm()) return 13;
  contract::Side::Done done;
  if (pair.a.peer->send(numbered(1), {}, 0, pair.a.record(done)).code() != core::Code::kClosed) return 14;
  pair.a.peer->close(core::Status(core::Code::kPeerDead, "in the child"));
  if (pair.a.transport->connect(core::EngineId{9}, pair.b.transport->address()).is_ok()) return 15;
  if (UcxTransport::create(test_options()).status().code() != core::Code::kUnsupported) return 16;
  pair.a.transport.reset();
  pair.b.transport.reset();
  return done.count == 0 ? 0 : 17;
}

TEST_CASE("transport/ucx: a forked child keeps no socket and cannot harm its parent", "[transport][fast]") {
  const std::size_t before = sockets_of_this_process();
  auto pair = make_ucx_pair();
  pair->connect();
  warm_up(*pair);
  contract::Side::Done pending;
  REQUIRE(
      pair->a.peer
          ->send(numbered(1), pair->a.filled(contract::kLargeBytes, 1), contract::kLargeBytes, pair->a.record(pending))
          .is_ok());
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(check_child(*pair, before));
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  // The parent goes on as if nothing had happened.
  CHECK(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  CHECK(contract::matches(pair->b.receiver.messages[0].payload.data(), contract::kLargeBytes, 1));
  pair->release_all();
  CHECK(pair->run_until([&] { return pending.count == 1; }));
  warm_up(*pair);
  CHECK(pair->a.receiver.failures.empty());
}

/// What one process tells another: a UCX address and an engine id, through a pipe.
struct Card {
  core::EngineId id;
  std::uint32_t bytes = 0;
  std::byte address[512];
};
bool write_card(int fd, const contract::Side& side) {
  Card card;
  const auto address = side.transport->address();
  card.id = side.id;
  card.bytes = static_cast<std::uint32_t>(address.size());
  std::memcpy(card.address, address.data(), address.size());
  return ::write(fd, &card, sizeof card) == sizeof card;
}
bool read_card(int fd, Card* card) { return ::read(fd, card, sizeof *card) == sizeof *card; }

bool connect_to(contract::Side& side, const Card& card) {
  auto endpoint = side.transport->connect(card.id, std::span(card.address, card.bytes));
  if (!endpoint.is_ok()) return false;
  side.peer = endpoint.value();
  return true;
}

/// A process of its own that answers each message, and has a child of its own that lives on.
[[noreturn]] void run_victim(int from_parent, int to_parent) {
  contract::Side side;
  side.use_heap();
  auto made = UcxTransport::create(test_options());
  Card card;
  if (!made.is_ok() || !read_card(from_parent, &card)) _exit(1);
  side.transport = std::move(made).value();
  if (!side.transport->attach(side.memory).is_ok()) _exit(2);
  side.transport->set_receiver(&side.receiver);
  if (!write_card(to_parent, side) || !connect_to(side, card)) _exit(3);
  bool forked = false;
  for (;;) {
    contract::wait_for_event(side, 50);
    while (!side.receiver.messages.empty()) {
      side.receiver.messages.pop_front();
      if (!forked) {
        forked = true;
        if (fork() == 0) {  // as a DataLoader worker: it touches nothing and outlives us, until the case ends
          char end;
          while (::read(from_parent, &end, 1) > 0) {
          }
          _exit(0);
        }
      }
      if (!side.peer->send(numbered(1), {}, 0, {}).is_ok()) _exit(4);
    }
  }
}

TEST_CASE("transport/ucx: a killed process is noticed though its forked child lives", "[transport]") {
  int down[2];
  int up[2];
  REQUIRE(pipe(down) == 0);
  REQUIRE(pipe(up) == 0);
  const pid_t victim = fork();  // before UCX is used in the parent's case; the child makes its own
  REQUIRE(victim >= 0);
  if (victim == 0) {
    ::close(down[1]);  // so that the pipe ends with the case
    ::close(up[0]);
    if (ucx_inherited_by_fork()) {
      // An earlier case used UCX in this process: start afresh.
      const std::string in = std::to_string(down[0]);
      const std::string out = std::to_string(up[1]);
      setenv("HYBRIDPS_TEST_VICTIM_IN", in.c_str(), 1);
      setenv("HYBRIDPS_TEST_VICTIM_OUT", out.c_str(), 1);
      execl("/proc/self/exe", "victim", "transport/ucx: (victim)", static_cast<char*>(nullptr));
      _exit(9);
    }
    run_victim(down[0], up[1]);
  }
  ::close(up[1]);  // so that a victim that could not start ends the wait for its address
  contract::Side side;
  side.use_heap();
  auto made = UcxTransport::create(test_options());
  REQUIRE(made.is_ok());
  side.transport = std::move(made).value();
  REQUIRE(side.transport->attach(side.memory).is_ok());
  side.transport->set_receiver(&side.receiver);
  REQUIRE(write_card(down[1], side));
  Card card;
  REQUIRE(read_card(up[0], &card));
  REQUIRE(connect_to(side, card));
  REQUIRE(side.peer->send(numbered(1), {}, 0, {}).is_ok());
  const auto wait_until = [&](const std::function<bool()>& condition, double seconds) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!condition() && std::chrono::steady_clock::now() < deadline) contract::wait_for_event(side, 50);
    return condition();
  };
  CHECK(wait_until([&] { return !side.receiver.messages.empty(); }, 20));
  side.receiver.messages.clear();
  contract::Side::Done done;
  kill(victim, SIGKILL);
  CHECK(side.peer->send(numbered(2), side.filled(contract::kLargeBytes, 2), contract::kLargeBytes, side.record(done))
            .is_ok());
  CHECK(wait_until([&] { return !side.receiver.failures.empty() && done.count == 1; }, 20));  // it still lives
  int status = 0;
  waitpid(victim, &status, 0);
  for (const int fd : {down[0], down[1], up[0]}) ::close(fd);
  CHECK(side.pool->slots_in_use() == 0);
  side.transport.reset();
}

// Not a case of its own: what the case above executes.
TEST_CASE("transport/ucx: (victim)", "[.victim]") {
  const char* in = std::getenv("HYBRIDPS_TEST_VICTIM_IN");
  const char* out = std::getenv("HYBRIDPS_TEST_VICTIM_OUT");
  if (in == nullptr || out == nullptr) return;
  run_victim(std::atoi(in), std::atoi(out));
}

}  // namespace
}  // namespace hybridps::transport
