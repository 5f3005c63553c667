// A hostile process against a TcpTransport, over real sockets: it greets, answers and sends what the fuzzer makes of
// honest bytes, in clear, with checksums, or in TLS as a member, or as a stranger, of the job.
//
// What must hold: an honest peer of the same transport gets its messages through, before and afterwards; no message
// comes in the honest peer's name but its own; each accepted send is done once; memory and descriptors go back.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/crc32c.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/log.h"
#include "hybridps/tls/authority.h"
#include "hybridps/tls/channel.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/transport/tcp/tcp_transport.h"
#include "hybridps/transport/tcp/tcp_wire.h"
#include "tests/fuzz/feed.h"

using namespace hybridps;
using namespace hybridps::transport;

namespace {

constexpr std::size_t kStepsMax = 48;
constexpr std::size_t kLinesMax = 6;
constexpr std::size_t kPayloadBytesMax = std::size_t{64} << 10;  // of the transport under test
constexpr std::array<BufferPool::SizeClass, 2> kClasses = {BufferPool::SizeClass{256, 32},
                                                           BufferPool::SizeClass{kPayloadBytesMax, 8}};
constexpr std::size_t kPoolBytes = 256 * 32 + kPayloadBytesMax * 8;
const core::EngineId kVictim{1};
const core::EngineId kHonest{2};
const core::EngineId kHostile{3};

void require(bool holds) {
  if (!holds) std::abort();
}

struct Counted final : Receiver {
  void on_message(core::EngineId from, std::span<const std::byte> header, RxPayload payload) noexcept override {
    require(!header.empty() && header.size() <= kHeaderBytesMax && payload.bytes() <= kPayloadBytesMax);
    unsigned sum = 0;  // every byte may be read
    for (const std::byte byte : header) sum += static_cast<unsigned>(byte);
    for (std::size_t i = 0; i < payload.bytes(); ++i) sum += static_cast<unsigned>(payload.data()[i]);
    bytes_sum += sum;
    if (from == kHonest || from == kVictim) {
      std::uint64_t number = 0;
      require(header.size() == sizeof number);
      std::memcpy(&number, header.data(), sizeof number);
      require(number == next++);
    }
    if (keeps && kept.size() < 4) kept.push_back(std::move(payload));
  }
  void on_peer_failed(core::EngineId peer, core::Status cause) noexcept override {
    require(!cause.is_ok());
    if (peer == kHonest || peer == kVictim) has_lost_friend = true;
    if (peer == kHostile) require(++failures == 1);
  }
  std::uint64_t next = 0;  // number of the friend's next message
  std::size_t failures = 0;
  bool has_lost_friend = false;
  bool keeps = false;
  std::uint64_t bytes_sum = 0;
  std::vector<RxPayload> kept;
};

struct Side {
  explicit Side(const TcpOptions& options)
      : memory(new(std::align_val_t{64}) std::byte[kPoolBytes]()), pool({memory.get(), kPoolBytes}, kClasses) {
    auto made = TcpTransport::create(options);
    require(made.is_ok());
    transport = std::move(made).value();
    require(transport->attach({memory.get(), kPoolBytes}).is_ok());
    transport->set_receiver(&receiver);
  }
  struct Aligned {
    void operator()(std::byte* bytes) const { ::operator delete[](bytes, std::align_val_t{64}); }
  };
  bool tell(Endpoint* endpoint, std::uint64_t number, std::size_t bytes) {
    std::array<std::byte, sizeof number> header{};
    std::memcpy(header.data(), &number, sizeof number);
    const Buffer payload = bytes > 0 ? pool.allocate(bytes) : Buffer();
    if (bytes > 0 && !payload) return false;
    const auto state = std::make_shared<bool>(false);
    if (!endpoint
             ->send(header, payload, bytes,
                    [this, state](core::Status) {
                      require(!std::exchange(*state, true));
                      ++done;
                    })
             .is_ok())
      return false;
    ++accepted;
    return true;
  }

  std::unique_ptr<std::byte[], Aligned> memory;
  Counted receiver;
  std::size_t accepted = 0;
  std::size_t done = 0;
  BufferPool pool;
  std::unique_ptr<TcpTransport> transport;
};

/// A connection of the hostile process.
struct Line {
  core::Descriptor socket;
  std::unique_ptr<tls::TlsChannel> channel;
  bool is_greeted = false;     // the transport's greeting or answer has come
  std::uint32_t received = 0;  // as an honest peer would count it, without greetings and answers
  std::vector<std::byte> came;
};

struct Jobs {
  Jobs() {
    core::set_log_level(core::LogLevel::kError);
    for (auto* job : {&own, &other}) {
      auto made = tls::Authority::from_token(job == &own ? "the token of the job" : "the token of others");
      require(made.is_ok());
      job->authority = std::move(made).value();
      auto identity = job->authority->make_identity();
      require(identity.is_ok());
      job->identity = std::move(identity).value();
    }
  }
  struct Job {
    std::shared_ptr<const tls::Authority> authority;
    std::shared_ptr<const tls::Identity> identity;
  };
  Job own, other;
};

core::Descriptor make_socket() {
  const core::ForkLock lock;
  return core::Descriptor(lock, ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

class Play {
 public:
  Play(fuzz::Feed& feed, const Jobs& jobs) : feed_(feed), jobs_(jobs), mode_(feed.below(8)) {
    TcpOptions options;
    options.address = "127.0.0.1";
    options.close_timeout = core::from_seconds(0);
    options.redial_for = core::from_seconds(0.02);
    options.payload_bytes_max = kPayloadBytesMax;
    options.checksums = mode_ == 4 || mode_ == 5;
    if (has_tls()) options.authority = jobs.own.authority;
    victim_.emplace(options);
    honest_.emplace(options);
    listen();
    const auto address = decode_tcp_address(victim_->transport->address());
    require(address.is_ok());
    there_ = address.value();
  }

  void run() {
    // The honest peer and the transport know each other.
    auto to_victim = honest_->transport->connect(kVictim, victim_->transport->address());
    auto to_honest = victim_->transport->connect(kHonest, honest_->transport->address());
    require(to_victim.is_ok() && to_honest.is_ok());
    honest_->transport->introduce(kVictim, victim_->transport->address());
    victim_->transport->introduce(kHonest, honest_->transport->address());
    exchange(*to_victim.value(), *to_honest.value(), 0);
    const bool is_named = feed_.below(4) != 0;
    if (is_named) victim_->transport->introduce(kHostile, encode(ours_));
    for (std::size_t step = 0; step < kStepsMax && !feed_.empty(); ++step) act();
    victim_->receiver.keeps = false;
    victim_->receiver.kept.clear();
    exchange(*to_victim.value(), *to_honest.value(), 1);
    lines_.clear();
    exchange(*to_victim.value(), *to_honest.value(), 2);
    require(!victim_->receiver.has_lost_friend && !honest_->receiver.has_lost_friend);
    // A part of a message keeps its memory until its connection is given up.
    const core::Deadline end = core::Deadline::after(core::from_seconds(10));
    while (victim_->transport->counters().receive_slots_in_use > 0) {
      require(!end.has_passed());
      progress(1);
    }
    victim_->transport.reset();
    honest_->transport.reset();
    for (const auto* side : {&*victim_, &*honest_}) {
      require(side->done == side->accepted);
      require(side->pool.slots_in_use() == 0);
    }
  }

 private:
  bool has_tls() const { return mode_ >= 6; }

  void listen() {
    listener_ = make_socket();
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof name;
    require(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&name), bytes) == 0);
    require(::listen(listener_.get(), 16) == 0);
    require(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&name), &bytes) == 0);
    ours_.id = has_tls() ? jobs_.own.identity->id() : make_tcp_id();
    ours_.socket = parse_address("127.0.0.1", ntohs(name.sin_port)).value();
    ours_.has_tls = has_tls();
    ours_.has_checksums = mode_ == 4 || mode_ == 5;
  }

  /// One message each way, within a bounded number of rounds.
  void exchange(Endpoint& to_victim, Endpoint& to_honest, std::uint64_t number) {
    require(honest_->tell(&to_victim, number, number == 1 ? 5000 : 0));
    require(victim_->tell(&to_honest, number, number == 1 ? 5000 : 0));
    const core::Deadline end = core::Deadline::after(core::from_seconds(10));
    while (victim_->receiver.next <= number || honest_->receiver.next <= number) {
      require(!end.has_passed());
      progress(1);
    }
  }

  void progress(std::size_t rounds) {
    for (; rounds > 0; --rounds) {
      (void)victim_->transport->progress();
      (void)victim_->transport->arm();
      (void)honest_->transport->progress();
      (void)honest_->transport->arm();
    }
  }

  void act() {
    switch (feed_.below(12)) {
      case 0: dial(); break;
      case 1: greet(); break;
      case 2:
      case 3: frame(); break;
      case 4: noise(); break;
      case 5: hang_up(); break;
      case 6: accept(); break;
      case 7: answer(); break;
      case 8: progress(1 + feed_.below(6)); break;
      case 9: use(); break;
      case 10: hear(); break;
      default: replay(); break;
    }
    if (feed_.below(2) == 0) progress(2);
  }

  void add(core::Descriptor socket, bool dials) {
    Line line;
    line.socket = std::move(socket);
    if (has_tls() && feed_.below(8) != 0) {
      const auto& identity = feed_.below(8) == 0 ? jobs_.other.identity : jobs_.own.identity;
      if (dials) {
        auto made = tls::TlsChannel::dial(identity, line.socket.get(),
                                          tls::knock_key(feed_.below(8) == 0 ? ours_.id : there_.id));
        require(made.is_ok());
        line.channel = std::move(made).value();
      } else {
        if (!guard_) guard_.emplace(std::vector{tls::knock_key(ours_.id)});
        line.channel = tls::TlsChannel::accept(identity, line.socket.get(), *guard_);
      }
    }
    if (lines_.size() == kLinesMax) lines_.erase(lines_.begin());
    lines_.push_back(std::move(line));
  }
  void dial() {
    core::Descriptor socket = make_socket();
    if (::connect(socket.get(), there_.socket.get(), there_.socket.bytes) != 0 && errno != EINPROGRESS) return;
    add(std::move(socket), /*dials=*/true);
    if (feed_.below(8) != 0) greet();
  }
  void accept() {
    core::Descriptor socket;
    {
      const core::ForkLock lock;
      socket = core::Descriptor(lock, ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    }
    if (!socket) return;
    add(std::move(socket), /*dials=*/false);
    progress(2);
    hear();
    if (feed_.below(8) != 0) answer();
  }
  Line* line() {
    if (lines_.empty()) return nullptr;
    return feed_.below(2) == 0 ? &lines_.back() : &lines_[feed_.below(lines_.size())];
  }

  void say(Line& line, std::span<const std::byte> bytes) {
    if (!line.channel) {
      (void)!::send(line.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      return;
    }
    const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};  // NOLINT: send() does not write to it
    for (int tries = 0; tries < 4 && line.channel->send(&part, 1) < 0; ++tries) {
      progress(1);
      hear(line);
    }
  }
  template <std::size_t N>
  void say_changed(Line& line, std::array<std::byte, N> bytes) {
    if (feed_.below(4) == 0) bytes[feed_.below(N)] ^= static_cast<std::byte>(1 + feed_.below(255));
    say(line, std::span(bytes).first(feed_.below(8) == 0 ? feed_.below(N) : N));
  }

  std::uint64_t count(std::uint64_t honest) {
    switch (feed_.below(6)) {
      case 0: return honest + feed_.byte();
      case 1: return honest - feed_.byte();
      case 2: return feed_.take<std::uint64_t>();
      default: return honest;
    }
  }
  void greet() {
    Line* const line = this->line();
    if (line == nullptr) return;
    TcpGreeting greeting;
    switch (feed_.below(8)) {
      case 0: greeting.from = decode_tcp_address(honest_->transport->address()).value().id; break;
      case 1: greeting.from = there_.id; break;
      case 2: greeting.from = make_tcp_id(); break;
      default: greeting.from = ours_.id;
    }
    if (greeting.from != ours_.id && !has_tls()) greeting.from = ours_.id;  // in clear an id is all that a peer proves
    greeting.to = feed_.below(16) == 0 ? ours_.id : there_.id;
    greeting.number = static_cast<std::uint32_t>(feed_.below(3));
    greeting.is_mine = feed_.below(4) != 0;
    greeting.is_new = feed_.below(4) != 0;
    greeting.has_small_packets = feed_.below(8) == 0;
    greeting.side = {count(1 + feed_.below(4)), count(line->received)};
    say_changed(*line, encode(greeting));
  }
  void answer() {
    Line* const line = this->line();
    if (line == nullptr) return;
    TcpReply reply;
    if (feed_.below(3) == 0) reply.answer = static_cast<TcpAnswer>(feed_.below(9));
    reply.side = {count(feed_.below(3)), count(line->received)};
    say_changed(*line, encode(reply));
  }
  void frame() {
    Line* const line = this->line();
    if (line == nullptr) return;
    Frame frame;
    frame.kind =
        static_cast<FrameKind>(static_cast<unsigned>(FrameKind::kMessage) + (feed_.below(4) == 0 ? feed_.below(4) : 0));
    constexpr std::array<std::uint32_t, 10> kLengths = {
        0, 1, 8, 255, 5000, kPayloadBytesMax, kPayloadBytesMax + 1, 0x7fffffff, 0xffffffff, 64};
    frame.payload_bytes = kLengths[feed_.below(kLengths.size())];
    frame.header_bytes = static_cast<std::uint16_t>(feed_.below(4) == 0 ? feed_.take<std::uint16_t>() : 8);
    if (frame.kind != FrameKind::kMessage && feed_.below(4) != 0) frame.payload_bytes = frame.header_bytes = 0;
    frame.received = static_cast<std::uint32_t>(count(line->received));
    std::array<std::byte, kFrameBytes + kSumsBytes> bytes{};
    encode(frame, bytes.data());
    const bool is_summed = ours_.has_checksums != (feed_.below(16) == 0);
    const std::size_t body = frame.header_bytes + std::size_t{std::min<std::uint32_t>(frame.payload_bytes, 100000)};
    const std::vector<std::byte> zeros(body);
    if (is_summed) add_sums(bytes.data(), feed_.below(4) == 0 ? feed_.take<std::uint32_t>() : core::crc32c(zeros));
    const std::size_t head = kFrameBytes + (is_summed ? kSumsBytes : 0);
    if (feed_.below(8) == 0) bytes[feed_.below(head)] ^= static_cast<std::byte>(1 + feed_.below(255));
    std::vector<std::byte> all(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(head));
    all.resize(head + body);
    if (feed_.below(4) == 0) all.resize(feed_.take<std::uint16_t>() % (all.size() + 1));
    say(*line, all);
  }
  void noise() {
    Line* const line = this->line();
    if (line == nullptr) return;
    std::array<std::byte, 32> bytes{};
    const std::size_t some = 1 + feed_.below(bytes.size());
    for (std::size_t i = 0; i < some; ++i) bytes[i] = static_cast<std::byte>(feed_.byte());
    // Also behind the channel's back: between its records.
    if (feed_.below(2) == 0)
      (void)!::send(line->socket.get(), bytes.data(), some, MSG_NOSIGNAL | MSG_DONTWAIT);
    else
      say(*line, std::span(bytes).first(some));
  }
  void hang_up() {
    if (lines_.empty()) return;
    Line& line = lines_[feed_.below(lines_.size())];
    switch (feed_.below(3)) {
      case 0: (void)::shutdown(line.socket.get(), SHUT_WR); return;
      case 1: {
        const linger at_once{1, 0};
        (void)::setsockopt(line.socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        break;
      }
      default: break;
    }
    lines_.erase(lines_.begin() + (&line - lines_.data()));
  }
  /// The program that the transport serves.
  void use() {
    Transport& transport = *victim_->transport;
    switch (feed_.below(6)) {
      case 0: victim_->receiver.keeps = !victim_->receiver.keeps; break;
      case 1: victim_->receiver.kept.clear(); break;
      case 2:
        if (Endpoint* const endpoint = transport.find(kHostile); endpoint != nullptr)
          endpoint->close({core::Code::kClosed, "the fuzzer closes it"});
        break;
      case 3: transport.send_now(); break;
      default:
        if (victim_->receiver.failures > 0) return;
        if (auto made = transport.connect(kHostile, encode(ours_)); made.is_ok())
          (void)victim_->tell(made.value(), 7, victim_->pool.slots_in_use() < 4 ? feed_.below(2) * 3000 : 0);
    }
  }
  void hear(Line& line) {
    std::array<std::byte, 4096> bytes;
    const iovec part{bytes.data(), bytes.size()};
    const ssize_t got = line.channel ? line.channel->receive(&part, 1)
                                     : ::recv(line.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got <= 0) return;
    line.came.assign(bytes.begin(), bytes.begin() + got);
    line.received += static_cast<std::uint32_t>(got);
    if (std::exchange(line.is_greeted, true)) return;
    const std::size_t greeting = line.came.size() >= kGreetingBytes ? kGreetingBytes : kAnswerBytes;
    line.received -= static_cast<std::uint32_t>(std::min(line.came.size(), greeting));
  }
  void hear() {
    if (Line* const line = this->line(); line != nullptr) hear(*line);
  }
  /// What the transport has said comes back to it, perhaps by another connection.
  void replay() {
    Line* const from = line();
    Line* const to = line();
    if (from != nullptr && to != nullptr && !from->came.empty()) say(*to, std::vector<std::byte>(from->came));
  }

  fuzz::Feed& feed_;
  const Jobs& jobs_;
  const std::size_t mode_;
  TcpAddress ours_;
  TcpAddress there_;
  core::Descriptor listener_;
  std::optional<Side> victim_;
  std::optional<Side> honest_;
  std::optional<tls::KnockGuard> guard_;  // of the hostile process
  std::vector<Line> lines_;
};

int open_descriptors() {
  int open = 0;
  for (int fd = 0; fd < 256; ++fd) open += ::fcntl(fd, F_GETFD) >= 0;
  return open;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Jobs jobs;
  fuzz::Feed feed(data, size);
  const int open_before = open_descriptors();
  {
    Play play(feed, jobs);
    play.run();
  }
  require(open_descriptors() == open_before);
  return 0;
}
