// What a chunk is on the wire may differ from what it is in memory: an identity that pads every chunk, and counts.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/recorder.h"

namespace {

using namespace hybridps;
using schedule::Kind;
using test::Cluster;
using test::ClusterOptions;
using Bytes = std::vector<std::byte>;

/// Elements behind a mark, and as many bytes more as its count of chunks says: it has state.
class Padding final : public compress::Codec {
 public:
  explicit Padding(std::size_t element_bytes) : element_bytes_(element_bytes) {}
  std::size_t bytes_max(std::size_t bytes) const noexcept override { return bytes + kMark + kMost; }
  std::size_t bytes_full(std::size_t bytes) const noexcept override { return bytes + kMark; }
  std::size_t block_elements() const noexcept override { return 16; }
  void accelerate(std::byte*, std::size_t, float*) const override {}
  compress::ChunkOrigin place_of(const std::byte*) const noexcept override { return {}; }
  std::size_t encode(const std::byte* in, std::size_t bytes, compress::ChunkOrigin&, std::byte* out) const override {
    std::memset(out, 0xA5, kMark);
    std::memcpy(out + kMark, in, bytes);
    const std::size_t more = encoded++ % (kMost + 1);
    std::memset(out + kMark + bytes, 0x5A, more);
    return kMark + bytes + more;
  }
  bool fits(const std::byte* data, std::size_t wire_bytes, std::size_t bytes) const noexcept override {
    ++looked_at;
    return wire_bytes >= bytes + kMark && wire_bytes <= bytes_max(bytes) && data[0] == std::byte{0xA5};
  }
  void expand(const std::byte* data, std::size_t first, std::size_t count, std::byte* out) const noexcept override {
    std::memcpy(out, data + kMark + first * element_bytes_, count * element_bytes_);
    if (make_coarse) std::memset(out, 0, count * element_bytes_);
  }

  mutable std::uint64_t encoded = 0;
  mutable std::uint64_t looked_at = 0;  // chunks that came
  bool make_coarse = false;             // loses everything

 private:
  static constexpr std::size_t kMark = 4;
  static constexpr std::size_t kMost = 9;
  const std::size_t element_bytes_;
};

class Paddings final : public compress::Codecs {
 public:
  Paddings() : compress::Codecs(compress::Spec{}) {}
  const compress::Codec* of(bool, core::DType) const noexcept override { return &padding; }
  Padding padding{sizeof(float)};
};

struct Layout {
  std::vector<int> node_of;
  std::vector<double> servers;
};

struct Job {
  Job(const Layout& layout, bool with_codec, std::size_t chunk_bytes = 1024, ClusterOptions options = {}) {
    options.node_of = layout.node_of;
    options.servers = layout.servers;
    options.chunk_bytes = chunk_bytes;
    if (with_codec)
      for (std::size_t member = 0; member < layout.node_of.size() + layout.servers.size(); ++member) {
        codecs.push_back(std::make_shared<Paddings>());
        options.codecs.push_back(codecs.back());
      }
    cluster = std::make_unique<Cluster>(options);
    uid = cluster->open_group();
  }
  std::vector<std::vector<float>> run(Kind kind, std::size_t count, core::ReduceOp op, int root) {
    const int n = cluster->size();
    std::vector<std::vector<float>> in;
    std::vector<std::vector<float>> out(static_cast<std::size_t>(n));
    int done = 0;
    for (int r = 0; r < n; ++r) {
      in.emplace_back(count * static_cast<std::size_t>(kind == Kind::kReduceScatter ? n : 1));
      for (std::size_t i = 0; i < in.back().size(); ++i)
        in.back()[i] = std::ldexp(static_cast<float>((r + 1) * 37 + static_cast<int>(i % 101)),
                                  static_cast<int>((i * 7 + static_cast<std::size_t>(r) * 13) % 40) - 20);
    }
    for (int r = 0; r < n; ++r) {
      worker::Operation o;
      o.kind = kind;
      o.dtype = core::DType::kFloat32;
      o.op = op;
      o.root = root;
      if (!codecs.empty()) o.coding = wire::Coding::kFull;
      const auto at = static_cast<std::size_t>(r);
      if (kind == Kind::kAllReduce) {
        out[at] = in[at];
      } else {
        o.input = {{reinterpret_cast<std::byte*>(in[at].data()), in[at].size() * sizeof(float)}};
        if (kind == Kind::kReduceScatter || r == root) out[at].resize(count);
        if (kind == Kind::kReduceScatter) o.input_bytes.assign(static_cast<std::size_t>(n), count * sizeof(float));
      }
      if (!out[at].empty()) o.output = {{reinterpret_cast<std::byte*>(out[at].data()), out[at].size() * sizeof(float)}};
      cluster->submit(uid, r, o, sequence, [&done](const worker::Outcome& outcome) {
        CHECK(outcome.status.to_string() == "ok");
        ++done;
      });
    }
    ++sequence;
    REQUIRE(cluster->run_until([&] { return done == n; }));
    return out;
  }
  std::uint64_t encoded() const {
    std::uint64_t sum = 0;
    for (const auto& codec : codecs) sum += codec->padding.encoded;
    return sum;
  }

  std::vector<std::shared_ptr<Paddings>> codecs;
  std::unique_ptr<Cluster> cluster;
  core::GroupUid uid;
  std::uint64_t sequence = 0;
};

const std::vector<Layout> kLayouts = {
    {{0, 1}, {}}, {{0, 1, 2}, {}}, {{0, 0, 1, 1}, {}}, {{0, 0, 0}, {}}, {{0, 1, 2}, {1}}, {{0, 0, 1}, {1, 2}},
};

}  // namespace

TEST_CASE("cluster/codec: what goes as other bytes between nodes gives the same bits", "[cluster][fast]") {
  for (std::size_t layout = 0; layout < kLayouts.size(); ++layout) {
    // The same chunks in both.
    Job plain(kLayouts[layout], false, 448);
    Job padded(kLayouts[layout], true, 1024);
    for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter})
      for (const std::size_t count : {std::size_t{1}, std::size_t{63}, std::size_t{1000}, std::size_t{5003}})
        for (const core::ReduceOp op : {core::ReduceOp::kSum, core::ReduceOp::kAvg, core::ReduceOp::kMax}) {
          INFO("layout " << layout << " kind " << static_cast<int>(kind) << " count " << count);
          const int root = kind == Kind::kReduce ? plain.cluster->size() - 1 : -1;
          REQUIRE(padded.run(kind, count, op, root) == plain.run(kind, count, op, root));
        }
    CHECK((padded.encoded() > 0) == (layout != 3));  // within a node nothing is encoded
  }
}

TEST_CASE("cluster/codec: each chunk is encoded once by who sends it, for all who get it", "[cluster][fast]") {
  for (const auto& layout : kLayouts) {
    Job job(layout, true);
    job.run(Kind::kAllReduce, 5003, core::ReduceOp::kSum, -1);
    std::map<std::uint32_t, schedule::Span> spans;
    for (int rank = 0; rank < job.cluster->size(); ++rank) {
      schedule::Request request;
      request.kind = Kind::kAllReduce;
      request.total_bytes = 5003 * sizeof(float);
      const Padding padding(sizeof(float));
      const std::uint32_t chunk_bytes = compress::chunk_bytes(padding, sizeof(float), 512, 512);
      for (const schedule::Span& span :
           schedule::make_plan(request, schedule::Topology(layout.node_of, rank, {}, layout.servers),
                               schedule::Limits{chunk_bytes, 256}))
        spans[span.id] = span;
    }
    const schedule::Topology topology(layout.node_of, 0, {}, layout.servers);
    const auto nodes = static_cast<std::uint64_t>(topology.nodes());
    std::uint64_t pushed = 0;
    std::uint64_t results = 0;
    for (const auto& [id, span] : spans) {
      pushed += span.chunks * (nodes > 1 ? nodes : 0);
      results += nodes > 1 ? span.chunks : 0;
    }
    CHECK(job.encoded() == pushed + results);
  }
}

TEST_CASE("cluster/codec: every rank gets what goes out, the owner and its node too", "[cluster][fast]") {
  for (const auto& layout : kLayouts) {
    Job job(layout, true);
    for (const auto& codec : job.codecs) codec->padding.make_coarse = true;
    const auto out = job.run(Kind::kAllReduce, 3000, core::ReduceOp::kSum, -1);
    const bool one_node = layout.node_of.back() == 0;
    for (const auto& result : out) {
      CHECK(result == out.front());
      CHECK((result == std::vector<float>(3000, 0.0F)) == !one_node);
    }
  }
}

TEST_CASE("cluster/codec: a chunk that a codec cannot have made fails the group", "[cluster][fast]") {
  Job job({{0, 1}, {}}, true);
  // One member has none.
  ClusterOptions options;
  options.node_of = {0, 1};
  options.codecs = {std::make_shared<Paddings>(), nullptr};
  options.chunk_bytes = 1024;
  Cluster cluster(options);
  const auto uid = cluster.open_group();
  int failed = 0;
  std::vector<std::vector<float>> data(2, std::vector<float>(10, 1.0F));
  for (int r = 0; r < 2; ++r) {
    worker::Operation o;
    o.kind = Kind::kAllReduce;
    o.dtype = core::DType::kFloat32;
    o.op = core::ReduceOp::kSum;
    o.coding = wire::Coding::kFull;
    o.output = {{reinterpret_cast<std::byte*>(data[static_cast<std::size_t>(r)].data()), 40}};
    cluster.submit(uid, r, o, 0,
                   [&failed](const worker::Outcome& outcome) { failed += outcome.status.is_ok() ? 0 : 1; });
  }
  CHECK(cluster.run_until([&] { return failed == 2; }));
}

namespace {

/// Gradients of several tensors on all ranks, step after step, through a codec that leaves much out.
struct Training {
  Training(const Layout& l, const std::string& spec, std::size_t elements, std::size_t chunk_bytes = 8192,
           ClusterOptions options = {})
      : layout(l), count(elements) {
    options.node_of = l.node_of;
    options.servers = l.servers;
    options.chunk_bytes = chunk_bytes;
    for (std::size_t member = 0; member < l.node_of.size() + l.servers.size(); ++member)
      options.codecs.push_back(std::make_shared<compress::Codecs>(compress::parse_spec(spec).value()));
    cluster = std::make_unique<Cluster>(options);
    uid = cluster->open_group();
    given.assign(count, 0.0);
    applied.assign(count, 0.0);
  }
  static float gradient(int rank, int step, std::size_t i) {
    const auto hash = static_cast<std::uint32_t>((i + 1) * 2654435761U ^ static_cast<unsigned>(step * 97 + rank * 31));
    return static_cast<float>(static_cast<std::int32_t>(hash * 747796405U + 2891336453U)) * 0x1p-31F *
           static_cast<float>(1 + i % 7);
  }
  /// Returns what rank 0 gets.
  std::vector<float> step(int number, wire::Coding coding = wire::Coding::kFull, compress::TensorKey tensor = 1) {
    const int n = cluster->size();
    std::vector<std::vector<float>> data(static_cast<std::size_t>(n), std::vector<float>(count));
    int done = 0;
    for (int r = 0; r < n; ++r) {
      auto& mine = data[static_cast<std::size_t>(r)];
      for (std::size_t i = 0; i < count; ++i) {
        mine[i] = i / 512 % 5 == 4 ? 0.0F : gradient(r, number, i);  // rows of zeros
        if (number == nan_step && r == 0 && i == 3) mine[i] = std::nanf("");
      }
      worker::Operation o;
      o.kind = Kind::kAllReduce;
      o.dtype = core::DType::kFloat32;
      o.op = core::ReduceOp::kSum;
      o.coding = coding;
      o.tensor = tensor;
      o.output = {{reinterpret_cast<std::byte*>(mine.data()), count * sizeof(float)}};
      for (std::size_t i = number == nan_step ? 32 : 0; i < count; ++i) given[i] += static_cast<double>(mine[i]);
      cluster->submit(uid, r, o, sequence, [&done](const worker::Outcome& outcome) {
        CHECK(outcome.status.to_string() == "ok");
        ++done;
      });
    }
    ++sequence;
    REQUIRE(cluster->run_until([&] { return done == n; }));
    for (const auto& other : data) REQUIRE(std::memcmp(other.data(), data.front().data(), count * sizeof(float)) == 0);
    for (std::size_t i = number == nan_step ? 32 : 0; i < count; ++i)
      applied[i] += std::isnan(data.front()[i]) ? 0.0 : static_cast<double>(data.front()[i]);
    return data.front();
  }
  /// What is left out on all ranks together.
  std::vector<double> left(compress::TensorKey tensor = 1) {
    std::vector<double> sum(count, 0.0);
    for (int r = 0; r < cluster->size(); ++r) {
      for (const auto* part :
           {&cluster->at(r).worker().find(uid)->residuals, &cluster->at(r).worker().find(uid)->owed}) {
        const auto kept = part->copy_of(tensor);
        for (std::size_t i = 0; i < kept.values.size(); ++i) sum[i] += static_cast<double>(kept.values[i]);
      }
    }
    return sum;
  }
  double apart() {
    const std::vector<double> rest = left();
    double error = 0.0;
    double size = 0.0;
    for (std::size_t i = 0; i < count; ++i) {
      error += std::pow(applied[i] + rest[i] - given[i], 2);
      size += given[i] * given[i];
    }
    return std::sqrt(error / size);
  }

  Layout layout;
  std::size_t count;
  std::unique_ptr<Cluster> cluster;
  core::GroupUid uid;
  std::uint64_t sequence = 0;
  int nan_step = -1;
  std::vector<double> given;
  std::vector<double> applied;
};

}  // namespace

TEST_CASE("cluster/codec: what was applied and what is left out are the sum of all gradients", "[cluster][fast]") {
  for (const std::string spec : {"int4", "onebit", "topk:k=0.02", "randomk:k=0.05", "int8:ef=1"})
    for (const Layout& layout : {Layout{{0, 1}, {}}, Layout{{0, 1, 2}, {}}, Layout{{0, 0, 1, 1}, {}}}) {
      INFO(spec << " " << layout.node_of.size());
      Training training(layout, spec, 6000);
      for (int step = 0; step < 200; ++step) training.step(step);
      CHECK(training.apart() < 1e-5);
      bool some = false;
      for (const double value : training.left()) some = some || value != 0.0;
      CHECK(some);
    }
}

TEST_CASE("cluster/codec: a step that is not finite leaves what was left out before", "[cluster][fast]") {
  Training training({{0, 1, 2}, {}}, "int4", 3000);
  training.nan_step = 20;
  for (int step = 0; step < 40; ++step) {
    const std::vector<float> result = training.step(step);
    CHECK(std::isnan(result[3]) == (step == 20));
    CHECK(std::isnan(result[0]) == (step == 20));  // of its block
    CHECK_FALSE(std::isnan(result[32]));
  }
  // Of its block what the other nodes had left out went with the step; all else adds up.
  const std::vector<double> rest = training.left();
  for (std::size_t i = 0; i < 3000; ++i) {
    CHECK(std::isfinite(rest[i]));
    if (i >= 32) CHECK(std::fabs(training.applied[i] + rest[i] - training.given[i]) < 1e-3);
  }
}

TEST_CASE("cluster/codec: a thousand steps, rows of zeros, one that is not finite, and shares that change",
          "[cluster][fast]") {
  for (const std::string spec : {"int4", "onebit"})
    for (const Layout& layout : {Layout{{0, 1, 2}, {}}, Layout{{0, 0, 1, 2, 2}, {}}}) {
      INFO(spec << " " << layout.node_of.size());
      Training training(layout, spec, 4000);
      training.nan_step = 500;
      const auto plans = [&](int rank) -> worker::PlanChanges& {
        return *training.cluster->at(rank).worker().find(training.uid)->plans;
      };
      std::uint32_t changes = 0;
      for (int step = 0; step < 1000; ++step) {
        training.step(step);
        if (step % 150 != 140) continue;
        plans(0).propose({1.0 + step % 4, 1.0 + step % 7, 2.0});
        ++changes;
        REQUIRE(training.cluster->run_until([&] {
          for (int r = 0; r < training.cluster->size(); ++r)
            if (plans(r).is_frozen() || plans(r).newest() != changes) return false;
          return true;
        }));
      }
      CHECK(changes == 6);
      const std::vector<double> rest = training.left();
      double error = 0.0;
      double size = 0.0;
      for (std::size_t i = spec == "int4" ? 32 : 256; i < training.count; ++i) {  // of its block the others' is lost
        error += std::pow(training.applied[i] + rest[i] - training.given[i], 2);
        size += training.given[i] * training.given[i];
      }
      CHECK(std::sqrt(error / size) < 1e-5);
    }
}

TEST_CASE("cluster/codec: bits depend neither on who owns what nor on chunks", "[cluster][fast]") {
  for (const std::string spec : {"int8", "int4", "onebit", "topk:k=0.02", "randomk:k=0.05", "dithering", "bf16"}) {
    std::vector<float> expected;
    for (const std::size_t chunk : {std::size_t{8192}, std::size_t{32768}})
      for (const std::vector<double>& servers :
           {std::vector<double>{}, std::vector<double>{1}, std::vector<double>{3, 1}}) {
        INFO(spec << " chunks " << chunk << " servers " << servers.size());
        Training training({{0, 1, 2}, servers}, spec, 20000, chunk);
        for (int step = 0; step < 3; ++step) training.step(step);
        // With feedback, too: what a server leaves out of a sum is what an owner would.
        const std::vector<float> result = training.step(3);
        if (expected.empty()) expected = result;
        REQUIRE(std::memcmp(result.data(), expected.data(), expected.size() * sizeof(float)) == 0);
      }
  }
}

namespace {

struct Regions {
  std::vector<int> node_of;
  std::vector<int> region_of;
};
const std::vector<Regions> kRegions = {
    {{0, 1}, {0, 1}},
    {{0, 1, 2, 3}, {0, 0, 1, 1}},
    {{0, 1, 2}, {0, 1, 1}},
    {{0, 0, 1, 1, 2, 3, 3}, {1, 0, 0, 1}},
    {{0, 1, 2, 3, 4, 5}, {0, 1, 1, 2, 0, 2}},
};

ClusterOptions options_of(const Regions& regions, std::vector<double> weights = {}) {
  ClusterOptions options;
  options.region_of = regions.region_of;
  options.weights = std::move(weights);
  options.tiny_bytes = 0;
  return options;
}

}  // namespace

TEST_CASE("cluster/codec: between regions each region's sum is encoded once, and the total once", "[cluster][fast]") {
  for (const std::string spec : {"bf16", "int8", "int4:ef=0", "onebit:ef=0", "topk:k=0.1,ef=0"})
    for (const Regions& regions : kRegions) {
      INFO(spec << ", " << regions.node_of.size() << " ranks, " << regions.region_of.size() << " nodes");
      const std::size_t count = 9000;
      Training training({regions.node_of, {}}, spec, count, 8192, options_of(regions));
      const std::vector<float> result = training.step(0);
      const compress::Codecs codecs(compress::parse_spec(spec).value());
      const compress::Codec& codec = *codecs.of(false, core::DType::kFloat32);
      const auto coded = [&](std::vector<float> values) {
        compress::ChunkOrigin place;
        Bytes wire(codec.bytes_max(4 * count));
        codec.encode(reinterpret_cast<const std::byte*>(values.data()), 4 * count, place, wire.data());
        codec.expand(wire.data(), 0, count, reinterpret_cast<std::byte*>(values.data()));
        return values;
      };
      const auto add = [&](std::vector<float>& sum, const std::vector<float>& part) {
        if (sum.empty()) sum.assign(count, -0.0F);
        for (std::size_t i = 0; i < count; ++i) sum[i] += part[i];
      };
      const int regions_count = *std::max_element(regions.region_of.begin(), regions.region_of.end()) + 1;
      std::vector<float> total;
      for (int region = 0; region < regions_count; ++region) {
        std::vector<float> of_region;
        for (int node = 0; node < static_cast<int>(regions.region_of.size()); ++node) {
          if (regions.region_of[static_cast<std::size_t>(node)] != region) continue;
          std::vector<float> of_node;
          for (int rank = 0; rank < static_cast<int>(regions.node_of.size()); ++rank) {
            if (regions.node_of[static_cast<std::size_t>(rank)] != node) continue;
            std::vector<float> mine(count);
            for (std::size_t i = 0; i < count; ++i) mine[i] = i / 512 % 5 == 4 ? 0.0F : Training::gradient(rank, 0, i);
            add(of_node, mine);
          }
          add(of_region, of_node);
        }
        add(total, coded(of_region));
      }
      const std::vector<float> expected = coded(total);
      for (std::size_t i = 0; i < count; ++i) REQUIRE(result[i] == expected[i]);
    }
}

TEST_CASE("cluster/codec: between regions what goes as other bytes gives the same bits", "[cluster][fast]") {
  for (const Regions& regions : kRegions) {
    Job plain({regions.node_of, {}}, false, 448, options_of(regions));
    Job padded({regions.node_of, {}}, true, 1024, options_of(regions));
    for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter})
      for (const std::size_t count : {std::size_t{1}, std::size_t{63}, std::size_t{1000}, std::size_t{5003}})
        for (int root = kind == Kind::kReduce ? plain.cluster->size() - 1 : -1; root >= -1; --root) {
          if (kind == Kind::kReduce && root < 0) break;
          INFO(regions.node_of.size() << " ranks, kind " << static_cast<int>(kind) << " count " << count << " root "
                                      << root);
          REQUIRE(padded.run(kind, count, core::ReduceOp::kSum, root) ==
                  plain.run(kind, count, core::ReduceOp::kSum, root));
        }
    CHECK(padded.encoded() > 0);
  }
}

TEST_CASE("cluster/codec: between regions, bits depend neither on who owns what nor on chunks", "[cluster][fast]") {
  for (const std::string spec :
       {"int8", "int4", "onebit", "topk:k=0.02", "randomk:k=0.05", "dithering", "bf16", "int8:momentum=0.9"})
    for (const Regions& regions : kRegions) {
      std::vector<float> expected;
      for (const std::size_t chunk : {std::size_t{8192}, std::size_t{32768}})
        for (const bool uneven : {false, true}) {
          INFO(spec << ", " << regions.node_of.size() << " ranks, chunks " << chunk << (uneven ? ", uneven" : ""));
          std::vector<double> weights;
          for (std::size_t node = 0; uneven && node < regions.region_of.size(); ++node)
            weights.push_back(static_cast<double>((node + 1) % 3));
          Training training({regions.node_of, {}}, spec, 20000, chunk, options_of(regions, weights));
          for (int step = 0; step < 3; ++step) training.step(step);
          const std::vector<float> result = training.step(3);
          if (expected.empty()) expected = result;
          REQUIRE(std::memcmp(result.data(), expected.data(), expected.size() * sizeof(float)) == 0);
        }
    }
}

TEST_CASE("cluster/codec: between regions, what was applied and what is left out are the sum of all gradients",
          "[cluster][fast]") {
  for (const std::string spec : {"int4", "onebit", "topk:k=0.02", "randomk:k=0.05", "int8:ef=1"})
    for (const Regions& regions : kRegions) {
      INFO(spec << ", " << regions.node_of.size() << " ranks");
      Training training({regions.node_of, {}}, spec, 6000, 8192, options_of(regions));
      for (int step = 0; step < 12; ++step) training.step(step);
      CHECK(training.apart() < 1e-5);
    }
}

TEST_CASE("cluster/codec: between regions a tensor crosses encoded, and inside as it is", "[cluster][fast]") {
  for (const std::string scope : {"regions", "nodes"})
    for (const Regions& regions : kRegions) {
      INFO("scope " << scope << ", " << regions.node_of.size() << " ranks");
      const auto region_of = [&regions](int rank) {
        return regions.region_of[static_cast<std::size_t>(regions.node_of[static_cast<std::size_t>(rank)])];
      };
      std::uint64_t across = 0;
      std::uint64_t plain_inside = 0;
      ClusterOptions options = options_of(regions);
      options.wrap = [&](std::unique_ptr<transport::Transport> inner,
                         int rank) -> std::unique_ptr<transport::Transport> {
        const auto seen = [&, rank](const wire::Message& message, core::EngineId peer) {
          const auto* data = message.as<wire::Data>();
          const int to = static_cast<int>(peer.value - 1000);
          if (data == nullptr || (data->chunk.stage != wire::Stage::kPush && data->chunk.stage != wire::Stage::kResult))
            return;
          if (region_of(rank) != region_of(to))
            across += message.payload_bytes;
          else if (regions.node_of[static_cast<std::size_t>(rank)] != regions.node_of[static_cast<std::size_t>(to)])
            plain_inside += message.payload_bytes;
        };
        return std::make_unique<test::Recorder>(std::move(inner), seen);
      };
      const std::uint64_t count = 1 << 16;
      Training training({regions.node_of, {}}, "int8:scope=" + scope, count, 8192, options);
      training.step(0);
      const std::uint64_t coded = count / 32 * 34;
      const auto nodes = regions.region_of.size();
      const auto many =
          static_cast<std::uint64_t>(*std::max_element(regions.region_of.begin(), regions.region_of.end()));
      if (scope == "regions") {
        CHECK(across == 2 * coded * many);  // to the other regions' owners, and back
        CHECK(plain_inside == 2 * 4 * count * (nodes - many - 1));
      } else {
        CHECK(across + plain_inside == 2 * coded * (nodes - 1));
      }
    }
}

TEST_CASE("cluster/codec: settings that take turns change no bit, whatever is remembered between operations",
          "[cluster][fast]") {
  for (const std::string spec :
       {"int8", "int8:ef=1", "int4", "onebit", "topk:k=0.02", "randomk:k=0.05", "dithering", "bf16"})
    for (const std::vector<double>& servers : {std::vector<double>{}, std::vector<double>{3, 1}}) {
      INFO(spec << " servers " << servers.size());
      Training plain({{0, 1, 1, 2}, servers}, spec, 8000, 32768);
      Training turned({{0, 1, 1, 2}, servers}, spec, 8000, 32768);
      worker::PlanChanges& plans = *turned.cluster->at(0).worker().find(turned.uid)->plans;
      for (int step = 0; step < 24; ++step) {
        if (step % 6 == 1) {
          schedule::Turns turns;
          turns.a.chunk_bytes = step % 12 == 1 ? 0 : 4096;
          turns.b.chunk_bytes = step % 12 == 1 ? 4096 : 16384;
          turns.b.pace_chunks = 2;
          turns.b.window_step = schedule::kWindowStepUsual - 1;
          turns.pairs = 2;
          turns.order = 2;
          REQUIRE(turned.cluster->run_until([&] { return !plans.is_frozen(); }));
          plans.try_out(turns);
        }
        const std::vector<float> expected = plain.step(step);
        const std::vector<float> result = turned.step(step);
        REQUIRE(std::memcmp(result.data(), expected.data(), expected.size() * sizeof(float)) == 0);
      }
      CHECK(plans.newest() >= 8);
      CHECK(plain.left() == turned.left());
    }
}

TEST_CASE("cluster/codec: results that wait for one receiver hold no slots that others need", "[cluster][fast]") {
  for (const std::vector<double>& servers : {std::vector<double>{}, std::vector<double>{}, std::vector<double>{},
                                             std::vector<double>{1}, std::vector<double>{3, 1}}) {
    INFO("servers " << servers.size());
    // Many chunks for few slots; and what they hold comes free in another order at each receiver.
    Training training({{0, 1, 2}, servers}, "int8", 20000, 1024);
    for (int step = 0; step < 10; ++step) training.step(step);
  }
}

TEST_CASE(
    "cluster/codec: a dedicated server without memory for what its sums leave out tells all ranks, and they go on",
    "[cluster][fast]") {
  constexpr std::size_t kCount = 6000;
  for (const bool has_memory : {true, false}) {
    INFO(has_memory);
    ClusterOptions options;
    if (!has_memory) options.server_residual_bytes = 1000;
    Training training({{0, 1, 2}, {2}}, "int4", kCount, 8192, options);
    for (int step = 0; step < 5; ++step)
      for (const compress::TensorKey tensor : {compress::TensorKey{1}, compress::TensorKey{2}})
        training.step(step, wire::Coding::kFull, tensor);
    for (int r = 0; r < 3; ++r) {
      const worker::GroupState& group = *training.cluster->at(r).worker().find(training.uid);
      CHECK(group.lost_servers->tensors_forgotten() == (has_memory ? 0 : 2));
      CHECK(group.residuals.copy_of(1).values.size() == kCount);  // contributions still have it
      CHECK(group.residuals.stats().refused == 0);
    }
  }
}

// --- Memory that is coded already

namespace {

struct CodedJob {
  CodedJob(const Layout& layout, const std::string& spec, std::vector<int> region_of = {})
      : codecs(compress::parse_spec(spec).value()) {
    ClusterOptions options;
    options.region_of = std::move(region_of);
    options.node_of = layout.node_of;
    options.servers = layout.servers;
    options.chunk_bytes = 1024;
    for (std::size_t member = 0; member < layout.node_of.size() + layout.servers.size(); ++member)
      options.codecs.push_back(std::make_shared<compress::Codecs>(compress::parse_spec(spec).value()));
    cluster = std::make_unique<Cluster>(options);
    uid = cluster->open_group();
  }
  const compress::Codec& codec() const { return *codecs.of(false, core::DType::kFloat32); }
  Bytes coded(const std::vector<float>& values) const {
    compress::ChunkOrigin place;
    Bytes out(codec().bytes_max(4 * values.size()));
    out.resize(codec().encode(reinterpret_cast<const std::byte*>(values.data()), 4 * values.size(), place, out.data()));
    return out;
  }
  /// An allreduce of all ranks, of which some have their memory coded.
  std::vector<std::vector<float>> run(std::size_t count, const std::function<bool(int)>& is_coded) {
    const int n = cluster->size();
    std::vector<std::vector<float>> values;
    std::vector<Bytes> codes;
    int done = 0;
    for (int r = 0; r < n; ++r) {
      values.emplace_back(count);
      for (std::size_t i = 0; i < count; ++i)
        values.back()[i] = std::sin(static_cast<float>(i * 7 + static_cast<std::size_t>(r) * 131));
      codes.push_back(coded(values.back()));
    }
    for (int r = 0; r < n; ++r) {
      worker::Operation o;
      o.kind = Kind::kAllReduce;
      o.dtype = core::DType::kFloat32;
      o.op = core::ReduceOp::kSum;
      o.coding = wire::Coding::kFull;
      o.coded = is_coded(r);
      o.total_bytes = 4 * count;
      auto& memory = codes[static_cast<std::size_t>(r)];
      if (o.coded)
        o.output = {{memory.data(), memory.size()}};
      else
        o.output = {{reinterpret_cast<std::byte*>(values[static_cast<std::size_t>(r)].data()), 4 * count}};
      cluster->submit(uid, r, o, sequence, [&done](const worker::Outcome& outcome) {
        CHECK(outcome.status.to_string() == "ok");
        ++done;
      });
    }
    ++sequence;
    REQUIRE(cluster->run_until([&] { return done == n; }));
    for (int r = 0; r < n; ++r)
      if (is_coded(r))
        codec().expand(codes[static_cast<std::size_t>(r)].data(), 0, count,
                       reinterpret_cast<std::byte*>(values[static_cast<std::size_t>(r)].data()));
    return values;
  }
  /// Of one rank's operation, which is coded.
  std::string refusal(const std::function<void(worker::Operation&)>& change) {
    Bytes memory(codec().bytes_full(4 * 1000));
    worker::Operation o;
    o.kind = Kind::kAllReduce;
    o.dtype = core::DType::kFloat32;
    o.op = core::ReduceOp::kSum;
    o.coding = wire::Coding::kFull;
    o.coded = true;
    o.total_bytes = 4 * 1000;
    o.output = {{memory.data(), memory.size()}};
    change(o);
    std::string text = "nothing";
    cluster->submit(uid, 0, o, sequence++,
                    [&text](const worker::Outcome& outcome) { text = outcome.status.to_string(); });
    cluster->run_until([&] { return text != "nothing"; });
    return text;
  }

  compress::Codecs codecs;
  std::unique_ptr<Cluster> cluster;
  core::GroupUid uid;
  std::uint64_t sequence = 0;
};

bool says(const std::string& text, const std::string& what) { return text.find(what) != std::string::npos; }

}  // namespace

TEST_CASE("cluster/codec: memory that is coded goes out and comes back as it would be coded here", "[cluster][fast]") {
  for (const auto& layout : {Layout{{0, 1}, {}}, Layout{{0, 1, 2}, {}}, Layout{{0, 1, 1}, {}}})
    for (const std::string spec : {"int8", "int4:ef=0"})
      for (const std::size_t count : {std::size_t{1}, std::size_t{32}, std::size_t{1000}, std::size_t{50021}}) {
        INFO("ranks " << layout.node_of.size() << " " << spec << " count " << count);
        CodedJob job(layout, spec);
        const auto want = job.run(count, [](int) { return false; });
        const bool all_alone = layout.node_of.back() == static_cast<int>(layout.node_of.size()) - 1;
        if (all_alone) CHECK((job.run(count, [](int) { return true; }) == want));
        CHECK((job.run(count, [](int rank) { return rank == 0; }) == want));
      }
}

TEST_CASE("cluster/codec: memory that cannot be coded is refused, and why", "[cluster][fast]") {
  const auto as_it_is = [](worker::Operation&) {};
  CodedJob job({{0, 1}, {}}, "int8");
  CHECK(says(job.refusal([](worker::Operation& o) { o.output[0].bytes -= 1; }),
             "the memory is coded and has 1063 bytes, where 1064"));
  CHECK(says(job.refusal([](worker::Operation& o) { o.coding = wire::Coding::kPlain; }),
             "its codec's bytes cannot be cut"));
  CHECK(says(job.refusal([](worker::Operation& o) { o.dtype = core::DType::kInt32; }),
             "its codec's bytes cannot be cut"));
  CHECK(says(job.refusal([](worker::Operation& o) {
    o.kind = Kind::kReduce;
    o.root = 0;
  }),
             "it is no allreduce"));
  CHECK(says(job.refusal([](worker::Operation& o) {
    o.scope = schedule::Scope::kNodes;
    o.rail_bytes = {4 * 1001};
  }),
             "where 1065"));
  CHECK(says(CodedJob({{0, 1}, {}}, "onebit:ef=0").refusal(as_it_is), "its codec's bytes cannot be cut"));
  CHECK(says(CodedJob({{0, 1}, {}}, "int8:ef=1").refusal(as_it_is), "its codec remembers elements"));
  CHECK(says(CodedJob({{0, 0, 1}, {}}, "int8").refusal(as_it_is), "ranks of a node add elements"));
  CHECK(says(CodedJob({{0}, {1}}, "int8").refusal(as_it_is), "its results do not leave the node"));
  CHECK(says(CodedJob({{0, 1, 2}, {1}}, "int8").refusal(as_it_is), "a dedicated server"));
  CHECK(says(CodedJob({{0, 1}, {}}, "int8", {0, 1}).refusal(as_it_is), "ranks of a region add elements"));
}
