#include "hybridps/transport/cards.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "hybridps/transport/loopback/loopback_transport.h"

namespace hybridps::transport {
namespace contract {
struct Pair;
}
struct TwoRailsBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
};
struct OneRailBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
};
}  // namespace hybridps::transport

#define HYBRIDPS_ENDPOINT_BACKENDS ::hybridps::transport::TwoRailsBackend, ::hybridps::transport::OneRailBackend
#include "tests/support/clock.h"
#include "tests/unit/transport/endpoint_contract.h"

namespace hybridps::transport {
namespace {

using contract::number_of;
using contract::numbered;

struct CardSpec {
  const char* name;
  const char* network;
  double rate;
};

/// One hub per network: what is on none of the other's networks cannot reach it.
struct Fixture {
  std::vector<std::unique_ptr<LoopbackHub>> hubs;
  std::vector<std::vector<Transport*>> inner;
  contract::Pair pair;

  Fixture(const std::vector<CardSpec>& a, const std::vector<CardSpec>& b) {
    for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) hubs.push_back(std::make_unique<LoopbackHub>());
    inner.resize(2);
    set_up(pair.a, a, inner[0]);
    set_up(pair.b, b, inner[1]);
    pair.finish_setup();
  }
  void set_up(contract::Side& side, const std::vector<CardSpec>& specs, std::vector<Transport*>& kept) {
    side.use_heap();
    std::vector<Card> cards;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      cards.push_back(
          {{specs[i].name, "10.0.0.1", specs[i].network, specs[i].rate, {}}, hubs[i]->make_transport(side.id)});
      kept.push_back(cards.back().transport.get());
    }
    side.transport = join_cards(std::move(cards)).value();
  }
  std::vector<double> sent(std::size_t side) const {
    std::vector<double> bytes;
    for (const Transport* transport : inner[side])
      bytes.push_back(static_cast<double>(transport->stats().tx_payload_bytes));
    return bytes;
  }
};

std::unique_ptr<contract::Pair> over_loopback(std::size_t count) {
  auto pair = std::make_unique<contract::Pair>();
  std::vector<std::unique_ptr<LoopbackHub>> hubs(count);
  for (auto& hub : hubs) hub = std::make_unique<LoopbackHub>();
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    std::vector<Card> cards;
    for (auto& hub : hubs) cards.push_back({{"eth", "", "", 0, {}}, hub->make_transport(side->id)});
    side->transport = join_cards(std::move(cards)).value();
  }
  pair->finish_setup();
  return pair;
}

std::vector<CardInfo> infos_of(const std::vector<CardSpec>& specs) {
  std::vector<CardInfo> infos;
  for (const CardSpec& card : specs) infos.push_back({card.name, "", card.network, card.rate, {}});
  return infos;
}

std::vector<std::pair<std::size_t, std::size_t>> ends(const std::vector<CardPair>& joined) {
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  for (const CardPair& pair : joined) pairs.emplace_back(pair.own, pair.theirs);
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

using Ends = std::vector<std::pair<std::size_t, std::size_t>>;

bool is_open(int fd) { return fcntl(fd, F_GETFD) != -1; }

/// Has a descriptor to wait on, which belongs to the test, or none; and nothing else.
class WithDescriptor final : public Transport {
 public:
  explicit WithDescriptor(int fd) : fd_(fd) {}
  std::string_view name() const noexcept override { return "descriptor"; }
  core::Status attach(std::span<std::byte>) override { return core::Status::ok(); }
  std::vector<std::byte> address() const override { return {}; }
  core::Result<Endpoint*> connect(core::EngineId, std::span<const std::byte>) override {
    return core::Status(core::Code::kUnsupported, "no endpoints here");
  }
  Endpoint* find(core::EngineId) noexcept override { return nullptr; }
  std::size_t progress() override { return 0; }
  int event_fd() const noexcept override { return fd_; }
  bool arm() override { return true; }
  bool has_unsent() const noexcept override { return false; }
  void set_receiver(Receiver*) noexcept override {}
  TransportStats stats() const noexcept override { return {}; }

 private:
  const int fd_;
};

std::unique_ptr<Transport> rails_with(const std::vector<int>& fds) {
  std::vector<Card> cards;
  for (const int fd : fds) cards.push_back({{"eth", "", "", 0, {}}, std::make_unique<WithDescriptor>(fd)});
  return join_cards(std::move(cards)).value();
}

}  // namespace

std::unique_ptr<contract::Pair> TwoRailsBackend::make_pair() { return over_loopback(2); }
std::unique_ptr<contract::Pair> OneRailBackend::make_pair() { return over_loopback(1); }

TEST_CASE("transport/cards: pairs join cards of one network", "[transport][fast]") {
  const auto two = infos_of({{"eth0", "10.0.0.0/24", 10}, {"eth1", "10.0.1.0/24", 10}});
  const auto turned = infos_of({{"eth0", "10.0.1.0/24", 10}, {"eth1", "10.0.0.0/24", 10}});
  const auto one = infos_of({{"eth0", "10.0.0.0/24", 10}});
  CHECK(ends(pairs_between(two, two)) == Ends{{0, 0}, {1, 1}});
  CHECK(ends(pairs_between(two, turned)) == Ends{{0, 1}, {1, 0}});
  CHECK(ends(pairs_between(two, one)) == Ends{{0, 0}});  // eth1 may not be able to reach it
  const auto flat = infos_of({{"eth0", "10.0.0.0/16", 10}, {"eth1", "10.0.0.0/16", 10}});
  const auto flat_one = infos_of({{"eth0", "10.0.0.0/16", 10}});
  CHECK(ends(pairs_between(flat, flat_one)) == Ends{{0, 0}, {1, 0}});
  CHECK(ends(pairs_between(flat_one, flat)) == Ends{{0, 0}, {0, 1}});
}

TEST_CASE("transport/cards: without a common network cards are joined by their place", "[transport][fast]") {
  const auto a = infos_of({{"eth0", "10.0.0.0/31", 0}, {"eth1", "10.0.0.2/31", 0}});
  const auto b = infos_of({{"eth0", "10.0.0.4/31", 0}, {"eth1", "", 0}, {"eth2", "10.0.0.8/31", 0}});
  CHECK(ends(pairs_between(a, b)) == Ends{{0, 0}, {0, 2}, {1, 1}});
  CHECK(ends(pairs_between(b, a)) == Ends{{0, 0}, {1, 1}, {2, 0}});
}

TEST_CASE("transport/cards: bytes go by what the cards at both ends carry", "[transport][fast]") {
  struct Case {
    std::vector<CardSpec> a, b;
    double part;  // of the first card
  };
  const std::vector<Case> cases = {
      {{{"e", "x", 0}, {"f", "y", 0}}, {{"e", "x", 0}, {"f", "y", 0}}, 0.5},
      {{{"e", "x", 30}, {"f", "y", 10}}, {{"e", "x", 30}, {"f", "y", 10}}, 0.75},
      {{{"e", "x", 30}, {"f", "y", 10}}, {{"e", "x", 20}, {"f", "y", 20}}, 20.0 / 30},
      {{{"e", "x", 30}, {"f", "y", 10}}, {{"e", "x", 20}, {"f", "y", 0}}, 0.5},  // one is not known
  };
  for (const Case& c : cases) {
    Fixture f(c.a, c.b);
    f.pair.connect();
    for (std::uint64_t i = 0; i < 400; ++i) {
      const std::size_t bytes = i % 7 == 0 ? 100 : 20000;
      REQUIRE(f.pair.a.peer->send(numbered(i), f.pair.a.filled(bytes, i), bytes, {}).is_ok());
      f.pair.settle(1);
      f.pair.release_all();
    }
    const std::vector<double> sent = f.sent(0);
    INFO(sent[0] << " " << sent[1]);
    CHECK(std::abs(sent[0] / (sent[0] + sent[1]) - c.part) < 0.01);
    CHECK(f.pair.b.transport->stats().rx_messages == 400);
    CHECK(f.pair.a.transport->stats().endpoints_open == 1);
  }
}

TEST_CASE("transport/cards: one broken pair is the end of the peer and names its cards", "[transport][fast]") {
  Fixture f({{"eth0", "x", 0}, {"eth1", "y", 0}}, {{"net0", "x", 0}, {"net1", "y", 0}});
  f.pair.connect();
  REQUIRE(f.pair.a.peer->send(numbered(1), f.pair.a.filled(50, 1), 50, {}).is_ok());
  f.hubs[1]->kill(f.pair.b.id);
  REQUIRE(f.pair.run_until([&] { return f.pair.a.receiver.failures.size() == 1; }));
  f.pair.release_all();
  CHECK(f.pair.a.receiver.failures[0].first == f.pair.b.id);
  CHECK(f.pair.a.transport->find(f.pair.b.id) == nullptr);
  contract::Side::Done done;
  CHECK(f.pair.a.peer->send(numbered(2), {}, 0, f.pair.a.record(done)).code() == core::Code::kPeerDead);
  CHECK(done.count == 0);

  Fixture apart({{"eth0", "x", 0}}, {{"net0", "x", 0}});
  apart.hubs[0]->kill(apart.pair.b.id);
  const auto refused = apart.pair.a.transport->connect(apart.pair.b.id, apart.pair.b.transport->address());
  REQUIRE_FALSE(refused.is_ok());
  CHECK(refused.status().message().find("eth0 (10.0.0.1) -> net0 (10.0.0.1)") != std::string_view::npos);
  const auto again = apart.pair.a.transport->connect(apart.pair.b.id, apart.pair.b.transport->address());
  CHECK(again.status().message() == refused.status().message());
}

TEST_CASE("transport/cards: a pair that breaks alone is reported at once and the others take what comes",
          "[transport][fast]") {
  test::MovableClock clock;  // stands still
  Fixture f({{"eth0", "x", 0}, {"eth1", "y", 0}}, {{"net0", "x", 0}, {"net1", "y", 0}});
  f.pair.connect();
  f.hubs[1]->kill(f.pair.b.id);
  f.pair.settle();
  REQUIRE(f.pair.a.receiver.failures.size() == 1);
  CHECK(f.pair.a.receiver.failures[0].first == f.pair.b.id);
  CHECK(f.pair.a.transport->find(f.pair.b.id) == nullptr);  // nothing more is sent
  // As when a peer leaves: its goodbye on one pair may come before what it has sent on another.
  REQUIRE(f.pair.b.peer->send(numbered(7), f.pair.b.filled(50, 7), 50, {}).is_ok());
  f.pair.settle();
  REQUIRE(f.pair.a.receiver.messages.size() == 1);
  CHECK(number_of(f.pair.a.receiver.messages[0].header) == 7);
  f.pair.release_all();
  CHECK(f.pair.b.receiver.failures.empty());
  // Not for ever: then all pairs are closed from here.
  clock.pass(std::chrono::milliseconds(250));
  f.pair.settle();
  REQUIRE(f.pair.b.receiver.failures.size() == 1);
  CHECK(f.pair.a.receiver.failures.size() == 1);

  // All have ended: nothing is left to be closed, and nothing is reported again.
  Fixture all({{"eth0", "x", 0}, {"eth1", "y", 0}}, {{"net0", "x", 0}, {"net1", "y", 0}});
  all.pair.connect();
  for (const auto& hub : all.hubs) hub->kill(all.pair.b.id);
  all.pair.settle();
  clock.pass(std::chrono::seconds(1));
  all.pair.settle();
  CHECK(all.pair.a.receiver.failures.size() == 1);

  // Closed from here meanwhile: all pairs are.
  Fixture closed({{"eth0", "x", 0}, {"eth1", "y", 0}}, {{"net0", "x", 0}, {"net1", "y", 0}});
  closed.pair.connect();
  closed.hubs[1]->kill(closed.pair.b.id);
  closed.pair.settle();
  closed.pair.a.peer->close(core::Status(core::Code::kPeerDead, "told to"));
  closed.pair.settle();
  CHECK(closed.pair.b.receiver.failures.size() == 1);
  clock.pass(std::chrono::seconds(1));
  closed.pair.settle();
  CHECK(closed.pair.a.receiver.failures.size() == 1);

  // Nobody is there any more to be told.
  Fixture deaf({{"eth0", "x", 0}, {"eth1", "y", 0}}, {{"net0", "x", 0}, {"net1", "y", 0}});
  deaf.pair.connect();
  deaf.hubs[1]->kill(deaf.pair.b.id);
  deaf.pair.a.transport->set_receiver(nullptr);
  deaf.pair.settle();
  clock.pass(std::chrono::seconds(1));
  deaf.pair.settle();
  CHECK(deaf.pair.a.receiver.failures.empty());
}

TEST_CASE("transport/cards: memory of a device is attached to all cards or to none", "[transport][fast]") {
  for (const bool all : {true, false}) {
    std::vector<std::byte> memory(1000);
    contract::Pair pair;
    LoopbackHub can(LoopbackHub::Done::kReleased, [](const std::byte* address) { return address; });
    LoopbackHub cannot;
    std::vector<Transport*> first;
    for (contract::Side* side : {&pair.a, &pair.b}) {
      side->use_heap();
      std::vector<Card> cards;
      cards.push_back({{"eth0", "", "", 0, {}}, can.make_transport(side->id)});
      first.push_back(cards[0].transport.get());
      if (!all) cards.push_back({{"eth1", "", "", 0, {}}, cannot.make_transport(side->id)});
      side->transport = join_cards(std::move(cards)).value();
    }
    pair.finish_setup();
    const core::Status attached = pair.a.transport->attach_device({{memory.data(), memory.size()}, {}});
    CHECK(attached.is_ok() == all);
    if (!all) CHECK(attached.code() == core::Code::kUnsupported);
    const Buffer payload = pair.a.pool->lend(memory.data(), 100, nullptr);
    auto endpoint = first[0]->connect(pair.b.id, first[1]->address());
    CHECK(endpoint.value()->send(numbered(1), payload, 100, {}).is_ok() == all);
  }
}

TEST_CASE("transport/cards: the descriptor of several is their own and is closed", "[transport][fast]") {
  const std::vector<int> inner = {eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  auto two = rails_with(inner);
  const int own = two->event_fd();
  REQUIRE(own >= 0);
  CHECK(is_open(own));
  for (const int fd : inner) CHECK(own != fd);
  for (const int fd : inner) {  // it tells of each
    const auto is_readable = [own] {
      pollfd event{own, POLLIN, 0};
      return poll(&event, 1, 0) == 1;
    };
    CHECK_FALSE(is_readable());
    REQUIRE(eventfd_write(fd, 1) == 0);
    CHECK(is_readable());
    eventfd_t count = 0;
    REQUIRE(eventfd_read(fd, &count) == 0);
  }
  two.reset();
  CHECK_FALSE(is_open(own));

  // That of a single one is not ours to close, and of several that cannot all tell there is none.
  auto one = rails_with({inner[0]});
  CHECK(one->event_fd() == inner[0]);
  one.reset();
  CHECK(rails_with({inner[0], -1})->event_fd() == -1);
  CHECK(rails_with({-1})->event_fd() == -1);
  for (const int fd : inner) {
    CHECK(is_open(fd));
    close(fd);
  }
}

TEST_CASE("transport/cards: what is encoded is decoded", "[transport][fast]") {
  std::vector<CardInfo> infos = infos_of({{"eth0", "10.0.0.0/24", 25}, {"eth1", "", 0}});
  infos[1].inner = {std::byte{1}, std::byte{2}};
  CHECK(decode_cards(encode_cards(infos)).value() == infos);
  CHECK_FALSE(decode_cards(encode_cards({})).is_ok());
  CHECK_FALSE(decode_cards(encode_cards(std::vector<CardInfo>(kCardsMax + 1))).is_ok());
  infos[0].rate = -1;
  CHECK_FALSE(decode_cards(encode_cards(infos)).is_ok());
}

}  // namespace hybridps::transport
