#include "hybridps/server/dedicated_server.h"

#include <cstring>

#include "tests/support/catch.h"
#include "tests/support/fake_router.h"

namespace {

using namespace hybridps;

const core::GroupUid kUid{7, 9};
constexpr std::uint32_t kServer = 2;  // behind two ranks, each a node of its own

core::EngineId engine(std::uint32_t member) { return core::EngineId{100 + member}; }

struct Rig final : server::DedicatedHost {
  explicit Rig(std::size_t slots = 8,
               std::uint64_t state_bytes = ~std::uint64_t{0})  // of the job of kUid, and of another job
      : budget(std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{state_bytes, 0})),
        pool({{1024, slots}}) {
    flow::OutboxOptions options;
    options.self = engine(kServer);
    options.class_bytes = {1024};
    options.net_slots = {8};
    outbox = std::make_unique<flow::Outbox>(options, *pool, router);
    dedicated = std::make_unique<server::DedicatedServer>(*outbox, *this, 2, ~std::uint64_t{0});
    open(kUid, budget);
  }
  void open(core::GroupUid uid, std::shared_ptr<compress::MemoryBudget> of, bool has_own_grants = false) {
    schedule::Topology topology({0, 1}, kServer, {}, {1.0});
    const schedule::Members members({{engine(0), "host0"}, {engine(1), "host1"}, {engine(2), "host2"}});
    server::ServedGroup group{uid, "test", members, std::move(topology), 64};
    group.state_budget = std::move(of);
    if (has_own_grants) group.grants = dedicated->make_grants();
    dedicated->open_group(std::move(group));
  }
  ~Rig() override {
    dedicated.reset();
    router.endpoints.clear();
  }
  void send_control(core::EngineId, wire::Message message, std::string_view text) override {
    told.emplace_back(text);
    const auto* failover = message.as<wire::Failover>();
    lost += failover != nullptr && failover->what == wire::Failover::What::kClosed ? 1 : 0;
  }
  void on_tuning(core::GroupUid, const schedule::Tuning&) override {}
  void on_served_group_closed(core::GroupUid, const core::Status&) override {}

  /// Rank `node` sends one chunk of 8 bytes, the whole span.
  void push(std::uint16_t attempt, std::uint32_t node, std::int32_t value, core::GroupUid uid = kUid,
            std::uint64_t sequence = 0) {
    const wire::ChunkId chunk{
        .stage = wire::Stage::kPush,
        .signature = {schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kSum, -1, 24},
        .attempt = attempt,
        .sequence = sequence,
        .span_bytes = 8,
        .span = kServer,
        .contributor = node};
    const std::int32_t values[2] = {value, value + 1};
    dedicated->on_message({{engine(node), uid, node}, 8, wire::Data{chunk}}, lender.lend(values, 8));
  }
  void complete_all() {
    for (const auto& [id, endpoint] : router.endpoints)
      for (std::size_t i = 0; i < endpoint->sent.size(); ++i)
        if (endpoint->sent[i].done) endpoint->complete(i);
  }
  /// What the rank got, by attempt.
  std::vector<std::pair<std::uint16_t, std::int32_t>> results_of(std::uint32_t rank) {
    std::vector<std::pair<std::uint16_t, std::int32_t>> list;
    for (const test::Sent& sent : router.to(engine(rank)).sent) {
      const auto* data = sent.message.as<wire::Data>();
      if (data == nullptr) continue;
      std::int32_t first = 0;
      std::memcpy(&first, sent.payload.data(), sizeof first);
      list.emplace_back(data->chunk.attempt, first);
    }
    return list;
  }

  std::shared_ptr<compress::MemoryBudget> budget;
  test::FakePool pool;
  test::FakeRouter router;
  test::Lender lender;
  std::vector<std::string> told;
  int lost = 0;  // of these, tell that the server is lost
  std::unique_ptr<flow::Outbox> outbox;
  std::unique_ptr<server::DedicatedServer> dedicated;
};

using Results = std::vector<std::pair<std::uint16_t, std::int32_t>>;

}  // namespace

TEST_CASE("server/dedicated_server: attempts at a span are summed apart, and each is over for itself",
          "[server][fast]") {
  Rig rig;
  rig.push(0, 0, 10);
  rig.push(1, 1, 2000);
  CHECK(rig.results_of(0).empty());
  rig.push(1, 0, 1000);
  CHECK(rig.results_of(0) == Results{{1, 3000}});
  CHECK(rig.results_of(1) == Results{{1, 3000}});
  rig.dedicated->tick();
  rig.push(1, 0, 1000);  // doubled on the way, behind its end
  CHECK(rig.lender.lent() == 1);
  rig.push(0, 1, 20);
  CHECK(rig.results_of(1) == Results{{1, 3000}, {0, 30}});
  rig.dedicated->tick();
  CHECK(rig.lender.lent() == 0);
  CHECK(rig.told.empty());
  CHECK(rig.dedicated->stats().chunks == 2);
}

TEST_CASE("server/dedicated_server: a verdict ends an operation with all its spans, known and to come",
          "[server][fast]") {
  Rig rig;
  rig.push(0, 0, 10);
  rig.push(1, 0, 10);
  CHECK(rig.lender.lent() == 2);
  rig.dedicated->on_message({{engine(1), kUid, 1}, 0, wire::Verdict::on_operation(0, core::Code::kTimeout)}, {});
  CHECK(rig.lender.lent() == 0);
  for (std::uint16_t attempt = 0; attempt < 3; ++attempt) rig.push(attempt, 1, 20);
  CHECK(rig.lender.lent() == 0);
  CHECK(rig.results_of(0).empty());
}

TEST_CASE("server/dedicated_server: results that wait for one rank leave the slots to others", "[server][fast]") {
  Rig rig(2);
  rig.router.peers[engine(1)] = {false, 8};
  Results expected;
  for (std::uint16_t attempt = 0; attempt < 6; ++attempt) {
    rig.push(attempt, 0, 10 * attempt);
    rig.push(attempt, 1, 1000);
    rig.complete_all();
    rig.outbox->progress(core::Clock::now());
    expected.emplace_back(attempt, 10 * attempt + 1000);
    CHECK(rig.results_of(0) == expected);
  }
  CHECK(rig.results_of(1) == Results{expected.front()});
  for (int more = 0; more < 6; ++more) {
    rig.outbox->on_credit(engine(1), {.bytes = rig.router.to(engine(1)).of<wire::Data>().back()->cost});
    rig.complete_all();
    rig.outbox->progress(core::Clock::now());
  }
  CHECK(rig.results_of(1) == expected);
  CHECK(rig.dedicated->stats().chunks == 6);  // each summed once
  rig.dedicated->tick();
  CHECK(rig.lender.lent() == 0);
  CHECK(rig.pool->slots_in_use() == 0);
}

TEST_CASE("server/dedicated_server: a job without memory for one more span loses the server, another goes on",
          "[server][fast]") {
  const std::uint64_t of_group = server::ServedGroup::state_bytes(3);
  Rig rig(8, of_group + 4500);  // spans of two nodes take some 1 KiB each, and as much again from their first result on
  const core::GroupUid other{8, 9};
  rig.open(other, std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{of_group + 20000, 0}));
  for (std::uint16_t attempt = 0; attempt < 3; ++attempt) rig.push(attempt, 0, 1);
  rig.dedicated->tick();
  CHECK(rig.told.empty());
  CHECK(rig.budget->used < of_group + 3500);
  CHECK(rig.lender.lent() == 3);
  rig.push(0, 1, 1);  // of an open span: nothing more is taken
  CHECK(rig.results_of(0).size() == 1);
  rig.push(3, 0, 1);
  rig.dedicated->tick();
  REQUIRE(rig.told.size() == 2);  // both ranks
  CHECK(rig.lost == 2);
  CHECK(rig.told[0].find("may take " + std::to_string(of_group + 4500) + " bytes, and ") != std::string::npos);
  CHECK_FALSE(rig.dedicated->has(kUid));
  CHECK(rig.budget->used == 0);
  rig.push(0, 0, 1, other);
  rig.push(0, 1, 1, other);
  CHECK(rig.results_of(0).size() == 2);
  CHECK(rig.dedicated->has(other));

  // Spans that are over give their part back.
  for (std::uint64_t sequence = 1; sequence < 20; ++sequence) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) rig.push(0, rank, 1, other, sequence);
    rig.complete_all();
    for (std::uint32_t rank = 0; rank < 2; ++rank)
      for (const wire::Failover& landed : wire::failovers_of(wire::Failover::What::kLanded, kServer, {sequence}))
        rig.dedicated->on_message({{engine(rank), other, rank}, 0, landed}, {});
    rig.dedicated->tick();
  }
  CHECK(rig.dedicated->has(other));
}

TEST_CASE("server/dedicated_server: chunks that one job does not send hold up no grants of another", "[server][fast]") {
  Rig rig;
  const core::GroupUid other{8, 9};
  rig.open(other, rig.budget, /*has_own_grants=*/true);
  const auto announce = [&](core::GroupUid uid, std::uint64_t sequence) {
    for (std::uint32_t node = 0; node < 2; ++node) {
      const wire::ChunkId chunk{
          .stage = wire::Stage::kPush,
          .signature = {schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kSum, -1, 24},
          .sequence = sequence,
          .span_bytes = 8,
          .span = kServer,
          .contributor = node};
      rig.dedicated->on_message({{engine(node), uid, node}, 0, wire::Announce{chunk}}, {});
    }
  };
  const auto grants = [&] { return rig.router.to(engine(0)).of<wire::Grant>().size(); };
  for (std::uint64_t sequence = 0; sequence < 5; ++sequence) announce(kUid, sequence);
  CHECK(grants() == 2);  // as many as may be unfinished
  for (std::uint64_t sequence = 0; sequence < 5; ++sequence) announce(other, sequence);
  CHECK(grants() == 4);
  for (std::uint32_t rank = 0; rank < 2; ++rank) rig.push(0, rank, 1, other, 0);
  CHECK(grants() == 5);
}
