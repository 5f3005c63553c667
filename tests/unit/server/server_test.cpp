#include "hybridps/server/server.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>

#include "tests/support/catch.h"
#include "tests/support/fake_router.h"

namespace {

using namespace hybridps;
using core::DType;
using core::ReduceOp;
using schedule::Kind;
using server::OperationKey;
using server::SpanKey;

constexpr std::uint32_t kChunkBytes = 64;
const core::GroupUid kUid{7, 9};

core::EngineId engine(std::uint32_t node) { return core::EngineId{100 + node}; }

struct Owner final : server::LocalOwner {
  void on_complete(std::uint32_t span, std::uint32_t chunk) override {
    if (const auto place = places.extract({span, chunk}))
      server->sum_into(place.mapped().first, chunk, place.mapped().second);
    summed.emplace_back(span, chunk);
    if (when_summed) when_summed(span, chunk);
  }
  void on_granted(std::uint32_t span, std::uint32_t chunk) override {
    granted.emplace_back(span, chunk);
    if (when_granted) when_granted(span, chunk);
  }
  using List = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
  server::Server* server = nullptr;
  /// Where sums go at once, of chunks that the own node contributes to: one operation at a time.
  std::map<List::value_type, std::pair<SpanKey, std::byte*>> places;
  List summed;
  List granted;
  std::function<void(std::uint32_t, std::uint32_t)> when_summed;
  std::function<void(std::uint32_t, std::uint32_t)> when_granted;
};

struct Listener final : server::Listener {
  void on_mismatch(const OperationKey& key, const server::RankCall& ours, const server::RankCall& theirs) override {
    mismatches.push_back({key, ours, theirs});
  }
  void on_bad_message(const OperationKey& key, std::string what) override { bad.emplace_back(key, std::move(what)); }
  struct Mismatch {
    OperationKey key;
    server::RankCall ours;
    server::RankCall theirs;
  };
  std::vector<Mismatch> mismatches;
  std::vector<std::pair<OperationKey, std::string>> bad;
  bool quiet() const { return mismatches.empty() && bad.empty(); }
};

struct Rig {
  explicit Rig(std::uint32_t nodes_ = 3, std::uint32_t own_ = 1, std::uint32_t grant_chunks = 2,
               std::uint64_t grant_bytes = ~std::uint64_t{0})
      : nodes(nodes_), own(own_), pool({{1024, 8}}) {
    flow::OutboxOptions options;
    options.self = engine(own);
    options.class_bytes = {1024};
    options.net_slots = {8};
    outbox = std::make_unique<flow::Outbox>(options, *pool, router);
    server = std::make_unique<server::Server>(*outbox, listener, grant_chunks, grant_bytes);
    owner.server = server.get();
    signature = {Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, -1, 4096};
  }
  ~Rig() {
    server.reset();
    router.endpoints.clear();
  }
  SpanKey key(std::uint64_t sequence = 0, std::uint32_t span = 5) const { return {{kUid, sequence}, span}; }
  server::Opening opening(std::uint64_t bytes) {
    server::Opening o;
    o.signature = signature;
    o.bytes = bytes;
    o.chunk_bytes = kChunkBytes;
    o.chunks = bytes == 0 ? 1 : static_cast<std::uint32_t>((bytes + kChunkBytes - 1) / kChunkBytes);
    o.nodes = nodes;
    o.own_node = own;
    o.own_rank = 10 + static_cast<int>(own);
    o.owner = &owner;
    return o;
  }
  wire::From from(const SpanKey& k, std::uint32_t node) const { return {engine(node), k.operation.uid, 10 + node}; }
  wire::ChunkId chunk(const SpanKey& k, std::uint32_t node, std::uint32_t number, std::uint64_t span_bytes) const {
    return {.stage = wire::Stage::kPush,
            .signature = signature,
            .attempt = k.attempt,
            .sequence = k.operation.sequence,
            .number = number,
            .span_bytes = span_bytes,
            .span = k.span,
            .contributor = node};
  }
  template <typename T>
  void push(const SpanKey& k, std::uint32_t node, std::uint32_t number, std::uint64_t span_bytes,
            const std::vector<T>& values) {
    server->on_push(from(k, node), chunk(k, node, number, span_bytes),
                    lender.lend(values.data(), values.size() * sizeof(T)));
  }
  void announce(const SpanKey& k, std::uint32_t node, std::uint64_t span_bytes) {
    server->on_announce(from(k, node), chunk(k, node, 0, span_bytes));
  }
  template <typename T>
  void contribute(const SpanKey& k, std::uint32_t chunk, std::vector<T>& data, std::vector<T>& out) {
    contribute(k, chunk, reinterpret_cast<const std::byte*>(data.data()), reinterpret_cast<std::byte*>(out.data()));
  }
  void contribute(const SpanKey& k, std::uint32_t chunk, const std::byte* data, std::byte* out) {
    owner.places[{k.span, chunk}] = {k, out};
    server->contribute(k, chunk, data);
  }
  /// Chunks granted to a node so far.
  std::vector<std::uint32_t> granted_to(std::uint32_t node) {
    std::vector<std::uint32_t> list;
    for (const test::Sent& sent : router.to(engine(node)).sent) {
      const auto* grant = sent.message.as<wire::Grant>();
      REQUIRE(grant != nullptr);
      REQUIRE(grant->chunk.stage == wire::Stage::kPush);
      REQUIRE(grant->chunk.signature == signature);
      REQUIRE(grant->chunk.attempt == attempt);
      REQUIRE(sent.message.from.sender_rank == 10 + own);
      REQUIRE(sent.message.from.uid == kUid);
      list.push_back(grant->chunk.number);
    }
    return list;
  }

  const std::uint32_t nodes;
  const std::uint32_t own;
  std::uint16_t attempt = 0;  // that grants are of
  test::FakePool pool;
  test::FakeRouter router;
  test::Lender lender;
  Listener listener;
  Owner owner;
  wire::Signature signature;
  std::unique_ptr<flow::Outbox> outbox;
  std::unique_ptr<server::Server> server;
};

using Floats = std::vector<float>;
using Chunks = std::vector<std::uint32_t>;
using List = Owner::List;

}  // namespace

TEST_CASE("server/server: contributions are added in node order whatever order they come in", "[server][fast]") {
  // In fp32 the order shows: (1e8 + 1) - 1e8 = 0, but (1e8 - 1e8) + 1 = 1.
  const Floats inputs[] = {{1e8F, 0.1F, 3.0F, 1e-8F}, {1.0F, 0.2F, -1e10F, 1.0F}, {-1e8F, 0.3F, 1e10F, 1e-8F}};
  for (std::uint32_t own = 0; own < 3; ++own) {
    std::vector<int> order = {0, 1, 2, 3};  // 3: open
    do {
      const auto at = [&](int what) { return std::find(order.begin(), order.end(), what) - order.begin(); };
      if (at(static_cast<int>(own)) < at(3)) continue;  // the own rank contributes after it has opened
      Rig rig(3, own);
      const SpanKey key = rig.key();
      Floats data = inputs[own];
      Floats out(4, -1.0F);
      for (const int what : order) {
        if (what == 3)
          REQUIRE(rig.server->open(key, rig.opening(16)));
        else if (what == static_cast<int>(own))
          rig.contribute(key, 0, data, out);
        else
          rig.push(key, static_cast<std::uint32_t>(what), 0, 16, inputs[what]);
      }
      REQUIRE(rig.owner.summed == List{{5, 0}});
      REQUIRE(rig.listener.quiet());
      REQUIRE(rig.lender.lent() == 0);
      for (std::size_t i = 0; i < 4; ++i) {
        volatile float first = inputs[0][i] + inputs[1][i];
        const float expected = first + inputs[2][i];
        REQUIRE(std::memcmp(&out[i], &expected, sizeof expected) == 0);
      }
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST_CASE("server/server: the sum may go where the own contribution lies", "[server][fast]") {
  Rig rig(2, 0);
  REQUIRE(rig.server->open(rig.key(), rig.opening(8)));
  Floats data = {1, 2};
  rig.push(rig.key(), 1, 0, 8, Floats{10, 20});
  rig.contribute(rig.key(), 0, data, data);
  CHECK(data == Floats{11, 22});
}

TEST_CASE("server/server: many chunks of many operations in random order sum right", "[server][fast]") {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 random(seed);
    const auto nodes = static_cast<std::uint32_t>(1 + random() % 5);
    Rig rig(nodes, static_cast<std::uint32_t>(random() % nodes));
    rig.signature.dtype = DType::kInt32;
    constexpr std::uint64_t kBytes = 5 * kChunkBytes - 8;
    constexpr std::size_t kCount = kBytes / 4;
    constexpr std::uint64_t kOperations = 4;
    std::vector<std::vector<std::vector<std::int32_t>>> in(kOperations);
    std::vector<std::vector<std::int32_t>> out(kOperations, std::vector<std::int32_t>(kCount));
    struct Step {
      std::uint64_t operation;
      std::uint32_t node;
      std::uint32_t chunk;
    };
    std::vector<Step> steps;
    for (std::uint64_t o = 0; o < kOperations; ++o) {
      for (std::uint32_t node = 0; node < nodes; ++node) {
        in[o].emplace_back(kCount);
        for (auto& v : in[o].back()) v = static_cast<std::int32_t>(random() % 100000);
        for (std::uint32_t chunk = 0; chunk < 5; ++chunk) {
          steps.push_back({o, node, chunk});
          if (node != rig.own && random() % 3 == 0) steps.push_back({o, node, chunk});  // doubled on the way
        }
      }
    }
    std::shuffle(steps.begin(), steps.end(), random);
    std::vector<bool> opened(kOperations, false);
    for (const Step& step : steps) {
      const SpanKey key = rig.key(step.operation, 3 + static_cast<std::uint32_t>(step.operation));
      const std::size_t begin = step.chunk * kChunkBytes / 4;
      const std::size_t end = std::min(kCount, begin + kChunkBytes / 4);
      auto& data = in[step.operation][step.node];
      if (step.node != rig.own) {
        rig.push(key, step.node, step.chunk, kBytes,
                 std::vector<std::int32_t>(data.begin() + static_cast<std::ptrdiff_t>(begin),
                                           data.begin() + static_cast<std::ptrdiff_t>(end)));
        continue;
      }
      if (!opened[step.operation]) REQUIRE(rig.server->open(key, rig.opening(kBytes)));
      opened[step.operation] = true;
      rig.contribute(key, step.chunk, reinterpret_cast<std::byte*>(data.data() + begin),
                     reinterpret_cast<std::byte*>(out[step.operation].data() + begin));
    }
    REQUIRE(rig.listener.quiet());
    REQUIRE(rig.owner.summed.size() == kOperations * 5);
    REQUIRE(rig.lender.lent() == 0);
    for (std::uint64_t o = 0; o < kOperations; ++o)
      for (std::size_t i = 0; i < kCount; ++i) {
        std::int32_t sum = 0;
        for (std::uint32_t node = 0; node < nodes; ++node) sum += in[o][node][i];
        REQUIRE(out[o][i] == sum);
      }
  }
}

TEST_CASE("server/server: a message that comes twice is ignored and given back", "[server][fast]") {
  Rig rig;
  const SpanKey key = rig.key();
  rig.push(key, 0, 0, 8, Floats{1, 1});
  rig.push(key, 0, 0, 8, Floats{9, 9});
  CHECK(rig.lender.lent() == 1);
  REQUIRE(rig.server->open(key, rig.opening(8)));
  rig.push(key, 0, 0, 8, Floats{9, 9});
  Floats data = {1, 1};
  Floats out(2);
  rig.contribute(key, 0, data, out);
  CHECK(rig.owner.summed.empty());
  rig.push(key, 2, 0, 8, Floats{1, 1});
  CHECK(out == Floats{3, 3});
  rig.push(key, 2, 0, 8, Floats{9, 9});  // after the sum
  CHECK(rig.owner.summed.size() == 1);
  CHECK(out == Floats{3, 3});
  CHECK(rig.lender.lent() == 0);
  CHECK(rig.listener.quiet());
}

TEST_CASE("server/server: averages of integers truncate and premultiplied sums are sums here", "[server][fast]") {
  Rig rig(2, 0);
  rig.signature.dtype = DType::kInt32;
  rig.signature.op = ReduceOp::kAvg;
  server::Opening opening = rig.opening(8);
  opening.finish = {reduce::Finish::Scaling::kDivideTruncate, 1.0, 3};
  REQUIRE(rig.server->open(rig.key(), opening));
  std::vector<std::int32_t> ints = {7, -7};
  rig.push(rig.key(), 1, 0, 8, std::vector<std::int32_t>{1, -1});
  rig.contribute(rig.key(), 0, ints, ints);
  CHECK(ints == std::vector<std::int32_t>{2, -2});

  rig.signature.dtype = DType::kFloat32;
  rig.signature.op = ReduceOp::kPremulSum;
  REQUIRE(rig.server->open(rig.key(1), rig.opening(8)));
  Floats floats = {1, 2};
  rig.push(rig.key(1), 1, 0, 8, Floats{3, 4});
  rig.contribute(rig.key(1), 0, floats, floats);
  CHECK(floats == Floats{4, 6});
}

TEST_CASE("server/server: the empty chunk of a barrier is complete when all nodes came", "[server][fast]") {
  Rig rig;
  rig.signature = {Kind::kBarrier, DType::kBytes, ReduceOp::kNone, -1, 0};
  REQUIRE(rig.server->open(rig.key(), rig.opening(0)));
  rig.push(rig.key(), 2, 0, 0, Floats{});
  rig.contribute(rig.key(), 0, nullptr, nullptr);
  CHECK(rig.owner.summed.empty());
  rig.push(rig.key(), 0, 0, 0, Floats{});
  CHECK(rig.owner.summed == List{{5, 0}});
}

TEST_CASE("server/server: a contribution of another size than the plan's is refused", "[server][fast]") {
  for (const std::size_t count : {1, 3}) {
    Rig rig(2, 0);
    REQUIRE(rig.server->open(rig.key(), rig.opening(8)));
    Floats data = {1, 2};
    rig.push(rig.key(), 1, 0, 8, Floats(count, 1.0F));
    rig.contribute(rig.key(), 0, data, data);
    CHECK(rig.owner.summed.empty());
    REQUIRE(rig.listener.bad.size() == 1);
    CHECK(rig.listener.bad[0].first == rig.key().operation);
    CHECK(rig.listener.bad[0].second.find(std::to_string(4 * count) + " bytes where the plan has 8") !=
          std::string::npos);
    CHECK(data == Floats{1, 2});
  }
}

TEST_CASE("server/server: a contribution larger than its span can be is refused before the operation is known",
          "[server][fast]") {
  Rig rig;
  rig.push(rig.key(), 0, 0, 8, Floats(69, 1.0F));  // whatever a codec makes of 8 bytes
  CHECK(rig.listener.bad.size() == 1);
  CHECK(rig.lender.lent() == 0);
}

TEST_CASE("server/server: two signatures that disagree are both named with their ranks", "[server][fast]") {
  const wire::Signature other{Kind::kAllReduce, DType::kInt64, ReduceOp::kSum, -1, 4096};
  // With the own operation open; the other way round; and among early messages.
  for (const int when : {0, 1, 2}) {
    INFO("when " << when);
    Rig rig;
    const wire::Signature ours = rig.signature;
    if (when == 0) REQUIRE(rig.server->open(rig.key(), rig.opening(8)));
    if (when == 2) rig.push(rig.key(), 2, 0, 8, Floats{1, 1});
    rig.signature = other;
    rig.push(rig.key(), 0, 0, 8, Floats{1, 1});
    rig.signature = ours;
    if (when == 1) REQUIRE_FALSE(rig.server->open(rig.key(), rig.opening(8)));
    REQUIRE(rig.listener.mismatches.size() == 1);
    const auto& m = rig.listener.mismatches[0];
    CHECK(m.key == rig.key().operation);
    CHECK(m.ours.signature == ours);
    CHECK(m.ours.rank == (when == 2 ? 12 : 11));
    CHECK(m.theirs.signature == other);
    CHECK(m.theirs.rank == 10);
    CHECK(rig.lender.lent() == (when == 0 ? 0 : 1));
    rig.server->close(rig.key().operation);
    CHECK(rig.lender.lent() == 0);
  }
}

TEST_CASE("server/server: another size of the span is a mismatch even when signatures agree", "[server][fast]") {
  for (const bool announced : {false, true}) {
    Rig rig;
    REQUIRE(rig.server->open(rig.key(), rig.opening(8)));
    if (announced)
      rig.announce(rig.key(), 0, 12);
    else
      rig.push(rig.key(), 0, 0, 12, Floats{1, 1});
    CHECK(rig.listener.mismatches.size() == 1);
  }
}

TEST_CASE("server/server: nodes and chunks that the plan does not have are refused", "[server][fast]") {
  struct Case {
    std::uint32_t node;
    std::uint32_t chunk;
  };
  // Unknown nodes, the own node from outside, and unknown chunks; a good message may have come before.
  for (const Case& c : {Case{3, 0}, Case{77, 0}, Case{1, 0}, Case{0, 1}, Case{2, 99}}) {
    for (const int when : {0, 1, 2}) {  // after open; before it; before it and not as the first
      for (const bool announced : {false, true}) {
        if (announced && c.chunk != 0) continue;
        INFO("node " << c.node << " chunk " << c.chunk << " when " << when << " announced " << announced);
        Rig rig;
        const auto bad = [&] {
          if (announced)
            rig.announce(rig.key(), c.node, 8);
          else
            rig.push(rig.key(), c.node, c.chunk, 8, Floats{1, 1});
        };
        if (when == 0) {
          REQUIRE(rig.server->open(rig.key(), rig.opening(8)));
          bad();
        } else {
          if (when == 2) rig.push(rig.key(), 0, 0, 8, Floats{1, 1});
          bad();
          REQUIRE_FALSE(rig.server->open(rig.key(), rig.opening(8)));
        }
        CHECK(rig.listener.bad.size() == 1);
        CHECK(rig.owner.summed.empty());
      }
    }
  }
}

TEST_CASE("server/server: a span that was refused when it was opened sums nothing that comes later", "[server][fast]") {
  Rig rig(2, 1);
  rig.push(rig.key(), 1, 0, 8, Floats{1, 1});  // in the name of the own node
  REQUIRE_FALSE(rig.server->open(rig.key(), rig.opening(8)));
  CHECK(rig.listener.bad.size() == 1);
  rig.push(rig.key(), 0, 0, 8, Floats{1, 1});  // with it all nodes have contributed, it seems
  CHECK(rig.owner.summed.empty());
}

TEST_CASE("server/server: an absurd node is refused without memory for it", "[server][fast]") {
  Rig rig;
  rig.push(rig.key(), 0xffffffffU, 0, 8, Floats{1, 1});
  CHECK(rig.listener.bad.size() == 1);
  CHECK(rig.lender.lent() == 0);
  rig.announce(rig.key(), 0xffffffffU, 8);
}

TEST_CASE("server/server: chunks are granted only when every node is known to take part", "[server][fast]") {
  for (const int order : {0, 1, 2, 3}) {
    INFO("order " << order);
    Rig rig;
    const SpanKey key = rig.key();
    const auto quiet = [&] {
      return rig.granted_to(0).empty() && rig.granted_to(2).empty() && rig.owner.granted.empty();
    };
    const std::uint64_t bytes = 5 * kChunkBytes;
    // Announcements may come before or after open; a node that delivers is seen too.
    if (order < 2) REQUIRE(rig.server->open(key, rig.opening(bytes)));
    rig.announce(key, 0, bytes);
    CHECK(quiet());
    if (order >= 2) REQUIRE(rig.server->open(key, rig.opening(bytes)));
    if (order % 2 == 0) {
      rig.server->local_seen(key);
      CHECK(quiet());
      rig.announce(key, 2, bytes);
    } else {
      rig.push(key, 2, 4, bytes, Floats(16, 1.0F));
      CHECK(quiet());
      rig.server->local_seen(key);
    }
    // Two unfinished chunks at most, in order, to all who have not delivered.
    CHECK(rig.granted_to(0) == Chunks{0, 1});
    CHECK(rig.granted_to(2) == Chunks{0, 1});
    CHECK(rig.owner.granted == List{{5, 0}, {5, 1}});
    rig.announce(key, 0, bytes);  // again
    rig.server->local_seen(key);
    rig.server->local_announce(key);
    CHECK(rig.granted_to(0) == Chunks{0, 1});
  }
}

TEST_CASE("server/server: the own node's wait asks for grants as a peer's does", "[server][fast]") {
  Rig rig;
  REQUIRE(rig.server->open(rig.key(), rig.opening(kChunkBytes)));
  rig.push(rig.key(), 0, 0, kChunkBytes, Floats(16, 1.0F));
  rig.push(rig.key(), 2, 0, kChunkBytes, Floats(16, 1.0F));
  rig.server->local_seen(rig.key());
  CHECK(rig.owner.granted.empty());  // nobody waits
  rig.server->local_announce(rig.key());
  CHECK(rig.owner.granted == List{{5, 0}});
  CHECK(rig.granted_to(0).empty());  // has delivered
}

TEST_CASE("server/server: a chunk that is finished makes room for the next grant", "[server][fast]") {
  Rig rig(2, 0, 2);
  const SpanKey key = rig.key();
  const std::uint64_t bytes = 6 * kChunkBytes;
  REQUIRE(rig.server->open(key, rig.opening(bytes)));
  rig.server->local_seen(key);
  rig.announce(key, 1, bytes);
  CHECK(rig.granted_to(1) == Chunks{0, 1});
  Floats data(16, 1.0F);
  Floats out(16);
  const auto finish = [&](std::uint32_t chunk) {
    rig.push(key, 1, chunk, bytes, data);
    rig.contribute(key, chunk, data, out);
  };
  finish(1);
  CHECK(rig.granted_to(1) == Chunks{0, 1, 2});
  finish(4);  // was not granted: by the allowance
  CHECK(rig.granted_to(1) == Chunks{0, 1, 2});
  finish(0);
  CHECK(rig.granted_to(1) == Chunks{0, 1, 2, 3});
  rig.push(key, 1, 5, bytes, data);  // half of it
  finish(2);
  CHECK(rig.granted_to(1) == Chunks{0, 1, 2, 3});             // chunk 4 is done; 5 has come
  CHECK(rig.owner.granted.back() == std::make_pair(5U, 5U));  // but not from the own node
  finish(3);
  rig.contribute(key, 5, data, out);
  CHECK(rig.owner.summed.size() == 6);
}

TEST_CASE("server/server: grants are bounded over all operations and go to the first in line", "[server][fast]") {
  Rig rig(2, 0, 3);
  const std::uint64_t bytes = 2 * kChunkBytes;
  for (std::uint64_t sequence = 0; sequence < 4; ++sequence) {
    REQUIRE(rig.server->open(rig.key(sequence), rig.opening(bytes)));
    rig.server->local_seen(rig.key(sequence));
    rig.announce(rig.key(sequence), 1, bytes);
  }
  const auto grants = [&] {
    std::vector<std::uint64_t> sequences;
    for (const auto* grant : rig.router.to(engine(1)).of<wire::Grant>()) sequences.push_back(grant->chunk.sequence);
    return sequences;
  };
  CHECK(grants() == std::vector<std::uint64_t>{0, 0, 1});
  rig.server->close(rig.key(0).operation);  // has failed
  CHECK(grants() == std::vector<std::uint64_t>{0, 0, 1, 1, 2});
  rig.server->close(rig.key(3).operation);  // in the queue
  rig.server->close(rig.key(1).operation);
  CHECK(grants() == std::vector<std::uint64_t>{0, 0, 1, 1, 2, 2});
  rig.server->close(rig.key(2).operation);
  // All units are back.
  for (std::uint64_t sequence = 10; sequence < 14; ++sequence) {
    REQUIRE(rig.server->open(rig.key(sequence), rig.opening(bytes)));
    rig.server->local_seen(rig.key(sequence));
    rig.announce(rig.key(sequence), 1, bytes);
  }
  CHECK(grants().size() == 6 + 3);
  CHECK(rig.listener.quiet());
}

TEST_CASE("server/server: a granted chunk costs what the other nodes may send at a time", "[server][fast]") {
  for (const std::uint64_t budget : {std::uint64_t{1}, std::uint64_t{4 * kChunkBytes}}) {
    Rig rig(3, 1, 8, budget);
    const std::uint64_t bytes = 5 * kChunkBytes;
    REQUIRE(rig.server->open(rig.key(), rig.opening(bytes)));
    rig.server->local_seen(rig.key());
    for (const std::uint32_t node : {0, 2}) rig.announce(rig.key(), node, bytes);
    CHECK(rig.granted_to(0) == (budget == 1 ? Chunks{0} : Chunks{0, 1}));  // one in any case
  }
}

TEST_CASE("server/server: a grant may be answered at once by the own node", "[server][fast]") {
  Rig rig(2, 0, 1);
  const std::uint64_t bytes = 4 * kChunkBytes;
  const SpanKey key = rig.key();
  Floats data(16, 1.0F);
  Floats out(16);
  bool inside = false;
  rig.owner.when_granted = [&](std::uint32_t, std::uint32_t chunk) {
    CHECK_FALSE(inside);  // spans have many chunks, and stacks an end
    inside = true;
    rig.contribute(key, chunk, data, out);
    inside = false;
  };
  REQUIRE(rig.server->open(key, rig.opening(bytes)));
  rig.server->local_seen(key);
  for (std::uint32_t chunk = 0; chunk < 4; ++chunk) rig.push(key, 1, chunk, bytes, data);
  rig.server->local_announce(key);
  CHECK(rig.owner.summed == List{{5, 0}, {5, 1}, {5, 2}, {5, 3}});
  CHECK(rig.granted_to(1).empty());
}

TEST_CASE("server/server: the operation may be closed from inside the last sum", "[server][fast]") {
  Rig rig(2, 0, 1);
  for (const bool granted : {false, true}) {
    const SpanKey key = rig.key(granted ? 1 : 0);
    rig.owner.when_summed = [&](std::uint32_t, std::uint32_t) { rig.server->close(key.operation); };
    REQUIRE(rig.server->open(key, rig.opening(kChunkBytes)));
    rig.server->local_seen(key);
    if (granted) rig.announce(key, 1, kChunkBytes);
    Floats data(16, 1.0F);
    rig.contribute(key, 0, data, data);
    rig.push(key, 1, 0, kChunkBytes, Floats(16, 1.0F));
    CHECK(data == Floats(16, 2.0F));
    CHECK(rig.server->spans_open() == 0);
  }
}

TEST_CASE("server/server: close in the middle gives payloads back", "[server][fast]") {
  Rig rig;
  const std::uint64_t bytes = 3 * kChunkBytes;
  rig.push(rig.key(0, 1), 0, 0, bytes, Floats(16, 1.0F));
  REQUIRE(rig.server->open(rig.key(0, 1), rig.opening(bytes)));
  rig.push(rig.key(0, 1), 2, 0, bytes, Floats(16, 1.0F));
  rig.push(rig.key(0, 2), 2, 1, bytes, Floats(16, 1.0F));  // another span of it, not open
  rig.push(rig.key(1, 1), 2, 1, bytes, Floats(16, 1.0F));  // another operation
  CHECK(rig.lender.lent() == 4);
  CHECK(rig.server->spans_open() == 3);
  rig.server->close(rig.key(0).operation);
  CHECK(rig.lender.lent() == 1);
  CHECK(rig.server->spans_open() == 1);
  rig.server->close(rig.key(0).operation);
  rig.server->close_group(core::GroupUid{7, 8});
  rig.server->close_group(core::GroupUid{7, 10});
  CHECK(rig.lender.lent() == 1);
  rig.server->close_group(kUid);
  CHECK(rig.lender.lent() == 0);
  CHECK(rig.server->spans_open() == 0);
  CHECK(rig.owner.summed.empty());
}

TEST_CASE("server/server: the progress of an operation names the nodes that were heard", "[server][fast]") {
  Rig rig;
  CHECK(rig.server->progress_of(rig.key().operation).empty());
  rig.push(rig.key(), 2, 0, 2 * kChunkBytes, Floats(16, 1.0F));
  CHECK(rig.server->progress_of(rig.key().operation).empty());
  REQUIRE(rig.server->open(rig.key(), rig.opening(2 * kChunkBytes)));
  rig.server->local_seen(rig.key());
  CHECK(rig.server->progress_of(rig.key().operation) ==
        "owner of span 5 has summed 0/2 chunks, heard from nodes [1, 2] of 3");
}

TEST_CASE("server/server: what was sent to an owner that is given up, and again to this one, counts once",
          "[server][fast]") {
  Rig rig;
  rig.attempt = 1;
  const SpanKey before = rig.key();
  SpanKey again = before;
  again.attempt = 1;
  Floats own{1, 2};
  // This engine is the second owner of the span: what comes of the first attempt is of another's.
  rig.push(before, 0, 0, 8, Floats{100, 100});
  rig.push(again, 0, 0, 8, Floats{10, 20});
  REQUIRE(rig.server->open(again, rig.opening(8)));
  rig.push(before, 2, 0, 8, Floats{100, 100});
  rig.server->local_seen(again);
  rig.announce(again, 2, 8);
  CHECK(rig.granted_to(2) == Chunks{0});
  rig.contribute(again, 0, own, own);
  CHECK(rig.owner.summed.empty());
  rig.push(again, 2, 0, 8, Floats{100, 200});
  CHECK(rig.owner.summed == List{{5, 0}});
  CHECK(own == Floats{111, 222});
  rig.server->close(again);
  CHECK(rig.server->spans_open() == 1);
  CHECK(rig.lender.lent() == 2);
  rig.server->close(before.operation);
  CHECK(rig.server->spans_open() == 0);
  CHECK(rig.lender.lent() == 0);
  CHECK(rig.listener.quiet());
}
