#include "hybridps/intranode/shm/handshake.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

namespace hybridps::intranode::shm {
namespace {

constexpr std::array<char, 8> kMagic = {'h', 'y', 'b', 'r', 'i', 'd', 'p', 's'};
constexpr std::uint32_t kVersion = 3;
constexpr std::array<char, 4> kAddressMagic = {'H', 'P', 'S', 'M'};
constexpr std::size_t kNameBytesMax = sizeof(sockaddr_un::sun_path) - 1;
static_assert(std::is_trivially_copyable_v<Packet>);

struct UnixAddress {
  sockaddr_un address{};
  socklen_t bytes = 0;
};

UnixAddress abstract_address(std::string_view name) noexcept {
  UnixAddress result;
  result.address.sun_family = AF_UNIX;
  name = name.substr(0, kNameBytesMax);
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());  // the leading zero makes it abstract
  result.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

std::uint64_t fnv1a(std::span<const std::byte> bytes) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (std::byte b : bytes) hash = (hash ^ static_cast<std::uint64_t>(b)) * 0x100000001b3;
  return hash;
}

void put_u64(std::vector<std::byte>& bytes, std::uint64_t value) {
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<std::byte>(value >> (8 * i)));
}

std::uint64_t get_u64(std::span<const std::byte> bytes) noexcept {
  std::uint64_t value = 0;
  for (std::size_t i = 8; i-- > 0;) value = (value << 8) | static_cast<std::uint64_t>(bytes[i]);
  return value;
}

core::Descriptor make_socket() {
  const core::ForkLock lock;
  return {lock, ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
}

}  // namespace

Packet make_packet(PacketKind kind, core::EngineId from, core::EngineId to) noexcept {
  Packet packet;
  packet.magic = kMagic;
  packet.version = kVersion;
  packet.kind = kind;
  packet.from = from.value;
  packet.to = to.value;
  return packet;
}

bool send_packet(int socket, const Packet& packet, std::span<const int> descriptors) noexcept {
  iovec bytes{const_cast<Packet*>(&packet), sizeof packet};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kDescriptorsMax)> control{};
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size_bytes());
  }
  ssize_t sent;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(sizeof packet);
}

Received receive_packet(int socket, Packet& packet, std::array<core::Descriptor, kDescriptorsMax>& descriptors) {
  for (core::Descriptor& descriptor : descriptors) descriptor.reset();
  iovec bytes{&packet, sizeof packet};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kDescriptorsMax)> control{};
  ssize_t received;
  {
    const core::ForkLock lock;
    // The kernel reports ECONNRESET once, before data that is still queued. Read again for this data and the end of
    // file.
    int resets = 0;
    do {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      received = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (received < 0 && (errno == EINTR || (errno == ECONNRESET && ++resets <= 2)));
    if (received >= 0) {
      for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t i = 0; i < count; ++i) {
          int fd = -1;
          std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
          if (i < kDescriptorsMax)
            descriptors[i] = core::Descriptor(lock, fd);
          else
            ::close(fd);  // where `control` has room for more, by its alignment
        }
      }
    }
  }
  if (received < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Received::kNothing : Received::kEndOfFile;
  if (received == 0) return Received::kEndOfFile;
  if (received != static_cast<ssize_t>(sizeof packet) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 ||
      packet.magic != kMagic || packet.version != kVersion) {
    return Received::kJunk;
  }
  return Received::kPacket;
}

Nonce draw_nonce() {
  const core::GroupUid bits = core::make_group_uid();
  return {bits.high, bits.low};
}

tls::Mac mac_of(const Secret128& secret, MeetingRole role, const std::array<Nonce, 2>& nonces,
                const std::array<std::uint64_t, 2>& ids) {
  const auto bytes_of = [](const auto& words) {
    return std::span(reinterpret_cast<const std::uint8_t*>(words.data()), sizeof words);
  };
  const std::string_view name = role == MeetingRole::kDialler ? "hybridps shm dialler" : "hybridps shm listener";
  return tls::hmac(secret, {tls::bytes_of(name), bytes_of(nonces), bytes_of(ids)});
}

core::Descriptor listen_on(std::string_view name, int backlog, int& error) {
  core::Descriptor socket = make_socket();
  const UnixAddress where = abstract_address(name);
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&where.address), where.bytes) != 0 ||
      ::listen(socket.get(), backlog) != 0) {
    error = errno;
    return {};
  }
  error = 0;
  return socket;
}

core::Descriptor connect_to(std::string_view name, int& error) {
  core::Descriptor socket = make_socket();
  const UnixAddress where = abstract_address(name);
  if (!socket || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&where.address), where.bytes) != 0) {
    error = errno;
    return {};
  }
  error = 0;
  return socket;
}

core::Descriptor accept_from(int listener, int& error) {
  const core::ForkLock lock;
  core::Descriptor socket(lock, ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  error = socket ? 0 : errno;
  return socket;
}

bool is_same_user(int socket, int& pid) noexcept {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  pid = 0;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return false;
  pid = peer.pid;
  return peer.uid == ::geteuid();
}

std::vector<std::byte> encode(const ShmAddress& address) {
  std::vector<std::byte> bytes;
  for (char c : kAddressMagic) bytes.push_back(static_cast<std::byte>(c));
  bytes.push_back(static_cast<std::byte>(kVersion));
  put_u64(bytes, address.engine.value);
  for (const std::uint8_t byte : address.secret) bytes.push_back(static_cast<std::byte>(byte));
  bytes.push_back(static_cast<std::byte>(address.socket_name.size()));
  for (char c : address.socket_name) bytes.push_back(static_cast<std::byte>(c));
  put_u64(bytes, fnv1a(bytes));
  return bytes;
}

std::optional<ShmAddress> decode(std::span<const std::byte> bytes) {
  constexpr std::size_t kSecretBytes = std::tuple_size_v<Secret128>;
  constexpr std::size_t kFixedBytes = kAddressMagic.size() + 1 + 8 + kSecretBytes + 1;
  constexpr std::size_t kChecksumBytes = 8;
  if (bytes.size() < kFixedBytes + kChecksumBytes) return std::nullopt;
  const auto checked = bytes.first(bytes.size() - kChecksumBytes);
  if (fnv1a(checked) != get_u64(bytes.last(kChecksumBytes))) return std::nullopt;
  bytes = checked;
  if (!std::equal(kAddressMagic.begin(), kAddressMagic.end(), bytes.begin(),
                  [](char c, std::byte b) { return static_cast<std::byte>(c) == b; })) {
    return std::nullopt;
  }
  if (static_cast<std::uint32_t>(bytes[4]) != kVersion) return std::nullopt;
  ShmAddress address;
  address.engine.value = get_u64(bytes.subspan(5, 8));
  for (std::size_t i = 0; i < kSecretBytes; ++i) address.secret[i] = static_cast<std::uint8_t>(bytes[13 + i]);
  const auto name_bytes = static_cast<std::size_t>(bytes[13 + kSecretBytes]);
  if (name_bytes == 0 || name_bytes > kNameBytesMax || bytes.size() != kFixedBytes + name_bytes) return std::nullopt;
  for (std::byte b : bytes.subspan(kFixedBytes)) address.socket_name.push_back(static_cast<char>(b));
  return address;
}

}  // namespace hybridps::intranode::shm
