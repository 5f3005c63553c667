// hybridps/intranode/shm/handshake.h: the packets that two engines exchange over their Unix socket, with descriptors.
//
// Model    fixed-size packets over SOCK_SEQPACKET. The hello carries descriptors (control page, eventfd, rings, pool).
//          The sequence of packets is in README.md.
// Trust    packets may come from any process of this host. receive_packet() checks size, magic and version; the caller
//          checks the rest. Each transport has a secret in its address, which only members of its groups get. Both
//          sides prove that they know the listener's secret before a descriptor is passed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/tls/hmac.h"

namespace hybridps::intranode::shm {

enum class PacketKind : std::uint32_t {
  kHello = 1,    // who I am and what I share
  kProof = 2,    // `nonce` is what I read in your rings
  kYield = 3,    // we both connected: use my connection
  kRefuse = 4,   // no slot free for you
  kGoodbye = 5,  // I send no more messages; I return your payloads before my end of file
  kMeet = 6,     // a nonce; the listener's answer carries its mac
};

/// Sent as it lies in memory: native byte order, because both ends are on one host.
struct Packet {
  std::array<char, 8> magic{};
  std::uint32_t version = 0;
  PacketKind kind{};
  std::uint64_t from = 0;
  std::uint64_t to = 0;
  std::array<std::uint64_t, 2> nonce{};  // hello: the session's; proof: read from memory
  std::array<std::uint64_t, 2> echo{};   // the other side's session nonce; zero in the first hello
  std::uint64_t pool_bytes = 0;          // hello
  std::uint32_t ring_entries = 0;        // hello
  std::uint32_t release_entries = 0;     // hello
  tls::Mac mac{};                        // meet (the listener's), the dialler's hello: see mac_of()
};
static_assert(sizeof(Packet) == 112);

using Nonce = std::array<std::uint64_t, 2>;
using Secret128 = std::array<std::uint8_t, 16>;
/// 128 random bits.
Nonce draw_nonce();
/// What shows that `role` knows the listener's secret, in this handshake alone. Nonces and ids: the dialler's first.
enum class MeetingRole { kDialler, kListener };
tls::Mac mac_of(const Secret128& secret, MeetingRole role, const std::array<Nonce, 2>& nonces,
                const std::array<std::uint64_t, 2>& ids);

Packet make_packet(PacketKind kind, core::EngineId from, core::EngineId to) noexcept;

enum class Received { kPacket, kNothing, kEndOfFile, kJunk };
inline constexpr std::size_t kDescriptorsMax = 4;

/// False: the packet could not be queued, because the peer is gone or does not read.
bool send_packet(int socket, const Packet& packet, std::span<const int> descriptors = {}) noexcept;
/// Never waits.
Received receive_packet(int socket, Packet& packet, std::array<core::Descriptor, kDescriptorsMax>& descriptors);

/// Sockets in the abstract namespace: no file, and they disappear with the process.
core::Descriptor listen_on(std::string_view name, int backlog, int& error);
core::Descriptor connect_to(std::string_view name, int& error);
core::Descriptor accept_from(int listener, int& error);
/// Whether the process at the other end runs as our user. Sets `pid` if it is visible from here, else 0.
bool is_same_user(int socket, int& pid) noexcept;

/// The content of Transport::address(). Grammar: "HPSM" version:u8 engine:u64le secret:u8[16] name_bytes:u8 name
/// checksum:u64le. The checksum is FNV-1a of all bytes before it.
struct ShmAddress {
  core::EngineId engine;
  std::string socket_name;
  Secret128 secret{};
};
std::vector<std::byte> encode(const ShmAddress& address);
std::optional<ShmAddress> decode(std::span<const std::byte> bytes);

}  // namespace hybridps::intranode::shm
