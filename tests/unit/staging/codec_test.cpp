// Sums of device memory, coded between nodes: with and without a library inside them, in slices.
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <random>

#include "hybridps/device/int8.h"
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
  std::function<bool(int rank)> on_device = [](int) { return false; };  // who may
};

/// Ranks with codecs, and a program's tensors.
struct Job {
  explicit Job(const Codes& codes, bool has_kernels = true) {
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
    const auto device = [has_kernels](int rank) {
      FakeOptions gpu = fake(500 + static_cast<std::uint64_t>(rank));
      gpu.has_int8 = has_kernels;
      return gpu;
    };
    all = ranks_with(*cluster, device, channel, hub);
    for (Rank& rank : all) {
      keys.push_back(std::make_shared<int>(0));
      const bool remembers = spec.value().feedback;
      const bool on_device = codes.on_device(rank.group->rank());
      rank.code = [key = keys.back(), remembers, on_device](worker::Operation& slice, const std::byte*) {
        slice.coding = wire::Coding::kFull;
        if (remembers) slice.tensor = static_cast<compress::TensorKey>(++*key);
        return on_device;
      };
      rank.codes = [memories = memories](std::uint64_t bytes) {
        memories->push_back(std::vector<std::byte>(bytes));
        return memories->back().data();
      };
    }
  }
  /// Each rank's result of a sum, or of the piece that it gets.
  std::vector<Floats> run(Kind kind, const std::vector<Floats>& inputs, core::ReduceOp op = core::ReduceOp::kSum,
                          const std::vector<std::size_t>& cuts = {}) {
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
      o.op = op;
      if (kind == Kind::kAllReduce) {
        std::size_t from = 0;  // in pieces
        for (const std::size_t cut : cuts) {
          o.output.push_back(piece_of(*in[r], from, cut - from));
          from = cut;
        }
        o.output.push_back(piece_of(*in[r], from, in[r]->size() - from));
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
        operations += c.at(rank).counters()[observe::Counter::kCompressOperations];
      });
    return operations;
  }
  FakeDevice::Copied copied() const {
    FakeDevice::Copied copied;
    for (const Rank& rank : all) {
      copied.to_host += rank.gpu->copied_bytes().to_host;
      copied.to_device += rank.gpu->copied_bytes().to_device;
    }
    return copied;
  }
  std::unique_ptr<ClusterThread> cluster;
  std::shared_ptr<std::deque<std::vector<std::byte>>> memories = std::make_shared<std::deque<std::vector<std::byte>>>();
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

// On the device
// ---------------------------------------------------------------------------------------------------------

namespace {

bool same_bits(const std::vector<Floats>& a, const std::vector<Floats>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t r = 0; r < a.size(); ++r)
    if (a[r].size() != b[r].size() || std::memcmp(a[r].data(), b[r].data(), 4 * a[r].size()) != 0) return false;
  return true;
}

bool everyone(int /*rank*/) { return true; }
bool nobody(int /*rank*/) { return false; }

struct Ran {
  std::vector<Floats> results;
  FakeDevice::Copied copied;
  std::uint64_t wire = 0;
  std::uint64_t not_finite = 0;
};

Ran ran(const Codes& codes, const std::vector<Floats>& inputs, core::ReduceOp op,
        const std::vector<std::size_t>& cuts = {}) {
  Job job(codes);
  Ran result;
  result.results = job.run(Kind::kAllReduce, inputs, op, cuts);
  result.copied = job.copied();
  for (int rank = 0; rank < job.cluster->size(); ++rank)
    job.cluster->run([&](Cluster& c) {
      c.at(rank).update_counters();
      result.wire += c.at(rank).counters()[observe::Counter::kCompressWireBytes];
      result.not_finite += c.at(rank).counters()[observe::Counter::kCompressNotFinite];
    });
  return result;
}

/// The layouts in which ranks that are alone on their nodes, or have a library there, code on the device.
struct Case {
  std::vector<int> layout;
  bool library = false;
};
const Case kCases[] = {
    {{0, 1}, false}, {{0, 1, 2}, false}, {{0, 1}, true}, {{0, 0, 1}, true}, {{0, 0, 1, 1, 1, 2}, true}};

}  // namespace

TEST_CASE("staging/codec: int8 on the device has the bits and messages of the CPU's, and a quarter of the copies",
          "[staging][fast]") {
  for (const Case& c : kCases) {
    for (const core::ReduceOp op : {core::ReduceOp::kSum, core::ReduceOp::kAvg}) {
      INFO("ranks " << c.layout.size() << " library " << c.library << " averages " << (op == core::ReduceOp::kAvg));
      auto inputs = gaussian(c.layout.size(), 60 * 1000 + 13);
      inputs[0][1000] = std::numeric_limits<float>::infinity();
      inputs[1][50000] = std::numeric_limits<float>::quiet_NaN();
      inputs[1][60012] = -std::numeric_limits<float>::infinity();
      for (std::size_t i = 20000; i < 20100; ++i)
        inputs[0][i] = inputs[1][i] = std::numeric_limits<float>::denorm_min();
      const Ran on_cpu = ran({c.layout, c.library, "int8", nobody}, inputs, op);
      const Ran on_device = ran({c.layout, c.library, "int8", everyone}, inputs, op);
      CHECK(same_bits(on_device.results, on_cpu.results));
      CHECK(on_device.wire == on_cpu.wire);
      CHECK(on_device.not_finite == on_cpu.not_finite);
      CHECK(on_device.not_finite > 0);
      // Each node has all of it once, in slices and rails of whole blocks.
      const std::uint64_t nodes = static_cast<std::uint64_t>(c.layout.back()) + 1;
      CHECK(on_cpu.copied.to_host == nodes * 4 * (60 * 1000 + 13));
      CHECK(on_device.copied.to_host == nodes * device::int8::bytes_of(60 * 1000 + 13));
      CHECK(on_device.copied.to_device == on_device.copied.to_host);
    }
  }
}

TEST_CASE("staging/codec: each rank's device may code or not", "[staging][fast]") {
  const auto inputs = gaussian(3, 60 * 1000);
  const Ran on_cpu = ran({{0, 1, 2}, false, "int8", nobody}, inputs, core::ReduceOp::kSum);
  for (int who = 0; who < 3; ++who) {
    const Ran mixed =
        ran({{0, 1, 2}, false, "int8", [who](int rank) { return rank == who; }}, inputs, core::ReduceOp::kSum);
    CHECK(same_bits(mixed.results, on_cpu.results));
    CHECK(mixed.copied.to_host == 2 * 4 * 60 * 1000 + device::int8::bytes_of(60 * 1000));
  }
}

TEST_CASE("staging/codec: tensors in pieces are coded on the device where pieces are of whole blocks",
          "[staging][fast]") {
  const auto inputs = gaussian(2, 20 * 1000);
  const std::vector<std::size_t> whole{320, 15 * 1024};
  const std::vector<std::size_t> inside{320, 15 * 1024 + 1};
  const Ran one = ran({{0, 1}, false, "int8", nobody}, inputs, core::ReduceOp::kSum);
  const Ran pieces = ran({{0, 1}, false, "int8", everyone}, inputs, core::ReduceOp::kSum, whole);
  CHECK(same_bits(pieces.results, one.results));
  CHECK(pieces.copied.to_host == 2 * device::int8::bytes_of(20 * 1000));
  const Ran broken = ran({{0, 1}, false, "int8", everyone}, inputs, core::ReduceOp::kSum, inside);
  CHECK(same_bits(broken.results, one.results));
  CHECK(broken.copied.to_host > pieces.copied.to_host);  // the slice in which a block is broken
  CHECK(broken.copied.to_host < one.copied.to_host);
}

TEST_CASE("staging/codec: what a device cannot code the CPU does", "[staging][fast]") {
  const auto inputs = gaussian(3, 30 * 1000);
  // Ranks of a node add up elements in its memory; the one that is alone need not.
  const Ran shared = ran({{0, 0, 1}, false, "int8", nobody}, inputs, core::ReduceOp::kSum);
  const Ran alone = ran({{0, 0, 1}, false, "int8", everyone}, inputs, core::ReduceOp::kSum);
  CHECK(same_bits(alone.results, shared.results));
  CHECK(alone.copied.to_host == 2 * 4 * 30 * 1000 + device::int8::bytes_of(30 * 1000));
  // One node: nothing is coded.
  const Ran one_node = ran({{0, 0, 0}, true, "int8", everyone}, inputs, core::ReduceOp::kSum);
  CHECK(one_node.copied.to_host == 0);

  for (const bool has_kernels : {false, true}) {
    INFO("kernels " << has_kernels);
    Job job({{0, 1, 2}, false, "int8", everyone}, has_kernels);
    for (Rank& rank : job.all)
      if (has_kernels) rank.codes = [](std::uint64_t) { return nullptr; };  // no memory
    const auto results = job.run(Kind::kAllReduce, inputs);
    CHECK(same_bits(results, ran({{0, 1, 2}, false, "int8", nobody}, inputs, core::ReduceOp::kSum).results));
    CHECK(job.copied().to_host == 3 * 4 * 30 * 1000);
  }
}
