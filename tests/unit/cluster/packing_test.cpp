// Data that goes packed between nodes: every kind of operation has the bits that it has without, in fewer bytes.
#include <cstring>
#include <memory>
#include <numeric>
#include <random>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/recorder.h"

namespace {

using namespace hybridps;
using core::DType;
using schedule::Kind;
using test::Cluster;
using test::ClusterOptions;
using Bytes = std::vector<std::byte>;

struct Place {
  std::vector<int> node_of;
  std::vector<double> servers;
  std::vector<int> region_of;
};

const std::vector<Place> kPlaces = {{{0, 1}, {}, {}},
                                    {{0, 0, 1, 1, 2}, {}, {}},
                                    {{0, 1, 2}, {1, 2}, {}},
                                    {{0, 1, 1, 2, 3, 3}, {}, {0, 0, 1, 1}},
                                    {{0, 0, 0}, {}, {}}};

/// As gradients are: neighbours of like size. `widened`: fp32 that was bf16.
Bytes values(DType dtype, std::size_t elements, std::mt19937_64& random) {
  Bytes bytes(elements * core::size_of(dtype));
  std::normal_distribution<float> normal(0.0F, 1e-3F);
  for (std::size_t i = 0; i < elements; ++i) {
    const float value = normal(random);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    if (dtype == DType::kFloat32) bits &= 0xffff0000U;
    if (dtype == DType::kBfloat16) bits >>= 16;
    if (dtype == DType::kInt32) bits = static_cast<std::uint32_t>(random());
    std::memcpy(bytes.data() + i * core::size_of(dtype), &bits, core::size_of(dtype));
  }
  return bytes;
}

struct Traffic {
  std::uint64_t bytes = 0;  // payload of data between nodes
  std::uint64_t packed = 0;
  std::uint64_t packed_local = 0;
};

class Calls {
 public:
  Calls(const Place& place, flow::MayPack may_pack, Traffic& traffic, std::uint64_t packs_from = 0) {
    ClusterOptions options;
    options.node_of = place.node_of;
    options.servers = place.servers;
    options.region_of = place.region_of;
    options.may_pack = may_pack;
    options.packs_from = packs_from;
    options.chunk_bytes = 4096;
    options.eager_bytes = 8192;
    options.wrap = [this, &traffic](std::unique_ptr<transport::Transport> inner,
                                    int) -> std::unique_ptr<transport::Transport> {
      const bool local = ++wrapped_ % 2 == 0;
      return std::make_unique<test::Recorder>(std::move(inner), [&traffic, local](const wire::Message& message) {
        const auto* data = message.as<wire::Data>();
        if (data == nullptr) return;
        const bool packed = data->packed != wire::kNotPacked;
        if (local) {
          traffic.packed_local += packed ? 1 : 0;
          return;
        }
        traffic.bytes += message.payload_bytes;
        traffic.packed += packed ? 1 : 0;
      });
    };
    cluster = std::make_unique<Cluster>(options);
    uid = cluster->open_group();
  }
  ~Calls() { cluster.reset(); }

  /// What all ranks have afterwards.
  std::vector<Bytes> run(Kind kind, DType dtype, std::size_t elements, std::uint64_t seed) {
    const auto n = static_cast<std::size_t>(cluster->size());
    std::mt19937_64 random(seed);
    std::vector<Bytes> in;
    std::vector<Bytes> out(n);
    const std::size_t own = elements * core::size_of(dtype);
    const bool spreads = kind == Kind::kScatter || kind == Kind::kAllToAll || kind == Kind::kReduceScatter;
    const bool collects = kind == Kind::kGather || kind == Kind::kAllGather || kind == Kind::kAllToAll;
    const std::size_t root = n - 1;
    for (std::size_t r = 0; r < n; ++r) in.push_back(values(dtype, elements * (spreads ? n : 1), random));
    std::size_t done = 0;
    std::size_t calls = 0;
    for (std::size_t r = 0; r < n; ++r) {
      worker::Operation o;
      o.kind = kind;
      o.dtype = dtype;
      if (kind == Kind::kPointToPoint) {
        if (r != 0 && r != root) continue;
        o.dtype = DType::kBytes;
        o.elements = dtype;
        o.sending = r == 0;
        o.peer = static_cast<int>(r == 0 ? root : 0);
        if (!o.sending) out[r].resize(own);
      } else {
        const bool rooted = kind == Kind::kGather || kind == Kind::kScatter || kind == Kind::kReduce;
        if (rooted || kind == Kind::kBroadcast) o.root = static_cast<int>(root);
        const bool sums = kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
        if (sums) o.op = core::ReduceOp::kSum;
        if (collects) out[r].resize(kind == Kind::kGather && r != root ? 0 : own * n);
        if (kind == Kind::kScatter || kind == Kind::kReduceScatter || (kind == Kind::kReduce && r == root))
          out[r].resize(own);
        if (kind == Kind::kAllReduce || kind == Kind::kBroadcast) out[r] = in[r];
        if (spreads && (kind != Kind::kScatter || r == root)) o.input_bytes.assign(n, own);
        if (collects && !out[r].empty()) o.output_bytes.assign(n, own);
      }
      const bool reads = kind != Kind::kAllReduce && kind != Kind::kBroadcast &&
                         (kind != Kind::kScatter || r == root) && (kind != Kind::kPointToPoint || o.sending);
      if (reads && !in[r].empty()) o.input = {{in[r].data(), in[r].size()}};
      if (!out[r].empty()) o.output = {{out[r].data(), out[r].size()}};
      ++calls;
      cluster->submit(uid, static_cast<int>(r), std::move(o), sequence_, [&done](const worker::Outcome& outcome) {
        CHECK(outcome.status.to_string() == "ok");
        ++done;
      });
    }
    if (kind != Kind::kPointToPoint) ++sequence_;
    REQUIRE(cluster->run_until([&] { return done == calls; }));
    return out;
  }

  std::unique_ptr<Cluster> cluster;
  core::GroupUid uid;

 private:
  std::uint64_t sequence_ = 0;
  int wrapped_ = 0;  // first the network, then shared memory, of each rank
};

constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kReduce,  Kind::kReduceScatter, Kind::kBroadcast,   Kind::kAllGather,
                           Kind::kGather,    Kind::kScatter, Kind::kAllToAll,      Kind::kPointToPoint};

}  // namespace

TEST_CASE("cluster/packing: every kind of operation has the same bits, in fewer bytes", "[cluster][fast]") {
  for (std::size_t place = 0; place < kPlaces.size(); ++place) {
    Traffic as_is;
    Traffic less;
    Calls plain(kPlaces[place], flow::MayPack::kNever, as_is);
    Calls packed(kPlaces[place], flow::MayPack::kAlways, less);
    const bool leaves_node = kPlaces[place].node_of.back() != 0;
    for (const Kind kind : kKinds)
      for (const DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat64, DType::kInt32})
        for (const std::size_t elements : {1, 67, 5003}) {
          INFO("place " << place << " kind " << schedule::name_of(kind) << " of " << core::name_of(dtype) << "["
                        << elements << "]");
          as_is = less = {};
          CHECK(packed.run(kind, dtype, elements, 3) == plain.run(kind, dtype, elements, 3));
          CHECK(as_is.packed == 0);
          CHECK(less.packed_local == 0);
          if (dtype == DType::kInt32 || !leaves_node) {
            CHECK(less.packed == 0);
            CHECK(less.bytes == as_is.bytes);
          } else if (elements == 5003 && dtype == DType::kFloat32) {
            // A sum of widened bf16 has more bits than that.
            CHECK(static_cast<double>(less.bytes) < 0.8 * static_cast<double>(as_is.bytes));
          } else if (elements == 5003 && dtype == DType::kBfloat16) {
            CHECK(static_cast<double>(less.bytes) < 0.85 * static_cast<double>(as_is.bytes));
          }
        }
  }
}

TEST_CASE("cluster/packing: small operations and unknown paths go as they are", "[cluster][fast]") {
  Traffic traffic;
  Calls small(kPlaces[1], flow::MayPack::kAlways, traffic, 20000);
  small.run(Kind::kAllReduce, DType::kFloat32, 4999, 1);
  CHECK(traffic.packed == 0);
  small.run(Kind::kAllReduce, DType::kFloat32, 5000, 1);
  CHECK(traffic.packed > 0);
  traffic = {};
  Calls unknown(kPlaces[1], flow::MayPack::kWhereItPays, traffic);
  unknown.run(Kind::kAllReduce, DType::kFloat32, 5000, 1);
  CHECK(traffic.packed == 0);
}

TEST_CASE("cluster/packing: a contribution that is packed as another type fails the group", "[cluster][fast]") {
  ClusterOptions options;
  options.node_of = {0, 1};
  options.chunk_bytes = 4096;
  options.may_pack = flow::MayPack::kAlways;
  Cluster cluster(options);
  const core::GroupUid uid = cluster.open_group();
  std::mt19937_64 random(1);
  std::vector<Bytes> memory;
  for (int rank = 0; rank < 2; ++rank) memory.push_back(values(DType::kFloat32, 4096, random));
  std::vector<core::Status> ends;
  for (int rank = 0; rank < 2; ++rank) {
    worker::Operation o;
    o.kind = Kind::kAllReduce;
    o.dtype = DType::kFloat32;
    o.op = core::ReduceOp::kSum;
    if (rank == 1) o.elements = DType::kFloat64;
    Bytes& bytes = memory[static_cast<std::size_t>(rank)];
    o.output = {{bytes.data(), bytes.size()}};
    cluster.submit(uid, rank, std::move(o), 0, [&ends](const worker::Outcome& end) { ends.push_back(end.status); });
  }
  REQUIRE(cluster.run_until([&] { return ends.size() == 2; }));
  for (const core::Status& end : ends) CHECK(end.code() == core::Code::kMismatch);
}
