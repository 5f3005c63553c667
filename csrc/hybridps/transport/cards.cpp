#include "hybridps/transport/cards.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "hybridps/core/clock.h"
#include "hybridps/core/sleeper.h"

namespace hybridps::transport {
namespace {

constexpr std::array<char, 8> kMagic = {'H', 'P', 'S', 'R', 'A', 'I', 'L', 1};
constexpr std::size_t kEnvelopeBytes = kMagic.size() + 2 * sizeof(std::uint32_t);
constexpr std::size_t kTextBytesMax = 128;
constexpr std::size_t kInnerBytesMax = 8192;
/// After one pair has ended, the other pairs may still deliver for this long. A peer that leaves or dies ends all pairs
/// within milliseconds. A peer with a failed card does not.
constexpr auto kEndWithin = std::chrono::milliseconds(250);
/// Bytes that a message costs besides its payload: our header and the network's headers.
constexpr double kMessageBytes = 200;

std::uint32_t fnv1a(std::span<const std::byte> bytes) {
  std::uint32_t sum = 2166136261U;
  for (const std::byte byte : bytes) sum = (sum ^ static_cast<std::uint32_t>(byte)) * 16777619U;
  return sum;
}

void put(std::vector<std::byte>& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<std::byte>(value >> (8 * i)));
}

template <typename Bytes>
void put_all(std::vector<std::byte>& out, const Bytes& bytes) {
  put(out, bytes.size(), 2);
  for (const auto byte : bytes) out.push_back(static_cast<std::byte>(byte));
}

class AddressReader {
 public:
  explicit AddressReader(std::span<const std::byte> rest) : rest_(rest) {}
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t value = 0;
    const auto read = raw(bytes);
    for (std::size_t i = 0; i < read.size(); ++i) value |= static_cast<std::uint64_t>(read[i]) << (8 * i);
    return value;
  }
  std::span<const std::byte> sized(std::size_t bytes_max) {
    const std::size_t bytes = number(2);
    if (bytes > bytes_max) ok_ = false;
    return raw(bytes);
  }
  std::string text() {
    std::string text;
    for (const std::byte byte : sized(kTextBytesMax)) text += static_cast<char>(byte);
    return text;
  }
  bool ok() const { return ok_; }
  bool finished() const { return ok_ && rest_.empty(); }

 private:
  std::span<const std::byte> raw(std::size_t bytes) {
    if (!ok_ || bytes > rest_.size()) {
      ok_ = false;
      return {};
    }
    const auto read = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return read;
  }
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

class CardsEndpoint final : public Endpoint {
 public:
  struct Way {
    Endpoint* endpoint = nullptr;
    double weight = 1;
    double dealt = 0;  // bytes / weight
    std::size_t socket = 0;
  };

  CardsEndpoint(core::EngineId peer, std::vector<Way> ways) : peer_(peer), ways_(std::move(ways)) {}

  core::Status send(std::span<const std::byte> header, const Buffer& payload, std::size_t payload_bytes,
                    SendDone done) override {
    if (!cause_.is_ok()) return cause_;
    // Choose the way that would finish this message first.
    const double bytes = static_cast<double>(payload_bytes) + kMessageBytes;
    Way* first = &ways_.front();
    for (Way& way : ways_)
      if (way.socket < used_ && way.dealt + bytes / way.weight < first->dealt + bytes / first->weight) first = &way;
    core::Status status = first->endpoint->send(header, payload, payload_bytes, std::move(done));
    if (status.is_ok()) first->dealt += bytes / first->weight;
    return status;
  }
  /// From now on distributes over `used` sockets of each card. The first way is always among them.
  void use_sockets(std::size_t used) noexcept {
    used_ = used;
    for (Way& way : ways_) way.dealt = 0;
  }
  core::EngineId peer() const noexcept override { return peer_; }
  void close(core::Status cause) noexcept override {
    if (std::exchange(closed_, true)) return;
    if (cause_.is_ok()) cause_ = cause.is_ok() ? core::Status(core::Code::kClosed, "the endpoint was closed") : cause;
    for (Way& way : ways_) way.endpoint->close(cause);
  }
  /// Sends nothing more. The ways stay open for incoming messages.
  void refuse(const core::Status& cause) noexcept { cause_ = cause; }
  const core::Status& cause() const noexcept { return cause_; }

 private:
  const core::EngineId peer_;
  std::vector<Way> ways_;
  std::size_t used_ = kCardsMax;
  core::Status cause_;  // ok: open
  bool closed_ = false;
};

class CardsTransport final : public Transport {
 public:
  CardsTransport(std::vector<Card> cards, std::size_t sockets, std::size_t used)
      : sockets_(sockets), set_(std::min(used, sockets)), used_(set_) {
    for (Card& card : cards) {
      card.info.inner = card.transport->address();
      infos_.push_back(std::move(card.info));
      transports_.push_back(std::move(card.transport));
      inlets_.push_back(std::make_unique<CardInlet>(*this));
      if (!name_.empty()) name_ += " + ";
      name_ += transports_.back()->name();
    }
    address_ = encode_cards(infos_);
  }
  ~CardsTransport() override { transports_.clear(); }

  core::Status start() {
    if (transports_.size() == 1) {
      event_fd_ = transports_.front()->event_fd();
      return core::Status::ok();
    }
    for (const auto& transport : transports_)
      if (transport->event_fd() < 0) return core::Status::ok();  // if one transport must be polled, all are polled
    for (const auto& transport : transports_)
      if (!fds_.open() || !fds_.watch(transport->event_fd()))
        return {core::Code::kOutOfResources, "no descriptor to wait on for several network cards"};
    event_fd_ = fds_.get();
    return core::Status::ok();
  }

  std::string_view name() const noexcept override { return name_; }
  core::Status attach(std::span<std::byte> pool_memory) override {
    for (const auto& transport : transports_)
      if (core::Status status = transport->attach(pool_memory); !status.is_ok()) return status;
    return core::Status::ok();
  }
  core::Status attach_device(const DeviceMemory& memory) override {
    for (std::size_t card = 0; card < transports_.size(); ++card) {
      const core::Status status = transports_[card]->attach_device(memory);
      if (status.is_ok()) continue;
      while (card-- > 0) transports_[card]->detach_device(memory.bytes);
      return status;
    }
    return core::Status::ok();
  }
  void detach_device(std::span<std::byte> memory) noexcept override {
    for (const auto& transport : transports_) transport->detach_device(memory);
  }
  std::vector<std::byte> address() const override { return address_; }

  core::Result<Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override {
    if (const auto found = peers_.find(peer); found != peers_.end()) return endpoint_of(found->first, found->second);
    core::Result<std::vector<CardInfo>> theirs = decode_cards(address);
    if (!theirs.is_ok()) return theirs.status();
    CardPeer made;
    std::vector<CardsEndpoint::Way> ways;
    std::vector<std::size_t> used(transports_.size(), 0);
    for (const CardPair& pair : pairs_between(infos_, theirs.value())) {
      const CardInfo& other = theirs.value()[pair.theirs];
      Way way;
      way.card = pair.own;
      // An inner transport has one endpoint for each engine id. So further pairs from the same card get new ids.
      way.id = used[pair.own]++ == 0 ? peer : core::make_engine_id();
      way.inner = other.inner;
      way.text = infos_[pair.own].describe() + " -> " + other.describe();
      core::Result<Endpoint*> opened = transports_[pair.own]->connect(way.id, other.inner);
      if (!opened.is_ok()) {
        const core::Status why(opened.status().code(), named(opened.status().message(), way.text));
        for (const CardsEndpoint::Way& before : ways) before.endpoint->close(why);
        if (why.code() != core::Code::kInvalidArgument) peers_[peer].cause = why;
        return why;
      }
      ways.push_back({opened.value(), pair.weight, 0, pair.own / (transports_.size() / sockets_)});
      made.ways.push_back(std::move(way));
    }
    for (const Way& way : made.ways)
      if (way.id != peer) aliases_.emplace(way.id, peer);
    if (ways.size() > 1) {
      made.endpoint = std::make_unique<CardsEndpoint>(peer, std::move(ways));
      made.endpoint->use_sockets(used_);
    }
    return endpoint_of(peer, peers_.emplace(peer, std::move(made)).first->second);
  }

  void introduce(core::EngineId peer, std::span<const std::byte> address) override {
    const core::Result<std::vector<CardInfo>> theirs = decode_cards(address);
    if (!theirs.is_ok()) return;  // connect() tells
    for (const auto& transport : transports_)
      for (const CardInfo& card : theirs.value()) transport->introduce(peer, card.inner);
  }
  core::EngineId name_of(core::EngineId from) override {
    for (const auto& transport : transports_)
      if (const core::EngineId name = transport->name_of(from); name != from) return name;
    return from;
  }
  void cut(core::EngineId from, const core::Status& cause) override {
    for (const auto& transport : transports_) transport->cut(from, cause);
  }
  Endpoint* find(core::EngineId peer) noexcept override {
    const auto found = peers_.find(peer);
    return found != peers_.end() ? open_endpoint(*found) : nullptr;
  }
  hybridps::transport::Way way(core::EngineId peer, std::span<const std::byte> address) noexcept override {
    using Stand = hybridps::transport::Way;
    Stand all = Stand::kStands;
    const auto add = [&](std::size_t card, core::EngineId id, std::span<const std::byte> inner) {
      const Stand one = transports_[card]->way(id, inner);
      if (one == Stand::kLacks || all == Stand::kStands) all = one;
    };
    if (const auto found = peers_.find(peer); found != peers_.end()) {
      if (open_endpoint(*found) == nullptr) return Stand::kNone;
      for (const Way& known : found->second.ways) add(known.card, known.id, known.inner);
      return all;
    }
    const core::Result<std::vector<CardInfo>> theirs = decode_cards(address);
    if (!theirs.is_ok()) return Stand::kNone;
    for (const CardPair& pair : pairs_between(infos_, theirs.value()))
      add(pair.own, peer, theirs.value()[pair.theirs].inner);
    return all;
  }
  std::size_t progress() override {
    std::size_t did = 0;
    // Unused sockets carry nothing from here, and from peers only for a moment: check them less often.
    const std::size_t looked_at = look_everywhere_ || ++rounds_ % kRoundsPerLook == 0
                                      ? transports_.size()
                                      : transports_.size() / sockets_ * used_;
    look_everywhere_ = false;
    for (std::size_t card = 0; card < looked_at; ++card) {
      const std::size_t one = transports_[card]->progress();
      did += one;
      if (one > 0 && card >= transports_.size() / sockets_ * used_) look_everywhere_ = true;
    }
    while (!ending_.empty() && ending_.front().second.has_passed()) {
      ++did;
      CardsEndpoint& endpoint = *peers_.find(ending_.front().first)->second.endpoint;
      ending_.pop_front();
      endpoint.close(endpoint.cause());
    }
    return did;
  }
  int event_fd() const noexcept override { return event_fd_; }
  bool arm() override {
    const bool armed =
        std::all_of(transports_.begin(), transports_.end(), [](const auto& transport) { return transport->arm(); });
    look_everywhere_ = true;
    return armed;
  }
  void use_sockets(std::size_t sockets) noexcept override {
    const std::size_t used = sockets == 0 ? set_ : std::min(sockets, sockets_);
    if (std::exchange(used_, used) == used) return;
    look_everywhere_ = true;
    for (const auto& [id, peer] : peers_)
      if (peer.endpoint) peer.endpoint->use_sockets(used);
  }
  void send_now() noexcept override {
    for (const auto& transport : transports_) transport->send_now();
  }
  bool has_unsent() const noexcept override {
    return std::any_of(transports_.begin(), transports_.end(),
                       [](const auto& transport) { return transport->has_unsent(); });
  }
  void set_receiver(Receiver* receiver) noexcept override {
    receiver_ = receiver;
    for (std::size_t card = 0; card < transports_.size(); ++card)
      transports_[card]->set_receiver(receiver == nullptr ? nullptr : inlets_[card].get());
  }
  TransportStats stats() const noexcept override {
    TransportStats sum;
    for (const auto& transport : transports_) {
      const TransportStats one = transport->stats();
      sum.tx_messages += one.tx_messages;
      sum.tx_payload_bytes += one.tx_payload_bytes;
      sum.tx_device_bytes += one.tx_device_bytes;
      sum.tx_header_bytes += one.tx_header_bytes;
      sum.rx_messages += one.rx_messages;
      sum.rx_payload_bytes += one.rx_payload_bytes;
      sum.rx_header_bytes += one.rx_header_bytes;
    }
    sum.endpoints_open = static_cast<std::uint64_t>(std::count_if(
        peers_.begin(), peers_.end(), [this](const auto& peer) { return open_endpoint(peer) != nullptr; }));
    return sum;
  }
  std::vector<PathInfo> paths() const override {
    std::vector<PathInfo> all;
    for (const auto& transport : transports_)
      for (PathInfo path : transport->paths()) {
        if (const auto alias = aliases_.find(path.peer); alias != aliases_.end()) path.peer = alias->second;
        all.push_back(path);
      }
    return all;
  }

 private:
  struct CardInlet final : Receiver {
    explicit CardInlet(CardsTransport& transport) : cards(transport) {}
    void on_message(core::EngineId from, std::span<const std::byte> header, RxPayload payload) noexcept override {
      cards.receiver_->on_message(from, header, std::move(payload));
    }
    void on_peer_failed(core::EngineId id, core::Status cause) noexcept override {
      cards.pair_failed(*this, id, std::move(cause));
    }
    CardsTransport& cards;
  };
  struct Way {
    std::size_t card = 0;
    core::EngineId id;  // id of the peer in the inner transport
    std::vector<std::byte> inner;
    std::string text;
  };
  struct CardPeer {
    std::vector<Way> ways;
    std::unique_ptr<CardsEndpoint> endpoint;  // null: there is one way, and the inner transport's endpoint is used
    core::Status cause;                       // why the peer could not be reached
  };

  /// Adds the names of the cards. The text for an ended process stays the same from every transport.
  static std::string named(std::string_view cause, const std::string& way) {
    if (cause == kEndedWithoutClosing) return std::string(cause);
    return std::string(cause) + " [" + way + ": the cards that data takes here, HYBRIDPS_DATA_INTERFACES]";
  }

  Endpoint* open_endpoint(const std::pair<const core::EngineId, CardPeer>& peer) const noexcept {
    if (!peer.second.cause.is_ok()) return nullptr;
    if (peer.second.endpoint) return peer.second.endpoint->cause().is_ok() ? peer.second.endpoint.get() : nullptr;
    return transports_[peer.second.ways.front().card]->find(peer.first);
  }
  core::Result<Endpoint*> endpoint_of(core::EngineId id, const CardPeer& peer) {
    if (!peer.cause.is_ok()) return peer.cause;
    if (!peer.endpoint) return transports_[peer.ways.front().card]->connect(id, peer.ways.front().inner);
    if (!peer.endpoint->cause().is_ok()) return peer.endpoint->cause();
    return static_cast<Endpoint*>(peer.endpoint.get());
  }

  void pair_failed(const CardInlet& inlet, core::EngineId id, core::Status cause) noexcept {
    const auto alias = aliases_.find(id);
    const core::EngineId peer = alias != aliases_.end() ? alias->second : id;
    const auto found = peers_.find(peer);
    if (found == peers_.end()) return;
    std::size_t card = 0;
    while (inlets_[card].get() != &inlet) ++card;
    for (const Way& way : found->second.ways)
      if (way.card == card && way.id == id) cause = core::Status(cause.code(), named(cause.message(), way.text));
    if (CardsEndpoint* endpoint = found->second.endpoint.get()) {
      if (!endpoint->cause().is_ok()) return;  // already reported, or closed on this side
      endpoint->refuse(cause);
      // The end of a way arrives after the messages sent on it. Closing the other ways now would lose their messages.
      ending_.emplace_back(peer, core::Deadline::after(kEndWithin));
    }
    if (receiver_ != nullptr) receiver_->on_peer_failed(peer, std::move(cause));
  }

  static constexpr std::uint64_t kRoundsPerLook = 8;

  const std::size_t sockets_;  // how many times transports_ holds the same cards
  const std::size_t set_;
  std::size_t used_;
  std::uint64_t rounds_ = 0;
  bool look_everywhere_ = true;
  std::vector<CardInfo> infos_;
  std::vector<std::unique_ptr<CardInlet>> inlets_;  // must outlive the transports
  std::unordered_map<core::EngineId, CardPeer> peers_;
  std::unordered_map<core::EngineId, core::EngineId> aliases_;
  std::deque<std::pair<core::EngineId, core::Deadline>> ending_;  // peers that lost a way, and their closing deadline
  std::vector<std::unique_ptr<Transport>> transports_;
  std::string name_;
  std::vector<std::byte> address_;
  core::FdSet fds_;    // where there are several transports
  int event_fd_ = -1;  // negative: polled
  Receiver* receiver_ = nullptr;
};

}  // namespace

std::string CardInfo::describe() const { return address.empty() ? name : name + " (" + address + ")"; }

std::vector<std::byte> encode_cards(const std::vector<CardInfo>& cards) {
  std::vector<std::byte> body;
  put(body, cards.size(), 1);
  for (const CardInfo& card : cards) {
    for (const std::string* text : {&card.name, &card.address, &card.network})
      put_all(body, std::string_view(*text).substr(0, kTextBytesMax));
    put(body, std::bit_cast<std::uint64_t>(card.rate), 8);
    put_all(body, card.inner);
  }
  std::vector<std::byte> bytes;
  for (const char letter : kMagic) bytes.push_back(static_cast<std::byte>(letter));
  put(bytes, body.size(), 4);
  put(bytes, fnv1a(body), 4);
  bytes.insert(bytes.end(), body.begin(), body.end());
  return bytes;
}

core::Result<std::vector<CardInfo>> decode_cards(std::span<const std::byte> bytes) {
  const auto malformed = [&](const char* what) {
    return core::Status(core::Code::kInvalidArgument,
                        "a list of network cards of " + std::to_string(bytes.size()) + " bytes is malformed: " + what);
  };
  if (bytes.size() < kEnvelopeBytes) return malformed("too short");
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0)
    return malformed("it begins otherwise; do all ranks run the same hybridps?");
  const auto body = bytes.subspan(kEnvelopeBytes);
  AddressReader envelope(bytes.subspan(kMagic.size(), 8));
  if (envelope.number(4) != body.size()) return malformed("wrong length");
  if (envelope.number(4) != fnv1a(body)) return malformed("its bytes were changed on the way");
  AddressReader in(body);
  const std::size_t count = in.number(1);
  if (count < 1 || count > kCardsMax) return malformed("wrong number of cards");
  std::vector<CardInfo> cards;
  for (std::size_t i = 0; i < count && in.ok(); ++i) {
    CardInfo& card = cards.emplace_back();
    card.name = in.text();
    card.address = in.text();
    card.network = in.text();
    card.rate = std::bit_cast<double>(in.number(8));
    const auto inner = in.sized(kInnerBytesMax);
    card.inner.assign(inner.begin(), inner.end());
    if (!std::isfinite(card.rate) || card.rate < 0) return malformed("a rate that is none");
  }
  if (!in.finished()) return malformed("wrong length");
  return cards;
}

std::vector<CardPair> pairs_between(const std::vector<CardInfo>& own, const std::vector<CardInfo>& theirs) {
  std::vector<CardPair> pairs;
  const auto join = [&](const std::vector<std::size_t>& a, const std::vector<std::size_t>& b) {
    if (a.empty() || b.empty()) return;
    for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) pairs.push_back({a[i % a.size()], b[i % b.size()]});
  };
  const auto on = [](const std::vector<CardInfo>& cards, const std::string& network) {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < cards.size(); ++i)
      if (cards[i].network == network) found.push_back(i);
    return found;
  };
  std::vector<std::string> networks;
  for (const CardInfo& card : own)
    if (!card.network.empty() && std::find(networks.begin(), networks.end(), card.network) == networks.end())
      networks.push_back(card.network);
  for (const std::string& network : networks) join(on(own, network), on(theirs, network));
  if (pairs.empty()) {
    const auto all = [](std::size_t count) {
      std::vector<std::size_t> numbers(count);
      for (std::size_t i = 0; i < count; ++i) numbers[i] = i;
      return numbers;
    };
    join(all(own.size()), all(theirs.size()));
  }
  const bool known = std::all_of(pairs.begin(), pairs.end(),
                                 [&](const CardPair& l) { return own[l.own].rate > 0 && theirs[l.theirs].rate > 0; });
  for (CardPair& pair : pairs) {
    const auto sharing = [&](auto which) {
      return static_cast<double>(std::count_if(pairs.begin(), pairs.end(), which));
    };
    if (known)
      pair.weight =
          std::min(own[pair.own].rate / sharing([&](const CardPair& l) { return l.own == pair.own; }),
                   theirs[pair.theirs].rate / sharing([&](const CardPair& l) { return l.theirs == pair.theirs; }));
  }
  return pairs;
}

core::Result<std::unique_ptr<Transport>> join_cards(std::vector<Card> cards, std::size_t sockets, std::size_t used) {
  auto transport = std::make_unique<CardsTransport>(std::move(cards), sockets, used);
  if (core::Status status = transport->start(); !status.is_ok()) return status;
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace hybridps::transport
