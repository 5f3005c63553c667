// Sessions: what both ends count holds over lost, late and repeated connections (a simulation of histories), and real
// transports go on over connections that a relay between them resets, holds back or swallows.
#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "hybridps/transport/tcp/tcp_session.h"
#include "tests/unit/transport/tcp/tcp_pair.h"
#include "tests/unit/transport/tcp/tcp_relay.h"

namespace hybridps::transport {
namespace {

using contract::matches;
using contract::number_of;
using contract::numbered;

/// Two sessions and the connections between them, in the order of a seed. A byte is its position in its stream.
class History {
 public:
  explicit History(std::uint64_t seed) : random_(seed) {
    ends_[0].goes_first = pick(2) == 0;
    ends_[1].goes_first = !ends_[0].goes_first;
  }

  /// Empty: each byte came once and in order. Else what did not.
  std::string run() {
    for (int i = 0; i < 60 && wrong_.empty(); ++i) happen(/*may_break=*/true);
    for (int i = 0; i < 4000 && wrong_.empty() && !is_over(); ++i) happen(/*may_break=*/false);
    if (wrong_.empty() && !is_over()) wrong_ = "not all bytes came";
    return wrong_;
  }
  int connections() const { return static_cast<int>(connections_.size()); }

 private:
  struct Packet {
    enum class What : std::uint8_t { kGreeting, kAnswer, kBytes, kEnd } what = What::kEnd;
    SessionSide side;         // kGreeting, kAnswer
    std::uint64_t from = 0;   // kBytes
    std::uint64_t bytes = 0;  // kBytes
    std::uint32_t told = 0;   // kBytes
  };
  struct Connection {
    int dialler = 0;
    std::array<std::deque<Packet>, 2> to;  // by the end that they go to
  };
  struct End {
    TcpSession session;
    bool goes_first = false;
    Connection* at = nullptr;  // over which it sends, or has greeted
    bool is_open = false;
    std::uint64_t produced = 0;
  };

  std::size_t pick(std::size_t below) { return static_cast<std::size_t>(random_() % below); }
  bool is_over() const {
    return ends_[0].session.received() == ends_[1].produced && ends_[1].session.received() == ends_[0].produced;
  }
  void let_go(int who) {
    End& end = ends_[static_cast<std::size_t>(who)];
    if (end.at != nullptr) end.at->to[static_cast<std::size_t>(1 - who)].push_back({});
    end.at = nullptr;
    end.is_open = false;
  }
  void happen(bool may_break) {
    const int who = static_cast<int>(pick(2));
    End& end = ends_[static_cast<std::size_t>(who)];
    switch (pick(may_break ? 9 : 6)) {
      case 0:
        if (may_break) end.produced += pick(5000);
        break;
      case 1:
        if (end.is_open && end.session.sent() < end.produced) {
          const std::uint64_t bytes = 1 + pick(end.produced - end.session.sent());
          end.at->to[static_cast<std::size_t>(1 - who)].push_back({Packet::What::kBytes,
                                                                   {},
                                                                   end.session.sent(),
                                                                   bytes,
                                                                   static_cast<std::uint32_t>(end.session.received())});
          end.session.has_sent(bytes);
        }
        break;
      case 2:
        if (end.at == nullptr) {
          connections_.push_back(std::make_unique<Connection>());
          end.at = connections_.back().get();
          end.at->dialler = who;
          end.at->to[static_cast<std::size_t>(1 - who)].push_back(
              {Packet::What::kGreeting, end.session.begin_attempt()});
        }
        break;
      case 6:  // a connection breaks: what is under way is lost from some place on, and both ends hear of it later
        if (!connections_.empty()) {
          Connection& connection = *connections_[pick(connections_.size())];
          for (auto& packets : connection.to) {
            if (!packets.empty()) packets.resize(pick(packets.size() + 1));
            packets.push_back({});
          }
        }
        break;
      case 7:  // an attempt is given up, or a connection that still stands
        if (pick(3) == 0) let_go(who);
        break;
      case 8:  // a greeting comes twice
        for (const auto& connection : connections_)
          for (auto& packets : connection->to)
            if (!packets.empty() && packets.front().what == Packet::What::kGreeting && pick(4) == 0)
              packets.push_front(packets.front());
        break;
      default:
        if (!connections_.empty()) deliver(*connections_[pick(connections_.size())], who);
    }
  }

  void deliver(Connection& connection, int who) {
    std::deque<Packet>& packets = connection.to[static_cast<std::size_t>(who)];
    if (packets.empty()) return;
    const Packet packet = packets.front();
    packets.pop_front();
    End& end = ends_[static_cast<std::size_t>(who)];
    const bool is_mine = end.at == &connection;
    if (packet.what == Packet::What::kGreeting) return hear_greeting(connection, who, packet.side);
    if (!is_mine) return;  // the socket is closed
    if (packet.what == Packet::What::kEnd) return let_go(who);
    if (packet.what == Packet::What::kAnswer) {
      if (end.session.on_answer(packet.side) != TcpSession::Fit::kGoesOn) wrong_ = "an answer that does not fit";
      end.is_open = true;
      return;
    }
    if (packet.from != end.session.received()) wrong_ = "bytes came twice, or are missing";
    if (!end.session.acknowledge(packet.told)) wrong_ = "told more than was sent";
    end.session.has_received(packet.bytes);
  }

  void hear_greeting(Connection& connection, int who, const SessionSide& side) {
    End& end = ends_[static_cast<std::size_t>(who)];
    while (end.is_open && !end.at->to[static_cast<std::size_t>(who)].empty()) deliver(*end.at, who);
    const TcpSession::Fit fit = end.session.on_greeting(side, end.at != nullptr && !end.is_open, end.goes_first);
    if (fit == TcpSession::Fit::kLost) wrong_ = "a greeting that does not fit";
    if (fit != TcpSession::Fit::kGoesOn) {
      connection.to[static_cast<std::size_t>(1 - who)].push_back({});
      return;
    }
    let_go(who);
    end.at = &connection;
    end.is_open = true;
    connection.to[static_cast<std::size_t>(1 - who)].push_back({Packet::What::kAnswer, end.session.side()});
  }

  std::mt19937_64 random_;
  std::array<End, 2> ends_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::string wrong_;
};

TEST_CASE("transport/tcp session: 100,000 histories of connections that break, cross, come late or twice",
          "[transport][fast]") {
  int connections = 0;
  for (std::uint64_t seed = 0; seed < 100'000; ++seed) {
    History history(seed);
    const std::string wrong = history.run();
    connections += history.connections();
    INFO("seed " << seed);
    REQUIRE(wrong.empty());
  }
  CHECK(connections > 300'000);
}

TEST_CASE("transport/tcp session: a count above what was sent is nobody's who has the stream", "[transport][fast]") {
  TcpSession session;
  session.has_sent(100);
  CHECK(session.acknowledge(60));
  CHECK(session.acknowledge(10));  // of a message that was counted before
  CHECK(session.acknowledged() == 60);
  CHECK_FALSE(session.acknowledge(101));
  CHECK(session.on_greeting({1, 59}, false, false) == TcpSession::Fit::kLost);
  CHECK(session.on_answer({1, 101}) == TcpSession::Fit::kLost);
  CHECK(session.on_answer({1, 100}) == TcpSession::Fit::kGoesOn);
  // Beyond 4 GiB only the low half is told.
  session.has_sent((std::uint64_t{1} << 32) - 1);
  CHECK(session.acknowledge(99));
  CHECK(session.acknowledged() == (std::uint64_t{1} << 32) + 99);
}

/// What holds for connections in clear holds for those in TLS.
TcpOptions either_options() { return GENERATE(false, true) ? tls_options() : test_options(); }

/// Two transports with a relay in each direction, so that either side's dial goes through one.
struct RelayedPair {
  explicit RelayedPair(const TcpOptions& options = test_options()) : pair(make_tcp_pair(options)) {
    contract::Side* const sides[] = {&pair->a, &pair->b};
    for (int i = 0; i < 2; ++i) relays.push_back(std::make_unique<TcpRelay>(sides[i]->transport->address()));
  }
  /// a dials b, and b uses that session or dials too.
  void connect(bool both) {
    auto to_b = pair->a.transport->connect(pair->b.id, relays[1]->address());
    REQUIRE(to_b.is_ok());
    pair->a.peer = to_b.value();
    if (!both) {
      REQUIRE(pair->a.peer->send(numbered(~std::uint64_t{1}), {}, 0, {}).is_ok());
      REQUIRE(run_until([&] { return pair->b.receiver.messages.size() == 1; }));
      pair->release_all();
    }
    auto to_a = pair->b.transport->connect(pair->a.id, relays[0]->address());
    REQUIRE(to_a.is_ok());
    pair->b.peer = to_a.value();
  }
  void run_relays() {
    for (auto& relay : relays) relay->run();
  }
  bool run_until(const std::function<bool()>& condition, double seconds = 20) {
    return pair->run_until(
        [&] {
          run_relays();
          return condition();
        },
        seconds);
  }
  std::uint64_t resumptions() const {
    std::uint64_t sum = 0;
    for (const contract::Side* side : {&pair->a, &pair->b})
      for (const PathInfo& path : side->transport->paths()) sum += path.resumptions;
    return sum;
  }

  std::unique_ptr<contract::Pair> pair;
  std::vector<std::unique_ptr<TcpRelay>> relays;
};

TEST_CASE("transport/tcp session: what goes both ways comes once and whole over connections that are reset",
          "[transport][fast]") {
  const bool both = GENERATE(false, true);
  const std::uint64_t seed = GENERATE(1, 2, 3, 4);
  RelayedPair world(either_options());
  world.connect(both);
  auto& pair = *world.pair;
  constexpr std::uint64_t kCount = 400;
  std::mt19937_64 random(seed);
  struct Way {
    contract::Side* from;
    contract::Side* to;
    std::uint64_t sent = 0;
    std::uint64_t done = 0;
    std::uint64_t next = 0;  // of one session, messages come in order
    std::size_t wrong = 0;
  };
  std::array<Way, 2> ways = {Way{&pair.a, &pair.b}, Way{&pair.b, &pair.a}};
  for (Way& way : ways)
    way.to->receiver.hook = [&way](contract::Recorder::Message& message) {
      const std::uint64_t number = number_of(message.header);
      if (number != way.next++ || !matches(message.payload.data(), message.payload.bytes(), number)) ++way.wrong;
    };
  std::uint64_t until = 40;
  REQUIRE(world.run_until(
      [&] {
        bool over = true;
        for (Way& way : ways) {
          way.to->receiver.messages.clear();
          while (way.sent < kCount) {
            const std::size_t sizes[] = {0, 17, 256, 5000, 65536, 500000};
            const std::size_t bytes = sizes[random() % 6];
            Buffer payload;
            if (bytes > 0 && !(payload = way.from->filled(bytes, way.sent))) break;
            REQUIRE(way.from->peer
                        ->send(numbered(way.sent), payload, bytes,
                               [&way](const core::Status& status) { way.done += status.is_ok() ? 1 : 0; })
                        .is_ok());
            ++way.sent;
          }
          over = over && way.next == kCount && way.done == kCount;
        }
        if (--until == 0) {
          until = 20 + random() % 60;
          for (auto& relay : world.relays) relay->cut(random() % 2 == 0 ? TcpRelay::Cut::kReset : TcpRelay::Cut::kEnd);
        }
        return over;
      },
      60));
  for (const Way& way : ways) CHECK(way.wrong == 0);
  CHECK(world.resumptions() > 1);
  CHECK(pair.a.receiver.failures.empty());
  CHECK(pair.b.receiver.failures.empty());
  CHECK(pair.a.pool->slots_in_use() == 0);
  CHECK(pair.b.pool->slots_in_use() == 0);
}

TEST_CASE("transport/tcp session: a way that swallows everything for a while is a pause", "[transport][fast]") {
  TcpOptions options = either_options();
  options.user_timeout = core::from_seconds(0.3);
  RelayedPair world(options);
  world.connect(/*both=*/false);
  auto& pair = *world.pair;
  for (auto& relay : world.relays) relay->swallow(true);
  contract::Side::Done done;
  for (std::uint64_t i = 0; i < 4; ++i)
    REQUIRE(pair.a.peer
                ->send(numbered(i), pair.a.filled(contract::kLargeBytes, i), contract::kLargeBytes, pair.a.record(done))
                .is_ok());
  (void)world.run_until([] { return false; }, 0.2);
  for (auto& relay : world.relays) relay->cut(TcpRelay::Cut::kReset);  // it has forgotten them
  (void)world.run_until([] { return false; }, 0.3);
  CHECK(pair.b.receiver.messages.empty());
  for (auto& relay : world.relays) relay->swallow(false);
  REQUIRE(world.run_until([&] { return pair.b.receiver.messages.size() == 4; }));
  for (std::uint64_t i = 0; i < 4; ++i) {
    CHECK(number_of(pair.b.receiver.messages[i].header) == i);
    CHECK(matches(pair.b.receiver.messages[i].payload.data(), contract::kLargeBytes, i));
  }
  pair.release_all();
  CHECK(world.run_until([&] { return done.count == 4; }));
  CHECK(pair.a.receiver.failures.empty());
  CHECK(pair.b.receiver.failures.empty());
}

TEST_CASE("transport/tcp session: either side can make the connection again where the other cannot",
          "[transport][fast]") {
  RelayedPair world(either_options());
  world.connect(/*both=*/false);  // a has dialled
  auto& pair = *world.pair;
  world.relays[1]->refuse_new();  // nobody gets to b any more
  contract::Side* sender = &pair.a;
  SECTION("who sends dials again") { world.relays[0]->refuse_new(), world.relays[1]->refuse_new(false); }
  SECTION("the other side dials") {}
  SECTION("the other side dials, and has something to send") { sender = &pair.b; }
  SECTION("the other side dials, and our own attempts are refused as if nobody listened") {
    world.relays[1]->refuse_new(false);
    world.relays[0]->end();  // where b dials
    sender = &pair.b;
  }
  world.relays[1]->cut(TcpRelay::Cut::kReset);
  REQUIRE(sender->peer->send(numbered(1), sender->filled(60000, 1), 60000, {}).is_ok());
  contract::Side& to = sender == &pair.a ? pair.b : pair.a;
  REQUIRE(world.run_until([&] { return to.receiver.messages.size() == 1; }));
  CHECK(pair.a.receiver.failures.empty());
  CHECK(pair.b.receiver.failures.empty());
}

TEST_CASE("transport/tcp session: a way that lets greetings pass and nothing else ends in time, without haste",
          "[transport][fast]") {
  TcpOptions options = either_options();
  options.redial_for = core::from_seconds(0.5);
  RelayedPair world(options);
  world.connect(/*both=*/false);
  auto& pair = *world.pair;
  for (auto& relay : world.relays) relay->pass_greetings_only();
  world.relays[1]->cut(TcpRelay::Cut::kReset);
  REQUIRE(pair.a.peer->send(numbered(1), pair.a.filled(60000, 1), 60000, {}).is_ok());
  REQUIRE(world.run_until([&] { return pair.a.receiver.failures.size() == 1; }));
  CHECK(pair.a.receiver.failures[0].second.message().find("it cannot be reached") != std::string_view::npos);
  CHECK(tcp(pair.a).counters().redials < 60);
}

TEST_CASE("transport/tcp session: a session that the peer has heard of is not dropped for another",
          "[transport][fast]") {
  RelayedPair world(either_options());
  auto& pair = *world.pair;
  auto to_b = pair.a.transport->connect(pair.b.id, world.relays[1]->address());
  auto to_a = pair.b.transport->connect(pair.a.id, world.relays[0]->address());
  REQUIRE((to_b.is_ok() && to_a.is_ok()));
  pair.a.peer = to_b.value();
  pair.b.peer = to_a.value();
  for (contract::Side* side : {&pair.a, &pair.b})
    REQUIRE(side->peer->send(numbered(1), side->filled(60000, 1), 60000, {}).is_ok());
  // Both handshakes are reset somewhere between the first greeting and the last answer, again and again.
  const int steps = GENERATE(range(1, 12));
  for (int cuts = 0; cuts < 3; ++cuts) {
    for (int step = 0; step < steps; ++step) {
      pair.a.progress();
      world.run_relays();
      pair.b.progress();
    }
    for (auto& relay : world.relays) relay->cut(TcpRelay::Cut::kReset);
  }
  REQUIRE(
      world.run_until([&] { return pair.a.receiver.messages.size() == 1 && pair.b.receiver.messages.size() == 1; }));
  CHECK(pair.a.receiver.failures.empty());
  CHECK(pair.b.receiver.failures.empty());
}

TEST_CASE("transport/tcp session: a peer that ends is told at once, one that cannot be reached after the patience",
          "[transport][fast]") {
  TcpOptions options = either_options();
  options.redial_for = core::from_seconds(0.3);
  RelayedPair world(options);
  world.connect(/*both=*/false);
  auto& pair = *world.pair;
  std::string_view what;
  SECTION("it ends") {
    what = kEndedWithoutClosing;
    pair.b.transport.reset();
    for (auto& relay : world.relays) relay->end();
  }
  SECTION("its own kernel has closed the connection, and nothing answers any more") {
    what = "it cannot be reached from 127.0.0.1";
    world.relays[1]->swallow(true);
    world.relays[0]->swallow(true);
    world.relays[1]->cut(TcpRelay::Cut::kEnd);
  }
  SECTION("it has given us up") {
    what = "it has given up this process";
    pair.b.peer->close(core::Status(core::Code::kPeerDead, "silent"));
  }
  REQUIRE(world.run_until([&] { return pair.a.receiver.failures.size() == 1; }));
  CHECK(pair.a.receiver.failures[0].second.code() == core::Code::kPeerDead);
  INFO(pair.a.receiver.failures[0].second.message());
  CHECK(pair.a.receiver.failures[0].second.message().find(what) != std::string_view::npos);
}

TEST_CASE("transport/tcp session: a friendly close over a connection that breaks loses nothing", "[transport][fast]") {
  TcpOptions options = either_options();
  options.close_timeout = core::from_seconds(10);
  RelayedPair world(options);
  world.connect(/*both=*/false);
  auto& pair = *world.pair;
  for (std::uint64_t i = 0; i < 6; ++i)
    REQUIRE(pair.a.peer->send(numbered(i), pair.a.filled(60000, i), 60000, {}).is_ok());
  pair.a.peer->close(core::Status(core::Code::kClosed, "goodbye"));
  pair.a.progress();
  world.relays[1]->run();
  world.relays[1]->cut(TcpRelay::Cut::kReset);
  REQUIRE(world.run_until([&] { return pair.b.receiver.messages.size() == 6; }));
  pair.release_all();
  CHECK(world.run_until([&] { return pair.a.pool->slots_in_use() == 0; }));
  // b need not look for a: a has said farewell.
  const std::uint64_t redials = tcp(pair.b).counters().redials;
  CHECK(world.run_until([&] { return pair.b.receiver.failures.size() == 1; }));
  CHECK(tcp(pair.b).counters().redials == redials);
}

TEST_CASE("transport/tcp session: a peer that hears and never sends lets go of payloads", "[transport][fast]") {
  auto pair = make_tcp_pair();
  pair->connect();
  contract::Side::Done done;
  for (std::uint64_t i = 0; i < 3; ++i) {
    REQUIRE(pair->a.peer->send(numbered(i), pair->a.filled(60000, i), 60000, pair->a.record(done)).is_ok());
    REQUIRE(pair->run_until([&] { return done.count == i + 1; }));
  }
  CHECK(pair->a.pool->slots_in_use() == 0);
  CHECK(pair->b.transport->stats().tx_messages == 0);
}

}  // namespace
}  // namespace hybridps::transport
