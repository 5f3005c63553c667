// What a chunk is on the wire may differ from what it is in memory: an identity that pads every chunk, and counts.
#include <cmath>
#include <cstring>
#include <map>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"

namespace {

using namespace hybridps;
using schedule::Kind;
using test::Cluster;
using test::ClusterOptions;

/// Elements behind a mark, and as many bytes more as its count of chunks says: it has state.
class Padding final : public reduce::Codec {
 public:
  explicit Padding(std::size_t element_bytes) : element_bytes_(element_bytes) {}
  std::size_t bytes_max(std::size_t bytes) const noexcept override { return bytes + kMark + kMost; }
  std::size_t encode(const std::byte* in, std::size_t bytes, std::byte* out) override {
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

  std::uint64_t encoded = 0;
  mutable std::uint64_t looked_at = 0;  // chunks that came
  bool make_coarse = false;             // loses everything

 private:
  static constexpr std::size_t kMark = 4;
  static constexpr std::size_t kMost = 9;
  const std::size_t element_bytes_;
};

struct Layout {
  std::vector<int> node_of;
  std::vector<double> servers;
};

struct Job {
  Job(const Layout& layout, bool with_codec, std::size_t chunk_bytes = 1024) {
    ClusterOptions options;
    options.node_of = layout.node_of;
    options.servers = layout.servers;
    options.chunk_bytes = chunk_bytes;
    if (with_codec)
      for (std::size_t member = 0; member < layout.node_of.size() + layout.servers.size(); ++member) {
        codecs.push_back(std::make_shared<Padding>(sizeof(float)));
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
    for (const auto& codec : codecs) sum += codec->encoded;
    return sum;
  }

  std::vector<std::shared_ptr<Padding>> codecs;
  std::unique_ptr<Cluster> cluster;
  core::GroupUid uid;
  std::uint64_t sequence = 0;
};

const std::vector<Layout> kLayouts = {
    {{0, 1}, {}}, {{0, 1, 2}, {}}, {{0, 0, 1, 1}, {}}, {{0, 0, 0}, {}}, {{0, 1, 2}, {1}}, {{0, 0, 1}, {1, 2}},
};

}  // namespace

TEST_CASE("engine/codec: what goes as other bytes between nodes gives the same bits", "[engine][fast]") {
  for (std::size_t layout = 0; layout < kLayouts.size(); ++layout) {
    // The same chunks in both.
    Job plain(kLayouts[layout], false, 512);
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

TEST_CASE("engine/codec: each chunk is encoded once by who sends it, for all who get it", "[engine][fast]") {
  for (const auto& layout : kLayouts) {
    Job job(layout, true);
    job.run(Kind::kAllReduce, 5003, core::ReduceOp::kSum, -1);
    std::map<std::uint32_t, schedule::Span> spans;
    for (int rank = 0; rank < job.cluster->size(); ++rank) {
      schedule::Request request;
      request.kind = Kind::kAllReduce;
      request.total_bytes = 5003 * sizeof(float);
      for (const schedule::Span& span : schedule::make_plan(
               request, schedule::Topology(layout.node_of, rank, {}, layout.servers), schedule::Limits{512, 256}))
        spans[span.id] = span;
    }
    const schedule::Topology topology(layout.node_of, 0, {}, layout.servers);
    const auto nodes = static_cast<std::uint64_t>(topology.nodes());
    std::uint64_t pushed = 0;
    std::uint64_t results = 0;
    for (const auto& [id, span] : spans) {
      pushed += span.chunks * (topology.is_dedicated(span.owner) ? nodes : nodes - 1);
      results += nodes > 1 ? span.chunks : 0;
    }
    CHECK(job.encoded() == pushed + results);
  }
}

TEST_CASE("engine/codec: every rank gets what goes out, the owner and its node too", "[engine][fast]") {
  for (const auto& layout : kLayouts) {
    Job job(layout, true);
    for (const auto& codec : job.codecs) codec->make_coarse = true;
    const auto out = job.run(Kind::kAllReduce, 3000, core::ReduceOp::kSum, -1);
    const bool one_node = layout.node_of.back() == 0;
    for (const auto& result : out) {
      CHECK(result == out.front());
      CHECK((result == std::vector<float>(3000, 0.0F)) == !one_node);
    }
  }
}

TEST_CASE("engine/codec: a chunk that a codec cannot have made fails the group", "[engine][fast]") {
  Job job({{0, 1}, {}}, true);
  // One member has none.
  ClusterOptions options;
  options.node_of = {0, 1};
  options.codecs = {std::make_shared<Padding>(sizeof(float)), nullptr};
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
    o.output = {{reinterpret_cast<std::byte*>(data[static_cast<std::size_t>(r)].data()), 40}};
    cluster.submit(uid, r, o, 0,
                   [&failed](const worker::Outcome& outcome) { failed += outcome.status.is_ok() ? 0 : 1; });
  }
  CHECK(cluster.run_until([&] { return failed == 2; }));
}
