// Real processes: death, forked children, other users. Each test forks before it makes anything.
#include <fcntl.h>
#include <grp.h>

#include <random>
#include <string>
#include <thread>

#include "hybridps/intranode/shm/handshake.h"
#include "hybridps/intranode/shm/shm_transport.h"
#include "tests/support/catch.h"
#include "tests/unit/intranode/shm/shm_sides.h"

namespace hybridps::intranode::shm {
namespace {

using transport::Buffer;
using transport::contract::matches;
using transport::contract::number_of;
using transport::contract::numbered;

/// In both processes: meet over the channel and connect.
void meet(Side& side, int channel) {
  REQUIRE(tell(channel, side.id, side.transport->address()));
  const auto [id, address] = hear(channel);
  REQUIRE(id.value != 0);
  side.peer = link(side, id, address);
  REQUIRE(sleep_until(side, [&, peer = id] { return shm_of(side).proof(peer).state == ProofState::kProven; }, 20));
}

/// An engine of a child process that receives until it is killed.
int live_until_killed(int channel) {
  Side side;
  open_side(side);
  meet(side, channel);
  REQUIRE(side.peer->send(numbered(1), side.filled(60000, 1), 60000, {}).is_ok());
  signal_step(channel);
  sleep_until(side, [] { return false; }, 60);
  return 1;
}

TEST_CASE("intranode/shm: two processes exchange 100000 messages and check each", "[intranode][fast]") {
  constexpr std::uint64_t kCount = 50000;
  const auto work = [](int channel, std::uint64_t seed) {
    Side side;
    open_side(side);
    meet(side, channel);
    std::mt19937_64 random(seed);
    std::uint64_t sent = 0;
    std::uint64_t completed = 0;
    std::uint64_t wrong = 0;
    std::vector<std::uint8_t> seen(kCount);
    const auto done = [&] {
      while (sent < kCount) {
        const std::size_t sizes[] = {0, 8, 100, 256, 257, 1000, 4000, 60000};
        const std::size_t bytes = sizes[random() % (sent % 100 == 0 ? 8 : 7)];
        Buffer payload = bytes > 0 ? side.filled(bytes, sent) : Buffer();
        if (bytes > 0 && !payload) break;
        wrong +=
            !side.peer->send(numbered(sent++), payload, bytes, [&](core::Status s) { completed += s.is_ok(); }).is_ok();
      }
      auto& messages = side.receiver.messages;
      const bool last = completed == kCount || sent == kCount;
      while (messages.size() > (last ? 0 : 4)) {
        const auto which = messages.begin() + static_cast<std::ptrdiff_t>(random() % messages.size());
        const std::uint64_t number = number_of(which->header);
        if (number >= kCount || seen[number]++ != 0) ++wrong;
        if (!matches(which->payload.data(), which->payload.bytes(), number)) ++wrong;
        messages.erase(which);
      }
      return completed == kCount && side.transport->stats().rx_messages == kCount && messages.empty();
    };
    const bool finished = sleep_until(side, done, 120);
    // Leave together: an early end would be seen as a failure.
    signal_step(channel);
    await_step(channel);
    for (std::uint8_t each : seen) wrong += each != 1;
    return finished && wrong == 0 && side.receiver.failures.empty() && side.pool->slots_in_use() == 0 ? 0 : 1;
  };
  Process child([&](int channel) { return work(channel, 1); });
  CHECK(work(child.channel(), 2) == 0);
  CHECK(child.wait() == 0);
}

TEST_CASE("intranode/shm: a killed peer is noticed at once and leaves nothing behind", "[intranode][fast]") {
  const std::size_t names = segment_names();
  Process child(live_until_killed);
  const std::size_t descriptors = open_descriptors();
  {
    Side side;
    open_side(side);
    const std::size_t alone = open_descriptors();
    meet(side, child.channel());
    REQUIRE(await_step(child.channel()));
    REQUIRE(sleep_until(side, [&] { return side.receiver.messages.size() == 1; }, 10));
    child.kill(SIGSTOP);  // it reads nothing more: all of this is in flight when it dies
    std::vector<Side::Done> done(300);
    for (std::size_t i = 0; i < done.size(); ++i) {
      const std::size_t bytes = i < 10 ? 60000 : 0;
      REQUIRE(side.peer->send(numbered(i), bytes > 0 ? side.filled(bytes, i) : Buffer(), bytes, side.record(done[i]))
                  .is_ok());
    }
    for (int i = 0; i < 100; ++i) side.progress();
    CHECK(done[0].count == 0);
    CHECK(side.receiver.failures.empty());
    const core::EngineId peer = side.peer->peer();
    const auto start = std::chrono::steady_clock::now();
    child.kill(SIGKILL);
    REQUIRE(sleep_until(side, [&] { return side.receiver.failures.size() == 1; }, 10));
    CHECK(seconds_since(start) < 1);
    CHECK(side.receiver.failures[0].first == peer);
    CHECK(side.receiver.failures[0].second.code() == core::Code::kPeerDead);
    CHECK(side.receiver.failures[0].second.message() == hybridps::transport::kEndedWithoutClosing);
    for (int i = 0; i < 10; ++i) side.progress();
    for (std::size_t i = 0; i < done.size(); ++i) CHECK(done[i].count == 1);
    CHECK(done[0].last.code() == core::Code::kPeerDead);
    CHECK(done[299].last.code() == core::Code::kPeerDead);
    CHECK(side.pool->slots_in_use() == 0);
    CHECK(matches(side.receiver.messages[0].payload.data(), 60000, 1));  // still held
    side.receiver.messages.clear();
    for (int i = 0; i < 10; ++i) side.progress();
    CHECK(open_descriptors() == alone);
  }
  CHECK(child.wait() == -SIGKILL);
  CHECK(open_descriptors() == descriptors);
  CHECK(segment_names() == names);
}

TEST_CASE("intranode/shm: a killed parent is noticed while its forked child lives", "[intranode][fast]") {
  int alive[2];  // its end of file: the grandchild has ended
  REQUIRE(::pipe2(alive, O_CLOEXEC) == 0);
  int hold[2];
  REQUIRE(::pipe2(hold, O_CLOEXEC) == 0);
  Process child([&](int channel) {
    ::close(hold[1]);
    Side side;
    open_side(side);
    meet(side, channel);
    if (::fork() == 0) {  // as a DataLoader worker
      char byte;
      static_cast<void>(!::read(hold[0], &byte, 1));
      ::_exit(0);
    }
    signal_step(channel);
    sleep_until(side, [] { return false; }, 60);
    return 1;
  });
  ::close(alive[1]);
  Side side;
  open_side(side);
  meet(side, child.channel());
  REQUIRE(await_step(child.channel()));
  CHECK_FALSE(sleep_until(side, [&] { return !side.receiver.failures.empty(); }, 0.3));
  const auto start = std::chrono::steady_clock::now();
  child.kill(SIGKILL);
  CHECK(sleep_until(side, [&] { return side.receiver.failures.size() == 1; }, 10));
  CHECK(seconds_since(start) < 1);
  pollfd event{alive[0], POLLIN, 0};
  CHECK(::poll(&event, 1, 0) == 0);  // the grandchild was alive all the time
  ::close(hold[1]);
  ::close(hold[0]);
  ::poll(&event, 1, 5000);
  ::close(alive[0]);
}

TEST_CASE("intranode/shm: an engine that ends in an orderly way is not called dead", "[intranode][fast]") {
  Process child([](int channel) {
    Side side;
    open_side(side);
    meet(side, channel);
    await_step(channel);  // or the other would find a proof that has come and gone
    return side.peer->send(numbered(7), {}, 0, {}).is_ok() ? 0 : 1;
  });
  Side side;
  open_side(side);
  meet(side, child.channel());
  signal_step(child.channel());
  CHECK(child.wait() == 0);
  REQUIRE(sleep_until(side, [&] { return side.receiver.failures.size() == 1; }, 10));
  CHECK(side.receiver.failures[0].second.code() == core::Code::kClosed);
  REQUIRE(side.receiver.messages.size() == 1);  // said before it went
}

TEST_CASE("intranode/shm: in a forked child every call does nothing", "[intranode][fast]") {
  Process peer(live_until_killed);
  Side side;
  open_side(side);
  meet(side, peer.channel());
  REQUIRE(await_step(peer.channel()));
  REQUIRE(sleep_until(side, [&] { return side.receiver.messages.size() == 1; }, 10));
  const auto address = side.transport->address();
  Process fork_child([&](int) {
    const auto before = side.transport->stats().tx_messages;
    if (side.peer->send(numbered(1), {}, 0, {}).code() != core::Code::kClosed) return 1;
    if (side.progress() != 0 || side.transport->arm()) return 2;
    if (side.transport->connect(core::EngineId{1}, address).status().code() != core::Code::kClosed) return 3;
    side.peer->close({core::Code::kPeerDead, "from the child"});
    if (side.transport->find(side.peer->peer()) == nullptr) return 4;
    if (::fcntl(side.transport->event_fd(), F_GETFD) != -1) return 5;
    side.receiver.messages.clear();
    side.transport.reset();
    side.pool.reset();
    side.context.reset();
    // A transport of its own works.
    Side own;
    open_side(own);
    return before == 0 && own.progress() == 0 ? 0 : 6;
  });
  CHECK(fork_child.wait() == 0);
  // The parent has noticed nothing.
  CHECK_FALSE(sleep_until(side, [&] { return !side.receiver.failures.empty(); }, 0.2));
  CHECK(matches(side.receiver.messages[0].payload.data(), 60000, 1));
  Side::Done done;
  REQUIRE(side.peer->send(numbered(2), side.filled(100, 2), 100, side.record(done)).is_ok());
  CHECK(sleep_until(side, [&] { return done.count == 1; }, 5));
  side.receiver.messages.clear();
}

TEST_CASE("intranode/shm: another user's process is dropped unheard", "[intranode][fast]") {
  if (::geteuid() != 0) return;  // needs to become someone else
  Process other([](int channel) {
    const auto [id, address] = hear(channel);
    if (::setgroups(0, nullptr) != 0 || ::setgid(65534) != 0 || ::setuid(65534) != 0) return 0;
    Side side;
    open_side(side);
    side.peer = link(side, id, address);
    // It notices that the socket is not its own user's, or is hung up on.
    const bool failed =
        sleep_until(side, [&, peer = id] { return shm_of(side).proof(peer).state == ProofState::kFailed; }, 10);
    int error = 0;
    core::Descriptor forced = connect_to(decode(address)->socket_name, error);
    signal_step(channel);
    Packet packet;
    std::array<core::Descriptor, kDescriptorsMax> descriptors;
    for (int i = 0; forced && i < 1000; ++i) {
      if (receive_packet(forced.get(), packet, descriptors) == Received::kEndOfFile) return failed ? 0 : 1;
      ::usleep(10000);
    }
    return 2;
  });
  Side side;
  open_side(side);
  REQUIRE(tell(other.channel(), side.id, side.transport->address()));
  REQUIRE(await_step(other.channel()));
  CHECK(sleep_until(side, [&] { return shm_of(side).counters().strangers_dropped >= 1; }, 10));
  CHECK(other.wait() == 0);
  CHECK(side.receiver.failures.empty());
}

TEST_CASE("intranode/shm: four processes in a full mesh", "[intranode][fast]") {
  constexpr std::size_t kRanks = 4;
  constexpr std::uint64_t kEach = 3000;
  const auto rank_work = [](int channel) {
    Side side;
    open_side(side);
    REQUIRE(tell(channel, side.id, side.transport->address()));
    std::vector<transport::Endpoint*> peers;
    for (std::size_t i = 0; i < kRanks; ++i) {
      const auto [id, address] = hear(channel);
      if (id != side.id) peers.push_back(link(side, id, address));
    }
    std::uint64_t sent = 0;
    std::uint64_t completed = 0;
    std::uint64_t received = 0;
    std::uint64_t wrong = 0;
    const auto done = [&] {
      while (sent < kEach) {
        const std::size_t bytes = sent % 4 == 0 ? 20000 : 64;
        Buffer payload = side.filled(bytes, sent);
        if (!payload) break;
        for (auto* peer : peers) {  // one buffer to all
          wrong += !peer->send(numbered(sent), payload, bytes, [&](core::Status s) { completed += s.is_ok(); }).is_ok();
        }
        ++sent;
      }
      for (const auto& message : side.receiver.messages) {
        wrong += !matches(message.payload.data(), message.payload.bytes(), number_of(message.header));
        ++received;
      }
      side.receiver.messages.clear();
      return completed == kEach * (kRanks - 1) && received == kEach * (kRanks - 1);
    };
    const bool finished = sleep_until(side, done, 120);
    signal_step(channel);
    await_step(channel);
    return finished && wrong == 0 && side.receiver.failures.empty() ? 0 : 1;
  };
  std::vector<std::unique_ptr<Process>> ranks;
  for (std::size_t i = 0; i < kRanks; ++i) ranks.push_back(std::make_unique<Process>(rank_work));
  std::vector<std::pair<core::EngineId, std::vector<std::byte>>> roster;
  for (auto& rank : ranks) roster.push_back(hear(rank->channel()));
  for (auto& rank : ranks) {
    for (const auto& [id, address] : roster) REQUIRE(tell(rank->channel(), id, address));
  }
  for (auto& rank : ranks) CHECK(await_step(rank->channel()));
  for (auto& rank : ranks) signal_step(rank->channel());
  for (auto& rank : ranks) CHECK(rank->wait() == 0);
}

}  // namespace
}  // namespace hybridps::intranode::shm
