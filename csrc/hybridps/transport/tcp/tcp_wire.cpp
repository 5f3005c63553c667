#include "hybridps/transport/tcp/tcp_wire.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "hybridps/core/crc32c.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/core/ids.h"
#include "hybridps/transport/envelope.h"
#include "hybridps/transport/interfaces.h"

namespace hybridps::transport {
namespace {

constexpr std::array<char, 8> kGreetingMark = {'H', 'P', 'S', 'T', 'C', 'P', 0, 4};
constexpr std::uint16_t kTlsFlag = 0x100;  // of an address, beside its family, as the next one
constexpr std::uint16_t kChecksumsFlag = 0x200;
constexpr std::size_t kKindAt = 6;  // of a frame
constexpr std::array<char, 7> kAnswerMark = {'H', 'P', 'S', 'T', 'C', 'P', 4};

template <typename Value>
void put(std::byte*& to, Value value) {
  for (std::size_t i = 0; i < sizeof value; ++i) *to++ = static_cast<std::byte>(value >> (8 * i));
}
template <typename Value>
Value get(const std::byte*& from) {
  Value value = 0;
  for (std::size_t i = 0; i < sizeof value; ++i)
    value = static_cast<Value>(value | static_cast<Value>(static_cast<Value>(*from++) << (8 * i)));
  return value;
}

void put_sum(std::span<std::byte> bytes) {
  std::byte* to = bytes.data() + bytes.size() - sizeof(std::uint32_t);
  put(to, core::crc32c(bytes.first(bytes.size() - sizeof(std::uint32_t))));
}
bool has_right_sum(std::span<const std::byte> bytes) {
  const std::byte* from = bytes.data() + bytes.size() - sizeof(std::uint32_t);
  return get<std::uint32_t>(from) == core::crc32c(bytes.first(bytes.size() - sizeof(std::uint32_t)));
}

}  // namespace

TcpId make_tcp_id() {
  TcpId id;
  const std::array<std::uint64_t, 2> random = {core::random_u64(), core::random_u64()};
  std::memcpy(id.data(), random.data(), id.size());
  return id;
}

std::string SocketAddress::text() const {
  std::array<char, INET6_ADDRSTRLEN> host{};
  if (name.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(name);
    inet_ntop(AF_INET, &v4.sin_addr, host.data(), host.size());
    return std::string(host.data()) + ":" + std::to_string(ntohs(v4.sin_port));
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(name);
  inet_ntop(AF_INET6, &v6.sin6_addr, host.data(), host.size());
  return "[" + std::string(host.data()) + "]:" + std::to_string(ntohs(v6.sin6_port));
}

std::optional<SocketAddress> parse_address(const std::string& numeric, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (numeric.empty() || getaddrinfo(numeric.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    return std::nullopt;
  SocketAddress address;
  address.bytes = found->ai_addrlen;
  std::memcpy(&address.name, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  return address;
}

namespace {

bool is_in_network(const IpBytes& here, const IpBytes& there) {
  for (const InterfaceAddress& at : interface_addresses()) {
    if (at.address != here || at.mask.size() != here.size() || there.size() != here.size()) continue;
    bool is = true;
    for (std::size_t i = 0; i < at.mask.size(); ++i) is = is && ((here[i] ^ there[i]) & at.mask[i]) == 0;
    if (is) return true;
  }
  return false;
}

}  // namespace

bool leads_through(const SocketAddress& here, const SocketAddress& there) {
  if (is_in_network(ip_bytes(here.get()), ip_bytes(there.get()))) return true;
  // Connecting a datagram socket sends nothing: it only asks the routing table.
  SocketAddress source;
  source.bytes = sizeof source.name;
  const core::ForkLock lock;
  const int socket = ::socket(there.name.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return true;  // the real connection will show what is wrong
  const bool known = ::connect(socket, there.get(), there.bytes) == 0 &&
                     ::getsockname(socket, reinterpret_cast<sockaddr*>(&source.name), &source.bytes) == 0;
  ::close(socket);
  const IpBytes through = ip_bytes(source.get());
  return known && (through == ip_bytes(here.get()) || through == ip_bytes(there.get()));
}

std::vector<std::byte> encode(const TcpAddress& address) {
  std::array<std::byte, 36> inside{};
  const auto flags =
      static_cast<std::uint16_t>((address.has_tls ? kTlsFlag : 0) | (address.has_checksums ? kChecksumsFlag : 0));
  std::byte* to = std::copy(address.id.begin(), address.id.end(), inside.begin());
  if (address.socket.name.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address.socket.name);
    put<std::uint16_t>(to, static_cast<std::uint16_t>(4 | flags));
    put(to, ntohs(v4.sin_port));
    std::memcpy(to, &v4.sin_addr, sizeof v4.sin_addr);
  } else {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address.socket.name);
    put<std::uint16_t>(to, static_cast<std::uint16_t>(6 | flags));
    put(to, ntohs(v6.sin6_port));
    std::memcpy(to, &v6.sin6_addr, sizeof v6.sin6_addr);
  }
  return wrap(kTcpEnvelope, inside);
}

core::Result<TcpAddress> decode_tcp_address(std::span<const std::byte> bytes) {
  const auto inside = unwrap(kTcpEnvelope, bytes);
  if (!inside.is_ok()) return inside.status();
  TcpAddress address;
  const std::byte* from = inside.value().data();
  std::copy_n(from, address.id.size(), address.id.begin());
  from += address.id.size();
  const auto kind = get<std::uint16_t>(from);
  const auto family = static_cast<std::uint16_t>(kind & ~(kTlsFlag | kChecksumsFlag));
  address.has_tls = (kind & kTlsFlag) != 0;
  address.has_checksums = (kind & kChecksumsFlag) != 0;
  const auto port = get<std::uint16_t>(from);
  if (family == 4) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address.socket.name);
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    std::memcpy(&v4.sin_addr, from, sizeof v4.sin_addr);
    address.socket.bytes = sizeof v4;
  } else if (family == 6) {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address.socket.name);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    std::memcpy(&v6.sin6_addr, from, sizeof v6.sin6_addr);
    address.socket.bytes = sizeof v6;
  }
  if (address.socket.bytes == 0 || port == 0)
    return core::Status(core::Code::kInvalidArgument, "a TCP address names no place");
  return address;
}

std::array<std::byte, kGreetingBytes> encode(const TcpGreeting& greeting) {
  std::array<std::byte, kGreetingBytes> bytes;
  std::memcpy(bytes.data(), kGreetingMark.data(), kGreetingMark.size());
  std::byte* at = std::copy(greeting.from.begin(), greeting.from.end(), bytes.data() + kGreetingMark.size());
  at = std::copy(greeting.to.begin(), greeting.to.end(), at);
  put(at, greeting.number);
  put(at, static_cast<std::uint32_t>((greeting.is_mine ? 1 : 0) | (greeting.is_new ? 2 : 0) |
                                     (greeting.has_small_packets ? 4 : 0)));
  put(at, greeting.side.attempt);
  put(at, greeting.side.received);
  put_sum(bytes);
  return bytes;
}

bool may_be_greeting(std::span<const std::byte> bytes) {
  return std::memcmp(bytes.data(), kGreetingMark.data(), std::min(bytes.size(), kGreetingMark.size())) == 0 &&
         (bytes.size() < kGreetingBytes || has_right_sum(bytes.first<kGreetingBytes>()));
}

std::optional<TcpGreeting> decode_greeting(std::span<const std::byte, kGreetingBytes> bytes, const TcpId& us) {
  if (!may_be_greeting(bytes)) return std::nullopt;
  TcpGreeting greeting;
  const std::byte* at = bytes.data() + kGreetingMark.size();
  std::copy_n(at, greeting.from.size(), greeting.from.begin());
  at += greeting.from.size();
  // All bytes are compared, so that the time taken does not tell how many were right.
  std::byte differs{0};
  for (const std::byte mine : us) differs |= *at++ ^ mine;
  greeting.to = us;
  greeting.number = get<std::uint32_t>(at);
  const auto flags = get<std::uint32_t>(at);
  greeting.is_mine = (flags & 1) != 0;
  greeting.is_new = (flags & 2) != 0;
  greeting.has_small_packets = (flags & 4) != 0;
  greeting.side.attempt = get<std::uint64_t>(at);
  greeting.side.received = get<std::uint64_t>(at);
  return differs == std::byte{0} && flags < 8 ? std::optional(greeting) : std::nullopt;
}

std::array<std::byte, kAnswerBytes> encode(const TcpReply& reply) {
  std::array<std::byte, kAnswerBytes> bytes;
  std::memcpy(bytes.data(), kAnswerMark.data(), kAnswerMark.size());
  std::byte* at = bytes.data() + kAnswerMark.size();
  *at++ = static_cast<std::byte>(reply.answer);
  put(at, reply.side.attempt);
  put(at, reply.side.received);
  put_sum(bytes);
  return bytes;
}

bool is_damaged_reply(std::span<const std::byte, kAnswerBytes> bytes) {
  std::size_t alike = 0;
  for (std::size_t i = 0; i < kAnswerMark.size(); ++i) alike += bytes[i] == static_cast<std::byte>(kAnswerMark[i]);
  return alike + 1 >= kAnswerMark.size() && !has_right_sum(bytes);
}

std::optional<TcpReply> decode_reply(std::span<const std::byte, kAnswerBytes> bytes) {
  const std::byte* at = bytes.data() + kAnswerMark.size();
  if (std::memcmp(bytes.data(), kAnswerMark.data(), kAnswerMark.size()) != 0 ||
      *at > static_cast<std::byte>(TcpAnswer::kDamaged) || !has_right_sum(bytes))
    return std::nullopt;
  TcpReply reply;
  reply.answer = static_cast<TcpAnswer>(*at++);
  reply.side.attempt = get<std::uint64_t>(at);
  reply.side.received = get<std::uint64_t>(at);
  return reply;
}

void encode(const Frame& frame, std::byte* to) {
  put(to, frame.payload_bytes);
  put(to, frame.header_bytes);
  put(to, static_cast<std::uint16_t>(frame.kind));
  put(to, frame.received);
}

void set_received(std::byte* frame, std::uint32_t received) {
  frame += kFrameBytes - sizeof received;
  put(frame, received);
}

std::optional<Frame> decode_frame(const std::byte* from) {
  Frame frame;
  frame.payload_bytes = get<std::uint32_t>(from);
  frame.header_bytes = get<std::uint16_t>(from);
  frame.kind = static_cast<FrameKind>(get<std::uint16_t>(from));
  frame.received = get<std::uint32_t>(from);
  if (frame.kind == FrameKind::kMessage)
    return frame.header_bytes > 0 && frame.header_bytes <= kHeaderBytesMax ? std::optional(frame) : std::nullopt;
  const bool is_bare = frame.header_bytes == 0 && frame.payload_bytes == 0;
  const bool is_kind = frame.kind == FrameKind::kCount || frame.kind == FrameKind::kFarewell;
  return is_bare && is_kind ? std::optional(frame) : std::nullopt;
}

void add_sums(std::byte* frame, std::uint32_t body) {
  for (std::size_t i = 0; i < sizeof(FrameKind); ++i) frame[kKindAt + i] = ~frame[kKindAt + i];
  std::byte* to = frame + kFrameBytes;
  put(to, body);
  put(to, core::crc32c({frame, kFrameBytes + sizeof body}));
}

std::optional<SummedFrame> decode_summed_frame(const std::byte* from) {
  std::array<std::byte, kFrameBytes> frame;
  std::copy_n(from, frame.size(), frame.begin());
  for (std::size_t i = 0; i < sizeof(FrameKind); ++i) frame[kKindAt + i] = ~frame[kKindAt + i];
  const std::byte* at = from + kFrameBytes;
  const auto body = get<std::uint32_t>(at);
  const std::uint32_t sum = core::crc32c({from, kFrameBytes + sizeof body});
  if (get<std::uint32_t>(at) != sum) return std::nullopt;
  return SummedFrame{decode_frame(frame.data()), body};
}

}  // namespace hybridps::transport
