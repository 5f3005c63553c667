// How connections end: closed, corrupt, refused, and strangers at the socket.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/stat.h>

#include <array>
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
using transport::contract::kLargeBytes;
using transport::contract::matches;
using transport::contract::number_of;
using transport::contract::numbered;

struct Ends {
  Side a;
  Side b;
  explicit Ends(ShmOptions options = {}) {
    open_side(a, options);
    open_side(b, options);
    a.peer = link(a, b.id, b.transport->address());
    b.peer = link(b, a.id, a.transport->address());
    REQUIRE(run_until({&a, &b}, [&] {
      return shm_of(a).proof(b.id).state == ProofState::kProven && shm_of(b).proof(a.id).state == ProofState::kProven;
    }));
  }
  ~Ends() {
    a.receiver.messages.clear();
    b.receiver.messages.clear();
  }
};

TEST_CASE("intranode/shm: an engine that closes is told apart from one that dies", "[intranode][fast]") {
  Ends ends;
  std::vector<Side::Done> done(4);
  for (std::size_t i = 0; i < 4; ++i) {
    REQUIRE(ends.a.peer->send(numbered(i), ends.a.filled(kLargeBytes, i), kLargeBytes, ends.a.record(done[i])).is_ok());
  }
  for (std::uint64_t i = 0; i < 20; ++i) {  // its last words are heard
    REQUIRE(ends.b.peer->send(numbered(i), i < 3 ? ends.b.filled(5000, i) : Buffer(), i < 3 ? 5000 : 0, {}).is_ok());
  }
  ends.b.transport.reset();
  REQUIRE(run_until({&ends.a}, [&] { return ends.a.receiver.failures.size() == 1 && done[3].count == 1; }));
  for (int i = 0; i < 100; ++i) ends.a.progress();
  REQUIRE(ends.a.receiver.failures.size() == 1);
  CHECK(ends.a.receiver.failures[0].first == ends.b.id);
  CHECK(ends.a.receiver.failures[0].second.code() == core::Code::kClosed);
  CHECK(shm_of(ends.a).proof(ends.b.id).state == ProofState::kFailed);
  for (const auto& each : done) {
    CHECK(each.count == 1);
    CHECK(each.last.code() == core::Code::kClosed);
  }
  CHECK(ends.a.pool->slots_in_use() == 0);
  REQUIRE(ends.a.receiver.messages.size() == 20);
  for (std::uint64_t i = 0; i < 3; ++i) CHECK(matches(ends.a.receiver.messages[i].payload.data(), 5000, i));
  CHECK(ends.a.transport->find(ends.b.id) == nullptr);
  CHECK(ends.a.peer->send(numbered(1), {}, 0, {}).code() == core::Code::kClosed);
  CHECK(ends.a.transport->stats().endpoints_open == 0);
}

TEST_CASE("intranode/shm: a payload held beyond the end of its sender stays readable", "[intranode][fast]") {
  Ends ends;
  REQUIRE(ends.b.peer->send(numbered(1), ends.b.filled(60000, 1), 60000, {}).is_ok());
  REQUIRE(run_until({&ends.a}, [&] { return ends.a.receiver.messages.size() == 1; }));
  ends.b.transport.reset();
  ends.b.pool.reset();
  ends.b.context.reset();
  REQUIRE(run_until({&ends.a}, [&] { return ends.a.receiver.failures.size() == 1; }));
  for (int i = 0; i < 100; ++i) ends.a.progress();
  CHECK(matches(ends.a.receiver.messages[0].payload.data(), 60000, 1));
  const std::size_t descriptors = open_descriptors();
  ends.a.receiver.messages.clear();
  REQUIRE(run_until({&ends.a}, [&] { return open_descriptors() < descriptors; }));
}

TEST_CASE("intranode/shm: a closed endpoint waits for what its peer still reads", "[intranode][fast]") {
  Ends ends;
  Side::Done done;
  REQUIRE(ends.a.peer->send(numbered(1), ends.a.filled(60000, 1), 60000, ends.a.record(done)).is_ok());
  REQUIRE(run_until({&ends.b}, [&] { return ends.b.receiver.messages.size() == 1; }));
  const std::size_t descriptors = open_descriptors();
  ends.a.peer->close({core::Code::kPeerDead, "verdict"});
  REQUIRE(run_until({&ends.a, &ends.b}, [&] { return ends.b.receiver.failures.size() == 1; }));
  for (int i = 0; i < 100; ++i) ends.a.progress(), ends.b.progress();
  CHECK(done.count == 0);
  CHECK(ends.a.pool->slots_in_use() == 1);
  CHECK(matches(ends.b.receiver.messages[0].payload.data(), 60000, 1));
  ends.b.receiver.messages.clear();
  // Told by event, as both may sleep.
  while (ends.b.progress() > 0 || !ends.b.transport->arm()) {
  }
  REQUIRE(sleep_until(ends.a, [&] { return done.count == 1; }, 5));
  CHECK(done.last.message() == "verdict");
  REQUIRE(run_until({&ends.a, &ends.b}, [&] { return open_descriptors() == descriptors - 4; }));
  CHECK(ends.a.receiver.failures.empty());
}

TEST_CASE("intranode/shm: a friendly close sends what waits for the connection and for room", "[intranode][fast]") {
  ShmOptions options;
  options.ring_entries = 4;
  options.release_entries = 4;
  Side a;
  Side b;
  open_side(a, options);
  open_side(b, options);
  a.peer = link(a, b.id, b.transport->address());
  std::size_t finished = 0;
  for (std::uint64_t i = 0; i < 40; ++i) {
    const std::size_t bytes = i % 4 == 0 ? 5000 : 0;
    REQUIRE(
        a.peer->send(numbered(i), bytes > 0 ? a.filled(bytes, i) : Buffer(), bytes, [&](core::Status) { ++finished; })
            .is_ok());
  }
  a.peer->close({core::Code::kClosed, "goodbye"});
  CHECK(a.peer->send(numbered(1), {}, 0, {}).code() == core::Code::kClosed);
  CHECK(a.transport->find(b.id) == nullptr);
  CHECK(a.transport->stats().endpoints_open == 0);
  std::vector<int> seen(40);
  REQUIRE(run_until({&a, &b}, [&] {
    for (auto& message : b.receiver.messages) ++seen[number_of(message.header)];
    b.receiver.messages.clear();
    return b.receiver.failures.size() == 1 && finished == 40;
  }));
  for (auto& message : b.receiver.messages) ++seen[number_of(message.header)];
  b.receiver.messages.clear();
  CHECK(seen == std::vector<int>(40, 1));
  CHECK(b.receiver.failures[0].second.code() == core::Code::kClosed);
  CHECK(a.receiver.failures.empty());
}

TEST_CASE("intranode/shm: an address without its engine fails later and says why", "[intranode][fast]") {
  Side a;
  open_side(a);
  const core::EngineId gone = core::make_engine_id();
  transport::Endpoint* endpoint = link(a, gone, encode({gone, "hybridps-nobody"}));
  static_cast<void>(endpoint->send(numbered(1), {}, 0, {}));
  const Proof proof = shm_of(a).proof(gone);
  CHECK(proof.state == ProofState::kFailed);
  CHECK(proof.reason.message().find("another host") != std::string_view::npos);
  REQUIRE(run_until({&a}, [&] { return a.receiver.failures.size() == 1; }));
  CHECK(a.receiver.failures[0].second.code() == core::Code::kPeerDead);
  CHECK_FALSE(a.receiver.called_outside_progress);
  CHECK(shm_of(a).proof(core::make_engine_id()).state == ProofState::kPending);
}

TEST_CASE("intranode/shm: an engine without room refuses and slots are used again", "[intranode][fast]") {
  ShmOptions small;
  small.peers_max = 1;
  small.ring_entries = 4;
  Side hub;
  open_side(hub, small);
  for (int round = 0; round < 3; ++round) {
    Side one;
    open_side(one);
    one.peer = link(one, hub.id, hub.transport->address());
    for (std::uint64_t i = 0; i < 11; ++i) {
      REQUIRE(one.peer->send(numbered(i), one.filled(1000, i), 1000, {}).is_ok());
    }
    REQUIRE(run_until({&one, &hub}, [&] { return hub.receiver.messages.size() == 11; }));
    for (const auto& message : hub.receiver.messages) {
      CHECK(matches(message.payload.data(), 1000, number_of(message.header)));
    }
    hub.receiver.messages.clear();

    Side two;
    open_side(two);
    two.peer = link(two, hub.id, hub.transport->address());
    REQUIRE(run_until({&one, &two, &hub}, [&] { return two.receiver.failures.size() == 1; }));
    CHECK(two.receiver.failures[0].second.code() == core::Code::kOutOfResources);
    CHECK(two.receiver.failures[0].second.message().find("LOCAL_WORLD_SIZE") != std::string_view::npos);
    CHECK(hub.transport->connect(two.id, two.transport->address()).status().code() == core::Code::kOutOfResources);

    one.transport.reset();
    REQUIRE(run_until({&hub}, [&] { return hub.receiver.failures.size() == std::size_t(round) + 1; }));
    for (int i = 0; i < 20; ++i) hub.progress();
  }
}

// ---- A peer that is broken: real packets and memory, made by hand.

struct ForgedPeer {
  core::EngineId id = core::make_engine_id();
  std::unique_ptr<Segment> control = std::move(Segment::create("test", 1 << 20).value());
  std::unique_ptr<Segment> rings = std::move(Segment::create("test", 1 << 20).value());
  std::unique_ptr<Segment> pool = std::move(Segment::create("test", 1 << 20).value());
  int event = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  core::Descriptor socket;
  SlotLayout layout{8, 8};
  Packet theirs;
  std::unique_ptr<Segment> slot;  // ours to write, in their control area
  MessageWriter writer;
  ReleaseWriter releases;

  ForgedPeer() = default;
  ForgedPeer(const ForgedPeer&) = delete;
  ~ForgedPeer() { ::close(event); }

  Packet hello(core::EngineId to) {
    Packet packet = make_packet(PacketKind::kHello, id, to);
    packet.nonce = {1, 2};
    packet.pool_bytes = pool->memory().size();
    packet.ring_entries = layout.ring_entries;
    packet.release_entries = layout.release_entries;
    return packet;
  }
  /// Connects, and tells what shows that it knows the listener's secret.
  tls::Mac dial(Side& to) {
    int error = 0;
    const ShmAddress address = *decode(to.transport->address());
    socket = connect_to(address.socket_name, error);
    REQUIRE(error == 0);
    Packet meet = make_packet(PacketKind::kMeet, id, to.id);
    meet.nonce = {1, 2};
    REQUIRE(send_packet(socket.get(), meet));
    Packet answer;
    std::array<core::Descriptor, kDescriptorsMax> none;
    REQUIRE(next(to, answer, none));
    REQUIRE(answer.kind == PacketKind::kMeet);
    CHECK_FALSE(none[0]);
    const std::array<Nonce, 2> nonces = {meet.nonce, answer.nonce};
    const std::array<std::uint64_t, 2> ids = {id.value, to.id.value};
    CHECK(answer.mac == mac_of(address.secret, MeetingRole::kListener, nonces, ids));
    return mac_of(address.secret, MeetingRole::kDialler, nonces, ids);
  }
  bool say(const Packet& packet) {
    const int descriptors[] = {control->fd(), event, rings->fd(), pool->fd()};
    return send_packet(socket.get(), packet, packet.kind == PacketKind::kHello ? descriptors : std::span<const int>());
  }
  bool next(Side& to, Packet& packet, std::array<core::Descriptor, kDescriptorsMax>& descriptors) {
    for (int i = 0; i < 2000; ++i) {
      to.progress();
      const Received received = receive_packet(socket.get(), packet, descriptors);
      if (received == Received::kPacket) return true;
      if (received == Received::kEndOfFile) return false;
      ::usleep(100);  // it looks at its sockets once in some milliseconds
    }
    return false;
  }
  static std::size_t bytes_of(const core::Descriptor& file) {
    struct stat found{};
    REQUIRE(::fstat(file.get(), &found) == 0);
    return static_cast<std::size_t>(found.st_size);
  }
  /// The whole handshake, honest.
  void join(Side& to, bool honest = true) {
    Packet first = hello(to.id);
    first.mac = dial(to);
    REQUIRE(say(first));
    std::array<core::Descriptor, kDescriptorsMax> descriptors;
    REQUIRE(next(to, theirs, descriptors));
    REQUIRE(theirs.kind == PacketKind::kHello);
    CHECK(theirs.echo == std::array<std::uint64_t, 2>{1, 2});
    const SlotLayout their_layout{theirs.ring_entries, theirs.release_entries};
    slot = std::move(
        Segment::map(descriptors[2].get(), 0, page_ceil(their_layout.slot_bytes()), Segment::Access::kReadWrite)
            .value());
    CHECK(bytes_of(descriptors[0]) == page_ceil(1));
    CHECK(bytes_of(descriptors[2]) == page_ceil(their_layout.slot_bytes()));  // no other peer's rings are in it
    writer = MessageWriter(slot->memory().data(), their_layout);
    releases = ReleaseWriter(slot->memory().data(), their_layout);
    Packet proof = make_packet(PacketKind::kProof, id, to.id);
    proof.echo = theirs.nonce;
    for (int i = 0; i < 2; ++i) {
      proof.nonce[i] = slot_of(slot->memory().data()).nonce[i];
      slot_of(slot->memory().data()).echo[i] = proof.nonce[i] + (honest ? 0 : 1);
    }
    REQUIRE(say(proof));
    for (int i = 0; i < 50; ++i) to.progress();
    CHECK((shm_of(to).proof(id).state == ProofState::kProven) == honest);
  }
};

TEST_CASE("intranode/shm: whoever cannot write our memory is not proven", "[intranode][fast]") {
  Side a;
  open_side(a);
  ForgedPeer peer;
  peer.join(a, false);
  const Proof proof = shm_of(a).proof(peer.id);
  CHECK(proof.state == ProofState::kFailed);
  CHECK(proof.reason.message().find("could not show") != std::string_view::npos);
}

TEST_CASE("intranode/shm: a corrupt peer is cut off with a reason", "[intranode][fast]") {
  const int kind = GENERATE(range(0, 9));
  INFO("kind " << kind);
  Side a;
  open_side(a);
  ForgedPeer peer;
  peer.join(a);
  a.peer = link(a, peer.id, encode({peer.id, "unused"}));
  Side::Done done;
  REQUIRE(a.peer->send(numbered(1), a.filled(5000, 1), 5000, a.record(done)).is_ok());
  const std::byte header[4] = {};
  const std::size_t pool_bytes = peer.pool->memory().size();
  const SlotLayout layout{peer.theirs.ring_entries, peer.theirs.release_entries};
  MessageEntry* const ring = ring_of(peer.slot->memory().data(), layout);
  REQUIRE(peer.writer.room() == Taken::kEntry);
  switch (kind) {
    case 0: peer.writer.put_reference(header, pool_bytes, 1, 0); break;
    case 1: peer.writer.put_reference(header, 4096, pool_bytes - 4095, 0); break;
    case 2: peer.writer.put_reference(header, ~std::uint64_t{0} - 10, 1000, 0); break;
    case 3: peer.writer.put_reference(header, 1, ~std::uint64_t{0}, 0); break;
    case 4:
      ring[0].shape = ~std::uint64_t{0};
      ring[0].turn = 1;
      break;
    case 5: ring[0].turn = 77; break;
    case 6: peer.releases.put(12345); break;
    case 7: REQUIRE(peer.say(make_packet(PacketKind::kProof, core::make_engine_id(), a.id))); break;
    case 8: REQUIRE(::send(peer.socket.get(), "junk", 4, MSG_NOSIGNAL) == 4); break;
  }
  REQUIRE(run_until({&a}, [&] { return a.receiver.failures.size() == 1 && done.count == 1; }, 5));
  INFO(a.receiver.failures[0].second.to_string());
  CHECK(a.receiver.failures[0].first == peer.id);
  CHECK(a.receiver.failures[0].second.code() == core::Code::kPeerDead);
  CHECK(a.receiver.failures[0].second.message().find("cut off") != std::string_view::npos);
  CHECK(done.last.code() == core::Code::kPeerDead);
  CHECK(a.receiver.messages.empty());
  CHECK(a.pool->slots_in_use() == 0);
  for (int i = 0; i < 50; ++i) a.progress();
  CHECK(a.receiver.failures.size() == 1);
}

TEST_CASE("intranode/shm: a ring full of noise never goes out of bounds", "[intranode][fast]") {
  std::mt19937_64 random(11);
  for (int round = 0; round < 40; ++round) {
    Side a;
    open_side(a);
    ForgedPeer peer;
    peer.join(a);
    a.peer = link(a, peer.id, encode({peer.id, "unused"}));
    static_cast<void>(a.peer->send(numbered(1), a.filled(5000, 1), 5000, {}));
    const std::span<std::byte> noise = peer.slot->memory();
    const SlotLayout layout{peer.theirs.ring_entries, peer.theirs.release_entries};
    for (std::size_t i = 0; i + 8 <= noise.size(); i += 8) {
      const std::uint64_t word = random() >> (random() % 64);
      std::memcpy(noise.data() + i, &word, 8);
    }
    for (std::uint32_t i = 0; i < layout.ring_entries; ++i) {
      if (random() % 8 != 0) ring_of(noise.data(), layout)[i].turn = i + 1;
      if (random() % 8 != 0) ring_of(noise.data(), layout)[i].shape = (random() % 200 << 16) | (random() % 2);
    }
    for (int i = 0; i < 20; ++i) {
      a.progress();
      unsigned sum = 0;
      for (const auto& message : a.receiver.messages) {
        for (std::size_t k = 0; k < message.payload.bytes(); k += 512) sum += unsigned(message.payload.data()[k]);
      }
      static_cast<void>(sum);
      a.receiver.messages.clear();
    }
    CHECK(a.receiver.failures.size() <= 1);
  }
}

TEST_CASE("intranode/shm: hellos with nonsense in them are refused", "[intranode][fast]") {
  const auto refused = [](auto spoil) {
    Side a;
    open_side(a);
    ForgedPeer peer;
    const tls::Mac mac = peer.dial(a);
    Packet hello = peer.hello(a.id);
    hello.mac = mac;
    spoil(peer, hello);
    REQUIRE(peer.say(hello));
    for (int i = 0; i < 200; ++i) {
      a.progress();
      ::usleep(100);
    }
    CHECK(a.receiver.failures.empty());  // nobody asked for this peer
    const Proof proof = shm_of(a).proof(peer.id);
    return proof.state == ProofState::kFailed ||
           (proof.state == ProofState::kPending && shm_of(a).counters().strangers_dropped == 1);
  };
  CHECK(refused([](ForgedPeer&, Packet& hello) { hello.pool_bytes = std::size_t{1} << 40; }));
  CHECK(refused([](ForgedPeer&, Packet& hello) { hello.pool_bytes = 0; }));
  CHECK(refused([](ForgedPeer& peer, Packet&) { peer.rings = std::move(Segment::create("test", 1).value()); }));
  CHECK(refused([](ForgedPeer&, Packet& hello) { hello.ring_entries = 3; }));
  CHECK(refused([](ForgedPeer&, Packet& hello) { hello.release_entries = 1u << 31; }));
  CHECK(refused([](ForgedPeer&, Packet& hello) { hello.ring_entries = 65536; }));  // beyond the end
  CHECK(refused([](ForgedPeer&, Packet& hello) { hello.version = 1; }));
  CHECK(refused([](ForgedPeer&, Packet& hello) { hello.kind = PacketKind::kProof; }));
  CHECK(refused([](ForgedPeer&, Packet& hello) { hello.to ^= 1; }));
  CHECK(refused([](ForgedPeer&, Packet& hello) { hello.from = hello.to; }));
  CHECK(refused([](ForgedPeer&, Packet& hello) { hello.from = 0; }));
  CHECK(refused([](ForgedPeer& peer, Packet&) {  // a pipe in place of the eventfd
    int ends[2];
    REQUIRE(::pipe2(ends, O_NONBLOCK | O_CLOEXEC) == 0);
    ::close(peer.event);
    ::close(ends[0]);
    peer.event = ends[1];
  }));
}

TEST_CASE("intranode/shm: who does not know the secret of an address gets no descriptor", "[intranode][fast]") {
  const int kind = GENERATE(range(0, 4));
  INFO("kind " << kind);
  Side a;
  open_side(a);
  ForgedPeer peer;
  Packet hello = peer.hello(a.id);
  if (kind < 3) {
    hello.mac = peer.dial(a);
    if (kind == 0) hello.mac = {};
    if (kind == 1) hello.mac[31] ^= 1;
    if (kind == 2) hello.from = core::make_engine_id().value;  // the proof is another engine's
  } else {  // it has not met: what it saw of another handshake serves nobody
    ForgedPeer other;
    hello.mac = other.dial(a);
    int error = 0;
    peer.socket = connect_to(decode(a.transport->address())->socket_name, error);
    REQUIRE(error == 0);
  }
  REQUIRE(peer.say(hello));
  Packet answer;
  std::array<core::Descriptor, kDescriptorsMax> descriptors;
  CHECK_FALSE(peer.next(a, answer, descriptors));
  for (const core::Descriptor& descriptor : descriptors) CHECK_FALSE(descriptor);
  CHECK(shm_of(a).counters().strangers_dropped == (kind == 3 ? 2 : 1));  // the other one has left
  CHECK(shm_of(a).proof(core::EngineId{hello.from}).state == ProofState::kPending);
}

TEST_CASE("intranode/shm: a process that has taken another's socket gets no descriptor", "[intranode][fast]") {
  Side a;
  Side b;
  open_side(a);
  open_side(b);
  ShmAddress address = *decode(b.transport->address());
  address.secret[0] ^= 1;  // what a's roster says of the process that had the socket before
  a.peer = link(a, b.id, encode(address));
  REQUIRE(run_until({&a, &b}, [&] { return shm_of(a).proof(b.id).state == ProofState::kFailed; }, 5));
  CHECK(shm_of(a).proof(b.id).reason.message().find("does not know the secret") != std::string_view::npos);
  CHECK(shm_of(b).proof(a.id).state == ProofState::kPending);
}

TEST_CASE("intranode/shm: strangers at the socket are dropped and harm nobody", "[intranode][fast]") {
  ShmOptions options;
  options.hello_deadline = std::chrono::milliseconds(100);
  Side a;
  open_side(a, options);
  const std::size_t descriptors = open_descriptors();
  const std::string name = decode(a.transport->address())->socket_name;
  int error = 0;
  core::Descriptor silent = connect_to(name, error);
  core::Descriptor noisy = connect_to(name, error);
  REQUIRE(::send(noisy.get(), "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL) == 18);
  core::Descriptor large = connect_to(name, error);
  const std::vector<char> many(sizeof(Packet) * 2, 'x');
  REQUIRE(::send(large.get(), many.data(), many.size(), MSG_NOSIGNAL) > 0);
  core::Descriptor gifts = connect_to(name, error);  // descriptors that nobody asked for
  const int three[] = {0, 1, 2};
  Packet packet = make_packet(PacketKind::kGoodbye, core::make_engine_id(), a.id);
  REQUIRE(send_packet(gifts.get(), packet, three));
  core::Descriptor gone = connect_to(name, error);
  gone.reset();

  const auto start = std::chrono::steady_clock::now();
  REQUIRE(sleep_until(a, [&] { return shm_of(a).counters().strangers_dropped == 5; }, 5));
  CHECK(seconds_since(start) > 0.09);  // the silent one had its time
  CHECK(seconds_since(start) < 2);
  Packet answer;
  std::array<core::Descriptor, kDescriptorsMax> none;
  CHECK(receive_packet(silent.get(), answer, none) == Received::kEndOfFile);
  silent.reset(), noisy.reset(), large.reset(), gifts.reset();
  CHECK(open_descriptors() == descriptors);

  Side b;
  open_side(b);
  b.peer = link(b, a.id, a.transport->address());
  REQUIRE(b.peer->send(numbered(3), {}, 0, {}).is_ok());
  REQUIRE(run_until({&a, &b}, [&] { return a.receiver.messages.size() == 1; }));
  CHECK(a.receiver.failures.empty());
}

TEST_CASE("intranode/shm: a crowd of silent strangers does not lock engines out for ever", "[intranode][fast]") {
  ShmOptions options;
  options.hello_deadline = std::chrono::milliseconds(200);
  options.peers_max = 100;
  Side a;
  open_side(a, options);
  const std::string name = decode(a.transport->address())->socket_name;
  std::vector<core::Descriptor> crowd;
  int error = 0;
  for (int i = 0; i < 200; ++i) {
    core::Descriptor socket = connect_to(name, error);
    if (!socket) break;
    crowd.push_back(std::move(socket));
    a.progress();
  }
  Side b;
  open_side(b);
  REQUIRE(sleep_until(a, [&] { return shm_of(a).counters().strangers_dropped >= crowd.size(); }, 5));
  b.peer = link(b, a.id, a.transport->address());
  REQUIRE(b.peer->send(numbered(3), {}, 0, {}).is_ok());
  REQUIRE(run_until({&a, &b}, [&] { return a.receiver.messages.size() == 1; }));
}

}  // namespace
}  // namespace hybridps::intranode::shm
