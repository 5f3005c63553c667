// hybridps/transport/tcp/tcp_transport_impl.h: TcpTransport's state. Internal to this room.
//
// Messages are delivered while sockets are read. `done`, closes and failure reports follow in the same progress().
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/fork.h"
#include "hybridps/core/ids.h"
#include "hybridps/tls/knock.h"
#include "hybridps/transport/rx_pool.h"
#include "hybridps/transport/tcp/tcp_endpoint.h"
#include "hybridps/transport/tcp/tcp_link.h"
#include "hybridps/transport/tcp/tcp_socket.h"
#include "hybridps/transport/tcp/tcp_transport.h"

namespace hybridps::transport {

class TcpTransportImpl final : public TcpTransport {
 public:
  explicit TcpTransportImpl(const TcpOptions& options);
  ~TcpTransportImpl() override;
  core::Status start();

  std::string_view name() const noexcept override { return name_; }
  core::Status attach(std::span<std::byte> pool_memory) override;
  std::vector<std::byte> address() const override { return encode(address_); }
  core::Result<Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override;
  void introduce(core::EngineId peer, std::span<const std::byte> address) override;
  core::EngineId name_of(core::EngineId from) override;
  void cut(core::EngineId from, const core::Status& cause) override;
  Endpoint* find(core::EngineId peer) noexcept override;
  Way way(core::EngineId peer, std::span<const std::byte> address) noexcept override;
  std::size_t progress() override;
  int event_fd() const noexcept override { return poller_.get(); }
  bool arm() override;
  void send_now() noexcept override;
  bool has_unsent() const noexcept override { return unsent_ > 0; }
  void set_receiver(Receiver* receiver) noexcept override { receiver_ = receiver; }
  TransportStats stats() const noexcept override;
  std::vector<PathInfo> paths() const override;
  TcpCounters counters() const noexcept override;

 private:
  friend class TcpEndpoint;
  struct TcpCompletion {
    Buffer payload;
    SendDone done;
    core::Status status;
  };

  core::Status listen();
  bool in_child() const noexcept { return core::fork_generation() != generation_; }
  core::Status child_error() const;

  // Connections
  core::Status watch(TcpLink& link, bool write, bool added = true);
  core::Result<TcpLink*> dial(const TcpAddress& to);
  /// kOutOfResources: try again later. kPeerDead: the peer cannot be reached.
  core::Status try_dial(TcpLink& link);
  void dial_later(TcpLink& link, core::Duration pause, bool lacks);
  /// Lets go of the connection. The session stays.
  void drop_socket(TcpLink& link);
  enum class Loss : std::uint8_t {
    kClosed,   // the peer's own kernel has ended the connection
    kRefused,  // the peer's host answers that nobody listens
    kOther
  };
  /// A link that never stood has waited since it was dialled, and knows why: it tells before the heartbeats do.
  core::Duration first_patience() const { return options_.redial_for * 9 / 10; }
  /// The session has lost its connection, or an attempt to get one.
  void on_lost(TcpLink& link, std::string why, Loss how);
  std::size_t look_at_waiting(core::TimePoint now);
  void say_hello(TcpLink& link);
  void hear_answer(TcpLink& link);
  void take_over(TcpLink& to, TcpLink& from);
  std::size_t accept_all();
  static bool may_be_member(TcpLink& link);
  void drop_greeting(TcpLink& link);
  /// Of those that have not greeted.
  TcpLink& first_to_go() const;
  void stop_accepting();
  void accept_again();
  bool turn_away();
  void keep_spare();
  void greet(TcpLink& link);
  TcpLink* find_session(const TcpGreeting& greeting) noexcept;
  /// The session goes on over the connection on which its peer has greeted.
  void resume(TcpLink& link, TcpLink& over, const TcpGreeting& greeting);
  bool has_room_for_stranger(core::TimePoint now);
  void refuse(TcpLink& link, bool reset = true);
  void adopt(TcpLink& link, TcpEndpoint& endpoint);
  void set_options(int socket) const;
  void expire_greetings(core::TimePoint now);

  // Over the socket, or its channel: as sendmsg() and readv().
  core::Status begin_channel(TcpLink& link);
  ssize_t put(TcpLink& link, const iovec* parts, std::size_t count);
  ssize_t take(TcpLink& link, const iovec* parts, std::size_t count);
  void say(TcpLink& link, std::span<const std::byte> bytes);
  void say(TcpLink& link, const TcpReply& reply);
  void send_the_rest(TcpLink& link);
  bool proves(const TcpLink& link, const TcpId& id) const noexcept;

  // Sending
  core::Status send(TcpEndpoint& endpoint, std::span<const std::byte> header, const Buffer& payload,
                    std::size_t payload_bytes, SendDone done);
  TcpSend& queue_frame(TcpLink& link, const Frame& frame);
  void list(TcpLink& link);
  std::size_t flush_all();
  std::size_t flush(TcpLink& link);
  void make_room(TcpLink& link) const;
  void has_sent(TcpLink& link, std::size_t bytes);
  void complete(TcpSend& send, const core::Status& status);
  void recycle(TcpSend& send, const core::Status& status);
  void release_kept(TcpLink& link);
  void go_on(TcpLink& link);
  /// What has come, in a frame of its own, if none waits to leave.
  void tell(TcpLink& link);
  void tell_later();
  std::size_t tell_all();
  bool set_timer(core::Duration after) noexcept;
  /// Tells what has come, and gives unused memory for payloads back.
  std::size_t on_timer();
  std::size_t run_completions();

  // Receiving
  std::size_t on_event(TcpLink& link, std::uint32_t events);
  std::size_t read(TcpLink& link);
  std::size_t read_unread();
  /// What has come is in the channel, where the poller does not see it.
  void read_later(TcpLink& link);
  std::size_t read_hello(TcpLink& link);
  void parse(TcpLink& link);
  bool begin_message(TcpLink& link);
  void deliver(TcpLink& link);
  void on_farewell(TcpLink& link);
  static void release_slot(void* transport, void* slot, std::uint64_t) noexcept;

  // Closing
  void close(TcpEndpoint& endpoint, core::Status cause);
  /// The session is over.
  void on_broken(TcpLink& link, std::string what, bool ended = false);
  bool may_resume(const TcpLink& link) const noexcept;
  void break_off(TcpLink& link, const char* doing, int error);
  /// Closes the socket. Queued messages end with `cause`. The link is freed at the end of progress().
  void close(TcpLink& link, const core::Status& cause, bool reset);
  std::size_t attend();
  /// True: the endpoint needs another step() later.
  bool step(TcpEndpoint& endpoint, core::TimePoint now);
  void run_down();
  void leave_to_parent() noexcept;

  /// What stands before the header of a message.
  std::size_t frame_bytes() const noexcept { return kFrameBytes + (address_.has_checksums ? kSumsBytes : 0); }
  void add_sums_to(TcpSend& send) const;
  /// Bytes came that the peer did not send so: the session is over.
  void on_damaged(TcpLink& link);
  /// Why a peer gets no connection any more. Null: its bytes have come as they were sent.
  const core::Status* find_damage(const TcpId& peer) const noexcept;

  const TcpOptions options_;
  const std::string name_;
  const std::uint64_t generation_ = core::fork_generation();
  TcpAddress address_;
  std::shared_ptr<const tls::Identity> identity_;  // null: without TLS
  std::optional<tls::KnockGuard> guard_;           // with TLS; outlives the links
  core::Descriptor poller_;                        // epoll over the listener and all sockets, level-triggered
  core::Descriptor listener_;
  bool accepts_ = true;  // the listener is watched; false while there are no descriptors
  core::TimePoint accepts_again_{};
  core::TimePoint looks_at_records_{};
  core::Descriptor spare_;  // reserve, given up for a moment to turn connections away
  std::size_t greetings_max_ = 0;
  std::size_t strangers_max_ = 0;
  SendBufferLimits send_buffers_;
  Receiver* receiver_ = nullptr;
  std::vector<std::span<std::byte>> regions_;

  std::vector<std::unique_ptr<TcpLink>> links_;
  std::vector<TcpLink*> greeting_;  // accepted, without a greeting yet, oldest first
  std::vector<TcpLink*> waiting_;   // without a connection, or with an attempt that has a time limit
  std::uint32_t next_number_ = 0;
  bool has_closed_ = false;  // some of links_ are to be freed
  std::unordered_map<core::EngineId, std::unique_ptr<TcpEndpoint>> endpoints_;
  std::map<TcpId, TcpEndpoint*> by_id_;
  std::map<TcpId, core::EngineId> names_;                       // of the transports that were introduced
  std::unordered_map<core::EngineId, core::EngineId> renamed_;  // what stood for a peer before that, and its name
  /// What stood for peers that nobody had introduced when their links closed: messages of theirs may wait for a group
  /// to open. The newest kUnnamedMax.
  std::deque<std::pair<TcpId, core::EngineId>> unnamed_;
  std::deque<std::pair<TcpId, core::Status>> damaged_;  // peers whose bytes were changed on the way

  std::vector<std::unique_ptr<TcpSend>> sends_;
  std::vector<TcpSend*> free_sends_;
  std::size_t unsent_ = 0;
  core::Descriptor timer_;    // soon after a message, to tell what has come; else to trim rx_pool_
  bool tells_later_ = false;  // timer_ is set to tell
  core::TimePoint trims_at_{};
  bool had_bulk_ = false;         // a large message was delivered in this progress()
  std::vector<TcpLink*> listed_;  // links that have something to send and may send now
  std::vector<TcpLink*> unread_;  // links whose channel has bytes that the socket has no more
  std::vector<TcpCompletion> completions_;
  std::vector<TcpCompletion> running_completions_;

  std::unique_ptr<RxPool> rx_pool_;
  std::vector<TcpEndpoint*> attention_;  // endpoints with new work
  std::vector<TcpEndpoint*> closing_;    // friendly closes under way

  TransportStats stats_;
  TcpCounters counters_;
};

}  // namespace hybridps::transport
