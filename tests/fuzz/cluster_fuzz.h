// tests/fuzz/cluster_fuzz.h: engines over loopback transports, driven and disturbed by the fuzzer's bytes.
//
// Model    A Tap stands before each transport's receiver and loses, doubles, holds back (and so reorders), cuts and
//          forges messages as they come in. play() reads a script: submit, progress, forge, kill, change the faults.
// Checked  sanitizers; every operation completes exactly once. Where messages were only doubled and reordered and the
//          ranks agree, all operations succeed with the right results.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "tests/fuzz/feed.h"
#include "tests/support/cluster.h"

namespace hybridps::fuzz {

struct Disturbance {
  std::uint8_t duplicate = 0;  // of 256
  std::uint8_t hold = 0;
  std::uint8_t lose = 0;
  std::uint8_t cut = 0;
  std::uint8_t forge = 0;
};

inline void forge(Feed& feed, wire::Header& h, core::EngineId any_engine) {
  const std::uint8_t value = feed.byte();
  const std::array<std::uint64_t, 8> edges = {0, 1, 2, 3, 0xffffffffU, ~std::uint64_t{0}, 1U << 20, 4096};
  const std::uint64_t number = (value & 128) != 0 ? feed.take<std::uint64_t>() : edges[value & 7];
  switch (feed.below(17)) {
    case 0: h.type = static_cast<wire::Type>(number % wire::kTypeCount); break;
    case 1: h.stage = static_cast<wire::Stage>(number % wire::kStageCount); break;
    case 2: h.flags = static_cast<std::uint8_t>(number); break;
    case 3: h.signature.kind = static_cast<schedule::Kind>(number % schedule::kKindCount); break;
    case 4: h.signature.dtype = static_cast<core::DType>(number % core::kDTypeCount); break;
    case 5: h.signature.op = static_cast<core::ReduceOp>(number % core::kReduceOpCount); break;
    case 6: h.signature.root = static_cast<std::int32_t>(number); break;
    // Of a size that this process could allocate: a total of 2^60 bytes is no more wrong than one of 2^24.
    case 7: h.signature.total_bytes = number % (1U << 24); break;
    case 8: h.source = any_engine; break;
    case 9: h.sequence = (number & 1) != 0 ? number : h.sequence + number % 4; break;
    case 10: h.span = static_cast<std::uint32_t>(number); break;
    case 11: h.chunk = static_cast<std::uint32_t>(number); break;
    case 12: h.contributor = static_cast<std::uint32_t>(number); break;
    case 13: h.sender_rank = static_cast<std::uint32_t>(number); break;
    case 14: h.span_bytes = number % (1U << 24); break;
    case 15: h.tag = static_cast<std::uint32_t>(number); break;
    default: h.aux = number; break;
  }
}

class Tap final : public transport::Transport, private transport::Receiver {
 public:
  Tap(std::unique_ptr<transport::Transport> inner, Feed& feed, const Disturbance& faults)
      : inner_(std::move(inner)), feed_(feed), faults_(faults) {
    inner_->set_receiver(this);
  }

  /// A message that nobody sent, with the next progress().
  void inject(const wire::Header& header, std::size_t payload_bytes) {
    Held held{wire::encode(header), copy_of(std::vector<std::byte>(payload_bytes, std::byte{7}))};
    held_.push_back(std::move(held));
  }
  bool has_seen() const noexcept { return seen_; }
  const wire::Header& last_seen() const noexcept { return last_; }

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
        receiver_->on_message(held.header, std::move(held.payload));
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
    wire::HeaderBytes header;
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

  void on_message(std::span<const std::byte> bytes, transport::RxPayload payload) noexcept override {
    wire::HeaderBytes header{};
    std::copy_n(bytes.begin(), std::min(bytes.size(), header.size()), header.begin());
    last_ = wire::decode(header).value();
    seen_ = true;
    if (chance(faults_.lose)) return;
    if (chance(faults_.forge)) {
      wire::Header h = last_;
      for (std::size_t fields = 1 + feed_.below(3); fields > 0; --fields) forge(feed_, h, h.source);
      header = wire::encode(h);
    }
    if (chance(faults_.cut)) {
      const std::size_t left = payload.bytes() > 0 ? feed_.below(payload.bytes()) : 0;
      const std::vector<std::byte> part(payload.data(), payload.data() + left);
      payload = copy_of(part);
      if (feed_.below(2) == 0) {  // consistently: the header says so too
        wire::Header h = wire::decode(header).value();
        h.payload_bytes = static_cast<std::uint32_t>(left);
        header = wire::encode(h);
      }
    }
    if (chance(faults_.duplicate)) {
      const std::vector<std::byte> again(payload.data(), payload.data() + payload.bytes());
      held_.push_back(Held{header, copy_of(again), static_cast<int>(feed_.below(16))});
    }
    if (chance(faults_.hold)) {
      held_.push_back(Held{header, std::move(payload), static_cast<int>(feed_.below(32))});
      return;
    }
    if (receiver_ != nullptr) receiver_->on_message(header, std::move(payload));
  }
  void on_peer_failed(core::EngineId peer, core::Status cause) noexcept override {
    if (receiver_ != nullptr) receiver_->on_peer_failed(peer, std::move(cause));
  }

  std::unique_ptr<transport::Transport> inner_;  // outlives what it lent to held_
  Feed& feed_;
  const Disturbance& faults_;
  transport::Receiver* receiver_ = nullptr;
  std::deque<Held> held_;
  wire::Header last_;
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
    test::ClusterOptions options;
    options.node_of = std::move(node_of);
    options.servers = std::move(servers);
    options.seed = 1 + feed.byte();
    options.chunk_bytes = 256;
    options.eager_bytes = 1024;
    options.tiny_bytes = 64;
    options.grant_chunks = 1 + static_cast<std::uint32_t>(feed.below(3));
    options.wrap = [this](std::unique_ptr<transport::Transport> inner, int rank) {
      auto tap = std::make_unique<Tap>(std::move(inner), feed_, faults_);
      if (taps_.size() <= static_cast<std::size_t>(rank)) taps_.resize(static_cast<std::size_t>(rank) + 1);
      taps_[static_cast<std::size_t>(rank)].push_back(tap.get());
      return tap;
    };
    cluster_ = std::make_unique<test::Cluster>(std::move(options));
    uid_ = cluster_->open_group();
    next_.assign(static_cast<std::size_t>(cluster_->size()), 0);
    dead_.assign(static_cast<std::size_t>(cluster_->runtimes()), false);
  }

  void run() {
    for (int step = 0; step < 40 && !feed_.empty(); ++step) {
      switch (feed_.below(9)) {
        case 0:
        case 1:
        case 2: submit(static_cast<int>(feed_.below(next_.size())), feed_.byte()); break;
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
        default:
          if (feed_.below(8) == 0) kill(static_cast<int>(feed_.below(static_cast<std::size_t>(cluster_->runtimes()))));
      }
    }
    finish();
  }

 private:
  struct Call {
    std::vector<std::int32_t> in;
    std::vector<std::int32_t> out;
    std::vector<std::int32_t> expected;
    int completions = 0;
    core::Status status;
  };

  void spin(int rounds) {
    for (int i = 0; i < rounds; ++i) {
      const int r = static_cast<int>(cluster_->random()() % static_cast<std::uint64_t>(cluster_->runtimes()));
      if (!dead_[static_cast<std::size_t>(r)]) cluster_->at(r).progress();
    }
  }

  // What operation `number` is follows from its number, unless `odd` asks this rank to be wrong.
  void submit(int rank, std::uint8_t odd) {
    if (dead_[static_cast<std::size_t>(rank)]) return;
    std::uint64_t& number = next_[static_cast<std::size_t>(rank)];
    if (number >= 8) return;
    const int n = cluster_->size();
    std::uint64_t shape = (number + 1) * 2654435761U + static_cast<std::uint64_t>(n);
    if (odd > 250) {
      shape += odd;
      peaceful_ = false;
    }
    const auto count = static_cast<std::size_t>(shape / 7 % 400);
    const int root = static_cast<int>(shape / 3 % static_cast<std::uint64_t>(n));
    calls_.push_back(std::make_unique<Call>());
    Call& call = *calls_.back();
    const auto values = [&](int of) {
      std::vector<std::int32_t> v(count);
      for (std::size_t i = 0; i < count; ++i) v[i] = of * 1000 + static_cast<int>(i);
      return v;
    };
    const auto piece = [](std::vector<std::int32_t>& v) {
      return worker::Piece{reinterpret_cast<std::byte*>(v.data()), v.size() * 4};
    };
    std::vector<std::int32_t> sum(count, 0);
    for (int r = 0; r < n; ++r)
      for (std::size_t i = 0; i < count; ++i) sum[i] += values(r)[i];
    worker::Operation o;
    o.dtype = core::DType::kInt32;
    switch (shape % 5) {
      case 0:
      case 1:
        o.kind = schedule::Kind::kAllReduce;
        o.op = core::ReduceOp::kSum;
        call.out = values(rank);
        call.expected = sum;
        o.output = {piece(call.out)};
        break;
      case 2:
        o.kind = schedule::Kind::kReduce;
        o.op = core::ReduceOp::kSum;
        o.root = root;
        call.in = values(rank);
        o.input = {piece(call.in)};
        if (rank == root) {
          call.out.assign(count, -1);
          call.expected = sum;
          o.output = {piece(call.out)};
        }
        break;
      case 3:
        o.kind = schedule::Kind::kBroadcast;
        o.root = root;
        call.out = values(rank);
        call.expected = values(root);
        o.output = {piece(call.out)};
        break;
      default:
        o.kind = schedule::Kind::kAllGather;
        call.in = values(rank);
        call.out.assign(count * static_cast<std::size_t>(n), -1);
        for (int r = 0; r < n; ++r) {
          const auto part = values(r);
          call.expected.insert(call.expected.end(), part.begin(), part.end());
        }
        o.input = {piece(call.in)};
        o.output = {piece(call.out)};
        o.output_bytes.assign(static_cast<std::size_t>(n), count * 4);
        break;
    }
    cluster_->submit(uid_, rank, o, number++, [&call](const worker::Outcome& outcome) {
      ++call.completions;
      call.status = outcome.status;
    });
  }

  void inject() {
    peaceful_ = false;
    const auto targets = static_cast<std::size_t>(cluster_->runtimes() - first_target_);
    const std::size_t target = static_cast<std::size_t>(first_target_) + feed_.below(targets);
    if (dead_[target]) return;
    const auto& taps = taps_[target];
    Tap& tap = *taps[feed_.below(taps.size())];
    wire::Header h;
    if (tap.has_seen() && feed_.below(4) != 0) {
      h = tap.last_seen();
    } else {
      h.uid = uid_;
      h.signature = {schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kSum, -1, 1200};
      h.sender_rank = static_cast<std::uint32_t>(feed_.below(static_cast<std::size_t>(cluster_->size())));
      h.source = cluster_->id(static_cast<int>(h.sender_rank));
      h.span_bytes = 256;
      h.payload_bytes = 256;
      h.stage = wire::Stage::kPush;
    }
    for (std::size_t fields = feed_.below(5); fields > 0; --fields)
      forge(feed_, h, cluster_->id(static_cast<int>(feed_.below(static_cast<std::size_t>(cluster_->runtimes())))));
    tap.inject(h, h.payload_bytes % 2048);
  }

  void kill(int rank) {
    if (dead_[static_cast<std::size_t>(rank)]) return;
    peaceful_ = false;
    dead_[static_cast<std::size_t>(rank)] = true;
    if (rank < cluster_->size()) lost_calls_ = true;
    cluster_->kill(rank);
  }

  void finish() {
    if (peaceful_) {
      const std::uint64_t most = *std::max_element(next_.begin(), next_.end());
      for (int rank = 0; rank < cluster_->size(); ++rank)
        while (next_[static_cast<std::size_t>(rank)] < most) submit(rank, 0);
      const auto done = [&] {
        return std::all_of(calls_.begin(), calls_.end(), [](const auto& call) { return call->completions > 0; });
      };
      const auto limit = core::Clock::now() + core::from_seconds(20);
      while (!done() && core::Clock::now() < limit) spin(100);
      if (!done()) broken("an undisturbed operation does not end");
      for (const auto& call : calls_) {
        if (!call->status.is_ok()) broken(call->status.to_string().c_str());
        if (call->out != call->expected) broken("a wrong result");
      }
    } else {
      spin(50);
    }
    for (int rank = 0; rank < cluster_->size(); ++rank)
      if (!dead_[static_cast<std::size_t>(rank)]) cluster_->at(rank).close_group(uid_);
    for (const auto& call : calls_)
      if (call->completions > 1 || (call->completions == 0 && !lost_calls_))
        broken("an operation did not complete exactly once");
    spin(10);
    cluster_.reset();
  }

  Feed& feed_;
  const int first_target_;
  Disturbance faults_;
  bool peaceful_ = true;
  bool lost_calls_ = false;
  std::vector<std::unique_ptr<Call>> calls_;  // outlive the cluster: it may write into them
  std::vector<std::vector<Tap*>> taps_;
  std::unique_ptr<test::Cluster> cluster_;
  core::GroupUid uid_;
  std::vector<std::uint64_t> next_;
  std::vector<bool> dead_;
};

}  // namespace hybridps::fuzz
