// Sums of device memory, coded between nodes: with and without a library inside them, in slices.
#include <cmath>
#include <random>

#include "tests/unit/staging/program.h"

namespace {

using namespace hybridps::test::program;
using Floats = std::vector<float>;

worker::Piece piece_of(Floats& values, std::size_t from, std::size_t count) {
  return {reinterpret_cast<std::byte*>(values.data() + from), count * sizeof(float)};
}

struct Codes {
  std::vector<int> layout;
  bool library = false;
  std::string codec;
};

/// Ranks with codecs, and a program's tensors.
struct Job {
  explicit Job(const Codes& codes) {
    ClusterOptions options = nodes(codes.layout, 5);
    options.chunk_bytes = 8192;
    options.eager_bytes = 16384;
    const auto spec = compress::parse_spec(codes.codec);
    REQUIRE(spec.is_ok());
    for (std::size_t i = 0; i < codes.layout.size(); ++i)
      options.codecs.push_back(std::make_shared<compress::Codecs>(spec.value()));
    cluster = std::make_unique<ClusterThread>(options);
    const Hub hub = codes.library ? intranode::FakeLocalGroups::make_hub() : nullptr;
    ChannelOptions channel = small();
    channel.limits.slice_bytes = 32768;
    all = ranks(*cluster, 5, 8, channel, hub);
    for (Rank& rank : all) {
      keys.push_back(std::make_shared<int>(0));
      rank.code = [key = keys.back()](worker::Operation& slice, const std::byte*) {
        slice.coding = wire::Coding::kFull;
        slice.tensor = static_cast<compress::TensorKey>(++*key);
      };
    }
  }
  /// Each rank's result of a sum, or of the piece that it gets.
  std::vector<Floats> run(Kind kind, const std::vector<Floats>& inputs) {
    const std::size_t n = all.size();
    const std::size_t part = inputs.front().size() / n;
    std::vector<std::shared_ptr<Floats>> in;
    std::vector<std::shared_ptr<Floats>> out;
    std::vector<std::shared_ptr<Staged>> staged;
    for (std::size_t r = 0; r < n; ++r) {
      *keys[r] = 0;  // the same tensors as before
      in.push_back(std::make_shared<Floats>(inputs[r]));
      out.push_back(std::make_shared<Floats>(part));
      worker::Operation o;
      o.kind = kind;
      o.dtype = core::DType::kFloat32;
      o.op = core::ReduceOp::kSum;
      if (kind == Kind::kAllReduce) {
        o.output = {piece_of(*in[r], 0, in[r]->size())};
      } else {
        o.input_bytes.assign(n, part * sizeof(float));
        for (std::size_t p = 0; p < n; ++p) o.input.push_back(piece_of(*in[r], p * part, part));
        o.output = {piece_of(*out[r], 0, part)};
      }
      staged.push_back(all[r].enqueue(std::move(o)));
      REQUIRE(staged.back());
    }
    for (const auto& s : staged) {
      REQUIRE(eventually([&] { return s->is_over(); }));
      REQUIRE(s->status().to_string() == "ok");
    }
    std::vector<Floats> results;
    for (std::size_t r = 0; r < n; ++r) results.push_back(kind == Kind::kAllReduce ? *in[r] : *out[r]);
    return results;
  }
  std::uint64_t coded() {
    std::uint64_t operations = 0;
    for (int rank = 0; rank < cluster->size(); ++rank)
      cluster->run([&](Cluster& c) {
        c.at(rank).update_counters();
        operations += c.at(rank).counters().compress_operations.load();
      });
    return operations;
  }
  std::unique_ptr<ClusterThread> cluster;
  std::vector<Rank> all;
  std::vector<std::shared_ptr<int>> keys;
};

std::vector<Floats> gaussian(std::size_t ranks, std::size_t count) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<Floats> values(ranks, Floats(count));
  for (Floats& of_rank : values)
    for (float& value : of_rank) value = normal(random);
  return values;
}

std::vector<double> sum_of(const std::vector<Floats>& values) {
  std::vector<double> sum(values.front().size());
  for (const Floats& of_rank : values)
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += of_rank[i];
  return sum;
}

double nmse(const Floats& got, const double* want) {
  double error = 0;
  double square = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    square += want[i] * want[i];
  }
  return error / square;
}

// Nodes with unequal ranks: rails lie elsewhere in their ranks' memory.
const std::vector<int> kLayouts[] = {{0, 1}, {0, 0, 1}, {0, 0, 1, 1, 1, 2}};

}  // namespace

TEST_CASE("staging/codec: sums of device memory are coded between nodes", "[staging][fast]") {
  for (const bool library : {false, true}) {
    for (const auto& layout : kLayouts) {
      INFO("ranks " << layout.size() << " library " << library);
      Job job({layout, library, "int8"});
      const auto inputs = gaussian(layout.size(), 60 * 1000);
      const auto want = sum_of(inputs);
      const auto sums = job.run(Kind::kAllReduce, inputs);
      for (const Floats& sum : sums) {
        CHECK(sum == sums.front());
        CHECK(nmse(sum, want.data()) < 1e-4);
        CHECK(nmse(sum, want.data()) > 1e-9);  // it was
      }
      const auto pieces = job.run(Kind::kReduceScatter, inputs);
      for (std::size_t r = 0; r < pieces.size(); ++r) {
        const double error = nmse(pieces[r], want.data() + r * pieces[r].size());
        CHECK(error < 1e-4);
        CHECK(error > 1e-9);
      }
      CHECK(job.coded() > 2 * layout.size());  // in slices
    }
  }
}

TEST_CASE("staging/codec: lots are drawn from where all ranks have an element", "[staging][fast]") {
  for (const auto& layout : kLayouts) {
    INFO("ranks " << layout.size());
    Job job({layout, /*library=*/true, "randomk:k=0.1,ef=0"});
    const auto inputs = gaussian(layout.size(), 60 * 1000);
    const auto want = sum_of(inputs);
    const auto sums = job.run(Kind::kAllReduce, inputs);
    std::size_t sent = 0;
    std::size_t apart = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (sums[0][i] == 0.0F) continue;
      ++sent;
      if (std::abs(sums[0][i] - want[i]) > 1e-4) ++apart;  // some nodes' only
    }
    CHECK(apart == 0);
    CHECK(sent > want.size() / 12);
    CHECK(sent < want.size() / 8);
    for (const Floats& sum : sums) CHECK(sum == sums.front());
  }
}

TEST_CASE("staging/codec: what is left out of a slice comes with its next", "[staging][fast]") {
  for (const auto& layout : kLayouts) {
    INFO("ranks " << layout.size());
    Job job({layout, /*library=*/true, "int4:ef=1"});
    const auto inputs = gaussian(layout.size(), 30 * 1000);
    const auto want = sum_of(inputs);
    std::vector<double> all(want.size());
    constexpr int kSteps = 30;
    double first = 0;
    for (int step = 0; step < kSteps; ++step) {
      const auto sums = job.run(Kind::kAllReduce, inputs);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] += sums[0][i];
      if (step == 0) first = nmse(sums[0], want.data());
    }
    Floats mean(all.size());
    for (std::size_t i = 0; i < all.size(); ++i) mean[i] = static_cast<float>(all[i] / kSteps);
    CHECK(nmse(mean, want.data()) < first / 100);  // falls with the square of the steps
  }
}
