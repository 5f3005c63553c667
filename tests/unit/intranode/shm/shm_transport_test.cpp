// Messages between transports of one process.
#include "hybridps/intranode/shm/shm_transport.h"

#include <atomic>
#include <random>
#include <thread>

#include "tests/support/catch.h"
#include "tests/unit/intranode/shm/shm_sides.h"

namespace hybridps::intranode::shm {
namespace {

using transport::Buffer;
using transport::contract::matches;
using transport::contract::number_of;
using transport::contract::numbered;

struct Ends {
  Side a;
  Side b;
  explicit Ends(ShmOptions options = {}) {
    open_side(a, options);
    open_side(b, options);
  }
  ~Ends() {
    a.receiver.messages.clear();
    b.receiver.messages.clear();
  }
  void connect() {
    a.peer = link(a, b.id, b.transport->address());
    b.peer = link(b, a.id, a.transport->address());
    REQUIRE(run_until({&a, &b}, [&] { return proven(); }));
  }
  bool proven() const {
    const auto& left = static_cast<const ShmTransport&>(*a.transport);
    const auto& right = static_cast<const ShmTransport&>(*b.transport);
    return left.proof(b.id).state == ProofState::kProven && right.proof(a.id).state == ProofState::kProven;
  }
};

TEST_CASE("intranode/shm: a payload is read where it was written", "[intranode][fast]") {
  Ends ends;
  ends.connect();
  Side::Done done;
  Buffer payload = ends.a.filled(100000, 1);
  REQUIRE(ends.a.peer->send(numbered(1), payload, 100000, ends.a.record(done)).is_ok());
  REQUIRE(run_until({&ends.a, &ends.b}, [&] { return ends.b.receiver.messages.size() == 1; }));
  auto& received = ends.b.receiver.messages.front().payload;
  CHECK(matches(received.data(), received.bytes(), 1));
  payload.data()[99999] ^= std::byte{0xff};  // no copy was made: the reader sees it
  CHECK(received.data()[99999] == payload.data()[99999]);
  for (int i = 0; i < 100; ++i) ends.a.progress();
  CHECK(done.count == 0);
  ends.b.receiver.messages.clear();
  REQUIRE(run_until({&ends.a}, [&] { return done.count == 1; }));
  CHECK(done.last.is_ok());
}

TEST_CASE("intranode/shm: messages before the connection stands are queued and arrive in order", "[intranode][fast]") {
  Ends ends;
  ends.a.peer = link(ends.a, ends.b.id, ends.b.transport->address());
  for (std::uint64_t i = 0; i < 600; ++i) {
    const std::size_t bytes = i % 20 == 0 ? 1000 : 0;
    REQUIRE(ends.a.peer->send(numbered(i), bytes > 0 ? ends.a.filled(bytes, i) : Buffer(), bytes, {}).is_ok());
    if (i == 10) CHECK(shm_of(ends.a).proof(ends.b.id).state == ProofState::kPending);
    if (bytes > 0 && ends.a.pool->slots_in_use() == 16) {
      REQUIRE(run_until({&ends.a, &ends.b}, [&] {
        for (auto& message : ends.b.receiver.messages) message.payload.reset();
        return ends.a.pool->slots_in_use() == 0;
      }));
    }
  }
  REQUIRE(run_until({&ends.a, &ends.b}, [&] { return ends.b.receiver.messages.size() == 600; }));
  for (std::uint64_t i = 0; i < 600; ++i) CHECK(number_of(ends.b.receiver.messages[i].header) == i);
  CHECK(shm_of(ends.a).counters().messages_queued > 0);
}

TEST_CASE("intranode/shm: eighty engines of a host talk to one, each in a slot of its own", "[intranode][fast]") {
  Side hub;
  open_side(hub);
  std::vector<std::unique_ptr<Side>> others;
  for (std::uint64_t i = 0; i < 80; ++i) {
    others.push_back(std::make_unique<Side>());
    Side& side = *others.back();
    open_side(side);
    side.peer = link(side, hub.id, hub.transport->address());
    transport::Endpoint* const back = link(hub, side.id, side.transport->address());
    REQUIRE(side.peer->send(numbered(i), {}, 0, {}).is_ok());
    REQUIRE(back->send(numbered(i), {}, 0, {}).is_ok());
    REQUIRE(run_until({&side, &hub},
                      [&] { return side.receiver.messages.size() == 1 && hub.receiver.messages.size() == i + 1; }));
  }
  for (std::uint64_t i = 0; i < 80; ++i) CHECK(number_of(others[i]->receiver.messages[0].header) == i);
  CHECK(hub.receiver.failures.empty());
}

TEST_CASE("intranode/shm: only one side needs to connect", "[intranode][fast]") {
  Ends ends;
  ends.a.peer = link(ends.a, ends.b.id, ends.b.transport->address());
  REQUIRE(ends.a.peer->send(numbered(5), {}, 0, {}).is_ok());
  REQUIRE(run_until({&ends.a, &ends.b}, [&] { return ends.b.receiver.messages.size() == 1 && ends.proven(); }));
  CHECK(ends.b.transport->find(ends.a.id) == nullptr);
  CHECK(ends.b.transport->stats().endpoints_open == 0);
  ends.b.peer = link(ends.b, ends.a.id, ends.a.transport->address());  // takes the connection that stands
  REQUIRE(ends.b.peer->send(numbered(6), {}, 0, {}).is_ok());
  REQUIRE(run_until({&ends.a, &ends.b}, [&] { return ends.a.receiver.messages.size() == 1; }));
  CHECK(ends.b.transport->find(ends.a.id) == ends.b.peer);
}

TEST_CASE("intranode/shm: connections from both sides become one", "[intranode][fast]") {
  for (int order = 0; order < 4; ++order) {
    Ends ends;
    const std::size_t descriptors = open_descriptors();
    if (order % 2 == 0) {
      ends.a.peer = link(ends.a, ends.b.id, ends.b.transport->address());
      ends.b.peer = link(ends.b, ends.a.id, ends.a.transport->address());
    } else {
      ends.b.peer = link(ends.b, ends.a.id, ends.a.transport->address());
      ends.a.peer = link(ends.a, ends.b.id, ends.b.transport->address());
    }
    REQUIRE(ends.a.peer->send(numbered(1), {}, 0, {}).is_ok());
    REQUIRE(ends.b.peer->send(numbered(2), {}, 0, {}).is_ok());
    Side& first = order < 2 ? ends.a : ends.b;
    for (int i = 0; i < 20; ++i) first.progress();
    REQUIRE(run_until({&ends.a, &ends.b}, [&] {
      return ends.proven() && ends.a.receiver.messages.size() == 1 && ends.b.receiver.messages.size() == 1;
    }));
    for (int i = 0; i < 100; ++i) ends.a.progress(), ends.b.progress();
    CHECK(ends.a.receiver.failures.empty());
    CHECK(ends.b.receiver.failures.empty());
    CHECK(open_descriptors() == descriptors + 4);  // each side: one socket and the peer's eventfd
  }
}

TEST_CASE("intranode/shm: more messages than the ring holds wait and arrive in order", "[intranode][fast]") {
  ShmOptions options;
  options.ring_entries = 4;
  Ends ends(options);
  ends.connect();
  std::size_t completed = 0;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    REQUIRE(ends.a.peer->send(numbered(i), {}, 0, [&](core::Status) { ++completed; }).is_ok());
  }
  CHECK(shm_of(ends.a).counters().messages_queued == 996);
  REQUIRE(run_until({&ends.a, &ends.b}, [&] { return ends.b.receiver.messages.size() == 1000 && completed == 1000; }));
  for (std::uint64_t i = 0; i < 1000; ++i) CHECK(number_of(ends.b.receiver.messages[i].header) == i);
}

TEST_CASE("intranode/shm: small messages overtake payloads that wait for others to come back", "[intranode][fast]") {
  ShmOptions options;
  options.release_entries = 2;
  Ends ends(options);
  ends.connect();
  for (std::uint64_t i = 0; i < 6; ++i) {
    REQUIRE(ends.a.peer->send(numbered(i), ends.a.filled(5000, i), 5000, {}).is_ok());
  }
  REQUIRE(ends.a.peer->send(numbered(100), {}, 0, {}).is_ok());
  REQUIRE(run_until({&ends.a, &ends.b}, [&] { return ends.b.receiver.messages.size() == 3; }));
  CHECK(number_of(ends.b.receiver.messages[2].header) == 100);
  REQUIRE(run_until({&ends.a, &ends.b}, [&] {
    for (const auto& message : ends.b.receiver.messages) {
      if (message.payload.bytes() > 0) CHECK(matches(message.payload.data(), 5000, number_of(message.header)));
    }
    ends.b.receiver.messages.clear();
    return ends.a.pool->slots_in_use() == 0;
  }));
  CHECK(ends.b.transport->stats().rx_messages == 7);
}

TEST_CASE("intranode/shm: payloads come back in any order", "[intranode][fast]") {
  Ends ends;
  ends.connect();
  std::vector<std::uint64_t> finished;
  for (std::uint64_t i = 0; i < 10; ++i) {
    REQUIRE(
        ends.a.peer->send(numbered(i), ends.a.filled(5000, i), 5000, [&, i](core::Status) { finished.push_back(i); })
            .is_ok());
  }
  REQUIRE(run_until({&ends.a, &ends.b}, [&] { return ends.b.receiver.messages.size() == 10; }));
  const std::vector<std::uint64_t> order = {3, 9, 0, 1, 8, 2, 7, 4, 6, 5};
  for (std::uint64_t i : order) ends.b.receiver.messages[i].payload.reset();
  REQUIRE(run_until({&ends.a}, [&] { return finished.size() == 10; }));
  CHECK(finished == order);
}

TEST_CASE("intranode/shm: an inline payload is done without the receiver", "[intranode][fast]") {
  Ends ends;
  ends.connect();
  Side::Done done;
  REQUIRE(ends.a.peer->send(numbered(1), ends.a.filled(256, 1), 256, ends.a.record(done)).is_ok());
  CHECK(done.count == 0);
  ends.a.progress();
  CHECK(done.count == 1);
  CHECK(ends.a.pool->slots_in_use() == 0);
  REQUIRE(run_until({&ends.b}, [&] { return ends.b.receiver.messages.size() == 1; }));
  CHECK(matches(ends.b.receiver.messages[0].payload.data(), 256, 1));
}

TEST_CASE("intranode/shm: three engines talk at random", "[intranode][fast]") {
  std::array<Side, 3> sides;
  for (Side& side : sides) open_side(side);
  std::array<std::array<transport::Endpoint*, 3>, 3> to{};
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t k = 0; k < 3; ++k) {
      if (i != k) to[i][k] = link(sides[i], sides[k].id, sides[k].transport->address());
    }
  }
  constexpr std::uint64_t kCount = 100000;
  std::mt19937_64 random(5);
  std::array<std::uint64_t, 3> expected{};
  std::array<std::uint64_t, 3> received{};
  std::size_t wrong = 0;
  std::size_t finished = 0;
  for (std::size_t k = 0; k < 3; ++k) {
    sides[k].receiver.hook = [&, k](transport::contract::Recorder::Message& message) {
      const std::uint64_t number = number_of(message.header);
      wrong += number % 3 != k || !matches(message.payload.data(), message.payload.bytes(), number);
      ++received[k];
    };
  }
  const auto work = [&] {
    for (Side& side : sides) {
      side.progress();
      auto& messages = side.receiver.messages;
      while (messages.size() > 5) messages.erase(messages.begin() + static_cast<std::ptrdiff_t>(random() % 5));
    }
  };
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const std::size_t from = random() % 3;
    const std::size_t target = (from + 1 + random() % 2) % 3;
    const std::size_t sizes[] = {0, 0, 1, 100, 256, 257, 2000};
    std::size_t bytes = i % 500 == 0 ? 65536 : sizes[random() % 7];
    const std::uint64_t number = i * 3 + target;
    Buffer payload;
    while (bytes > 0 && !(payload = sides[from].filled(bytes, number))) {
      work();
      sides[0].receiver.messages.clear();
      sides[1].receiver.messages.clear();
      sides[2].receiver.messages.clear();
    }
    REQUIRE(to[from][target]
                ->send(numbered(number), payload, bytes, [&](core::Status s) { finished += s.is_ok(); })
                .is_ok());
    ++expected[target];
    if (i % 16 == 0) work();
  }
  REQUIRE(run_until({&sides[0], &sides[1], &sides[2]}, [&] {
    for (Side& side : sides) side.receiver.messages.clear();
    return received == expected && finished == kCount;
  }));
  CHECK(wrong == 0);
  for (Side& side : sides) {
    CHECK(side.pool->slots_in_use() == 0);
    CHECK(side.receiver.failures.empty());
    side.receiver.hook = nullptr;
  }
}

TEST_CASE("intranode/shm: engines on two threads sleep and wake each other", "[intranode][fast]") {
  ShmOptions options;
  options.ring_entries = 8;
  options.release_entries = 8;
  Ends ends(options);
  ends.a.peer = link(ends.a, ends.b.id, ends.b.transport->address());
  ends.b.peer = link(ends.b, ends.a.id, ends.a.transport->address());
  constexpr std::uint64_t kCount = 20000;
  std::atomic<int> ready{0};
  std::size_t wrong_a = 1;
  std::size_t wrong_b = 1;
  std::atomic<std::uint64_t> sleeps{0};
  const auto work = [&](Side& side) {
    std::uint64_t sent = 0;
    std::uint64_t completed = 0;
    std::uint64_t received = 0;
    std::size_t wrong = 0;
    bool counted = false;
    const auto start = std::chrono::steady_clock::now();
    while (ready.load() < 2 && seconds_since(start) < 120) {
      for (int burst = 0; burst < 40 && sent < kCount; ++burst) {
        const std::size_t bytes = sent % 3 == 0 ? 0 : sent % 3 == 1 ? 200 : 3000;
        Buffer payload = bytes > 0 ? side.filled(bytes, sent) : Buffer();
        if (bytes > 0 && !payload) break;
        wrong +=
            !side.peer->send(numbered(sent), payload, bytes, [&](core::Status s) { completed += s.is_ok(); }).is_ok();
        ++sent;
      }
      const std::size_t did = side.progress();
      for (const auto& message : side.receiver.messages) {
        wrong += number_of(message.header) >= kCount;
        wrong += !matches(message.payload.data(), message.payload.bytes(), number_of(message.header));
        ++received;
      }
      side.receiver.messages.clear();
      if (!counted && completed == kCount && received == kCount) {
        counted = true;
        ++ready;
      }
      if (did == 0 && side.transport->arm()) {
        ++sleeps;
        pollfd event{side.transport->event_fd(), POLLIN, 0};
        // A lost wake-up would cost 2 s, and 120 s are soon over. Only the end is not announced.
        ::poll(&event, 1, counted ? 10 : 2000);
      }
    }
    return wrong + (counted ? 0 : 1);
  };
  const auto start = std::chrono::steady_clock::now();
  std::thread other([&] { wrong_a = work(ends.a); });
  wrong_b = work(ends.b);
  other.join();
  CHECK(wrong_a == 0);
  CHECK(wrong_b == 0);
  CHECK(seconds_since(start) < 60);
  INFO("slept " << sleeps << " times; woke the other "
                << shm_of(ends.a).counters().wakeups_sent + shm_of(ends.b).counters().wakeups_sent);
  CHECK(ends.a.pool->slots_in_use() == 0);
}

TEST_CASE("intranode/shm: wake-ups are sent to sleepers only and polls are rare in a busy loop", "[intranode][fast]") {
  Ends ends;
  ends.connect();
  for (int i = 0; i < 100; ++i) ends.a.progress(), ends.b.progress();
  const auto before = shm_of(ends.a).counters();
  for (std::uint64_t i = 0; i < 50; ++i) REQUIRE(ends.a.peer->send(numbered(i), {}, 0, {}).is_ok());
  CHECK(shm_of(ends.a).counters().wakeups_sent == before.wakeups_sent);
  REQUIRE(run_until({&ends.b}, [&] { return ends.b.receiver.messages.size() == 50; }));
  while (!ends.b.transport->arm()) ends.b.progress();
  for (std::uint64_t i = 0; i < 50; ++i) REQUIRE(ends.a.peer->send(numbered(i), {}, 0, {}).is_ok());
  CHECK(shm_of(ends.a).counters().wakeups_sent == before.wakeups_sent + 1);
  pollfd event{ends.b.transport->event_fd(), POLLIN, 0};
  CHECK(::poll(&event, 1, 0) == 1);
  CHECK_FALSE(ends.b.transport->arm());

  const auto start = std::chrono::steady_clock::now();
  const auto polls = shm_of(ends.b).counters().polls;
  for (int i = 0; i < 100000; ++i) ends.b.progress();
  const double milliseconds = seconds_since(start) * 1e3;
  CHECK(static_cast<double>(shm_of(ends.b).counters().polls - polls) < milliseconds + 10);
  CHECK(ends.b.receiver.messages.size() == 100);
  while (ends.b.progress() > 0) {
  }
  REQUIRE(ends.b.transport->arm());
  CHECK(::poll(&event, 1, 0) == 0);  // the wake-up is used up
}

TEST_CASE("intranode/shm: a transport without a receiver keeps messages for later", "[intranode][fast]") {
  Ends ends;
  ends.b.transport->set_receiver(nullptr);
  ends.connect();
  REQUIRE(ends.a.peer->send(numbered(1), {}, 0, {}).is_ok());
  for (int i = 0; i < 50; ++i) ends.b.progress();
  CHECK(ends.b.transport->stats().rx_messages == 0);
  ends.b.transport->set_receiver(&ends.b.receiver);
  REQUIRE(run_until({&ends.b}, [&] { return ends.b.receiver.messages.size() == 1; }));
}

TEST_CASE("intranode/shm: only its own pool memory can be attached", "[intranode][fast]") {
  Side side;
  ShmOptions options;
  options.self = side.id;
  options.pool_bytes = 1 << 20;
  auto made = ShmTransport::create(options);
  REQUIRE(made.is_ok());
  alignas(64) std::array<std::byte, 64> other{};
  CHECK(made.value()->attach(other).code() == core::Code::kInvalidArgument);
  CHECK(made.value()->attach(made.value()->pool_memory().first(4096)).code() == core::Code::kInvalidArgument);
  CHECK(made.value()->attach(made.value()->pool_memory()).is_ok());
  const auto own = made.value()->address();
  CHECK(made.value()->connect(side.id, own).status().code() == core::Code::kInvalidArgument);
}

TEST_CASE("intranode/shm: a transport without a pool sends headers and receives payloads", "[intranode][fast]") {
  Side a;
  Side b;
  ShmOptions without;
  without.pool_bytes = 0;
  open_side(a, without);
  open_side(b);
  a.peer = link(a, b.id, b.transport->address());
  b.peer = link(b, a.id, a.transport->address());
  REQUIRE(a.peer->send(numbered(1), {}, 0, {}).is_ok());
  CHECK(a.peer->send(numbered(1), b.filled(10, 1), 10, {}).code() == core::Code::kInvalidArgument);
  REQUIRE(b.peer->send(numbered(2), b.filled(5000, 2), 5000, {}).is_ok());
  REQUIRE(run_until({&a, &b}, [&] { return a.receiver.messages.size() == 1 && b.receiver.messages.size() == 1; }));
  CHECK(matches(a.receiver.messages[0].payload.data(), 5000, 2));
  a.receiver.messages.clear();
}

TEST_CASE("intranode/shm: nonsensical options are refused", "[intranode][fast]") {
  const auto refused = [](auto change) {
    ShmOptions options;
    options.self = core::make_engine_id();
    options.pool_bytes = 4096;
    change(options);
    return !ShmTransport::create(options).is_ok();
  };
  CHECK_FALSE(refused([](ShmOptions&) {}));
  CHECK(refused([](ShmOptions& options) { options.self = {}; }));
  CHECK(refused([](ShmOptions& options) { options.ring_entries = 100; }));
  CHECK(refused([](ShmOptions& options) { options.release_entries = 0; }));
  CHECK(refused([](ShmOptions& options) { options.peers_max = 0; }));
  CHECK(refused([](ShmOptions& options) { options.pool_bytes = std::size_t{1} << 62; }));
}

}  // namespace
}  // namespace hybridps::intranode::shm
