// What a peer in the same node can write where this process reads: its slot of the control area, and packets on the
// socket of the handshake. An engine reads entries that are honest until the fuzzer changes them.
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "hybridps/intranode/shm/handshake.h"
#include "hybridps/intranode/shm/ring.h"
#include "tests/fuzz/feed.h"

using namespace hybridps;
using namespace hybridps::intranode::shm;

namespace {

constexpr SlotLayout kLayout{4, 4};
constexpr std::size_t kStepsMax = 64;

struct Slot {
  alignas(kCacheLineBytes) std::array<std::byte, 4096> bytes{};
};

void read_one(MessageReader& reader, Slot& slot) {
  RingMessage message;
  if (reader.peek(message) != Taken::kEntry) return;
  if (message.header_bytes == 0 || message.header_bytes > message.header.size()) std::abort();
  if (message.is_inline) {
    const auto* end = slot.bytes.data() + kLayout.slot_bytes();
    if (message.inline_payload < slot.bytes.data() || message.inline_payload + message.payload_bytes > end)
      std::abort();
    std::array<std::byte, kInlineBytesMax> copy;
    std::memcpy(copy.data(), message.inline_payload, message.payload_bytes);
  } else if (message.payload_bytes == 0) {
    std::abort();
  }
  reader.advance();
  if (reader.publish_is_due()) static_cast<void>(reader.publish());
}

void play_rings(fuzz::Feed& feed) {
  static_assert(sizeof(PeerSlot) <= 4096);
  if (kLayout.slot_bytes() > sizeof(Slot::bytes)) std::abort();
  const auto slot = std::make_unique<Slot>();
  MessageWriter writer(slot->bytes.data(), kLayout);
  MessageReader reader(slot->bytes.data(), kLayout);
  ReleaseWriter releases(slot->bytes.data(), kLayout);
  ReleaseReader released(slot->bytes.data(), kLayout);
  std::array<std::byte, transport::kHeaderBytesMax> header{};
  std::array<std::byte, kInlineBytesMax> payload{};
  for (std::size_t step = 0; step < kStepsMax && !feed.empty(); ++step) {
    switch (feed.below(7)) {
      case 0:
        if (writer.room() == Taken::kEntry)
          writer.put_inline(std::span(header).first(1 + feed.below(header.size())),
                            std::span(payload).first(feed.byte()));
        break;
      case 1:
        if (writer.room() == Taken::kEntry)
          writer.put_reference(std::span(header).first(1 + feed.below(header.size())), feed.take<std::uint64_t>(),
                               1 + feed.byte(), feed.byte());
        break;
      case 2:
        if (reader.has_more()) read_one(reader, *slot);
        break;
      case 3: read_one(reader, *slot); break;
      case 4: releases.put(feed.byte()); break;
      case 5: {
        std::uint32_t token = 0;
        if (released.has_more() && released.take(token) == Taken::kCorrupt) return;
        break;
      }
      default: {
        // Words, as they are what is checked: of the head, the releases, or an entry.
        const std::size_t entry = feed.below(kLayout.ring_entries + 2);
        std::size_t at = kLayout.ring_offset_bytes() + entry * kEntryBytes;
        if (entry == kLayout.ring_entries) at = 0;
        if (entry == kLayout.ring_entries + 1) at = kLayout.release_offset_bytes();
        at += 8 * feed.below(8);
        std::uint64_t word = 0;
        std::memcpy(&word, slot->bytes.data() + at, sizeof word);
        word = (feed.byte() & 1) != 0 ? feed.take<std::uint64_t>()
                                      : word ^ (std::uint64_t{1 + feed.below(255)} << 8 * feed.below(8));
        std::memcpy(slot->bytes.data() + at, &word, sizeof word);
      }
    }
  }
}

/// Rises when a descriptor is left open.
int lowest_free() {
  const int fd = dup(0);
  close(fd);
  return fd;
}

/// With as many descriptors as the fuzzer says.
void play_packets(fuzz::Feed& feed) {
  static const std::array<int, 2> sockets = [] {
    std::array<int, 2> pair{};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair.data()) != 0) std::abort();
    return pair;
  }();
  Packet packet = make_packet(static_cast<PacketKind>(feed.below(8)), core::EngineId{1}, core::EngineId{2});
  std::array<std::byte, sizeof packet + 8> bytes{};
  std::memcpy(bytes.data(), &packet, sizeof packet);
  const std::size_t count = feed.below(4) != 0 ? sizeof packet : 1 + feed.below(bytes.size());
  for (std::size_t changes = feed.below(4); changes > 0; --changes)
    bytes[feed.below(bytes.size())] = static_cast<std::byte>(feed.byte());
  std::array<int, 8> handles{};
  static const int handle = eventfd(0, EFD_CLOEXEC);
  handles.fill(handle);
  const std::size_t handed = feed.below(handles.size() + 1);
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof handles)> control{};
  iovec part{bytes.data(), count};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (handed > 0) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(handed * sizeof(int));
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(handed * sizeof(int));
    std::memcpy(CMSG_DATA(head), handles.data(), handed * sizeof(int));
  }
  if (sendmsg(sockets[0], &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) std::abort();
  const int free_before = lowest_free();
  Packet got;
  std::array<core::Descriptor, kDescriptorsMax> descriptors;
  const Received received = receive_packet(sockets[1], got, descriptors);
  const bool honest = count == sizeof packet && handed <= kDescriptorsMax;
  if (received == Received::kPacket && (!honest || got.magic != packet.magic || got.version != packet.version))
    std::abort();
  if (received != Received::kPacket && received != Received::kJunk) std::abort();
  for (core::Descriptor& descriptor : descriptors) descriptor.reset();
  if (lowest_free() != free_before) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Feed feed(data, size);
  if (feed.below(4) == 0)
    play_packets(feed);
  else
    play_rings(feed);
  return 0;
}
