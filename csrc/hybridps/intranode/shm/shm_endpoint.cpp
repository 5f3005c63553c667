#include "hybridps/intranode/shm/shm_endpoint.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "hybridps/intranode/shm/shm_transport.h"

namespace hybridps::intranode::shm {
namespace {

using core::Code;
using core::Status;
using std::chrono::steady_clock;

constexpr auto kDialAgainAfter = std::chrono::milliseconds(5);
constexpr int kPacketsPerVisit = 16;

/// Whether `fd` can be an eventfd that cannot block us. The peer could pass anything.
bool is_safe_to_write(int fd) noexcept {
  struct stat file{};
  if (::fstat(fd, &file) != 0) return false;
  const auto type = file.st_mode & S_IFMT;
  const int flags = ::fcntl(fd, F_GETFL);
  return type == 0 && flags >= 0 && (flags & O_NONBLOCK) != 0;  // anonymous inodes have no type
}

}  // namespace

// ---- Handshake

void ShmEndpoint::open_slot(std::unique_ptr<Segment> slot) {
  if (!own_slot_) ++owner_.slots_in_use_;
  own_slot_ = std::move(slot);
  session_nonce_ = draw_nonce();
  memory_nonce_ = draw_nonce();
  std::byte* const memory = own_slot_->memory().data();
  for (int i = 0; i < 2; ++i) slot_of(memory).nonce[i].store(memory_nonce_[i], std::memory_order_seq_cst);
  messages_in_ = MessageReader(memory, owner_.layout_);
  releases_in_ = ReleaseReader(memory, owner_.layout_);
}

void ShmEndpoint::watch_socket(core::Descriptor socket) {
  if (socket_) owner_.unwatch(socket_.get());
  socket_ = std::move(socket);
  owner_.watch(socket_.get(), EPOLLIN | EPOLLRDHUP, ShmTransport::endpoint_tag(index_));
}

void ShmEndpoint::dial() {
  int error = 0;
  core::Descriptor socket = connect_to(address_.socket_name, error);
  if (error == EAGAIN || error == EINTR) {  // the peer's queue of connections is full
    deadline_ = steady_clock::now() + kDialAgainAfter;
    owner_.set_timer();
    return;
  }
  if (error == ECONNREFUSED) {
    return end({Code::kPeerDead, who() + " has no socket on this host: it has ended, or runs on another host or in "
                                         "another network namespace"},
               true, true);
  }
  if (error != 0) {
    const Code code = error == EMFILE || error == ENFILE || error == ENOMEM ? Code::kOutOfResources : Code::kPeerDead;
    return end({code, "cannot connect to " + who() + ": " + std::strerror(error)}, true, true);
  }
  if (!is_same_user(socket.get(), pid_)) {
    return end({Code::kPeerDead, "the socket of " + who() + " belongs to another user"}, true, true);
  }
  watch_socket(std::move(socket));
  state_ = ConnectionState::kMeeting;
  Packet packet = make_packet(PacketKind::kMeet, owner_.options_.self, peer_);
  packet.nonce = session_nonce_;
  if (!send_packet(socket_.get(), packet)) on_socket();  // a packet from the peer says more than a broken pipe
}

void ShmEndpoint::retry(steady_clock::time_point now) {
  if (now < deadline_) return;
  if (state_ == ConnectionState::kConnecting) {
    dial();
  } else if (state_ == ConnectionState::kYielded) {
    end({Code::kPeerDead, who() + " asked to use its own connection, but did not connect"}, true, true);
  }
}

bool ShmEndpoint::say_hello(const Nonce& echo, const tls::Mac& mac) {
  if (own_slot_->fd() < 0) {  // the other side has turned our first hello down
    auto slot = Segment::create("message rings of a peer", owner_.layout_.slot_bytes());
    if (!slot.is_ok()) {
      end(slot.status(), true, true);
      return true;
    }
    const Nonce session = session_nonce_;
    open_slot(std::move(slot).value());
    session_nonce_ = session;  // the other side may know it already
  }
  Packet packet = make_packet(PacketKind::kHello, owner_.options_.self, peer_);
  packet.nonce = session_nonce_;
  packet.echo = echo;
  packet.mac = mac;
  packet.pool_bytes = owner_.pool_ ? owner_.pool_->memory().size() : 0;
  packet.ring_entries = owner_.layout_.ring_entries;
  packet.release_entries = owner_.layout_.release_entries;
  const std::array<int, kDescriptorsMax> descriptors = {owner_.control_->fd(), owner_.event_.get(), own_slot_->fd(),
                                                        owner_.pool_ ? owner_.pool_->fd() : -1};
  if (!send_packet(socket_.get(), packet, std::span(descriptors).first(owner_.pool_ ? 4 : 3))) return false;
  own_slot_->close_descriptor();
  return true;
}

void ShmEndpoint::say_proof() {
  Packet packet = make_packet(PacketKind::kProof, owner_.options_.self, peer_);
  PeerSlot& slot = slot_of(peer_slot_->memory().data());
  for (int i = 0; i < 2; ++i) {
    packet.nonce[i] = slot.nonce[i].load(std::memory_order_seq_cst);
    slot.echo[i].store(packet.nonce[i], std::memory_order_seq_cst);
  }
  packet.echo = peer_session_nonce_;
  send_packet(socket_.get(), packet);  // on_socket() reports a failure as end of file
}

Status ShmEndpoint::map_peer(const Packet& hello, std::array<core::Descriptor, kDescriptorsMax>& descriptors) {
  const SlotLayout layout{hello.ring_entries, hello.release_entries};
  auto& [control, wake, ring, pool] = descriptors;
  if (!layout.is_valid() || !control || !wake || !ring || !is_safe_to_write(wake.get()) ||
      (hello.pool_bytes > 0) != bool(pool)) {
    return {Code::kPeerDead, who() + " said hello with nonsense in it"};
  }
  auto front = Segment::map(control.get(), 0, page_ceil(sizeof(EngineControl)), Segment::Access::kReadWrite);
  if (!front.is_ok()) return front.status();
  auto slot = Segment::map(ring.get(), 0, page_ceil(layout.slot_bytes()), Segment::Access::kReadWrite);
  if (!slot.is_ok()) return slot.status();
  if (pool) {
    auto view = Segment::map(pool.get(), 0, hello.pool_bytes, Segment::Access::kReadOnly);
    if (!view.is_ok()) return view.status();
    peer_pool_ = std::move(view).value();
  }
  peer_front_ = std::move(front).value();
  peer_slot_ = std::move(slot).value();
  wake_ = std::move(wake);
  messages_out_ = MessageWriter(peer_slot_->memory().data(), layout);
  releases_out_ = ReleaseWriter(peer_slot_->memory().data(), layout);
  peer_session_nonce_ = hello.nonce;
  return Status::ok();
}

void ShmEndpoint::accept(core::Descriptor socket, const Packet& hello,
                         std::array<core::Descriptor, kDescriptorsMax>& descriptors) {
  is_same_user(socket.get(), pid_);
  watch_socket(std::move(socket));
  state_ = ConnectionState::kProving;
  if (Status mapped = map_peer(hello, descriptors); !mapped.is_ok()) return end(std::move(mapped), true, true);
  say_hello(hello.nonce);
  if (state_ != ConnectionState::kEnded) say_proof();
}

void ShmEndpoint::check_proof(const Packet& packet) {
  Nonce echoed;
  for (int i = 0; i < 2; ++i) {
    echoed[i] = slot_of(own_slot_->memory().data()).echo[i].load(std::memory_order_seq_cst);
  }
  if (packet.nonce != memory_nonce_ || echoed != memory_nonce_ || packet.echo != session_nonce_) {
    return end({Code::kPeerDead, who() + " could not show that it shares this host's memory"}, true, true);
  }
  state_ = ConnectionState::kOpen;
  was_open_ = true;
  --owner_.handshakes_;
}

void ShmEndpoint::on_socket() {
  for (int i = 0; i < kPacketsPerVisit && socket_ && !peer_gone_; ++i) {
    Packet packet;
    std::array<core::Descriptor, kDescriptorsMax> descriptors;
    switch (receive_packet(socket_.get(), packet, descriptors)) {
      case Received::kNothing: return;
      case Received::kEndOfFile: return on_peer_gone();
      case Received::kJunk: end(corrupt("nonsense on its socket"), true, true); break;
      case Received::kPacket:
        if (state_ == ConnectionState::kEnded) break;
        if (packet.from == peer_.value && packet.to == owner_.options_.self.value) {
          on_packet(packet, descriptors);
        } else {
          end(corrupt("a message for another engine"), true, true);
        }
        break;
    }
  }
}

void ShmEndpoint::on_packet(const Packet& packet, std::array<core::Descriptor, kDescriptorsMax>& descriptors) {
  const auto mac_by = [&](MeetingRole role) {
    return mac_of(address_.secret, role, {session_nonce_, packet.nonce}, {owner_.options_.self.value, peer_.value});
  };
  switch (packet.kind) {
    case PacketKind::kMeet:
      if (state_ != ConnectionState::kMeeting || packet.echo != session_nonce_) break;
      if (!tls::is_equal(mac_by(MeetingRole::kListener), packet.mac.data()))
        return end(
            {Code::kPeerDead, who() + " does not know the secret of its address: another process has its socket"}, true,
            true);
      state_ = ConnectionState::kHelloSent;
      if (!say_hello({}, mac_by(MeetingRole::kDialler))) on_socket();
      return;
    case PacketKind::kHello:
      if (state_ != ConnectionState::kHelloSent || packet.echo != session_nonce_) break;
      state_ = ConnectionState::kProving;
      if (Status mapped = map_peer(packet, descriptors); !mapped.is_ok()) return end(std::move(mapped), true, true);
      return say_proof();
    case PacketKind::kProof:
      if (state_ != ConnectionState::kProving) break;
      return check_proof(packet);
    case PacketKind::kYield:
      if (state_ != ConnectionState::kHelloSent) break;
      owner_.unwatch(socket_.get());
      socket_.reset();
      state_ = ConnectionState::kYielded;
      deadline_ = steady_clock::now() + owner_.options_.hello_deadline;
      return owner_.set_timer();
    case PacketKind::kRefuse:
      return end(
          {Code::kOutOfResources,
           who() + " has no room for another engine of this host (its log says why); LOCAL_WORLD_SIZE sets the limit"},
          true, true);
    case PacketKind::kGoodbye: return drain_and_end({Code::kClosed, who() + " closed the connection"});
  }
  end(corrupt("a handshake out of order"), true, true);
}

// ---- Messages

Status ShmEndpoint::send(std::span<const std::byte> header, const transport::Buffer& payload, std::size_t payload_bytes,
                         transport::SendDone done) {
  if (owner_.in_forked_child()) return {Code::kClosed, "a forked child cannot send"};
  if (!is_usable()) return cause_;
  if (header.empty() || header.size() > transport::kHeaderBytesMax) {
    return {Code::kInvalidArgument, "a header has 1 to " + std::to_string(transport::kHeaderBytesMax) + " bytes, got " +
                                        std::to_string(header.size())};
  }
  if (payload_bytes > 0) {
    const std::span<std::byte> pool = owner_.pool_memory();
    if (!payload || payload_bytes > payload.capacity_bytes()) {
      return {Code::kInvalidArgument, "payload_bytes exceeds the buffer"};
    }
    if (!owner_.attached_ || payload.data() < pool.data() ||
        payload.data() + payload_bytes > pool.data() + pool.size()) {
      return {Code::kInvalidArgument, "the payload's pool was not attached to this transport"};
    }
  }
  const bool must_park = !is_inline(payload_bytes) && (!may_lend() || !parked_.empty());
  if (state_ == ConnectionState::kOpen && queue_.empty() && !must_park &&
      try_post(header, payload, payload_bytes, done)) {
    return Status::ok();
  }
  if (state_ == ConnectionState::kEnded) return cause_;
  Queued& queued = (must_park ? parked_ : queue_).emplace_back();
  std::memcpy(queued.header.data(), header.data(), header.size());
  queued.header_bytes = header.size();
  if (payload_bytes > 0) queued.payload = payload;
  queued.payload_bytes = payload_bytes;
  queued.done = std::move(done);
  ++owner_.counters_.messages_queued;
  return Status::ok();
}

bool ShmEndpoint::try_post(std::span<const std::byte> header, const transport::Buffer& payload,
                           std::size_t payload_bytes, transport::SendDone& done) {
  switch (messages_out_.room()) {
    case Taken::kNothing: return false;
    case Taken::kCorrupt: end(corrupt("an impossible place in the message ring"), true, true); return false;
    case Taken::kEntry: break;
  }
  if (is_inline(payload_bytes)) {
    const std::byte* const data = payload_bytes > 0 ? payload.data() : nullptr;
    messages_out_.put_inline(header, {data, payload_bytes});
    if (done) owner_.completions_.push_back({std::move(done), Status::ok(), payload});
  } else {
    if (!may_lend()) return false;
    if (lent_free_.empty()) {
      lent_free_.push_back(static_cast<std::uint32_t>(lent_.size()));
      lent_.emplace_back();
    }
    const std::uint32_t place = lent_free_.back();
    lent_free_.pop_back();
    ++lent_count_;
    Lent& lent = lent_[place];
    lent.in_use = true;
    lent.payload = payload;
    lent.done = std::move(done);
    messages_out_.put_reference(header, payload.offset_bytes(), payload_bytes,
                                place | (static_cast<std::uint32_t>(lent.life) << 16));
  }
  ++owner_.stats_.tx_messages;
  owner_.stats_.tx_header_bytes += header.size();
  owner_.stats_.tx_payload_bytes += payload_bytes;
  wake();
  return true;
}

void ShmEndpoint::wake() noexcept {
  auto& sleeping = reinterpret_cast<EngineControl*>(peer_front_->memory().data())->sleeping;
  if (sleeping.load(std::memory_order_seq_cst) == 0 || sleeping.exchange(0, std::memory_order_seq_cst) == 0) return;
  const std::uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof one));  // a full eventfd is readable anyway
  ++owner_.counters_.wakeups_sent;
}

std::size_t ShmEndpoint::step() {
  constexpr std::size_t kMessagesPerStep = 64;
  if (state_ == ConnectionState::kOpen) {
    std::size_t done = take_releases();
    if (owner_.receiver_ != nullptr) done += take_messages(kMessagesPerStep);
    if (!nothing_queued() && state_ == ConnectionState::kOpen) done += flush_queue();
    if (closing_ && nothing_queued() && state_ == ConnectionState::kOpen) end(cause_, false, false);
    return done;
  }
  if (state_ != ConnectionState::kEnded) return 0;
  const std::size_t done = lent_count_ > 0 ? take_releases() : 0;
  return done + (finish() ? 1 : 0);
}

std::size_t ShmEndpoint::take_releases() {
  std::size_t count = 0;
  while (lent_count_ > 0) {
    std::uint32_t token = 0;
    const Taken taken = releases_in_.take(token);
    if (taken == Taken::kNothing) return count;
    const std::uint32_t place = token & 0xffff;
    if (taken == Taken::kCorrupt || place >= lent_.size() || !lent_[place].in_use || lent_[place].life != token >> 16) {
      if (state_ == ConnectionState::kEnded) {
        let_go_all();
      } else {
        end(corrupt("a release of what was not sent"), true, true);
      }
      return count;
    }
    Lent& lent = lent_[place];
    lent.in_use = false;
    ++lent.life;
    --lent_count_;
    lent_free_.push_back(place);
    owner_.completions_.push_back({std::move(lent.done), cause_, std::move(lent.payload)});
    ++count;
  }
  return count;
}

std::size_t ShmEndpoint::take_messages(std::size_t messages_max) {
  std::size_t count = 0;
  RingMessage message;
  while (count < messages_max && state_ == ConnectionState::kOpen) {
    const Taken taken = messages_in_.peek(message);
    if (taken == Taken::kNothing) break;
    if (taken == Taken::kCorrupt) {
      end(corrupt("nonsense in the message ring"), true, true);
      break;
    }
    transport::RxPayload payload;
    if (message.is_inline) {
      if (message.payload_bytes > 0) payload = owner_.copy_inline({message.inline_payload, message.payload_bytes});
    } else {
      const std::size_t pool_bytes = peer_pool_ ? peer_pool_->memory().size() : 0;
      if (message.offset_bytes > pool_bytes || message.payload_bytes > pool_bytes - message.offset_bytes) {
        end(corrupt("a payload outside its pool"), true, true);
        break;
      }
      ++held_;
      payload = transport::RxPayload(peer_pool_->memory().data() + message.offset_bytes, message.payload_bytes,
                                     &release_held, this, nullptr, message.token);
    }
    messages_in_.advance();
    ++count;
    if (messages_in_.publish_is_due() && messages_in_.publish()) wake();
    ++owner_.stats_.rx_messages;
    owner_.stats_.rx_header_bytes += message.header_bytes;
    owner_.stats_.rx_payload_bytes += message.payload_bytes;
    if (owner_.receiver_ != nullptr) {
      owner_.receiver_->on_message(peer_, std::span(message.header).first(message.header_bytes), std::move(payload));
    }
  }
  if (messages_in_.publish()) wake();
  return count;
}

bool ShmEndpoint::may_lend() const noexcept { return lent_count_ < owner_.layout_.release_entries; }

bool ShmEndpoint::post_front(std::deque<Queued>& queue) {
  Queued& next = queue.front();
  if (!try_post(std::span(next.header).first(next.header_bytes), next.payload, next.payload_bytes, next.done)) {
    return false;  // end() may have destroyed `next`
  }
  // Do not drop the buffer here: the pool's hook may send, and must find the queues in order.
  if (next.payload) owner_.completions_.push_back({{}, Status::ok(), std::move(next.payload)});
  queue.pop_front();
  return true;
}

std::size_t ShmEndpoint::flush_queue() {
  std::size_t count = 0;
  while (state_ == ConnectionState::kOpen && !parked_.empty() && may_lend() && post_front(parked_)) ++count;
  while (state_ == ConnectionState::kOpen && !queue_.empty()) {
    if (!is_inline(queue_.front().payload_bytes) && (!may_lend() || !parked_.empty())) {
      parked_.push_back(std::move(queue_.front()));
      queue_.pop_front();
    } else if (!post_front(queue_)) {
      break;
    }
    ++count;
  }
  if (state_ == ConnectionState::kOpen && nothing_queued()) messages_out_.set_waiting(false);
  return count;
}

bool ShmEndpoint::has_work() {
  if (state_ == ConnectionState::kEnded) return (lent_count_ > 0 && releases_in_.has_more()) || can_finish_more();
  if (state_ != ConnectionState::kOpen) return false;
  if (lent_count_ > 0 && releases_in_.has_more()) return true;
  if (owner_.receiver_ != nullptr && messages_in_.has_more()) return true;
  if (nothing_queued()) return false;
  messages_out_.set_waiting(true);
  return messages_out_.room() != Taken::kNothing && (!queue_.empty() || may_lend());
}

void ShmEndpoint::release_held(void* context, void* /*token*/, std::uint64_t extra) noexcept {
  auto& self = *static_cast<ShmEndpoint*>(context);
  if (self.owner_.in_forked_child()) return;
  --self.held_;
  if (self.peer_gone_) return;
  self.releases_out_.put(static_cast<std::uint32_t>(extra));
  self.wake();
}

// ---- End

std::string ShmEndpoint::who() const {
  std::string text = "engine " + core::to_string(peer_);
  if (pid_ > 0) text += " (pid " + std::to_string(pid_) + ")";
  return text;
}

Status ShmEndpoint::corrupt(const char* what) const {
  return {Code::kPeerDead, who() + " was cut off: " + what + "; it is broken or runs another version"};
}

void ShmEndpoint::close(Status cause) noexcept {
  if (owner_.in_forked_child() || !is_usable()) return;
  if (cause.is_ok()) cause = {Code::kClosed, "the connection to " + who() + " was closed here"};
  if (cause.code() != Code::kClosed || nothing_queued()) return end(std::move(cause), false, false);
  closing_ = true;  // step() ends the endpoint when the queues are empty
  cause_ = std::move(cause);
  if (std::exchange(requested_, false)) --owner_.stats_.endpoints_open;
}

void ShmEndpoint::end(Status cause, bool gone, bool report) {
  if (state_ == ConnectionState::kEnded) {
    if (gone) let_go_all();
    return;
  }
  if (state_ != ConnectionState::kOpen) --owner_.handshakes_;
  report = report && !closing_ && (requested_ || was_open_);
  if (std::exchange(requested_, false)) --owner_.stats_.endpoints_open;
  state_ = ConnectionState::kEnded;
  if (!closing_) cause_ = std::move(cause);
  if (socket_ && !peer_gone_)
    send_packet(socket_.get(), make_packet(PacketKind::kGoodbye, owner_.options_.self, peer_));
  for (auto* queue : {&parked_, &queue_}) {
    for (Queued& queued : *queue) {
      owner_.completions_.push_back({std::move(queued.done), cause_, std::move(queued.payload)});
    }
    queue->clear();
  }
  if (gone) let_go_all();
  if (report) owner_.failures_.push_back(this);
}

void ShmEndpoint::let_go_all() {
  if (lent_count_ == 0) return;
  lent_count_ = 0;
  for (Lent& lent : lent_) {
    if (!lent.in_use) continue;
    lent.in_use = false;
    owner_.completions_.push_back({std::move(lent.done), cause_, std::move(lent.payload)});
  }
}

void ShmEndpoint::on_peer_gone() {
  owner_.unwatch(socket_.get());
  peer_gone_ = true;
  if (state_ == ConnectionState::kOpen) {
    drain_and_end({Code::kPeerDead, std::string(transport::kEndedWithoutClosing)});
  } else {
    end({Code::kPeerDead, who() + " ended or hung up before the connection stood"}, true, true);
  }
  let_go_all();
}

void ShmEndpoint::drain_and_end(Status cause) {
  if (state_ == ConnectionState::kOpen) {
    take_releases();
    // A live peer could refill the ring for ever. Everything written before the end or goodbye fits in the ring.
    if (state_ == ConnectionState::kOpen && owner_.receiver_ != nullptr) take_messages(owner_.layout_.ring_entries);
  }
  end(std::move(cause), peer_gone_, true);
}

bool ShmEndpoint::can_finish_more() const noexcept {
  return !finished_ && held_ == 0 && (peer_gone_ || !socket_ || !write_shut_);
}

bool ShmEndpoint::finish() {
  if (!can_finish_more()) return false;
  if (socket_ && !peer_gone_) {
    ::shutdown(socket_.get(), SHUT_WR);  // "I hold nothing of yours and write nothing more"
    write_shut_ = true;
    return true;
  }
  let_go_all();
  socket_.reset();
  wake_.reset();
  peer_front_.reset();
  peer_slot_.reset();
  peer_pool_.reset();
  lent_.clear();
  lent_.shrink_to_fit();
  lent_free_.clear();
  lent_free_.shrink_to_fit();
  if (own_slot_) --owner_.slots_in_use_;
  own_slot_.reset();
  finished_ = true;
  return true;
}

}  // namespace hybridps::intranode::shm
