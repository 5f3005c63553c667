#include "hybridps/transport/threaded.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <optional>
#include <thread>

#include "hybridps/transport/loopback/loopback_transport.h"
#include "hybridps/transport/cards.h"
#include "tests/support/faulty_transport.h"
#include "tests/support/no_threads.h"

namespace hybridps::transport {
namespace contract {
struct Pair;
}
struct ThreadedBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
/// Both sides on one thread.
struct OneThreadBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
struct ThreadedRailsBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
/// To and fro between the engine's thread and another every few messages.
struct HandoverBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
  static constexpr bool kSendsByItself = true;
};
}  // namespace hybridps::transport

#define HYBRIDPS_ENDPOINT_BACKENDS                                                 \
  ::hybridps::transport::ThreadedBackend, ::hybridps::transport::OneThreadBackend, \
      ::hybridps::transport::ThreadedRailsBackend, ::hybridps::transport::HandoverBackend
#include "tests/unit/transport/endpoint_contract.h"

namespace hybridps::transport {
namespace {

using contract::kLargeBytes;
using contract::numbered;
using test_support::Faults;
using test_support::FaultyTransport;

std::shared_ptr<TransportThread> make_thread(core::Duration patience = std::chrono::seconds(1)) {
  TransportThreadOptions options;
  options.patience = patience;
  options.name = "test-data";
  options.when_needed = true;
  return start_transport_thread(std::move(options)).value();
}

struct Wrapped : Transport {
  explicit Wrapped(std::unique_ptr<Transport> transport) : inner(std::move(transport)) {}
  std::string_view name() const noexcept override { return "wrapped"; }
  core::Status attach(std::span<std::byte> memory) override { return inner->attach(memory); }
  std::vector<std::byte> address() const override { return inner->address(); }
  core::Result<Endpoint*> connect(core::EngineId peer, std::span<const std::byte> to) override {
    return inner->connect(peer, to);
  }
  Endpoint* find(core::EngineId peer) noexcept override { return inner->find(peer); }
  std::size_t progress() override { return inner->progress(); }
  int event_fd() const noexcept override { return inner->event_fd(); }
  bool arm() override { return inner->arm(); }
  void send_now() noexcept override { inner->send_now(); }
  bool has_unsent() const noexcept override { return inner->has_unsent(); }
  void set_receiver(Receiver* receiver) noexcept override { inner->set_receiver(receiver); }
  TransportStats stats() const noexcept override { return inner->stats(); }
  std::unique_ptr<Transport> inner;
};

/// What the two cases of a late thread look at. Outlives the transport.
struct Lateness {
  std::atomic<bool> stands_still{false};
  std::atomic<bool> is_standing{false};
  std::atomic<int> sent_by_caller{0};
  std::thread::id caller = std::this_thread::get_id();
};
struct Late final : Wrapped {
  Late(std::unique_ptr<Transport> transport, Lateness& shared) : Wrapped(std::move(transport)), lateness(shared) {}
  std::size_t progress() override {
    while (lateness.stands_still.load()) {
      lateness.is_standing.store(true);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return Wrapped::progress();
  }
  void send_now() noexcept override {
    if (std::this_thread::get_id() == lateness.caller) ++lateness.sent_by_caller;
    Wrapped::send_now();
  }
  Lateness& lateness;
};

/// Every stretch in which a byte moves is too much for the one, and too little for the other.
HandoverOptions to_and_fro() { return {core::Duration::zero(), 0, 1e30, 1, 1}; }

std::unique_ptr<Transport> threaded(std::unique_ptr<Transport> inner,
                                    std::shared_ptr<TransportThread> thread = make_thread(),
                                    const std::optional<HandoverOptions>& handover = std::nullopt) {
  return make_threaded(std::move(inner), std::move(thread), handover ? std::make_shared<Handover>(*handover) : nullptr)
      .value();
}

std::unique_ptr<contract::Pair> make_pair(LoopbackHub& hub, bool one_thread = false,
                                          const std::optional<HandoverOptions>& handover = std::nullopt) {
  auto pair = std::make_unique<contract::Pair>();
  const auto thread = make_thread();
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    side->transport = threaded(hub.make_transport(side->id), one_thread ? thread : make_thread(), handover);
  }
  pair->finish_setup();
  return pair;
}

/// Side a's thread is late when told to be.
std::unique_ptr<contract::Pair> make_late_pair(LoopbackHub& hub, Lateness& lateness) {
  auto pair = std::make_unique<contract::Pair>();
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    std::unique_ptr<Transport> inner = hub.make_transport(side->id);
    if (side == &pair->a) inner = std::make_unique<Late>(std::move(inner), lateness);
    side->transport = threaded(std::move(inner), make_thread(std::chrono::milliseconds(50)));
  }
  pair->finish_setup();
  pair->connect();
  return pair;
}

/// Side a's messages go through the faults.
std::unique_ptr<contract::Pair> make_faulty_pair(const Faults& faults, std::uint64_t seed,
                                                 const std::optional<HandoverOptions>& handover) {
  auto pair = std::make_unique<contract::Pair>();
  LoopbackHub hub;
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    std::unique_ptr<Transport> inner = hub.make_transport(side->id);
    if (side == &pair->a) inner = std::make_unique<FaultyTransport>(std::move(inner), faults, seed);
    side->transport = threaded(std::move(inner), make_thread(), handover);
  }
  pair->finish_setup();
  pair->connect();
  return pair;
}

}  // namespace

std::unique_ptr<contract::Pair> ThreadedBackend::make_pair() {
  LoopbackHub hub;
  return transport::make_pair(hub);
}
std::unique_ptr<contract::Pair> OneThreadBackend::make_pair() {
  LoopbackHub hub;
  return transport::make_pair(hub, /*one_thread=*/true);
}
std::unique_ptr<contract::Pair> HandoverBackend::make_pair() {
  LoopbackHub hub;
  return transport::make_pair(hub, /*one_thread=*/false, to_and_fro());
}
std::unique_ptr<contract::Pair> ThreadedRailsBackend::make_pair() {
  auto pair = std::make_unique<contract::Pair>();
  LoopbackHub hubs[2];
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    std::vector<Card> cards;
    for (LoopbackHub& hub : hubs) {
      std::unique_ptr<Transport> made = threaded(hub.make_transport(side->id));
      cards.push_back({{"eth", "", "", 0, {}}, std::move(made)});
    }
    side->transport = join_cards(std::move(cards)).value();
  }
  pair->finish_setup();
  return pair;
}

TEST_CASE("transport/threaded: many events wake the engine once, and it looks again by itself", "[transport][fast]") {
  LoopbackHub hub;
  auto pair = make_pair(hub);
  pair->connect();
  for (int round = 0; round < 5; ++round) {
    while (!pair->b.transport->arm()) pair->b.progress();
    for (std::uint64_t i = 0; i < 20; ++i) {
      REQUIRE(pair->a.peer->send(numbered(i), pair->a.filled(200, i), 200, {}).is_ok());
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    while (hub.payloads_lent() < 20) std::this_thread::yield();
    std::uint64_t wakes = 0;
    pollfd event{pair->b.transport->event_fd(), POLLIN, 0};  // the thread wakes us behind the messages
    REQUIRE(::poll(&event, 1, 20000) == 1);
    REQUIRE(::read(pair->b.transport->event_fd(), &wakes, sizeof wakes) == sizeof wakes);
    CHECK(wakes == 1);
    REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 20; }));
    pair->release_all();
    // Given back outside of progress(): they must reach the inner transport before anyone sleeps.
    while (!pair->b.transport->arm()) pair->b.progress();
    CHECK_FALSE(pair->b.transport->has_unsent());
    while (hub.payloads_lent() > 0) std::this_thread::yield();
    REQUIRE(pair->run_until([&] { return pair->a.pool->slots_in_use() == 0; }));
  }
  CHECK(hub.payloads_changed_early() == 0);
}

TEST_CASE("transport/threaded: messages that nobody waits for end without waking the engine", "[transport][fast]") {
  LoopbackHub hub;
  auto pair = make_pair(hub);
  pair->connect();
  std::uint64_t got = 0;
  for (int i = 0; i < 100; ++i) REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  while (!pair->a.transport->arm()) CHECK(pair->a.progress() == 0);
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 100; }));
  CHECK(::read(pair->a.transport->event_fd(), &got, sizeof got) < 0);
}

TEST_CASE("transport/threaded: one of several transports of a thread can go", "[transport][fast]") {
  LoopbackHub hub;
  const auto thread = make_thread();
  auto pair = make_pair(hub, /*one_thread=*/true);
  pair->connect();
  for (int i = 0; i < 20; ++i) {
    const core::EngineId id = core::make_engine_id();
    auto third = threaded(hub.make_transport(id), thread);
    REQUIRE(third->attach(pair->a.memory).is_ok());
    auto endpoint = third->connect(pair->b.id, pair->b.transport->address());
    REQUIRE(endpoint.is_ok());
    std::size_t done = 0;
    REQUIRE(endpoint.value()
                ->send(numbered(7), pair->a.filled(kLargeBytes, 7), kLargeBytes, [&](core::Status) { ++done; })
                .is_ok());
    third.reset();
    CHECK(done == 1);
    // What it had accepted arrives, and the others go on.
    REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
    CHECK(contract::matches(pair->b.receiver.messages[0].payload.data(), kLargeBytes, 7));
    pair->release_all();
    REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
    REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
    pair->release_all();
  }
}

TEST_CASE("transport/threaded: delayed and reordered messages arrive once each", "[transport][fast]") {
  const auto handover = GENERATE(std::optional<HandoverOptions>(), std::optional(to_and_fro()));
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    Faults faults;
    faults.delay = 0.5;
    auto pair = make_faulty_pair(faults, seed, handover);
    contract::Side::Done done;
    std::vector<int> seen(300, 0);
    std::uint64_t sent = 0;
    REQUIRE(pair->run_until([&] {
      for (; sent < seen.size(); ++sent) {
        const std::size_t bytes = sent % 3 == 0 ? 0 : sent % 3 == 1 ? 200 : 60000;
        Buffer payload = bytes > 0 ? pair->a.filled(bytes, sent) : Buffer();
        if (bytes > 0 && !payload) break;
        REQUIRE(pair->a.peer->send(numbered(sent), payload, bytes, pair->a.record(done)).is_ok());
      }
      for (const auto& message : pair->b.receiver.messages) {
        const std::uint64_t number = contract::number_of(message.header);
        CHECK(contract::matches(message.payload.data(), message.payload.bytes(), number));
        ++seen[number];
      }
      pair->release_all();
      return done.count == seen.size() && std::count(seen.begin(), seen.end(), 1) == 300;
    }));
    CHECK(pair->a.done_outside_progress == 0);
    CHECK(pair->a.pool->slots_in_use() == 0);
  }
}

TEST_CASE("transport/threaded: a path that breaks under way ends every send and is reported once",
          "[transport][fast]") {
  const auto handover = GENERATE(std::optional<HandoverOptions>(), std::optional(to_and_fro()));
  for (std::uint64_t after = 1; after <= 40; after += 3) {
    Faults faults;
    faults.delay = 0.3;
    faults.kill_after = after;
    auto pair = make_faulty_pair(faults, after, handover);
    contract::Side::Done done;
    std::size_t accepted = 0;
    core::Status refused;
    REQUIRE(pair->run_until([&] {
      if (refused.is_ok()) {
        Buffer payload = pair->a.filled(60000, accepted);
        if (payload) {
          refused = pair->a.peer->send(numbered(accepted), payload, 60000, pair->a.record(done));
          if (refused.is_ok()) ++accepted;
        }
      }
      pair->release_all();
      return !refused.is_ok() && done.count == accepted;
    }));
    pair->settle();
    CHECK(refused.code() == core::Code::kPeerDead);
    CHECK(refused.message() == "killed by FaultyTransport");
    CHECK(done.count == accepted);
    CHECK(accepted >= after);
    REQUIRE(pair->a.receiver.failures.size() == 1);
    CHECK(pair->a.receiver.failures[0].first == pair->b.id);
    CHECK_FALSE(pair->a.receiver.called_outside_progress);
    CHECK(pair->a.done_outside_progress == 0);
    CHECK(pair->a.pool->slots_in_use() == 0);
    CHECK(pair->a.transport->find(pair->b.id) == nullptr);
    CHECK(pair->a.transport->connect(pair->b.id, pair->b.transport->address()).status().message() ==
          "killed by FaultyTransport");
  }
}

TEST_CASE("transport/threaded: destruction under traffic ends every send once", "[transport][fast]") {
  const auto handover = GENERATE(std::optional<HandoverOptions>(), std::optional(to_and_fro()));
  for (int round = 0; round < 20; ++round) {
    LoopbackHub hub;
    auto pair = make_pair(hub, round % 2 == 0, handover);
    pair->connect();
    contract::Side::Done done;
    std::size_t accepted = 0;
    for (int i = 0; i < 10 * round; ++i) {
      if (Buffer payload = pair->a.filled(60000, 1)) {
        REQUIRE(pair->a.peer->send(numbered(1), payload, 60000, pair->a.record(done)).is_ok());
        ++accepted;
      }
      const Buffer answer = pair->b.filled(200, 2);
      REQUIRE(pair->b.peer->send(numbered(2), answer, answer ? 200 : 0, {}).is_ok());
      pair->a.progress();
      pair->b.progress();
      pair->release_all();
    }
    pair->a.transport.reset();
    CHECK(done.count == accepted);
    CHECK(pair->a.pool->slots_in_use() == 0);
    pair->a.receiver.messages.clear();
    REQUIRE(pair->run_until([&] {
      pair->release_all();
      return pair->b.receiver.failures.size() == 1 && pair->b.pool->slots_in_use() == 0;
    }));
  }
}

TEST_CASE("transport/threaded: a forked child does nothing and ends", "[transport][fast]") {
  LoopbackHub hub;
  const auto handover = GENERATE(std::optional<HandoverOptions>(), std::optional(to_and_fro()));
  auto pair = make_pair(hub, /*one_thread=*/false, handover);
  pair->connect();
  contract::Side::Done done;
  REQUIRE(pair->a.peer->send(numbered(1), pair->a.filled(kLargeBytes, 1), kLargeBytes, pair->a.record(done)).is_ok());
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(20);
    Transport& transport = *pair->a.transport;
    int wrong = 0;
    if (transport.progress() != 0 || !transport.arm()) wrong = 1;
    if (pair->a.peer->send(numbered(2), {}, 0, {}).code() != core::Code::kClosed) wrong = 2;
    if (transport.connect(core::make_engine_id(), transport.address()).status().code() != core::Code::kClosed)
      wrong = 3;
    pair->a.peer->close(core::Status(core::Code::kClosed, "child"));
    pair->a.transport.reset();
    if (done.count != 0) wrong = 4;
    _exit(wrong);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  pair->release_all();
  REQUIRE(pair->run_until([&] { return done.count == 1; }));
  CHECK(done.last.is_ok());
}

TEST_CASE("transport/threaded: who drives decides whether a message needs progress() to leave", "[transport][fast]") {
  LoopbackHub hub;
  // Handed over with the first bytes that are seen to have moved, and kept.
  auto pair = make_pair(hub, /*one_thread=*/false, HandoverOptions{core::Duration::zero(), 0, 0, 1, 1});
  pair->connect();
  const auto threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
  };
  // Threads that were joined a moment ago may still be listed. A sanitizer may have one of its own, which stays.
  auto before = threads();
  for (int same = 0, looks = 0; before > 1 && same < 50 && looks < 3000; ++looks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const auto now = threads();
    same = now == before ? same + 1 : 0;
    before = now;
  }
  const auto exchange = [&](std::uint64_t number, std::size_t bytes) {
    contract::Side::Done done;
    REQUIRE(
        pair->a.peer
            ->send(numbered(number), bytes > 0 ? pair->a.filled(bytes, number) : Buffer(), bytes, pair->a.record(done))
            .is_ok());
    REQUIRE(pair->run_until([&] {
      for (const auto& message : pair->b.receiver.messages)
        CHECK(contract::matches(message.payload.data(), message.payload.bytes(), number));
      pair->release_all();
      return done.count == 1;
    }));
    CHECK(done.last.is_ok());
  };
  for (std::uint64_t i = 0; i < 20; ++i) exchange(i, 0);
  CHECK(threads() == before);  // nothing to hand over for
  const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  std::uint64_t number = 20;
  while (threads() < before + 2 && std::chrono::steady_clock::now() < late) exchange(number++, 60000);
  CHECK(threads() == before + 2);  // one for each side
  // Both sides' threads carry it, though nobody calls progress().
  REQUIRE(pair->a.peer->send(numbered(number), pair->a.filled(60000, number), 60000, {}).is_ok());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (hub.payloads_lent() == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  CHECK(hub.payloads_lent() == 1);
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  pair->release_all();
}

TEST_CASE("transport/threaded: engines that hand over to one thread at the same time start it once",
          "[transport][fast]") {
  for (int round = 0; round < 20; ++round) {
    const auto thread = make_thread();
    std::atomic<int> ready{0};
    std::atomic<int> right{0};
    std::vector<std::thread> engines;
    while (engines.size() < 3)
      engines.emplace_back([&] {
        LoopbackHub hub;
        contract::Side sides[2];
        for (contract::Side& side : sides) {
          side.use_heap();
          side.transport =
              threaded(hub.make_transport(side.id), thread, HandoverOptions{core::Duration::zero(), 0, 0, 1, 1});
          (void)side.transport->attach(side.memory);
          side.transport->set_receiver(&side.receiver);
        }
        auto endpoint = sides[0].transport->connect(sides[1].id, sides[1].transport->address());
        for (++ready; ready.load() < 3;) std::this_thread::yield();
        std::size_t done = 0;
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
        for (std::size_t i = 0; i < 10; ++i) {
          if (!endpoint.value()
                   ->send(numbered(i), sides[0].filled(60000, i), 60000, [&](core::Status) { ++done; })
                   .is_ok())
            return;
          while (done <= i && std::chrono::steady_clock::now() < deadline) {
            for (contract::Side& side : sides) (void)side.transport->progress();
            sides[1].receiver.messages.clear();
          }
        }
        if (done == 10) ++right;
      });
    for (std::thread& engine : engines) engine.join();
    REQUIRE(right.load() == 3);
  }
}

TEST_CASE("transport/threaded: what is to be sent now has been sent when the call returns", "[transport][fast]") {
  LoopbackHub hub;
  auto pair = std::make_unique<contract::Pair>();
  const Transport* inner = nullptr;
  for (contract::Side* side : {&pair->b, &pair->a}) {
    side->use_heap();
    std::unique_ptr<Transport> made = hub.make_transport(side->id);
    inner = made.get();
    side->transport = threaded(std::move(made), make_thread(std::chrono::minutes(1)));
  }
  pair->finish_setup();
  pair->connect();
  for (std::size_t i = 1; i <= 200; ++i) {
    REQUIRE(pair->a.peer->send(numbered(i), pair->a.filled(200, i), 200, {}).is_ok());
    pair->a.transport->send_now();
    CHECK(inner->stats().tx_messages == i);
    // The other side's thread may be late, and there are not slots for all.
    REQUIRE(pair->run_until([&] {
      pair->release_all();
      return pair->a.pool->slots_in_use() == 0;
    }));
  }
}

TEST_CASE("transport/threaded: a thread that stands still keeps nobody from going on", "[transport][fast]") {
  LoopbackHub hub;
  Lateness lateness;
  auto pair = make_late_pair(hub, lateness);
  lateness.stands_still.store(true);
  REQUIRE(pair->a.peer->send(numbered(0), {}, 0, {}).is_ok());  // wakes it
  while (!lateness.is_standing.load()) std::this_thread::yield();
  constexpr std::uint64_t kMessages = 1000;  // if each waited: 50 s
  std::atomic<bool> gone_on{false};
  // If the caller waits for the thread, that ends, for the test to fail instead of hanging.
  std::thread watch([&] {
    const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!gone_on.load() && std::chrono::steady_clock::now() < late)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lateness.stands_still.store(false);
  });
  for (std::uint64_t i = 1; i <= kMessages; ++i) {
    REQUIRE(pair->a.peer->send(numbered(i), {}, 0, {}).is_ok());
    pair->a.transport->send_now();  // waits for the first only
  }
  const bool went_on = lateness.stands_still.load();
  gone_on.store(true);
  watch.join();
  CHECK(went_on);
  // Nothing is lost, and nothing sent twice.
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() > kMessages; }));
  pair->settle();
  std::vector<int> seen(kMessages + 1, 0);
  for (const auto& message : pair->b.receiver.messages) ++seen.at(contract::number_of(message.header));
  CHECK(std::count(seen.begin(), seen.end(), 1) == static_cast<std::ptrdiff_t>(seen.size()));
  // And it is waited for again.
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  pair->a.transport->send_now();
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == kMessages + 2; }));
}

TEST_CASE("transport/threaded: what is to be sent now does not wait for the thread to come", "[transport][fast]") {
  LoopbackHub hub;
  Lateness lateness;
  auto pair = make_late_pair(hub, lateness);
  const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  // Not each time: the thread, which send() woke, may have been faster.
  for (std::uint64_t i = 0; lateness.sent_by_caller.load() < 20 && std::chrono::steady_clock::now() < late; ++i) {
    REQUIRE(pair->a.peer->send(numbered(i), {}, 0, {}).is_ok());
    pair->a.transport->send_now();
  }
  CHECK(lateness.sent_by_caller.load() >= 20);
}

TEST_CASE("transport/threaded: where there can be no thread to hand over to, bytes go on", "[transport][fast]") {
  CHECK(test::holds_without_threads([] {
    LoopbackHub hub;
    auto pair = make_pair(hub, /*one_thread=*/false, to_and_fro());
    pair->connect();
    bool all = true;
    for (std::uint64_t i = 0; i < 10; ++i) {
      contract::Side::Done done;
      all = all && pair->a.peer->send(numbered(i), pair->a.filled(60000, i), 60000, pair->a.record(done)).is_ok();
      all = all && pair->run_until([&] {
        pair->release_all();
        return done.count == 1;
      });
      all = all && done.last.is_ok();
    }
    return all;
  }));
}

TEST_CASE("transport/threaded: a transport that is polled is refused", "[transport][fast]") {
  struct Polled final : Wrapped {
    using Wrapped::Wrapped;
    int event_fd() const noexcept override { return -1; }
    bool arm() override { return false; }
  };
  LoopbackHub hub;
  const auto made = make_threaded(std::make_unique<Polled>(hub.make_transport(core::make_engine_id())), make_thread());
  CHECK(made.status().code() == core::Code::kInvalidArgument);
}

}  // namespace hybridps::transport
