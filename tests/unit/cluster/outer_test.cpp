// Owners' steps in an in-process cluster: what ranks get does not depend on who owns what, and is the step of one
// optimizer.
#include <cmath>
#include <cstring>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"

namespace {

using namespace hybridps;
using core::ReduceOp;
using test::Cluster;
using test::ClusterOptions;

std::vector<float> floats(int rank, std::uint64_t round, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(100 * round + static_cast<unsigned>(rank)));
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

struct Call {
  ReduceOp op = ReduceOp::kNesterovStep;
  compress::TensorKey slot = 1;
  float rate = 0.7F;
  float momentum = 0.9F;
  wire::Coding coding = wire::Coding::kPlain;
};

struct Job {
  explicit Job(ClusterOptions options) : cluster(std::move(options)), uid(cluster.open_group()) {}

  /// The results of all ranks, or the first error.
  std::string run(const std::function<Call(int)>& call, std::vector<std::vector<float>>& data) {
    int done = 0;
    std::string error;
    for (int r = 0; r < cluster.size(); ++r) {
      const Call c = call(r);
      worker::Operation o;
      o.kind = schedule::Kind::kAllReduce;
      o.dtype = core::DType::kFloat32;
      o.op = c.op;
      o.tensor = c.slot;
      o.rate = c.rate;
      o.momentum = c.momentum;
      o.coding = c.coding;
      auto& values = data[static_cast<std::size_t>(r)];
      o.output = {worker::Piece{reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)}};
      cluster.submit(uid, r, o, sequence, [&](const worker::Outcome& outcome) {
        ++done;
        if (error.empty()) error = outcome.status.message();
      });
    }
    ++sequence;
    REQUIRE(cluster.run_until([&] { return done == cluster.size(); }, idle_rounds));
    return error;
  }

  std::vector<float> step(std::uint64_t round, std::size_t count, const Call& call) {
    std::vector<std::vector<float>> data;
    for (int r = 0; r < cluster.size(); ++r) data.push_back(floats(r, round, count));
    REQUIRE(run([&](int) { return call; }, data) == "");
    for (const auto& values : data)
      REQUIRE((count == 0 || std::memcmp(values.data(), data[0].data(), count * sizeof(float)) == 0));
    return data[0];
  }

  /// `op`: load of what rank 0 has, or read.
  std::vector<float> state(ReduceOp op, std::vector<float> values, compress::TensorKey slot = 1) {
    std::vector<std::vector<float>> data(static_cast<std::size_t>(cluster.size()),
                                         std::vector<float>(values.size(), 0.0F));
    data[0] = std::move(values);
    REQUIRE(run([&](int) { return Call{op, slot, 0.0F, 0.0F}; }, data) == "");
    for (const auto& all : data) REQUIRE(all == data[0]);
    return data[0];
  }

  Cluster cluster;
  core::GroupUid uid;
  std::uint64_t sequence = 0;
  int idle_rounds = 20000;
};

ClusterOptions layout(std::vector<int> node_of, std::vector<double> servers = {}) {
  ClusterOptions options;
  options.node_of = std::move(node_of);
  options.servers = std::move(servers);
  return options;
}

}  // namespace

TEST_CASE("cluster/outer: rounds give the bits of one optimizer, whoever owns what, in chunks of any size",
          "[cluster][fast]") {
  for (const std::size_t count : {0, 1, 60, 65, 4099, 20011}) {
    INFO(count << " elements");
    std::vector<std::vector<float>> reference;
    std::vector<float> m(count, 0.0F);
    for (std::uint64_t round = 0; round < 3; ++round) {
      std::vector<float> u(count);
      const std::vector<float> of_rank[] = {floats(0, round, count), floats(1, round, count), floats(2, round, count)};
      for (std::size_t i = 0; i < count; ++i) {
        float sum = 0.0F;
        for (int r = 0; r < 3; ++r) {
          volatile float scaled = of_rank[r][i] * static_cast<float>(1.0 / 3.0);
          sum = r == 0 ? scaled : sum + scaled;
          if (count > 5000) break;  // below: by a cluster of its own
        }
        volatile float kept = 0.9F * m[i];
        m[i] = kept + sum;
        volatile float ahead = 0.9F * m[i];
        volatile float direction = sum + ahead;
        u[i] = 0.7F * direction;
        if (count > 5000) break;
      }
      reference.push_back(u);
    }
    if (count > 5000) {
      reference.clear();
      Job plain(layout({0, 1, 2}));
      for (std::uint64_t round = 0; round < 3; ++round) reference.push_back(plain.step(round, count, {}));
      m = plain.state(ReduceOp::kStateRead, std::vector<float>(count, 1.0F));
    }
    for (ClusterOptions options : {layout({0, 1, 2}), layout({0, 1, 2}, {1}), layout({0, 1, 2}, {1, 0, 0.5, 4})}) {
      for (const std::size_t chunk : {256, 1024, 4096}) {
        options.chunk_bytes = chunk;
        Job job(options);
        for (std::uint64_t round = 0; round < 3; ++round)
          for (const bool other : {false, true})  // another slot in between is another optimizer
            REQUIRE(job.step(round, count,
                             {ReduceOp::kNesterovStep, other ? compress::TensorKey{7} : compress::TensorKey{1}}) ==
                    reference[round]);
        REQUIRE(job.state(ReduceOp::kStateRead, std::vector<float>(count, 1.0F)) == m);
      }
    }
  }
}

TEST_CASE("cluster/outer: state that is read goes to other owners and servers, and the next round is the same",
          "[cluster][fast]") {
  constexpr std::size_t kCount = 9001;
  Job before(layout({0, 1, 2}, {2}));
  for (std::uint64_t round = 0; round < 3; ++round) before.step(round, kCount, {});
  const std::vector<float> saved = before.state(ReduceOp::kStateRead, std::vector<float>(kCount, 0.0F));
  const std::vector<float> next = before.step(3, kCount, {});
  for (const ClusterOptions& options : {layout({0, 1, 2}), layout({0, 1, 2}, {1, 1})}) {
    Job after(options);
    REQUIRE(after.state(ReduceOp::kStateLoad, saved) == saved);
    REQUIRE(after.step(3, kCount, {}) == next);
  }
  Job without(layout({0, 1, 2}));
  REQUIRE(without.step(3, kCount, {}) != next);  // it does matter
}

TEST_CASE("cluster/outer: with a codec too bits do not depend on owners, and state is cut as steps are",
          "[cluster][fast]") {
  constexpr std::size_t kCount = 20011;
  for (const std::string spec : {"int8", "int4:ef=1", "topk:k=0.1,ef=1"}) {
    INFO(spec);
    const auto codecs = std::make_shared<const compress::Codecs>(compress::parse_spec(spec).value());
    Call call;
    call.coding = wire::Coding::kFull;
    std::vector<float> first;
    std::vector<float> momentum;
    for (ClusterOptions options : {layout({0, 1, 2}), layout({0, 1, 2}, {1}), layout({0, 1, 2}, {1, 4})}) {
      options.chunk_bytes = 1024;
      options.codecs.assign(options.node_of.size() + options.servers.size(), codecs);
      Job job(options);
      std::vector<float> last;
      for (std::uint64_t round = 0; round < 4; ++round) last = job.step(round, kCount, call);
      const std::vector<float> kept = job.state(ReduceOp::kStateRead, std::vector<float>(kCount, 0.0F));
      if (first.empty()) {
        first = last;
        momentum = kept;
      }
      REQUIRE(last == first);
      REQUIRE(kept == momentum);
    }
  }
}

TEST_CASE("cluster/outer: ranks that step by other rates or another optimizer are told who asked for what",
          "[cluster][fast]") {
  for (const auto& servers : {std::vector<double>{}, std::vector<double>{100}}) {
    for (const Call& other : {Call{ReduceOp::kNesterovStep, 1, 0.5F}, Call{ReduceOp::kMomentumStep},
                              Call{ReduceOp::kNesterovStep, 1, 0.7F, 0.8F}, Call{ReduceOp::kStateRead}}) {
      Job job(layout({0, 1, 2}, servers));
      std::vector<std::vector<float>> data(3, std::vector<float>(3000, 1.0F));
      const std::string error = job.run([&](int r) { return r == 1 ? other : Call{}; }, data);
      INFO(error);
      CHECK(error.find("nesterov step of fp32[3000], 12000 bytes, rate 0.7, momentum 0.9") != std::string::npos);
      CHECK(error.find(std::string(core::name_of(other.op)) + " of fp32[3000], 12000 bytes") != std::string::npos);
    }
  }
}

TEST_CASE("cluster/outer: a slot that is used for a tensor of another size fails the group and gives no step",
          "[cluster][fast]") {
  for (const auto& servers : {std::vector<double>{}, std::vector<double>{2}}) {
    Job job(layout({0, 1, 2}, servers));
    job.step(0, 3000, {});
    std::vector<std::vector<float>> data(3, std::vector<float>(6000, 1.0F));
    const std::string error = job.run([](int) { return Call{}; }, data);
    INFO(error);
    CHECK(error.find("of slot 1, of which this owner has") != std::string::npos);
  }
}

TEST_CASE("cluster/outer: a dedicated server without memory for the momentum fails the group and says so",
          "[cluster][fast]") {
  ClusterOptions options = layout({0, 1, 2}, {2});
  options.outer_bytes = 1000;
  Job job(options);
  std::vector<std::vector<float>> data(3, std::vector<float>(6000, 1.0F));
  const std::string error = job.run([](int) { return Call{}; }, data);
  INFO(error);
  CHECK(error.find("a dedicated server has no memory for the outer optimizer's momentum") != std::string::npos);
  CHECK(error.find("and 0 of 1000 bytes are used") != std::string::npos);
}

// An heir has no momentum: what it made of the sum would be wrong, and nobody would know.
TEST_CASE("cluster/outer: a dedicated server that dies or leaves fails the group and no rank gets a wrong step",
          "[cluster][fast]") {
  constexpr std::size_t kCount = 6000;
  std::vector<std::vector<float>> right;
  Job undisturbed(layout({0, 1, 1, 2}, {2}));
  for (std::uint64_t round = 0; round < 3; ++round) right.push_back(undisturbed.step(round, kCount, {}));
  int failed_in_a_step = 0;
  for (int after = 0; after < 160; after += 4) {
    for (const bool leaves : {false, true}) {
      INFO(after << " rounds of progress into the third step, " << (leaves ? "told to go" : "killed"));
      Job job(layout({0, 1, 1, 2}, {2}));
      for (std::uint64_t round = 0; round < 2; ++round) REQUIRE(job.step(round, kCount, {}) == right[round]);
      std::vector<std::vector<float>> data;
      std::vector<std::string> errors(4, "none");
      for (int r = 0; r < 4; ++r) data.push_back(floats(r, 2, kCount));
      int done = 0;
      const auto submit = [&](int r, ReduceOp op) {
        worker::Operation o;
        o.kind = schedule::Kind::kAllReduce;
        o.dtype = core::DType::kFloat32;
        o.op = op;
        o.tensor = 1;
        o.rate = 0.7F;
        o.momentum = 0.9F;
        auto& values = data[static_cast<std::size_t>(r)];
        o.output = {worker::Piece{reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)}};
        job.cluster.submit(job.uid, r, o, job.sequence, [&, r](const worker::Outcome& outcome) {
          ++done;
          errors[static_cast<std::size_t>(r)] = outcome.status.message();
        });
      };
      for (int r = 0; r < 4; ++r) submit(r, ReduceOp::kNesterovStep);
      for (int round = 0; round < after; ++round) job.cluster.progress();
      if (leaves)
        job.cluster.at(4).dedicated().leave_all(core::Status(core::Code::kAborted, "it was stopped"));
      else
        job.cluster.kill(4);
      REQUIRE(job.cluster.run_until([&] { return done == 4; }, 100000000));
      for (std::size_t r = 0; r < 4; ++r) {
        if (errors[r].empty()) REQUIRE(data[r] == right[2]);
        failed_in_a_step += errors[r].empty() ? 0 : 1;
        if (!errors[r].empty()) {
          CHECK(errors[r].find("the dedicated server host4 is gone: ") != std::string::npos);
          CHECK(errors[r].find("outer optimizer's state (LocalSteps), and this part is lost") != std::string::npos);
        }
      }
      // Nor does any later operation, of whatever kind.
      ++job.sequence;
      done = 0;
      errors.assign(4, "none");
      for (int r = 0; r < 4; ++r) submit(r, ReduceOp::kSum);
      REQUIRE(job.cluster.run_until([&] { return done == 4; }, 100000000));
      for (const std::string& error : errors) CHECK(error.find("and this part is lost") != std::string::npos);
    }
  }
  CHECK(failed_in_a_step > 30);
}

TEST_CASE("cluster/outer: a step whose server was lost before says so, and sums go on until then", "[cluster][fast]") {
  Job job(layout({0, 1, 2}, {2}));
  job.idle_rounds = 100000000;  // until a broken connection is a verdict
  job.cluster.kill(3);
  std::vector<std::vector<float>> data(3, std::vector<float>(6000, 1.0F));
  REQUIRE(job.run([](int) { return Call{ReduceOp::kSum, 0, 0.0F, 0.0F}; }, data) == "");
  REQUIRE(data[0] == std::vector<float>(6000, 3.0F));
  const std::string error = job.run([](int) { return Call{}; }, data);
  INFO(error);
  CHECK(error.find("the dedicated server host3 is gone: before this operation was issued") != std::string::npos);
}
