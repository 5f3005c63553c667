// tests/fuzz/cluster_fuzz.h: engines over loopback transports, driven and disturbed by the fuzzer's bytes.
//
// Model    A Tap stands before each transport's receiver and loses, doubles, holds back (and so reorders), cuts and
//          forges messages as they come in. play() reads a script: submit, progress, let time pass, forge, kill, abort,
//          leave, change the shares, change the faults.
// Time     stands still but for what the script says: an input means the same run whenever it is played, and hours of
//          waiting cost nothing. This program's steady clock is replaced, so one source file per program includes this.
// Checked  sanitizers; every operation completes exactly once, and none outlives its deadline. Where messages were only
//          doubled and reordered and the ranks agree, all operations succeed with the right results, all say goodbye
//          without an error, and every slot comes back.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "tests/fuzz/feed.h"
#include "tests/support/cluster.h"

namespace hybridps::fuzz {

inline core::TimePoint now{};

}  // namespace hybridps::fuzz

// In place of the standard library's.
std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept { return hybridps::fuzz::now; }

namespace hybridps::fuzz {

struct Disturbance {
  std::uint8_t duplicate = 0;  // of 256
  std::uint8_t hold = 0;
  std::uint8_t lose = 0;
  std::uint8_t cut = 0;
  std::uint8_t forge = 0;
};

/// Another value in one of its fields, or another type. What a peer's decoder refuses stays as it was.
inline void forge(Feed& feed, wire::Message& message, core::EngineId any_engine) {
  const std::uint8_t value = feed.byte();
  const std::array<std::uint64_t, 8> edges = {0, 1, 2, 3, 0xffffffffU, ~std::uint64_t{0}, 1U << 20, 4096};
  std::uint64_t number = (value & 128) != 0 ? feed.take<std::uint64_t>() : edges[value & 7];
  const std::size_t what = feed.byte();
  if (what % 16 == 0) {
    message.from.source = any_engine;
    return;
  }
  static const std::vector<wire::Field> layout = wire::layout();
  wire::HeaderBytes bytes = wire::encode(message);
  if (what % 16 == 1) {  // of another type, with what lies there
    bytes[5] = static_cast<std::byte>(number % wire::kTypeCount);
    for (const wire::Field& field : layout) {
      if (wire::decode(bytes).is_ok()) break;
      if (!field.message.empty()) bytes[field.offset] = std::byte{0};
    }
    for (std::size_t at = wire::kHeaderBytes; at > 40 && !wire::decode(bytes).is_ok();) bytes[--at] = std::byte{0};
  } else {
    std::vector<wire::Field> fields;
    const std::string_view name = std::visit([](const auto& m) { return m.kName; }, message.body);
    for (const wire::Field& field : layout)
      if (field.message == name || field.name == "sender_rank") fields.push_back(field);
    const wire::Field& field = fields[feed.byte() % fields.size()];
    // Of a size that this process could allocate: a total of 2^60 bytes is no more wrong than one of 2^24.
    if (field.name == "total_bytes" || field.name == "span_bytes") number %= 1U << 24;
    if (field.name == "sequence" && (number & 1) == 0) number = message.sequence() + number % 4;
    if (field.bytes == 1) number %= 16;
    std::memcpy(bytes.data() + field.offset, &number, field.bytes);
  }
  if (const auto forged = wire::decode(bytes); forged.is_ok()) message = forged.value();
}

class Tap final : public transport::Transport, private transport::Receiver {
 public:
  Tap(std::unique_ptr<transport::Transport> inner, Feed& feed, const Disturbance& faults)
      : inner_(std::move(inner)), feed_(feed), faults_(faults) {
    inner_->set_receiver(this);
  }

  /// A message that nobody sent, with the next progress().
  void inject(const wire::Message& message, std::size_t payload_bytes) {
    Held held{message.from.source, wire::encode(message), wire::kHeaderBytes,
              copy_of(std::vector<std::byte>(payload_bytes, std::byte{7}))};
    held_.push_back(std::move(held));
  }
  bool has_seen() const noexcept { return seen_; }
  const wire::Message& last_seen() const noexcept { return last_; }

  std::string_view name() const noexcept override { return inner_->name(); }
  core::Status attach(std::span<std::byte> memory) override { return inner_->attach(memory); }
  std::vector<std::byte> address() const override { return inner_->address(); }
  core::Result<transport::Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override {
    return inner_->connect(peer, address);
  }
  transport::Endpoint* find(core::EngineId peer) noexcept override { return inner_->find(peer); }
  std::size_t progress() override {
    std::size_t did = inner_->progress();
    for (auto waiting = std::exchange(held_, {}); Held & held : waiting) {
      ++did;
      if (held.rounds-- > 0)
        held_.push_back(std::move(held));
      else if (receiver_ != nullptr)
        receiver_->on_message(held.from, held.bytes(), std::move(held.payload));
    }
    return did;
  }
  int event_fd() const noexcept override { return inner_->event_fd(); }
  bool arm() override { return held_.empty() && inner_->arm(); }
  bool has_unsent() const noexcept override { return inner_->has_unsent(); }
  void set_receiver(transport::Receiver* receiver) noexcept override { receiver_ = receiver; }
  transport::TransportStats stats() const noexcept override { return inner_->stats(); }

 private:
  struct Held {
    std::span<const std::byte> bytes() const { return std::span<const std::byte>(header).first(header_bytes); }
    core::EngineId from;
    wire::HeaderBytes header;
    std::size_t header_bytes;
    transport::RxPayload payload;
    int rounds = 0;
  };

  static transport::RxPayload copy_of(std::vector<std::byte> bytes) {
    auto* copy = new std::vector<std::byte>(std::move(bytes));
    return transport::RxPayload(
        copy->data(), copy->size(),
        [](void*, void* token, std::uint64_t) noexcept { delete static_cast<std::vector<std::byte>*>(token); }, nullptr,
        copy);
  }
  bool chance(std::uint8_t of_256) { return of_256 > 0 && feed_.byte() < of_256; }

  void on_message(core::EngineId from, std::span<const std::byte> bytes,
                  transport::RxPayload payload) noexcept override {
    Held held{};
    held.from = from;
    std::copy_n(bytes.begin(), std::min(bytes.size(), held.header.size()), held.header.begin());
    held.header_bytes = held.header.size();
    last_ = wire::decode(held.header).value();
    seen_ = true;
    if (chance(faults_.lose)) return;
    if (chance(faults_.forge)) {
      wire::Message forged = last_;
      for (std::size_t fields = 1 + feed_.below(3); fields > 0; --fields) forge(feed_, forged, forged.from.source);
      held.header = wire::encode(forged);
    }
    if (chance(faults_.cut)) {
      const std::size_t left = payload.bytes() > 0 ? feed_.below(payload.bytes()) : 0;
      const std::size_t how = feed_.below(3);
      if (how < 2) payload = copy_of({payload.data(), payload.data() + left});
      if (how == 0) {  // consistently: the header says so too
        wire::Message shorter = wire::decode(held.header).value();
        shorter.payload_bytes = static_cast<std::uint32_t>(left);
        held.header = wire::encode(shorter);
      }
      if (how == 2) held.header_bytes = feed_.below(held.header.size());
    }
    if (chance(faults_.duplicate))
      held_.push_back(Held{from, held.header, held.header_bytes,
                           copy_of({payload.data(), payload.data() + payload.bytes()}),
                           static_cast<int>(feed_.below(16))});
    held.payload = std::move(payload);
    if (chance(faults_.hold)) {
      held.rounds = static_cast<int>(feed_.below(32));
      held_.push_back(std::move(held));
      return;
    }
    if (receiver_ != nullptr) receiver_->on_message(from, held.bytes(), std::move(held.payload));
  }
  void on_peer_failed(core::EngineId peer, core::Status cause) noexcept override {
    if (receiver_ != nullptr) receiver_->on_peer_failed(peer, std::move(cause));
  }

  std::unique_ptr<transport::Transport> inner_;  // outlives what it lent to held_
  Feed& feed_;
  const Disturbance& faults_;
  transport::Receiver* receiver_ = nullptr;
  std::vector<Held> held_;
  wire::Message last_;
  bool seen_ = false;
};

[[noreturn]] inline void broken(const char* what) {
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

class Play {
 public:
  /// Forged messages go to `target`: the runtimes from there on.
  Play(Feed& feed, std::vector<int> node_of, std::vector<double> servers, int first_target)
      : feed_(feed), first_target_(first_target) {
    now = core::TimePoint{} + std::chrono::hours(1);
    test::ClusterOptions options;
    options.node_of = std::move(node_of);
    options.servers = std::move(servers);
    options.seed = 1 + feed.byte();
    options.chunk_bytes = 256;
    options.eager_bytes = 1024;
    options.tiny_bytes = 64;
    options.grant_chunks = 1 + static_cast<std::uint32_t>(feed.below(3));
    options.heartbeat_seconds = 1;
    options.dead_seconds = 5;
    options.wrap = [this](std::unique_ptr<transport::Transport> inner, int rank) {
      auto tap = std::make_unique<Tap>(std::move(inner), feed_, faults_);
      if (taps_.size() <= static_cast<std::size_t>(rank)) taps_.resize(static_cast<std::size_t>(rank) + 1);
      taps_[static_cast<std::size_t>(rank)].push_back(tap.get());
      return tap;
    };
    cluster_ = std::make_unique<test::Cluster>(std::move(options));
    uid_ = cluster_->new_uid();
    ranks_.resize(static_cast<std::size_t>(cluster_->runtimes()));
    // One rank may be late: until then its peers send to a group that it does not know.
    const std::size_t late = feed.below(2 * ranks_.size());
    for (int member = 0; member < cluster_->runtimes(); ++member)
      if (static_cast<std::size_t>(member) != late || member >= cluster_->size()) open(member);
  }

  void run() {
    for (int step = 0; step < 40 && !feed_.empty(); ++step) {
      switch (feed_.below(13)) {
        case 0:
        case 1:
        case 2: submit(any_rank(), feed_.byte()); break;
        case 3:
        case 4:
        case 5: spin(1 + static_cast<int>(feed_.below(8))); break;
        case 6: inject(); break;
        case 7:
          faults_.duplicate = feed_.byte();
          faults_.hold = feed_.byte();
          if (feed_.below(3) == 0) {
            peaceful_ = false;
            faults_.lose = feed_.byte();
            faults_.cut = feed_.byte();
            faults_.forge = feed_.byte();
          }
          break;
        case 8: pause(std::chrono::microseconds(1) * (std::int64_t{1} << feed_.below(25))); break;
        case 9: send_and_receive(any_rank(), any_rank()); break;
        case 10: propose(); break;
        case 11: open(any_rank()); break;
        default:
          if (feed_.below(4) == 0) leave(static_cast<int>(feed_.below(ranks_.size())), feed_.below(3));
      }
    }
    if (peaceful_)
      finish_in_peace();
    else
      finish_in_time();
    for (int rank = 0; rank < cluster_->size(); ++rank) close(rank);
    for (const auto& call : calls_)
      if (call->completions > 1 || (call->completions == 0 && !of(call->rank).dead))
        broken("an operation did not complete exactly once");
    spin(10);
    if (cluster_->network().payloads_changed_early() > 0) broken("a payload changed while it was being sent");
    cluster_.reset();
  }

 private:
  static constexpr std::uint64_t kOperationsMax = 8;
  // Longer than the script may pause in peace, and than it takes to find a dead peer.
  static constexpr auto kTimeout = std::chrono::seconds(30);
  static constexpr auto kPeacefulPauses = std::chrono::seconds(4);

  struct Call {
    int rank = 0;
    std::vector<std::int32_t> in;
    std::vector<std::int32_t> out;
    std::vector<std::int32_t> expected;
    int completions = 0;
    core::Status status;
  };
  struct Rank {
    std::uint64_t next = 0;  // operation
    bool opened = false;
    bool dead = false;
    bool closed = false;
    bool is_there() const { return opened && !dead && !closed; }
  };

  Rank& of(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  int any_rank() { return static_cast<int>(feed_.below(static_cast<std::size_t>(cluster_->size()))); }
  worker::GroupState& group(int rank) { return *cluster_->at(rank).worker().find(uid_); }

  void open(int member) {
    if (of(member).opened || of(member).dead) return;
    of(member).opened = true;
    cluster_->open_group_on(uid_, member);
  }
  void close(int rank) {
    if (!of(rank).is_there()) return;
    of(rank).closed = true;
    cluster_->at(rank).close_group(uid_);
  }

  void progress(int member) {
    now += std::chrono::microseconds(10);
    if (!of(member).dead) cluster_->at(member).progress();
  }
  void spin(int rounds) {
    for (int i = 0; i < rounds; ++i)
      progress(static_cast<int>(cluster_->random()() % static_cast<std::uint64_t>(cluster_->runtimes())));
  }
  void pause(core::Duration duration) {
    now += duration;
    paused_ += duration;
    if (paused_ > kPeacefulPauses) peaceful_ = false;
  }

  static std::int32_t value(int rank, std::size_t i) { return rank * 100'000 + static_cast<std::int32_t>(i); }
  static std::vector<std::int32_t> values(int rank, std::size_t count, std::size_t first = 0) {
    std::vector<std::int32_t> v(count);
    for (std::size_t i = 0; i < count; ++i) v[i] = value(rank, first + i);
    return v;
  }
  std::vector<std::int32_t> sums(std::size_t count, std::size_t first = 0) const {
    const int n = cluster_->size();
    std::vector<std::int32_t> v(count);
    for (std::size_t i = 0; i < count; ++i) v[i] = value(0, first + i) * n + value(1, 0) * (n * (n - 1) / 2);
    return v;
  }
  static worker::Piece piece(std::vector<std::int32_t>& v) {
    return worker::Piece{reinterpret_cast<std::byte*>(v.data()), v.size() * 4};
  }

  void issue(std::unique_ptr<Call> owned, worker::Operation o, std::uint64_t number) {
    Call& call = *owned;
    calls_.push_back(std::move(owned));
    if (!call.in.empty()) o.input = {piece(call.in)};
    if (!call.out.empty()) o.output = {piece(call.out)};
    o.timeout = kTimeout;
    now += std::chrono::microseconds(1);
    cluster_->submit(uid_, call.rank, std::move(o), number, [&call](const worker::Outcome& outcome) {
      ++call.completions;
      call.status = outcome.status;
    });
  }

  // What operation `number` is follows from its number, unless `odd` asks this rank to be wrong.
  void submit(int rank, std::uint8_t odd) {
    if (!of(rank).is_there() || of(rank).next >= kOperationsMax) return;
    const std::uint64_t number = of(rank).next++;
    const int n = cluster_->size();
    const auto un = static_cast<std::size_t>(n);
    std::uint64_t shape = (number + 1) * 2654435761U + static_cast<std::uint64_t>(n);
    if (odd > 250) {
      shape += odd;
      peaceful_ = false;
    }
    const auto count = static_cast<std::size_t>(shape / 7 % 400);
    const std::size_t part = count / un;
    const auto me = static_cast<std::size_t>(rank);
    const int root = static_cast<int>(shape / 3 % un);
    auto call = std::make_unique<Call>();
    call->rank = rank;
    worker::Operation o;
    o.dtype = core::DType::kInt32;
    switch (shape % 10) {
      case 0:
      case 1:
        o.kind = schedule::Kind::kAllReduce;
        o.op = core::ReduceOp::kSum;
        call->out = values(rank, count);
        call->expected = sums(count);
        break;
      case 2:
        o.kind = schedule::Kind::kReduce;
        o.op = core::ReduceOp::kSum;
        o.root = root;
        call->in = values(rank, count);
        if (rank == root) {
          call->out.assign(count, -1);
          call->expected = sums(count);
        }
        break;
      case 3:
        o.kind = schedule::Kind::kBroadcast;
        o.root = root;
        call->out = values(rank, count);
        call->expected = values(root, count);
        break;
      case 4:
        o.kind = schedule::Kind::kAllGather;
        call->in = values(rank, part);
        call->out.assign(part * un, -1);
        for (int r = 0; r < n; ++r) append(call->expected, values(r, part));
        o.output_bytes.assign(un, part * 4);
        break;
      case 5:
        o.kind = schedule::Kind::kReduceScatter;
        o.op = core::ReduceOp::kSum;
        call->in = values(rank, part * un);
        call->out.assign(part, -1);
        call->expected = sums(part, me * part);
        o.input_bytes.assign(un, part * 4);
        break;
      case 6:
        o.kind = schedule::Kind::kGather;
        o.root = root;
        call->in = values(rank, part);
        if (rank != root) break;
        call->out.assign(part * un, -1);
        for (int r = 0; r < n; ++r) append(call->expected, values(r, part));
        o.output_bytes.assign(un, part * 4);
        break;
      case 7:
        o.kind = schedule::Kind::kScatter;
        o.root = root;
        call->out.assign(part, -1);
        call->expected = values(root, part, me * part);
        if (rank != root) break;
        call->in = values(root, part * un);
        o.input_bytes.assign(un, part * 4);
        break;
      case 8:
        o.kind = schedule::Kind::kAllToAll;
        call->in = values(rank, part * un);
        call->out.assign(part * un, -1);
        for (int r = 0; r < n; ++r) append(call->expected, values(r, part, me * part));
        o.input_bytes.assign(un, part * 4);
        o.output_bytes = o.input_bytes;
        break;
      default: o.kind = schedule::Kind::kBarrier; o.dtype = core::DType::kBytes;
    }
    issue(std::move(call), std::move(o), number);
  }
  static void append(std::vector<std::int32_t>& to, const std::vector<std::int32_t>& what) {
    to.insert(to.end(), what.begin(), what.end());
  }

  void send_and_receive(int from, int to) {
    if (from == to || !of(from).is_there() || !of(to).is_there() || messages_ >= kOperationsMax) return;
    const std::uint32_t tag = ++messages_;
    const std::size_t count = feed_.byte() * std::size_t{2};
    const bool sender_first = feed_.below(2) == 0;
    for (const bool sends : {sender_first, !sender_first}) {
      auto call = std::make_unique<Call>();
      call->rank = sends ? from : to;
      worker::Operation o;
      o.kind = schedule::Kind::kPointToPoint;
      o.sending = sends;
      o.tag = tag;
      o.peer = sends ? to : tag % 2 == 0 ? from : worker::kAnySource;
      (sends ? call->in : call->out) = values(sends ? from : to, count);
      if (!sends) call->expected = values(from, count);
      issue(std::move(call), std::move(o), 0);
    }
  }

  // As a rate finder does: of a version that every member has begun an operation of, and without dedicated servers.
  void propose() {
    if (cluster_->runtimes() > cluster_->size()) return;
    std::uint64_t begun = kOperationsMax;
    for (int rank = 0; rank < cluster_->size(); ++rank) {
      if (!of(rank).is_there() || !group(rank).status.is_ok() || group(rank).leaving) return;
      if (group(rank).plans->is_frozen() || group(rank).plans->newest() != group(0).plans->newest()) return;
      begun = std::min(begun, of(rank).next);
    }
    const worker::PlanChanges& plans = *group(0).plans;
    if (plans.newest() > 0 && (begun == 0 || plans.version_of(begun - 1).number != plans.newest())) return;
    std::vector<double> weights;
    for (int node = 0; node < group(0).info.topology.nodes(); ++node)
      weights.push_back(static_cast<double>(feed_.below(4)));
    weights.front() += 0.5;
    group(0).plans->propose(weights);
  }

  void inject() {
    peaceful_ = false;
    const auto targets = static_cast<std::size_t>(cluster_->runtimes() - first_target_);
    const std::size_t target = static_cast<std::size_t>(first_target_) + feed_.below(targets);
    if (ranks_[target].dead) return;
    const auto& taps = taps_[target];
    Tap& tap = *taps[feed_.below(taps.size())];
    wire::Message message;
    if (tap.has_seen() && feed_.below(4) != 0) {
      message = tap.last_seen();
    } else {
      const int rank = any_rank();
      message.from = {cluster_->id(rank), uid_, static_cast<std::uint32_t>(rank)};
      message.payload_bytes = 256;
      wire::Data data;
      data.chunk.stage = wire::Stage::kPush;
      data.chunk.signature = {schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kSum, -1, 1200};
      data.chunk.span_bytes = 256;
      message.body = data;
    }
    for (std::size_t fields = feed_.below(5); fields > 0; --fields)
      forge(feed_, message, cluster_->id(static_cast<int>(feed_.below(ranks_.size()))));
    tap.inject(message, message.payload_bytes % 2048);
  }

  // 0: dies, 1: gives the group up, 2: closes it with whatever is pending.
  void leave(int member, std::size_t how) {
    if (of(member).dead || (how > 0 && (member >= cluster_->size() || !of(member).is_there()))) return;
    peaceful_ = false;
    if (how == 0) {
      of(member).dead = true;
      cluster_->kill(member);
    } else if (how == 1) {
      cluster_->at(member).worker().fail_group(group(member), core::Status(core::Code::kAborted, "enough"),
                                               /*tell=*/true);
    } else {
      close(member);
    }
  }

  bool is_done() const {
    return std::all_of(calls_.begin(), calls_.end(), [](const auto& call) { return call->completions > 0; });
  }
  template <typename Done>
  void spin_until(Done done, const char* otherwise) {
    const core::TimePoint limit = now + kTimeout;
    while (!done()) {
      if (now > limit) broken(otherwise);
      spin(20);
    }
  }

  void finish_in_peace() {
    std::uint64_t most = 0;
    for (int rank = 0; rank < cluster_->size(); ++rank) {
      open(rank);
      most = std::max(most, of(rank).next);
    }
    for (int rank = 0; rank < cluster_->size(); ++rank)
      while (of(rank).next < most) submit(rank, 0);
    for (int rank = 0; rank < cluster_->size(); ++rank) {
      auto call = std::make_unique<Call>();
      call->rank = rank;
      worker::Operation goodbye;
      goodbye.kind = schedule::Kind::kGoodbye;
      issue(std::move(call), std::move(goodbye), most);
    }
    spin_until([&] { return is_done(); }, "an undisturbed operation does not end");
    for (const auto& call : calls_) {
      if (!call->status.is_ok()) broken(call->status.to_string().c_str());
      if (!call->expected.empty() && call->out != call->expected) broken("a wrong result");
    }
    const auto is_empty = [&] {
      for (int member = 0; member < cluster_->runtimes(); ++member)
        if (cluster_->at(member).pool().slots_in_use() > 0) return false;
      return true;
    };
    spin_until(is_empty, "a slot does not come back");
  }

  // Whatever happened, every operation ends by its deadline.
  void finish_in_time() {
    spin(50);
    now += kTimeout;
    for (int member = 0; member < cluster_->runtimes(); ++member) progress(member);
    for (const auto& call : calls_)
      if (call->completions == 0 && !of(call->rank).dead) broken("an operation outlives its deadline");
  }

  Feed& feed_;
  const int first_target_;
  Disturbance faults_;
  bool peaceful_ = true;
  core::Duration paused_{};
  std::vector<std::unique_ptr<Call>> calls_;  // outlive the cluster: it may write into them
  std::vector<std::vector<Tap*>> taps_;
  std::unique_ptr<test::Cluster> cluster_;
  core::GroupUid uid_;
  std::vector<Rank> ranks_;  // and then servers
  std::uint32_t messages_ = 0;
};

}  // namespace hybridps::fuzz
