// Frames over a connection: sends the queued messages, and cuts the received bytes into messages.
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "hybridps/core/crc32c.h"
#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/transport/tcp/tcp_transport_impl.h"

namespace hybridps::transport {
namespace {

/// Limits of one system call, in parts and in bytes. A socket takes fewer bytes at once.
constexpr std::size_t kPartsMax = 64;
constexpr std::size_t kSendBytesMax = std::size_t{1} << 20;
/// A payload of at most this size is copied when it has left, so that its buffer need not wait for the peer's count.
constexpr std::size_t kCopiedBytesMax = 4096;
/// What has come is told by the next frame that leaves. Without one: after this many bytes, or after a while
/// (kTellAfter).
constexpr std::size_t kTellBytes = std::size_t{256} << 10;
/// Bytes that one connection may bring before the others are read.
constexpr std::size_t kReadBytesMax = std::size_t{512} << 10;
/// Peers whose bytes were changed on the way are remembered, the latest.
constexpr std::size_t kDamagedMax = 64;
constexpr std::size_t kBulkBytes = std::size_t{4} << 10;
/// Rates and round trips of a connection become known while it sends.
constexpr auto kMakeRoomEvery = std::chrono::milliseconds(50);

}  // namespace

core::Status TcpTransportImpl::send(TcpEndpoint& endpoint, std::span<const std::byte> header, const Buffer& payload,
                                    std::size_t payload_bytes, SendDone done) {
  if (in_child()) return child_error();
  if (!endpoint.is_open()) return endpoint.cause_;
  if (header.empty() || header.size() > kHeaderBytesMax)
    return {core::Code::kInvalidArgument, "a header of " + std::to_string(header.size()) + " bytes"};
  if (payload_bytes > 0) {
    if (!payload || payload_bytes > payload.capacity_bytes() || payload_bytes > options_.payload_bytes_max)
      return {core::Code::kInvalidArgument, "more payload than its buffer holds, or than a message may have"};
    const std::byte* const data = payload.data();
    const auto holds = [&](std::span<std::byte> region) {
      return data >= region.data() && data + payload_bytes <= region.data() + region.size();
    };
    if (std::none_of(regions_.begin(), regions_.end(), holds))
      return {core::Code::kInvalidArgument, "the payload's memory was not attached to this transport"};
  }
  TcpSend& send = queue_frame(*endpoint.out_, {FrameKind::kMessage, static_cast<std::uint32_t>(payload_bytes),
                                               static_cast<std::uint16_t>(header.size()), 0});
  if (payload_bytes > 0) send.payload = payload;
  send.payload_bytes = payload_bytes;
  send.done = std::move(done);
  std::memcpy(send.head.data() + frame_bytes(), header.data(), header.size());
  send.head_bytes += header.size();
  ++stats_.tx_messages;
  stats_.tx_header_bytes += header.size();
  stats_.tx_payload_bytes += payload_bytes;
  return core::Status::ok();
}

TcpSend& TcpTransportImpl::queue_frame(TcpLink& link, const Frame& frame) {
  if (free_sends_.empty()) {
    sends_.push_back(std::make_unique<TcpSend>());
    free_sends_.reserve(sends_.size());
    free_sends_.push_back(sends_.back().get());
  }
  TcpSend& send = *free_sends_.back();
  free_sends_.pop_back();
  send.payload_bytes = 0;
  send.is_stamped = false;
  send.head_bytes = frame_bytes();
  encode(frame, send.head.data());
  link.queue.push_back(&send);
  ++unsent_;
  list(link);
  return send;
}

/// send() only queues. So the messages of a round to one peer leave with one system call, and in full packets.
void TcpTransportImpl::list(TcpLink& link) {
  if (link.state != TcpLink::LinkState::kOpen || link.watches_write || link.error != 0) return;
  if (std::exchange(link.is_listed, true)) return;
  listed_.push_back(&link);
}

std::size_t TcpTransportImpl::flush_all() {
  std::size_t did = 0;
  while (!listed_.empty()) {
    TcpLink* const link = listed_.back();
    listed_.pop_back();
    link->is_listed = false;
    const bool given_up = link->endpoint != nullptr && link->endpoint->state_ == TcpEndpoint::EndpointState::kDoomed;
    if (link->state == TcpLink::LinkState::kOpen && !given_up) did += flush(*link);
  }
  return did;
}

std::size_t TcpTransportImpl::flush(TcpLink& link) {
  std::size_t did = 0;
  while ((!link.queue.empty() || (link.channel && link.channel->has_unsent())) && link.error == 0) {
    std::array<iovec, kPartsMax> parts;
    std::size_t count = 0;
    std::size_t bytes = 0;
    std::size_t skip = link.front_sent;
    const auto add = [&](const std::byte* data, std::size_t length) {
      if (skip >= length) {
        skip -= length;
        return;
      }
      parts[count++] = {const_cast<std::byte*>(data) + skip, length - skip};
      bytes += length - skip;
      skip = 0;
    };
    for (auto at = link.queue.begin(); at != link.queue.end() && count + 2 <= kPartsMax && bytes < kSendBytesMax;
         ++at) {
      TcpSend& send = **at;
      if (!std::exchange(send.is_stamped, true)) {
        set_received(send.head.data(), static_cast<std::uint32_t>(link.session.received()));
        if (address_.has_checksums) add_sums_to(send);
        link.untold_bytes = 0;
      }
      add(send.head.data(), send.head_bytes);
      if (send.payload_bytes > 0) add(send.data(), send.payload_bytes);
    }
    const ssize_t sent = put(link, parts.data(), count);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      // What the peer sent before it broke off must still be read. Then read() finds the end.
      link.error = errno;
      (void)::shutdown(link.socket.get(), SHUT_RDWR);
      if (link.watches_write) (void)watch(link, /*write=*/false);
      return did;
    }
    if (sent > 0) {
      ++did;
      ++counters_.sends;
      has_sent(link, static_cast<std::size_t>(sent));
    }
    const bool is_full =
        sent < 0 || (link.channel ? link.channel->has_unsent() : static_cast<std::size_t>(sent) < bytes);
    if (is_full) {
      make_room(link);
      if (!link.watches_write) (void)watch(link, /*write=*/true);
      return did;
    }
  }
  if (link.watches_write) (void)watch(link, /*write=*/false);
  return did;
}

/// The send buffer is full.
void TcpTransportImpl::make_room(TcpLink& link) const {
  if (send_buffers_.asked <= send_buffers_.own) return;
  const core::TimePoint now = core::Clock::now();
  if (now < link.makes_room_at) return;
  link.makes_room_at = now + kMakeRoomEvery;
  PathInfo path;
  if (read_path(link.socket.get(), path)) make_send_room(link.socket.get(), path, send_buffers_);
}

/// When the frame is stamped, and its bytes change no more.
void TcpTransportImpl::add_sums_to(TcpSend& send) const {
  const std::span<const std::byte> head(send.head.data(), send.head_bytes);
  std::uint32_t body = core::crc32c(head.subspan(frame_bytes()));
  if (send.payload_bytes > 0) body = core::crc32c({send.data(), send.payload_bytes}, body);
  add_sums(send.head.data(), body);
}

void TcpTransportImpl::has_sent(TcpLink& link, std::size_t bytes) {
  link.session.has_sent(bytes);
  link.front_sent += bytes;
  while (!link.queue.empty()) {
    TcpSend& send = *link.queue.front();
    if (link.front_sent < send.bytes()) return;
    link.front_sent -= send.bytes();
    link.queue.pop_front();
    --unsent_;
    link.kept.push_back(&send);
    if (send.payload_bytes > kCopiedBytesMax) continue;
    if (send.payload) send.copy.assign(send.payload.data(), send.payload.data() + send.payload_bytes);
    complete(send, core::Status::ok());
  }
}

/// The payload's buffer is free, and `done` runs, both in run_completions().
void TcpTransportImpl::complete(TcpSend& send, const core::Status& status) {
  if (send.payload || send.done) completions_.push_back({std::move(send.payload), std::move(send.done), status});
  send.payload = Buffer();
}

void TcpTransportImpl::recycle(TcpSend& send, const core::Status& status) {
  complete(send, status);
  free_sends_.push_back(&send);
}

/// Lets go of what the peer has.
void TcpTransportImpl::release_kept(TcpLink& link) {
  while (!link.kept.empty()) {
    TcpSend& send = *link.kept.front();
    if (link.kept_from + send.bytes() > link.session.acknowledged()) return;
    link.kept_from += send.bytes();
    link.kept.pop_front();
    recycle(send, core::Status::ok());
  }
}

/// A connection stands: the stream goes on behind what the peer has.
void TcpTransportImpl::go_on(TcpLink& link) {
  release_kept(link);
  unsent_ += link.kept.size();
  link.queue.insert(link.queue.begin(), link.kept.begin(), link.kept.end());
  link.kept.clear();
  link.front_sent = static_cast<std::size_t>(link.session.sent() - link.kept_from);
  link.untold_bytes = 0;
  link.error = 0;
  link.state = TcpLink::LinkState::kOpen;
  if (link.name.value == 0) {  // the engine's own number for a stranger: no peer can choose it
    const auto known = names_.find(link.peer);
    link.name = known != names_.end() ? known->second : core::make_engine_id();
  }
  link.lacks = false;
  link.cuts = 0;
  if (std::exchange(link.was_open, true)) {
    ++link.resumptions;
    static core::LogRate rate(core::from_seconds(10));
    const core::Duration pause = core::Clock::now() - link.lost_at;
    if (rate.permit())
      core::log_warn(link.why, "; after ", core::format_seconds(core::to_seconds(pause)),
                     " a new connection goes on, and nothing is lost");
  }
  link.acknowledged_before = link.session.acknowledged();
  link.received_before = link.session.received();
  if (!link.queue.empty() || (link.channel && link.channel->has_unsent())) list(link);
  read_later(link);
}

void TcpTransportImpl::tell(TcpLink& link) {
  const bool has_said_farewell = link.endpoint != nullptr && link.endpoint->has_said_farewell_;
  if (link.queue.empty() && !has_said_farewell) (void)queue_frame(link, {FrameKind::kCount, 0, 0, 0});
}

std::size_t TcpTransportImpl::tell_all() {
  std::size_t told = 0;
  for (const auto& link : links_) {
    if (link->state != TcpLink::LinkState::kOpen || link->untold_bytes == 0) continue;
    // What waits to leave may tell an older count.
    if (!link->queue.empty() && !tells_later_) tell_later();
    tell(*link);
    ++told;
  }
  return told;
}

std::size_t TcpTransportImpl::run_completions() {
  if (completions_.empty()) return 0;
  std::swap(running_completions_, completions_);
  for (TcpCompletion& completion : running_completions_) {
    completion.payload = Buffer();  // first, so that `done` may use the slot
    completion.done(std::move(completion.status));
  }
  const std::size_t count = running_completions_.size();
  running_completions_.clear();
  return count;
}

/// What comes before messages: a greeting, or the answer to ours. Nothing follows either of them unasked but messages,
/// so no byte of them is taken here.
std::size_t TcpTransportImpl::read_hello(TcpLink& link) {
  const bool greets = link.state == TcpLink::LinkState::kGreeting;
  const std::size_t wanted = greets ? kGreetingBytes : kAnswerBytes;
  const iovec rest{link.hello.data() + link.hello_have, wanted - link.hello_have};
  ssize_t got = 0;
  do {
    got = take(link, &rest, 1);
  } while (got < 0 && errno == EINTR);
  const int error = errno;
  send_the_rest(link);
  errno = error;
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  if (got <= 0 && greets) {
    refuse(link, /*reset=*/got == 0 || errno != EPROTO);  // else the other side reads why
    return 1;
  }
  if (got <= 0) {
    break_off(link, "broke", got < 0 ? errno : link.error);
    return 1;
  }
  ++counters_.receives;
  link.hello_have += static_cast<std::size_t>(got);
  if (greets && !may_be_greeting(std::span(link.hello).first(link.hello_have))) {
    refuse(link);
    return 1;
  }
  if (link.hello_have < wanted) return 1;
  link.hello_have = 0;
  if (greets)
    greet(link);
  else
    hear_answer(link);
  return 1;
}

std::size_t TcpTransportImpl::read(TcpLink& link) {
  using LinkState = TcpLink::LinkState;
  std::size_t did = 0;
  if (link.state == LinkState::kGreeting || link.state == LinkState::kGreeted) did = read_hello(link);
  std::size_t had = 0;
  while (link.state == LinkState::kOpen && link.socket && had < kReadBytesMax) {
    if (link.begin > 0) {
      std::memmove(link.read_ahead.data(), link.read_ahead.data() + link.begin, link.end - link.begin);
      link.end -= std::exchange(link.begin, 0);
    }
    std::array<iovec, 2> parts;
    std::size_t count = 0;
    const std::size_t rest = link.slot != nullptr ? link.payload_bytes - link.payload_have : 0;
    if (rest > 0) parts[count++] = {link.slot->data + link.payload_have, rest};
    const std::size_t room = link.read_ahead.size() - link.end;
    parts[count++] = {link.read_ahead.data() + link.end, room};
    const ssize_t got = take(link, parts.data(), count);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return did;
    if (got <= 0) {
      break_off(link, "broke", got < 0 ? errno : link.error);
      return did + 1;
    }
    ++did;
    ++counters_.receives;
    const auto bytes = static_cast<std::size_t>(got);
    had += bytes;
    link.session.has_received(bytes);
    const std::size_t in_place = std::min(bytes, rest);
    link.payload_have += in_place;
    link.end += bytes - in_place;
    parse(link);
    if (bytes < rest + room && !(link.channel && link.channel->has_failed())) return did;  // the socket is empty now
  }
  read_later(link);
  return did;
}

void TcpTransportImpl::read_later(TcpLink& link) {
  if (link.state == TcpLink::LinkState::kOpen && link.channel && !std::exchange(link.is_unread, true))
    unread_.push_back(&link);
}

std::size_t TcpTransportImpl::read_unread() {
  std::size_t did = 0;
  for (std::vector<TcpLink*> looked_at = std::exchange(unread_, {}); !looked_at.empty(); looked_at.pop_back()) {
    TcpLink& link = *looked_at.back();
    link.is_unread = false;
    if (link.state == TcpLink::LinkState::kOpen) did += read(link);
  }
  return did;
}

void TcpTransportImpl::parse(TcpLink& link) {
  while (link.state == TcpLink::LinkState::kOpen) {
    if (link.slot != nullptr) {
      if (link.payload_have < link.payload_bytes) return;
      deliver(link);
    } else if (!begin_message(link)) {
      return;
    }
  }
}

bool TcpTransportImpl::begin_message(TcpLink& link) {
  const std::byte* const bytes = link.read_ahead.data() + link.begin;
  const std::size_t have = link.end - link.begin;
  if (have < frame_bytes()) return false;
  std::optional<Frame> frame;
  if (address_.has_checksums) {
    const std::optional<SummedFrame> summed = decode_summed_frame(bytes);
    if (!summed) {
      on_damaged(link);
      return false;
    }
    frame = summed->frame;
    link.body_sum = summed->body;
  } else {
    frame = decode_frame(bytes);
  }
  const bool is_too_large = frame && frame->payload_bytes > options_.payload_bytes_max;
  if (!frame || is_too_large || !link.session.acknowledge(frame->received)) {
    ++counters_.malformed;
    on_broken(link, "the connection (" + name_ + ") to " + link.to + " brought " +
                        (is_too_large ? "a message of " + std::to_string(frame->payload_bytes) +
                                            " bytes, and no group here has more than " +
                                            std::to_string(options_.payload_bytes_max)
                                      : std::string("bytes that hybridps does not send")));
    return false;
  }
  release_kept(link);
  const std::size_t head = frame_bytes() + frame->header_bytes;
  if (have < head) return false;
  if (frame->kind != FrameKind::kMessage) {
    link.begin += frame_bytes();
    if (frame->kind == FrameKind::kFarewell) on_farewell(link);
    return true;
  }
  if (frame->payload_bytes > 0) {
    link.slot = rx_pool_->allocate(frame->payload_bytes);
    if (!tells_later_) tell_later();  // the timer looks after this memory, too
    if (link.slot == nullptr) {
      on_broken(link, "no memory for a message of " + std::to_string(frame->payload_bytes) + " bytes from it");
      return false;
    }
  }
  link.header_bytes = frame->header_bytes;
  std::memcpy(link.header.data(), bytes + frame_bytes(), link.header_bytes);
  link.payload_bytes = frame->payload_bytes;
  link.payload_have = std::min(have - head, link.payload_bytes);
  link.begin += head + link.payload_have;
  if (link.payload_have > 0) std::memcpy(link.slot->data, bytes + head, link.payload_have);
  counters_.bytes_copied += link.payload_have;
  if (link.begin == link.end) link.begin = link.end = 0;
  if (link.payload_have == link.payload_bytes) deliver(link);
  return true;
}

void TcpTransportImpl::deliver(TcpLink& link) {
  RxSlot* const slot = std::exchange(link.slot, nullptr);
  RxPayload payload;
  if (slot != nullptr) payload = RxPayload(slot->data, link.payload_bytes, &release_slot, this, slot);
  if (address_.has_checksums) {
    const std::uint32_t header_sum = core::crc32c({link.header.data(), link.header_bytes});
    const std::uint32_t sum = slot == nullptr ? header_sum : core::crc32c({slot->data, link.payload_bytes}, header_sum);
    if (sum != link.body_sum) return on_damaged(link);
  }
  if (receiver_ == nullptr) return;
  had_bulk_ |= link.payload_bytes >= kBulkBytes;
  link.untold_bytes += link.header_bytes + link.payload_bytes;
  if (link.untold_bytes >= kTellBytes) tell(link);
  if (!tells_later_) tell_later();
  ++stats_.rx_messages;
  stats_.rx_header_bytes += link.header_bytes;
  stats_.rx_payload_bytes += link.payload_bytes;
  receiver_->on_message(link.name, {link.header.data(), link.header_bytes}, std::move(payload));
}

const core::Status* TcpTransportImpl::find_damage(const TcpId& peer) const noexcept {
  const auto found = std::find_if(damaged_.begin(), damaged_.end(), [&](const auto& one) { return one.first == peer; });
  return found != damaged_.end() ? &found->second : nullptr;
}

/// The other side, which hears a reset, dials again. Then it is told why.
void TcpTransportImpl::on_damaged(TcpLink& link) {
  ++counters_.damaged;
  if (options_.damaged) options_.damaged->fetch_add(1, std::memory_order_relaxed);
  const std::string what = "the connection (" + name_ + ") between " + options_.address + " here and " + link.to +
                           " brought bytes that were " + std::string(kChangedOnTheWay) +
                           "; look at the memory, the network card (first switch off its checksum offload) and the "
                           "cable of both hosts, and at what is between them";
  core::log_error(what);
  if (damaged_.size() >= kDamagedMax) damaged_.pop_front();
  damaged_.emplace_back(link.peer, core::Status(core::Code::kPeerDead, what));
  on_broken(link, what);
}

void TcpTransportImpl::release_slot(void* transport, void* slot, std::uint64_t) noexcept {
  auto& self = *static_cast<TcpTransportImpl*>(transport);
  if (!self.in_child()) self.rx_pool_->release(static_cast<RxSlot*>(slot));
}

}  // namespace hybridps::transport
