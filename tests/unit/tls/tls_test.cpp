// Who holds the token talks, who does not is refused; what is changed on the way is found; sealed values.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "hybridps/core/descriptor.h"
#include "hybridps/tls/authority_impl.h"
#include "hybridps/tls/channel.h"
#include "hybridps/tls/sealed_store.h"
#include "tests/support/catch.h"
#include "tests/support/clock.h"

namespace hybridps::tls {
namespace {

using core::Code;

std::shared_ptr<const Authority> authority(const std::string& token = "a token of some length") {
  auto made = Authority::from_token(token);
  INFO(made.status().to_string());
  REQUIRE(made.is_ok());
  return std::move(made).value();
}
std::shared_ptr<const Identity> identity(const std::shared_ptr<const Authority>& of,
                                         Encryptor encryptor = Encryptor::kOpenSsl) {
  auto made = of->make_identity(encryptor);
  INFO(made.status().to_string());
  REQUIRE(made.is_ok());
  return std::move(made).value();
}

/// Two channels, and a wire between them that the test holds: bytes go on when it says so.
struct Wire {
  Wire(std::shared_ptr<const Identity> a, std::shared_ptr<const Identity> b) {
    for (std::size_t i = 0; i < 2; ++i) {
      std::array<int, 2> pair{};
      const core::ForkLock lock;
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair.data()) == 0);
      own[i] = core::Descriptor(lock, pair[0]);
      const int small = 16384;
      (void)::setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
      far[i] = core::Descriptor(lock, pair[1]);
    }
    ends[0] = TlsChannel::dial(std::move(a), own[0].get(), key_of("the secret of the listener")).value();
    ends[1] = TlsChannel::accept(std::move(b), own[1].get(), guard);
  }
  static Mac key_of(const std::string& secret) { return knock_key(bytes_of(secret)); }
  /// Takes what `from` has sent.
  std::vector<std::byte> take(std::size_t from) const {
    std::vector<std::byte> bytes(1 << 20);
    const ssize_t got = ::recv(far[from].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    seen.insert(seen.end(), bytes.begin(), bytes.end());
    return bytes;
  }
  /// What does not fit into the socket goes with the next bytes.
  void give(std::size_t to, const std::vector<std::byte>& bytes) {
    std::vector<std::byte>& rest = held[to];
    rest.insert(rest.end(), bytes.begin(), bytes.end());
    const ssize_t sent = rest.empty() ? 0 : ::send(far[to].get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (sent > 0) rest.erase(rest.begin(), rest.begin() + sent);
  }
  bool pass(std::size_t from) {
    const auto bytes = take(from);
    give(1 - from, bytes);
    return !bytes.empty();
  }
  /// Both ends try to read, and the wire hands on, until nothing moves.
  void shake() {
    for (int quiet = 0; quiet < 3; ++quiet) {
      for (std::size_t i = 0; i < 2; ++i)
        if (!ends[i]->is_open() && !ends[i]->has_failed()) (void)read(i, 0);
      for (std::size_t i = 0; i < 2; ++i)
        if (pass(i)) quiet = -1;
    }
  }
  ssize_t write(std::size_t from, const std::string& text) {
    const iovec part{const_cast<char*>(text.data()), text.size()};
    return ends[from]->send(&part, 1);
  }
  /// What came, or nothing and errno.
  std::string read(std::size_t at, std::size_t bytes_max = 1 << 20) {
    std::string text(bytes_max, '\0');
    const iovec part{text.data(), text.size()};
    last = ends[at]->receive(&part, 1);
    error = errno;
    text.resize(last > 0 ? static_cast<std::size_t>(last) : 0);
    return text;
  }

  std::array<core::Descriptor, 2> own;
  std::array<core::Descriptor, 2> far;
  std::array<std::vector<std::byte>, 2> held;  // for an end whose socket is full
  KnockGuard guard{{key_of("another secret"), key_of("the secret of the listener")}};
  std::array<std::unique_ptr<TlsChannel>, 2> ends;
  mutable std::vector<std::byte> seen;  // all that went over the wire
  ssize_t last = 0;
  int error = 0;
};

bool contains(const std::vector<std::byte>& bytes, const void* what, std::size_t size) {
  return ::memmem(bytes.data(), bytes.size(), what, size) != nullptr;
}

TEST_CASE("tls: processes with one token talk, each knows the other's id, and nothing goes in clear", "[tls][fast]") {
  const auto one = authority();
  const auto other = authority();  // another process
  const auto a = identity(one);
  const auto b = identity(other);
  CHECK(a->id() != b->id());
  Wire wire(a, b);
  REQUIRE(wire.write(0, "a greeting that goes with the handshake") > 0);
  wire.shake();
  REQUIRE((wire.ends[0]->is_open() && wire.ends[1]->is_open()));
  CHECK(wire.ends[0]->peer() == b->id());
  CHECK(wire.ends[1]->peer() == a->id());
  CHECK(wire.read(1) == "a greeting that goes with the handshake");
  CHECK(wire.read(1).empty());
  CHECK((wire.last == -1 && wire.error == EAGAIN));
  const std::string text = "what the other side is to read, and nobody else";
  REQUIRE(wire.write(1, text) == static_cast<ssize_t>(text.size()));
  REQUIRE(wire.pass(1));
  CHECK(wire.read(0) == text);
  for (const std::string& clear : {text, std::string("a greeting"), std::string("hybridps"), std::string("a token")})
    CHECK_FALSE(contains(wire.seen, clear.data(), clear.size()));
  CHECK_FALSE(contains(wire.seen, a->id().data(), a->id().size()));
  CHECK_FALSE(contains(wire.seen, b->id().data(), b->id().size()));
  wire.own[1].reset();  // the end of the connection, without a word
  wire.far[0].reset();
  CHECK(wire.read(0).empty());
  CHECK(wire.last == 0);
}

TEST_CASE("tls: random sizes go both ways whole, through a socket that fills up", "[tls][fast]") {
  const std::uint64_t seed = GENERATE(1, 2, 3, 4, 5);
  Wire wire(identity(authority()), identity(authority()));
  wire.shake();
  REQUIRE(wire.ends[0]->is_open());
  std::mt19937_64 random(seed);
  std::array<std::string, 2> sent;
  std::array<std::string, 2> got;
  bool was_full = false;
  for (int step = 0; step < 1000; ++step) {
    const std::size_t from = random() % 2;
    if (step < 400) {
      std::vector<std::string> texts(1 + random() % 5);
      std::vector<iovec> parts;
      for (std::string& text : texts) {
        text.resize(random() % 4 == 0 ? random() % 300'000 : random() % 200);
        for (char& c : text) c = static_cast<char>(random());
        parts.push_back({text.data(), text.size()});
      }
      const ssize_t taken = wire.ends[from]->send(parts.data(), parts.size());
      was_full |= wire.ends[from]->has_unsent();
      std::size_t left = taken > 0 ? static_cast<std::size_t>(taken) : 0;
      for (const std::string& text : texts) {
        sent[from] += text.substr(0, left);
        left -= std::min(left, text.size());
      }
    } else {
      (void)wire.ends[from]->send(nullptr, 0);
    }
    for (std::size_t i = 0; i < 2; ++i) {
      (void)wire.pass(i);
      const std::size_t room = 1 + random() % 100'000;
      std::string first(room, '\0');
      std::string second(4096, '\0');
      const std::array<iovec, 2> parts{iovec{first.data(), first.size()}, iovec{second.data(), second.size()}};
      const ssize_t bytes = wire.ends[i]->receive(parts.data(), parts.size());
      if (bytes > 0) got[1 - i] += (first + second).substr(0, static_cast<std::size_t>(bytes));
    }
  }
  for (std::size_t i = 0; i < 2; ++i) {
    for (std::string more = "x"; !more.empty();) got[1 - i] += more = wire.read(i);
    CHECK(sent[i].size() > 100'000);
    CHECK(got[i] == sent[i]);
  }
  CHECK(was_full);
}

TEST_CASE("tls: a process with another token, or with none, gets no byte and gives none", "[tls][fast]") {
  Wire wire(identity(authority("another token than theirs")), identity(authority()));
  REQUIRE(wire.write(0, "a greeting") > 0);
  wire.shake();
  for (std::size_t i = 0; i < 2; ++i) {
    INFO(i);
    CHECK(wire.read(i).empty());
    CHECK((wire.last == -1 && wire.error == EPROTO));
    CHECK_FALSE(wire.ends[i]->is_open());
    CHECK(wire.ends[i]->has_failed());
    CHECK_FALSE(wire.ends[i]->why().empty());
  }
  CHECK(wire.ends[0]->why().find("HYBRIDPS_TOKEN") != std::string::npos);

  Wire clear(identity(authority()), identity(authority()));
  const std::string noise(200, 'x');
  (void)clear.take(0);
  clear.give(1, std::vector<std::byte>(200, std::byte{'x'}));
  CHECK(clear.read(1).empty());
  CHECK((clear.last == -1 && clear.error == EPROTO));
}

TEST_CASE("tls: a handshake begins only with a process that has knocked, once", "[tls][fast]") {
  const auto a = identity(authority());
  // One who dials, and what it has said first.
  Wire wire(a, a);
  (void)wire.read(0, 0);
  const std::vector<std::byte> said = wire.take(0);
  REQUIRE(said.size() > kKnockBytes + 100);
  const auto hears = [&](TlsChannel& channel, Wire& at, std::vector<std::byte> bytes) {
    at.give(1, bytes);
    const bool was_taken = channel.hear_knock();
    at.error = errno;
    return was_taken;
  };
  SECTION("it is a member") {
    for (std::size_t i = 0; i + 1 < kKnockBytes; ++i) {
      REQUIRE_FALSE(hears(*wire.ends[1], wire, {said[i]}));
      REQUIRE(wire.error == EAGAIN);
    }
    CHECK(hears(*wire.ends[1], wire, {said.begin() + kKnockBytes - 1, said.end()}));
    CHECK(wire.ends[1]->has_knocked());
    (void)wire.read(1);
    CHECK(wire.take(1).size() > 100);
    SECTION("what it has said is repeated by another") {
      const auto again = TlsChannel::accept(a, wire.own[1].get(), wire.guard);
      CHECK_FALSE(hears(*again, wire, said));
      CHECK(wire.error == EPROTO);
      CHECK(again->why().find("repeats") != std::string::npos);
      CHECK_FALSE(again->is_of_another_job());
      CHECK(wire.take(1).empty());
    }
  }
  SECTION("a handshake without a knock, or noise, gets no answer") {
    const std::vector<std::byte> hello(said.begin() + kKnockBytes, said.end());
    const bool is_noise = GENERATE(true, false);
    CHECK_FALSE(hears(*wire.ends[1], wire, is_noise ? std::vector<std::byte>{std::byte{'H'}, std::byte{'x'}} : hello));
    CHECK(wire.error == EPROTO);
    CHECK_FALSE(wire.ends[1]->is_of_another_job());
    CHECK(wire.ends[1]->why().find("HYBRIDPS_SECURITY") != std::string::npos);
    CHECK(wire.take(1).empty());
  }
  SECTION("bytes of it were changed on the way") {
    for (std::size_t i = 0; i < kKnockBytes; ++i) {
      Wire another(a, a);
      std::vector<std::byte> changed = said;
      changed[i] ^= std::byte{0x10};
      CHECK_FALSE(hears(*another.ends[1], another, changed));
      CHECK(another.error == EPROTO);
      CHECK_FALSE(another.ends[1]->is_of_another_job());
      CHECK(another.take(1).empty());
    }
  }
  SECTION("it is for another listener") {
    KnockGuard other({Wire::key_of("a third secret")});
    const auto elsewhere = TlsChannel::accept(a, wire.own[1].get(), other);
    CHECK_FALSE(hears(*elsewhere, wire, said));
    CHECK(wire.error == EPROTO);
    CHECK(elsewhere->is_of_another_job());
    const std::vector<std::byte> answer = wire.take(1);
    CHECK(answer.size() == 1);
    wire.give(0, answer);
    CHECK(wire.read(0).empty());
    CHECK((wire.last == -1 && wire.error == EPROTO));
    CHECK(wire.ends[0]->is_elsewhere());
    CHECK(wire.ends[0]->why().find("HYBRIDPS_TOKEN") != std::string::npos);
  }
}

TEST_CASE("tls: a process with two tokens talks to holders of either, and these not to each other", "[tls][fast]") {
  const std::string now = "the token of today";
  const std::string before = "the token of before";
  auto made = Authority::from_token(now, before);
  INFO(made.status().to_string());
  REQUIRE(made.is_ok());
  const auto both = identity(made.value());
  const auto talks = [](const std::shared_ptr<const Identity>& a, const std::shared_ptr<const Identity>& b) {
    Wire wire(a, b);
    (void)wire.write(0, "a greeting");
    wire.shake();
    const bool is_heard = wire.read(1) == "a greeting";
    if (is_heard) CHECK((wire.ends[0]->peer() == b->id() && wire.ends[1]->peer() == a->id()));
    return is_heard;
  };
  for (const std::string& token : {now, before}) {
    const auto one = identity(authority(token));
    CHECK(talks(one, both));
    CHECK(talks(both, one));
    CHECK(talks(one, identity(authority(token))));
  }
  CHECK(talks(both, identity(made.value())));
  const auto stranger = identity(authority("the token of another job"));
  CHECK_FALSE((talks(both, stranger) || talks(stranger, both)));
  CHECK_FALSE(talks(identity(authority(now)), identity(authority(before))));
  CHECK_FALSE(talks(identity(authority(before)), identity(authority(now))));
  CHECK(made.value()->seal("key", {}) == authority(now)->seal("key", {}));
}

TEST_CASE("tls: over TCP, where the kernel encrypts if it can, and with keys that change", "[tls][fast]") {
  // Two connected sockets.
  const auto make = [] {
    const core::ForkLock lock;
    return core::Descriptor(lock, ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  };
  const core::Descriptor listener = make();
  const core::Descriptor dials = make();
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof at;
  REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&at), sizeof at) == 0);
  REQUIRE(::listen(listener.get(), 1) == 0);
  REQUIRE(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &bytes) == 0);
  REQUIRE((::connect(dials.get(), reinterpret_cast<sockaddr*>(&at), sizeof at) == 0 || errno == EINPROGRESS));
  pollfd comes{listener.get(), POLLIN, 0};
  REQUIRE(::poll(&comes, 1, 10'000) == 1);
  const core::Descriptor answers = [&] {
    const core::ForkLock lock;
    return core::Descriptor(lock, ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  }();
  REQUIRE(answers);

  std::ifstream file("/proc/sys/net/ipv4/tcp_available_ulp");
  const std::string modules{std::istreambuf_iterator<char>(file), {}};
  // Before the first try: after a failed one nothing is worth a try.
  const bool can = KernelSender::is_worth_a_try() && modules.find("tls") != std::string::npos;
  KnockGuard guard{{knock_key({})}};
  std::array<std::unique_ptr<TlsChannel>, 2> ends{
      TlsChannel::dial(identity(authority(), Encryptor::kKernel), dials.get(), knock_key({})).value(),
      TlsChannel::accept(identity(authority(), Encryptor::kKernel), answers.get(), guard)};
  std::mt19937_64 random(11);
  std::array<std::string, 2> says;
  for (std::string& text : says) {
    text.resize(3'000'000);
    for (char& c : text) c = static_cast<char>(random());
  }
  std::array<std::size_t, 2> sent{};
  std::array<std::string, 2> heard;
  const core::Deadline deadline = core::Deadline::after(core::from_seconds(60));
  while ((heard[0].size() < says[1].size() || heard[1].size() < says[0].size()) && !deadline.has_passed()) {
    for (std::size_t i = 0; i < 2; ++i) {
      ends[i]->change_key_after(5);
      std::array<iovec, 3> parts;
      std::size_t from = sent[i];
      for (iovec& part : parts) {
        const std::size_t most = sent[i] < 200 ? 30 : random() % 3 == 0 ? 70'000 : 700;
        part.iov_base = says[i].data() + from;
        part.iov_len = std::min(says[i].size() - from, static_cast<std::size_t>(random() % most));
        from += part.iov_len;
      }
      const ssize_t took = ends[i]->send(parts.data(), parts.size());
      INFO(ends[i]->why());
      REQUIRE((took >= 0 || errno == EAGAIN));
      if (took > 0) sent[i] += static_cast<std::size_t>(took);
      std::string part(1 + random() % 100'000, '\0');
      const iovec to{part.data(), part.size()};
      const ssize_t got = ends[i]->receive(&to, 1);
      INFO(ends[i]->why());
      REQUIRE((got > 0 || (got < 0 && errno == EAGAIN)));
      if (got > 0) heard[i].append(part, 0, static_cast<std::size_t>(got));
    }
  }
  CHECK(heard[0] == says[1]);
  CHECK(heard[1] == says[0]);
  for (const auto& end : ends) CHECK(end->is_sent_by_kernel() == can);
}

TEST_CASE("tls: a listener's own key signs no certificate that peers take", "[tls][fast]") {
  const std::string token = "a token of some length";
  const Mac seed = hmac(bytes_of(token), {bytes_of("hybridps tls authority 1")});
  const Key of_token = key_from(core::SecretBytes(std::span<const std::uint8_t>(seed)));
  for (const bool may_sign : {true, false}) {
    // Its chain is that of a listener: a certificate by the token, and one by the key of that certificate.
    const core::SecretBytes own("32 bytes are the seed of any key");
    const Key key = key_from(own);
    REQUIRE(key);
    auto state = std::make_shared<Authority::AuthorityState>();
    state->ssl = load_libssl().value();
    state->seed = own;
    state->token_keys.push_back(key_from(core::SecretBytes(std::span<const std::uint8_t>(seed))));
    state->between.push_back(make_certificate("hybridps", key.get(), of_token.get(),
                                              may_sign ? "critical,CA:TRUE,pathlen:0" : "critical,CA:FALSE"));
    const auto heir = identity(std::make_shared<Authority>(std::move(state)));
    Wire wire(heir, identity(authority(token)));
    (void)wire.write(0, "a greeting");
    wire.shake();
    CHECK((wire.read(1) == "a greeting") == may_sign);
  }
}

TEST_CASE("tls: an alert says that the job is another one only if it is of certificates", "[tls][fast]") {
  constexpr unsigned char kInternalError = 80;
  constexpr unsigned char kDecodeError = 50;
  constexpr unsigned char kUnknownAuthority = 48;
  constexpr unsigned char kDecryptError = 51;
  const auto a = identity(authority());
  for (const unsigned char alert : {kInternalError, kDecodeError, kUnknownAuthority, kDecryptError}) {
    Wire wire(a, a);
    REQUIRE(wire.write(0, "a greeting") > 0);
    (void)wire.take(0);
    std::vector<std::byte> record;
    for (const unsigned char byte : {0x15, 0x03, 0x03, 0x00, 0x02, 0x02, int{alert}}) record.push_back(std::byte{byte});
    wire.give(0, record);
    CHECK(wire.read(0).empty());
    INFO(int{alert} << " " << wire.ends[0]->why());
    CHECK((wire.last == -1 && wire.error == EPROTO));
    CHECK(wire.ends[0]->is_of_another_job() == (alert == kUnknownAuthority || alert == kDecryptError));
  }
}

TEST_CASE("tls: each bit that flips, each record that is missing, repeated or moved, is found", "[tls][fast]") {
  const auto a = identity(authority());
  const auto b = identity(authority());
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    Wire wire(a, b);
    wire.shake();
    REQUIRE(wire.ends[1]->is_open());
    std::string all;
    std::vector<std::vector<std::byte>> records;
    for (int i = 0; i < 4; ++i) {
      const std::string text = "record " + std::to_string(i);
      all += text;
      REQUIRE(wire.write(0, text) > 0);
      records.push_back(wire.take(0));
    }
    switch (round % 4) {
      case 0: {
        auto& record = records[random() % records.size()];
        record[random() % record.size()] ^= static_cast<std::byte>(1U << (random() % 8));
        break;
      }
      case 1: records.erase(records.begin() + static_cast<std::ptrdiff_t>(random() % 3)); break;
      case 2: records.insert(records.begin(), records[random() % records.size()]); break;
      case 3: std::swap(records[random() % 2], records[2 + random() % 2]); break;
    }
    for (const auto& record : records) wire.give(1, record);
    std::string got;
    for (int i = 0; i < 8; ++i) got += wire.read(1, 64);
    INFO(round << " " << got);
    CHECK(got.size() < all.size());
    CHECK(all.starts_with(got));  // never a byte that was not sent there
    // A length that was made longer waits for bytes that do not come: the heartbeats' matter.
    const bool waits = wire.last == -1 && wire.error == EAGAIN;
    CHECK((waits || (wire.last == -1 && wire.error == EPROTO)));
    if (round % 4 != 0) CHECK_FALSE(waits);
  }
}

TEST_CASE("tls: random bytes instead of a handshake end the channel, and claim nothing", "[tls][fast]") {
  const auto a = identity(authority());
  std::mt19937_64 random(11);
  for (int round = 0; round < 500; ++round) {
    Wire wire(a, a);
    (void)wire.read(0, 0);
    std::vector<std::byte> hello = wire.take(0);
    REQUIRE(hello.size() > 50);
    const std::size_t from = random() % hello.size();
    for (std::size_t i = 0; i < 1 + random() % 8; ++i)
      hello[std::min(from + i, hello.size() - 1)] ^= static_cast<std::byte>(random());
    if (random() % 2 == 0) hello.resize(from + 1);
    wire.give(1, hello);
    CHECK(wire.read(1, 100).empty());
    CHECK_FALSE(wire.ends[1]->is_open());
    wire.shake();
    // What was changed may be a part that nobody reads; then the two transcripts differ, and neither side opens.
    CHECK((hello.size() > 50 || !wire.ends[1]->is_open()));
  }
}

TEST_CASE("tls: a sealed store takes values of holders of the token only, each under its own key", "[tls][fast]") {
  auto memory = std::make_shared<bootstrap::MemoryStore>();
  const auto ours = seal(memory, authority());
  const auto plain = seal(memory, nullptr);
  const bootstrap::Bytes value{1, 2, 3};
  REQUIRE(ours->set("group/rec/1", value).is_ok());
  REQUIRE(seal(memory, authority())->try_get("group/rec/1").value() == value);
  CHECK_FALSE(ours->try_get("group/rec/2").value());
  CHECK(memory->contents().at("group/rec/1").size() == value.size() + 36);
  const auto refused = [&](const std::shared_ptr<bootstrap::KeyValueStore>& by, const std::string& key,
                           const std::string& text) {
    const auto got = by->try_get(key);
    INFO(got.status().to_string());
    REQUIRE_FALSE(got.is_ok());
    CHECK(got.status().code() == Code::kMismatch);
    CHECK(got.status().message().find("\"" + key + "\"") != std::string_view::npos);
    CHECK(got.status().message().find(text) != std::string_view::npos);
  };
  refused(seal(memory, authority("another token of a job")), "group/rec/1", "another token");
  refused(plain, "group/rec/1", "HYBRIDPS_SECURITY=tls");
  // A value that was moved, spoilt, or written by somebody else.
  const bootstrap::Bytes sealed = memory->contents().at("group/rec/1");
  REQUIRE(memory->set("group/rec/3", sealed).is_ok());
  refused(ours, "group/rec/3", "another token");
  for (std::size_t i = 0; i < sealed.size(); ++i) {
    bootstrap::Bytes spoilt = sealed;
    spoilt[i] ^= 0x20;
    REQUIRE(memory->set("spoilt", spoilt).is_ok());
    CHECK_FALSE(ours->try_get("spoilt").is_ok());
  }
  // Several at a time: each has its own seal, and one that is bad spoils all.
  REQUIRE(ours->set_each(std::vector<bootstrap::KeyAndValue>{{"several/1", {1}}, {"several/2", {2}}}).is_ok());
  CHECK(memory->contents().at("several/2").size() == 37);
  const std::vector<std::string> several{"several/1", "several/none", "several/2"};
  const auto got = ours->try_get_each(several);
  REQUIRE(got.is_ok());
  CHECK(got.value() ==
        std::vector<std::optional<bootstrap::Bytes>>{bootstrap::Bytes{1}, std::nullopt, bootstrap::Bytes{2}});
  REQUIRE(memory->set("several/2", memory->contents().at("several/1")).is_ok());
  CHECK(ours->try_get_each(several).status().message().find("\"several/2\"") != std::string_view::npos);
  CHECK(plain->try_get_each(several).status().code() == Code::kMismatch);
  const std::string words = "could not read HYBRIDPS_TOKEN_FILE";
  REQUIRE(plain->set("group/failed", bootstrap::Bytes(words.begin(), words.end())).is_ok());
  refused(ours, "group/failed", words);
  CHECK(plain->try_get("group/failed").is_ok());
}

TEST_CASE("tls: HMAC-SHA256 is that of RFC 4231, in any parts, also without a key", "[tls][fast]") {
  const auto hex = [](const Mac& mac) {
    std::string text;
    for (const std::uint8_t byte : mac) {
      text += "0123456789abcdef"[byte >> 4];
      text += "0123456789abcdef"[byte & 15];
    }
    return text;
  };
  const std::string expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";  // test case 2
  CHECK(hex(hmac(bytes_of("Jefe"), {bytes_of("what do ya want for nothing?")})) == expected);
  CHECK(hex(hmac(bytes_of("Jefe"), {bytes_of("what do ya"), {}, bytes_of(" want for nothing?")})) == expected);
  CHECK(hex(hmac({}, {})) == "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST_CASE("tls: a record whose length was made longer does not wait for ever", "[tls][fast]") {
  test::MovableClock clock;
  const auto a = identity(authority());
  Wire wire(a, a);
  wire.shake();
  REQUIRE(wire.ends[1]->is_open());
  REQUIRE(wire.write(0, "all of it") > 0);
  std::vector<std::byte> record = wire.take(0);
  REQUIRE(record.size() > 5);
  const auto late = [&] { return wire.ends[1]->waits_too_long(core::Clock::now()); };
  std::vector<std::byte> rest(record.begin() + 7, record.end());
  bool is_spoilt = false;
  SECTION("it comes late, but whole") {}
  SECTION("it never comes") {
    is_spoilt = true;
    record[4] ^= std::byte{0x40};
  }
  record.resize(7);
  wire.give(1, record);
  CHECK(wire.read(1).empty());
  CHECK(wire.error == EAGAIN);
  clock.pass(core::from_seconds(9));
  CHECK_FALSE(late());
  wire.give(1, rest);
  CHECK(wire.read(1).empty() == is_spoilt);
  clock.pass(core::from_seconds(9));
  CHECK_FALSE(late());  // something has come meanwhile
  CHECK(wire.read(1).empty());
  clock.pass(core::from_seconds(2));
  CHECK(late() == is_spoilt);
}

}  // namespace
}  // namespace hybridps::tls
