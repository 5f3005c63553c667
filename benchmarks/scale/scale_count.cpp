// scale_count: what a job sends and opens for each event, counted on real engines, and what idle things cost.
//
//   benchmarks/scale/run count [--layouts 4x2,64x8] [--quick] [--output DIR]
//
// All ranks are engines' Runtimes in one thread, over loopback transports (tests/support/cluster.h), with the settings
// of a job. Time stands still while anything is under way, so the counts are exact and the same in every run. Times are
// of the real clock: medians of pairs that take turns.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/scale/report.h"
#include "hybridps/bootstrap/rendezvous.h"
#include "hybridps/engine/peers.h"
#include "hybridps/engine/status_relay.h"
#include "hybridps/transport/tcp/tcp_transport.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/counting_transport.h"

namespace {

using namespace hybridps;
using std::chrono::milliseconds;
using test::Cluster;
using test::ClusterCounts;
using test::ClusterOptions;

struct Layout {
  int nodes = 0;
  int each = 0;
  int size() const { return nodes * each; }
  std::string text() const { return std::to_string(nodes) + "x" + std::to_string(each); }
};

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

std::vector<int> node_of(Layout layout) {
  std::vector<int> result;
  for (int rank = 0; rank < layout.size(); ++rank) result.push_back(rank / layout.each);
  return result;
}

/// What a rank has sent and opened so far.
struct Sent {
  std::uint64_t data = 0;  // over the network
  std::uint64_t data_here = 0;
  std::uint64_t permits = 0;  // announcements, grants
  std::uint64_t credits = 0;
  std::uint64_t control = 0;
  std::uint64_t control_opened = 0;
  std::uint64_t data_opened = 0;
};

/// The most of an ordinary rank, then what the owner of the operation has, and rank 0.
struct Most {
  std::uint64_t ordinary = 0;
  std::uint64_t owner = 0;
  std::uint64_t first = 0;
  std::string text() const {
    return std::to_string(ordinary) + ", " + std::to_string(owner) + ", " + std::to_string(first);
  }
};

/// All ranks of a job, with one group. It has made an all_reduce.
class Job {
 public:
  explicit Job(Layout layout) : layout_(layout), cluster_(options_of(layout, counts_)), uid_(cluster_.open_group()) {
    data_.resize(index(size()));
    outcomes_.resize(index(size()));
    for (int rank = 0; rank < size(); ++rank) submit(rank, schedule::Kind::kAllReduce, 64);
    finish();
    pass(milliseconds(300));
  }
  ~Job() {
    for (int rank = 0; rank < size(); ++rank)
      if (cluster_.is_alive(rank)) cluster_.at(rank).close_group(uid_);
  }

  int size() const { return layout_.size(); }
  Cluster& cluster() { return cluster_; }
  worker::GroupState& group(int rank) { return *cluster_.at(rank).worker().find(uid_); }
  void submit(int rank, schedule::Kind kind, std::size_t bytes, milliseconds timeout = {}) {
    worker::Operation o;
    o.kind = kind;
    o.timeout = timeout;
    if (kind == schedule::Kind::kAllReduce) {
      o.dtype = core::DType::kInt32;
      o.op = core::ReduceOp::kSum;
      data_[index(rank)].assign(bytes / 4, 1);
      o.output = {worker::Piece{reinterpret_cast<std::byte*>(data_[index(rank)].data()), bytes}};
    }
    outcomes_[index(rank)].reset();
    cluster_.submit(uid_, rank, o, group(rank).submitted,
                    [this, rank](const worker::Outcome& outcome) { outcomes_[index(rank)] = outcome.status; });
  }
  void finish() {
    const auto are_done = [&] {
      clock_.pass(std::chrono::microseconds(10));
      return std::all_of(outcomes_.begin(), outcomes_.end(), [](const auto& one) { return one && one->is_ok(); });
    };
    if (!cluster_.run_until(are_done)) throw std::runtime_error(layout_.text() + ": an operation does not end");
  }
  void pass(milliseconds time) {
    constexpr auto kStep = milliseconds(10);
    for (auto passed = milliseconds(0); passed < time; passed += kStep) {
      clock_.pass(kStep);
      cluster_.run_until([] { return false; }, /*idle_rounds_max=*/8);
    }
  }
  std::vector<Sent> look() const {
    std::vector<Sent> all;
    for (int rank = 0; rank < size(); ++rank) {
      Sent& sent = all.emplace_back();
      sent.data = counts_.network(rank).data;
      sent.data_here = counts_.memory(rank).data;
      for (const auto& counts : counts_.all(rank)) {
        sent.permits += counts->permits;
        sent.credits += counts->credits;
        sent.control += counts->control;
      }
      sent.control_opened = counts_.control(rank).opened;
      sent.data_opened = counts_.network(rank).bytes_to.size();
    }
    return all;
  }
  /// The tiny sum under way, or the last one, has the owner `owner`.
  Most since(const std::vector<Sent>& before, std::uint64_t Sent::* what, int owner) const {
    const std::vector<Sent> now = look();
    Most most;
    for (int rank = 0; rank < size(); ++rank) {
      const std::uint64_t count = now[index(rank)].*what - before[index(rank)].*what;
      if (rank == 0) most.first = count;
      if (rank == owner) most.owner = count;
      if (rank != 0 && rank != owner) most.ordinary = std::max(most.ordinary, count);
    }
    return most;
  }

 private:
  static ClusterOptions options_of(Layout layout, ClusterCounts& counts) {
    ClusterOptions options;
    options.node_of = node_of(layout);
    options.chunk_bytes = schedule::chunk_bytes_for(schedule::Topology(options.node_of, 0), 64 * 1024);
    options.eager_bytes = 512 * 1024;
    options.tiny_bytes = schedule::Limits().tiny_bytes;
    options.grant_chunks = 4;
    options.local_peers = index(std::max(layout.each - 1, 1));
    options.pool_extra_bytes = std::size_t{24} << 20;
    options.control = true;
    options.heartbeat_seconds = options.dead_seconds = 1e6;
    options.warn_seconds = 0;
    counts.count(options);
    return options;
  }

  const Layout layout_;
  test::MovableClock clock_;
  ClusterCounts counts_;
  Cluster cluster_;
  const core::GroupUid uid_;
  std::vector<std::vector<std::int32_t>> data_;
  std::vector<std::optional<core::Status>> outcomes_;
};

void count_events(const std::vector<Layout>& layouts, scale::Report& report) {
  std::vector<std::string> columns = {"event"};
  for (const Layout& layout : layouts) columns.push_back(layout.text());
  scale::Table messages{"Control messages of an ordinary rank (the most), the operation's owner, rank 0", columns};
  scale::Table opened{"Control connections that they open", columns};
  const auto add = [&](std::size_t row, const char* name, const Job& job, const std::vector<Sent>& before) {
    for (scale::Table* table : {&messages, &opened}) {
      if (row == table->rows.size()) table->rows.push_back({name});
      table->rows[row].push_back(
          job.since(before, table == &messages ? &Sent::control : &Sent::control_opened, /*owner=*/1).text());
    }
  };
  for (const Layout& layout : layouts) {
    const int last = layout.size() - 1;
    const int finder = layout.size() / 3;
    {
      Job job(layout);
      for (int rank = 0; rank < last; ++rank) job.submit(rank, schedule::Kind::kAllReduce, 64, milliseconds(1500));
      auto before = job.look();
      job.pass(milliseconds(1000));
      add(0, "a rank is late: questions of 1 s", job, before);
      before = job.look();
      job.pass(milliseconds(600));
      add(1, "the deadline passes on all ranks at once", job, before);
    }
    const auto fails = [&](std::size_t row, const char* name, const std::function<void(Job&)>& what) {
      Job job(layout);
      for (int rank = 0; rank < last; ++rank) job.submit(rank, schedule::Kind::kAllReduce, 64);
      job.pass(milliseconds(100));
      const auto before = job.look();
      what(job);
      job.pass(milliseconds(120));
      add(row, name, job, before);
    };
    fails(2, "a verdict on an operation, found by one rank", [&](Job& job) {
      job.cluster().at(finder).worker().submit_failed(job.group(finder), {}, 2,
                                                      core::Status(core::Code::kTimeout, "timed out"));
    });
    fails(3, "a verdict on the group, found by one rank", [&](Job& job) {
      job.cluster().at(finder).worker().fail_group(job.group(finder),
                                                   core::Status(core::Code::kMismatch, "ranks disagree"), true);
    });
    fails(4, "a rank is killed", [&](Job& job) { job.cluster().kill(last); });
    {
      Job job(layout);
      const auto before = job.look();
      std::vector<double> weights(index(layout.nodes), 1.0);
      weights.back() = 3.0;
      job.group(0).plans->propose(weights);
      const auto is_new = [&] {
        for (int rank = 0; rank < job.size(); ++rank)
          if (job.group(rank).plans->newest() != 1) return false;
        return true;
      };
      if (!job.cluster().run_until(is_new)) throw std::runtime_error(layout.text() + ": the plan does not change");
      add(5, "a change of plans", job, before);
    }
    {
      Job job(layout);
      std::vector<std::unique_ptr<engine::StatusRelay>> relays;
      std::vector<core::EngineId> others;
      std::set<core::EngineId> answers;
      for (int rank = 0; rank < job.size(); ++rank) {
        engine::Runtime& runtime = job.cluster().at(rank);
        const core::EngineId self = job.cluster().id(rank);
        relays.push_back(std::make_unique<engine::StatusRelay>(runtime, self));
        if (rank != 1) others.push_back(self);
        engine::Runtime::RuntimeHooks hooks;
        hooks.status_asked = [self, relay = relays.back().get()](const wire::Message& message) {
          if (!relay->on_asked(message)) return;
          const auto& ask = *message.as<wire::StatusAsk>();
          relay->send_answer(message, {ask.number, ask.sent_ns, 0, 0, 1, ask.asker, self}, "a status");
        };
        hooks.status_answered = [&answers, relay = relays.back().get()](const wire::Message& message,
                                                                        std::span<const std::byte>) {
          if (relay->on_answered(message, "a status")) answers.insert(message.as<wire::StatusAnswer>()->author);
        };
        runtime.set_hooks(std::move(hooks));
      }
      const auto before = job.look();
      relays[1]->ask(1, 0, others);
      if (!job.cluster().run_until([&] { return answers.size() == others.size(); }))
        throw std::runtime_error(layout.text() + ": engines do not tell their status");
      add(6, "the job's status, for the owner; the others pass answers on", job, before);
    }
    std::fprintf(stderr, "%s: events counted\n", layout.text().c_str());
  }
  report.add(std::move(messages));
  report.add(std::move(opened));
}

void count_operations(const std::vector<Layout>& layouts, scale::Report& report) {
  std::vector<std::string> columns = {"operation"};
  for (const Layout& layout : layouts) columns.push_back(layout.text());
  scale::Table table{"Messages that an ordinary rank (the most), the operation's owner, rank 0 send", columns};
  scale::Table starts{"Connections for data, of the same ranks", columns};
  for (const Layout& layout : layouts) {
    Job job(layout);
    std::size_t row = 0;
    const auto add = [&](scale::Table& to, std::size_t at, const std::string& name, const std::string& text) {
      if (at == to.rows.size()) to.rows.push_back({name});
      to.rows[at].push_back(text);
    };
    std::size_t dialled = 0;
    for (int rank = 0; rank < layout.size(); ++rank)
      dialled = std::max(dialled, engine::ranks_to_dial(schedule::Topology(node_of(layout), rank)).size());
    add(starts, 0, "dialled when a group opens, the most", std::to_string(dialled));
    const std::vector<Sent> none(index(layout.size()));
    for (const auto& [name, kind, bytes] : std::vector<std::tuple<std::string, schedule::Kind, std::size_t>>{
             {"64 B", schedule::Kind::kAllReduce, 64},
             {"1 MiB", schedule::Kind::kAllReduce, 1 << 20},
             {"barrier", schedule::Kind::kBarrier, 0}}) {
      const auto before = job.look();
      const auto owner = static_cast<int>(job.group(0).submitted % index(job.size()));
      for (int rank = 0; rank < job.size(); ++rank) job.submit(rank, kind, bytes);
      job.finish();
      job.pass(milliseconds(20));
      add(table, row++, name + ": data, to other nodes", job.since(before, &Sent::data, owner).text());
      add(table, row++, name + ": data, in the node", job.since(before, &Sent::data_here, owner).text());
      add(table, row++, name + ": announcements, grants", job.since(before, &Sent::permits, owner).text());
      add(table, row++, name + ": credits", job.since(before, &Sent::credits, owner).text());
      add(table, row++, name + ": control", job.since(before, &Sent::control, owner).text());
      if (bytes > 64) add(starts, 1, "opened after 1 MiB", job.since(none, &Sent::data_opened, owner).text());
    }
    std::fprintf(stderr, "%s: operations counted\n", layout.text().c_str());
  }
  report.add(std::move(table));
  report.add(std::move(starts));
}

// --- The Store -------------------------------------------------------------------------------------------------------

/// One member's way to the store of all.
class CountedStore final : public bootstrap::KeyValueStore {
 public:
  explicit CountedStore(std::shared_ptr<bootstrap::MemoryStore> store) : store_(std::move(store)) {}
  core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    ++requests;
    bytes += key.size() + value.size();
    return store_->set(key, value);
  }
  core::Result<std::optional<bootstrap::Bytes>> try_get(std::string_view key) override {
    ++requests;
    auto value = store_->try_get(key);
    bytes += key.size() + (value.is_ok() && value.value() ? value.value()->size() : 0);
    return value;
  }
  std::uint64_t requests = 0;
  std::uint64_t bytes = 0;

 private:
  const std::shared_ptr<bootstrap::MemoryStore> store_;
};

void count_store(const std::vector<Layout>& layouts, scale::Report& report) {
  std::vector<std::string> columns = {"rendezvous"};
  for (const Layout& layout : layouts) columns.push_back(layout.text());
  scale::Table table{"The Store, when all members come within 1 ms: an ordinary member (the most), rank 0", columns};
  table.rows = {{"requests"}, {"KiB"}};
  for (const Layout& layout : layouts) {
    const auto store = std::make_shared<bootstrap::MemoryStore>();
    std::vector<std::shared_ptr<CountedStore>> ways;
    std::vector<std::unique_ptr<bootstrap::Rendezvous>> members;
    core::TimePoint now{std::chrono::hours(1)};
    for (int rank = 0; rank < layout.size(); ++rank) {
      bootstrap::RendezvousOptions options;
      options.group_name = "g";
      options.key_prefix = "hybridps/g/run.0.0";
      options.deadline = core::Deadline::at(now + std::chrono::seconds(60));
      bootstrap::MemberRecord& self = options.self;
      self.build = "0.2.0.dev0";
      self.incarnation = "run.0.0";
      self.engine.value = 1000 + index(rank);
      self.node_identity = "host" + std::to_string(rank / layout.each) + ":4026531840:0";
      self.host_name = "host" + std::to_string(rank / layout.each);
      self.pid = 1000 + static_cast<std::uint32_t>(rank);
      self.group_rank = rank;
      self.group_size = layout.size();
      self.shm_address.resize(64);
      self.data_address.resize(64);
      self.control_address.resize(64);
      self.eager_bytes = 512 << 10;
      self.chunk_bytes = 64 << 10;
      self.nics = {{"eth0", "10.1.0.0/16", 10}};
      self.control = {"eth0", "10.1.0.0/16", 10};
      ways.push_back(std::make_shared<CountedStore>(store));
      members.push_back(std::make_unique<bootstrap::Rendezvous>(ways.back(), options));
    }
    using Phase = bootstrap::Rendezvous::RendezvousPhase;
    for (bool pending = true; pending; now += std::chrono::microseconds(100)) {
      pending = false;
      for (std::size_t rank = 0; rank < members.size(); ++rank) {
        if (members[rank]->phase() == Phase::kPending && members[rank]->next_step() <= now) members[rank]->step(now);
        if (members[rank]->phase() == Phase::kFailed)
          throw std::runtime_error("no roster: " + members[rank]->status().to_string());
        pending |= members[rank]->phase() == Phase::kPending;
      }
    }
    std::uint64_t requests = 0;
    std::uint64_t bytes = 0;
    for (std::size_t rank = 1; rank < ways.size(); ++rank) {
      requests = std::max(requests, ways[rank]->requests);
      bytes = std::max(bytes, ways[rank]->bytes);
    }
    table.rows[0].push_back(std::to_string(requests) + ", " + std::to_string(ways[0]->requests));
    table.rows[1].push_back(scale::number(static_cast<double>(bytes) / 1024) + ", " +
                            scale::number(static_cast<double>(ways[0]->bytes) / 1024));
  }
  report.add(std::move(table));
}

// --- What is idle ----------------------------------------------------------------------------------------------------

double seconds_of(const std::function<void()>& what) {
  const auto began = std::chrono::steady_clock::now();
  what();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Two nodes of one rank, with a group that works.
class TwoNodes {
 public:
  TwoNodes(int idle_groups, int peers) : cluster_(options()), uid_(cluster_.open_group()) {
    for (int i = 0; i < idle_groups; ++i) idle_.push_back(cluster_.open_group());
    if (peers > 0)
      for (int rank : {0, 1}) meet(rank, peers);
    for (int i = 0; i < 50; ++i) allreduce();
  }
  ~TwoNodes() {
    for (int rank : {0, 1}) cluster_.at(rank).close_group(uid_);
  }
  void allreduce() {
    int done = 0;
    for (int rank : {0, 1}) {
      worker::Operation o;
      o.kind = schedule::Kind::kAllReduce;
      o.dtype = core::DType::kInt32;
      o.op = core::ReduceOp::kSum;
      o.output = {worker::Piece{reinterpret_cast<std::byte*>(data_[rank]), sizeof data_[rank]}};
      cluster_.submit(uid_, rank, o, sequence_, [&done](const worker::Outcome&) { ++done; });
    }
    ++sequence_;
    while (done < 2) {
      cluster_.at(0).progress();
      cluster_.at(1).progress();
    }
  }
  void idle_rounds(int count) {
    for (int i = 0; i < count; ++i) cluster_.at(0).progress();
  }
  Cluster& cluster() { return cluster_; }

 private:
  static ClusterOptions options() {
    ClusterOptions options;
    options.node_of = {0, 1};
    options.control = true;
    options.tiny_bytes = schedule::Limits().tiny_bytes;
    options.heartbeat_seconds = options.dead_seconds = 1e6;
    return options;
  }
  /// A further group, of `peers` members that nobody has heard of.
  void meet(int rank, int peers) {
    std::vector<schedule::Member> members;
    std::vector<int> nodes;
    for (int peer = 0; peer < peers; ++peer) {
      const bool self = peer == rank;
      engine::PeerRecord record;
      record.engine = self ? cluster_.id(rank) : core::EngineId{100000 + index(peer)};
      record.where = "rank " + std::to_string(peer);
      record.eager_bytes = 512 * 1024;
      record.far_bytes = 512 * 1024;
      members.push_back({record.engine, "host" + std::to_string(peer)});
      nodes.push_back(peer);
      if (!self) cluster_.at(rank).add_peer(record);
    }
    worker::GroupInfo info{cluster_.new_uid(), "crowd", schedule::Members(members), schedule::Topology(nodes, rank)};
    info.tuning.chunks = {1024, 1024, 1024};
    cluster_.at(rank).open_group(std::move(info));
  }

  Cluster cluster_;
  const core::GroupUid uid_;
  std::vector<core::GroupUid> idle_;
  std::int32_t data_[2][16] = {};
  std::uint64_t sequence_ = 0;
};

/// "a, b: b / a" of medians; the two take turns.
void add_pair(scale::Table& table, const std::string& name, double unit, const std::function<double()>& a,
              const std::function<double()>& b) {
  std::vector<double> of_a;
  std::vector<double> of_b;
  std::vector<double> ratios;
  for (int i = 0; i < 31; ++i) {
    of_a.push_back(a());
    of_b.push_back(b());
    ratios.push_back(of_b.back() / of_a.back());
  }
  table.rows.push_back(
      {name, scale::number(median(of_a) * unit), scale::number(median(of_b) * unit), scale::number(median(ratios))});
}

void time_idle(scale::Report& report) {
  scale::Table table{"What is idle: medians of 31 pairs, us", {"", "few", "many", "many / few"}};
  const auto round = [](TwoNodes& nodes) {
    return [&nodes] { return seconds_of([&] { nodes.idle_rounds(500); }) / 500; };
  };
  const auto operation = [](TwoNodes& nodes) {
    return [&nodes] {
      return seconds_of([&] {
               for (int i = 0; i < 50; ++i) nodes.allreduce();
             }) /
             50;
    };
  };
  {
    TwoNodes few(1, 0);
    TwoNodes many(1000, 0);
    add_pair(table, "an idle round, with 1 and 1000 idle groups", 1e6, round(few), round(many));
    add_pair(table, "allreduce of 64 B, with 1 and 1000 idle groups", 1e6, operation(few), operation(many));
  }
  {
    TwoNodes few(0, 8);
    TwoNodes many(0, 2000);
    add_pair(table, "an idle round, with 8 and 2000 known peers", 1e6, round(few), round(many));
    add_pair(table, "allreduce of 64 B, with 8 and 2000 known peers", 1e6, operation(few), operation(many));
  }
  std::vector<double> tenth;
  std::vector<double> thousandth;
  for (int i = 0; i < 5; ++i) {
    ClusterOptions options;
    options.node_of = {0, 1, 2, 3, 4, 5, 6, 7};
    Cluster cluster(options);
    std::vector<core::GroupUid> opened;
    for (int number = 1; number <= 1000; ++number) {
      opened.push_back(cluster.new_uid());
      const double seconds = seconds_of([&] { cluster.open_group_on(opened.back(), 0); });
      if (number >= 6 && number <= 15) tenth.push_back(seconds);
      if (number > 990) thousandth.push_back(seconds);
    }
    for (const core::GroupUid uid : opened) cluster.at(0).close_group(uid);
  }
  const double few = median(tenth);
  const double many = median(thousandth);
  table.rows.push_back({"to open a group of 8 members: the 10th, the 1000th", scale::number(few * 1e6),
                        scale::number(many * 1e6), scale::number(many / few)});
  report.add(std::move(table));
}

template <typename Worker>
std::uint64_t looks_of(const Worker& worker) {
  if constexpr (requires { worker.group_looks(); })
    return worker.group_looks();
  else
    return 0;
}

void count_looks(scale::Report& report) {
  scale::Table table{"Looks at groups in 20 operations of one group", {"idle groups", "looks"}};
  for (const int idle : {1, 100, 1000}) {
    TwoNodes nodes(idle, 0);
    const std::uint64_t before = looks_of(nodes.cluster().at(0).worker());
    for (int i = 0; i < 20; ++i) nodes.allreduce();
    table.rows.push_back({std::to_string(idle), std::to_string(looks_of(nodes.cluster().at(0).worker()) - before)});
  }
  report.add(std::move(table));
}

// --- What a message costs
// ---------------------------------------------------------------------------------------------

struct Arrivals final : transport::Receiver {
  void on_message(core::EngineId, std::span<const std::byte>, transport::RxPayload) noexcept override { ++count; }
  void on_peer_failed(core::EngineId, core::Status) noexcept override {}
  std::uint64_t count = 0;
};

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

/// What the owner of a sum of 64 B works for each message, over loopback.
double owner_seconds_per_message() {
  const auto seconds_of_owner = [](int nodes) {
    ClusterOptions options;
    options.node_of = node_of({nodes, 1});
    options.tiny_bytes = schedule::Limits().tiny_bytes;
    options.heartbeat_seconds = options.dead_seconds = 1e6;
    options.local_peers = 1;
    options.pool_extra_bytes = std::size_t{4} << 20;
    Cluster cluster(options);
    const auto uid = cluster.open_group();
    std::vector<std::int32_t> data(index(nodes) * 16, 1);
    std::vector<double> times;
    for (int sequence = 0; sequence < 3 * nodes; ++sequence) {
      const int owner = sequence % nodes;
      int done = 0;
      double seconds = 0;
      for (int rank = 0; rank < nodes; ++rank) {
        worker::Operation o;
        o.kind = schedule::Kind::kAllReduce;
        o.dtype = core::DType::kInt32;
        o.op = core::ReduceOp::kSum;
        o.output = {worker::Piece{reinterpret_cast<std::byte*>(&data[index(rank) * 16]), 64}};
        cluster.submit(uid, rank, o, static_cast<std::uint64_t>(sequence), [&done](const worker::Outcome&) { ++done; });
      }
      while (done < nodes)
        for (int rank = 0; rank < nodes; ++rank) {
          if (rank != owner)
            cluster.at(rank).progress();
          else
            seconds += seconds_of([&] { cluster.at(rank).progress(); });
        }
      if (sequence >= nodes) times.push_back(seconds);
    }
    for (int rank = 0; rank < nodes; ++rank) cluster.at(rank).close_group(uid);
    return median(times);
  };
  return (seconds_of_owner(72) - seconds_of_owner(8)) / (2 * 64);
}

/// Of a rank that gets a message over TCP from each of many peers, and answers each: as the owner of a tiny sum does.
void time_messages(scale::Report& report) {
  constexpr std::size_t kPeers = 64;
  constexpr std::size_t kPayload = 64;
  constexpr int kRounds = 200;
  transport::TcpOptions options;
  options.address = "127.0.0.1";
  options.close_timeout = core::from_seconds(0.05);
  struct Side {
    std::unique_ptr<transport::TcpTransport> transport;
    std::unique_ptr<std::byte[]> memory;
    std::unique_ptr<transport::BufferPool> pool;
    Arrivals arrivals;
    std::vector<transport::Endpoint*> endpoints;
  };
  std::vector<std::unique_ptr<Side>> sides;
  for (std::size_t i = 0; i <= kPeers; ++i) {
    auto side = std::make_unique<Side>();
    side->transport = transport::TcpTransport::create(options).value();
    constexpr std::size_t kBytes = 1024 * (kPeers + 4);
    side->memory.reset(new std::byte[kBytes + 64]);
    auto* const start =
        reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(side->memory.get()) + 63) & ~std::uintptr_t{63});
    const std::vector<transport::BufferPool::SizeClass> classes = {{1024, kPeers + 4}};
    side->pool = std::make_unique<transport::BufferPool>(std::span<std::byte>(start, kBytes), classes);
    if (!side->transport->attach(side->pool->memory()).is_ok()) throw std::runtime_error("cannot attach");
    side->transport->set_receiver(&side->arrivals);
    sides.push_back(std::move(side));
  }
  const auto id = [](std::size_t side) { return core::EngineId{500 + side}; };
  Side& owner = *sides[0];
  for (std::size_t i = 1; i <= kPeers; ++i) {
    sides[i]->endpoints.push_back(sides[i]->transport->connect(id(0), owner.transport->address()).value());
    owner.endpoints.push_back(owner.transport->connect(id(i), sides[i]->transport->address()).value());
  }
  const std::vector<std::byte> header(wire::kHeaderBytes, std::byte{1});
  const auto send = [&](Side& from, transport::Endpoint& to) {
    const transport::Buffer buffer = from.pool->allocate(kPayload);
    if (!buffer || !to.send(header, buffer, kPayload, {}).is_ok()) throw std::runtime_error("cannot send");
  };
  double cpu = 0;
  std::vector<double> rounds;
  for (int round = 0; round < kRounds + 20; ++round) {
    const std::uint64_t wanted = owner.arrivals.count + kPeers;
    for (std::size_t i = 1; i <= kPeers; ++i) {
      send(*sides[i], *sides[i]->endpoints[0]);
      sides[i]->transport->send_now();
      sides[i]->transport->progress();
    }
    double began = cpu_seconds();
    while (owner.arrivals.count < wanted) {
      if (owner.transport->progress() == 0)
        for (std::size_t i = 1; i <= kPeers; ++i) sides[i]->transport->progress();  // connections are being made
    }
    for (transport::Endpoint* endpoint : owner.endpoints) send(owner, *endpoint);
    owner.transport->send_now();
    cpu = cpu_seconds() - began;
    if (round >= 20) rounds.push_back(cpu / (2 * kPeers));
    for (std::size_t i = 1; i <= kPeers; ++i) {
      const std::uint64_t seen = static_cast<std::uint64_t>(round) + 1;
      while (sides[i]->arrivals.count < seen) {
        sides[i]->transport->progress();
        owner.transport->progress();
      }
    }
  }
  const double network = median(rounds) * 1e6;
  const double engine = owner_seconds_per_message() * 1e6;
  scale::Table table{"CPU time of a message of 64 B, sent or received, us; its connection has no other", {"", "us"}};
  table.rows = {{"TCP over loopback, 64 peers", scale::number(network)},
                {"the engine's part, on the owner of a sum", scale::number(engine)},
                {"both", scale::number(network + engine)}};
  report.add(std::move(table));
}

Layout layout_in(const std::string& text) {
  const std::size_t cross = text.find('x');
  Layout layout;
  if (cross != std::string::npos)
    layout = {std::atoi(text.substr(0, cross).c_str()), std::atoi(text.substr(cross + 1).c_str())};
  if (layout.nodes < 2 || layout.each < 1 || layout.size() > 4096)
    throw std::invalid_argument("--layouts: not NODESxRANKS, of 2 nodes or more and 4096 ranks at most: " + text);
  return layout;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::vector<Layout> layouts;
    std::string names = "4x2,16x8,64x4,128x1";
    std::string output;
    bool quick = false;
    for (int i = 1; i < argc; ++i) {
      const std::string name = argv[i];
      if (name == "--quick")
        quick = true;
      else if (name == "--layouts" && i + 1 < argc)
        names = argv[++i];
      else if (name == "--output" && i + 1 < argc)
        output = argv[++i];
      else
        throw std::invalid_argument(name + ": an unknown option, or its value is missing");
    }
    for (std::size_t at = 0; at <= names.size();) {
      const std::size_t end = std::min(names.find(',', at), names.size());
      layouts.push_back(layout_in(names.substr(at, end - at)));
      at = end + 1;
    }
    scale::Report report("scale-count", "Counts of real engines, nodes x ranks");
    count_events(layouts, report);
    count_operations(layouts, report);
    count_store(layouts, report);
    count_looks(report);
    if (!quick) {
      time_idle(report);
      time_messages(report);
    }
    if (!output.empty()) report.write(output);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "scale_count: %s\n", error.what());
    return 2;
  }
  return 0;
}
