// A member that sends anything: each field of each message at its extremes, for its own group, for that of another job
// on the same server, and for groups that nobody has opened.
//
// What must hold: the memory of all others stays bounded, and so does their log; the group's calls end, with an error
// that names the member; the other job's sums stay right.
#include <malloc.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "tests/support/captured_stderr.h"
#include "tests/support/catch.h"
#include "tests/support/cluster.h"

namespace {

using namespace hybridps;
using test::Cluster;
using test::ClusterOptions;

constexpr int kHostile = 1;
constexpr std::size_t kChunkBytes = 1024;

template <std::size_t... I>
std::vector<wire::Body> bodies_of_all_types(std::index_sequence<I...>) {
  return {wire::Body(std::in_place_index<I>)...};
}

std::size_t bytes_in_use() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

/// What the member knows: its group, the other job's, and what a reader of the protocol can think of.
class Forger {
 public:
  Forger(Cluster& cluster, core::GroupUid own, core::GroupUid others)
      : cluster_(cluster), random_(cluster.random()), uids_{own, own, own, others} {}

  wire::HeaderBytes next(std::size_t payload_bytes) {
    const wire::Body& body = bodies_[random_() % bodies_.size()];
    core::GroupUid uid = uids_[random_() % uids_.size()];
    if (random_() % 16 == 0) uid = {random_(), random_() % 64};  // a group that may open yet
    const std::uint64_t rank = random_() % 8 == 0 ? random_() : kHostile;
    wire::HeaderBytes bytes = wire::encode({{cluster_.id(kHostile), uid, static_cast<std::uint32_t>(rank)},
                                            static_cast<std::uint32_t>(payload_bytes),
                                            body});
    const std::string_view name = std::visit([](const auto& m) { return m.kName; }, body);
    std::vector<wire::Field> fields;
    for (const wire::Field& field : layout_)
      if (field.message == name) fields.push_back(field);
    // Few at once: what is wrong in one place only gets furthest.
    for (std::size_t left = fields.empty() ? 0 : random_() % 6; left > 0; --left) {
      const wire::Field& field = fields[random_() % fields.size()];
      const wire::HeaderBytes before = bytes;
      const std::uint64_t value = extreme(field.bytes);
      std::memcpy(bytes.data() + field.offset, &value, field.bytes);
      if (random_() % 8 != 0 && !wire::decode(bytes).is_ok()) bytes = before;  // else it comes no further than there
    }
    return bytes;
  }

 private:
  std::uint64_t extreme(std::size_t bytes) {
    const std::uint64_t all = bytes == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << (8 * bytes)) - 1;
    switch (random_() % 8) {
      case 0: return 0;
      case 1: return all;
      case 2: return all / 2;
      case 3: return all / 2 + 1;
      case 4: return random_() & all;
      case 5: return kChunkBytes & all;
      default: return random_() % 8;
    }
  }

  Cluster& cluster_;
  std::mt19937_64& random_;
  const std::array<core::GroupUid, 4> uids_;
  const std::vector<wire::Body> bodies_ = bodies_of_all_types(std::make_index_sequence<wire::kTypeCount>());
  const std::vector<wire::Field> layout_ = wire::layout();
};

struct Job {
  int done = 0;
  std::vector<std::string> errors;
  worker::Completion completion() {
    return [this](const worker::Outcome& outcome) {
      ++done;
      if (!outcome.status.is_ok()) errors.push_back(outcome.status.to_string());
    };
  }
};

worker::Operation sum_of(std::vector<std::int32_t>& data) {
  worker::Operation o;
  o.kind = schedule::Kind::kAllReduce;
  o.dtype = core::DType::kInt32;
  o.op = core::ReduceOp::kSum;
  o.total_bytes = data.size() * sizeof data[0];
  o.output = {worker::Piece{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof data[0]}};
  return o;
}

/// How much the memory of the process has grown at most. `messages`: that the member sends.
std::size_t grows(std::uint64_t seed, std::size_t messages) {
  ClusterOptions options;
  options.node_of = {0, 1, 2, 3};
  options.servers = {1.0};
  options.seed = seed;
  options.chunk_bytes = kChunkBytes;
  options.pool_extra_bytes = std::size_t{1} << 20;
  Cluster cluster(options);
  const auto own = cluster.open_group();
  // The other job: ranks 2 and 3, and the same server.
  const core::GroupUid others = cluster.new_uid();
  const schedule::Members members({{cluster.id(2), "host2"}, {cluster.id(3), "host3"}, {cluster.id(4), "host4"}});
  const auto topology = [](int member) { return schedule::Topology({0, 1}, member, {}, {1.0}); };
  constexpr schedule::ChunkSizes kChunks{kChunkBytes, kChunkBytes, kChunkBytes};
  for (int i = 0; i < 2; ++i) {
    worker::GroupInfo info{others, "other", members, topology(i)};
    info.tuning.chunks = kChunks;
    cluster.at(2 + i).open_group(std::move(info));
  }
  cluster.at(4).open_served_group({others, "other", members, topology(2), kChunks});

  Forger forger(cluster, own, others);
  Job job;
  std::vector<std::vector<std::int32_t>> data(4, std::vector<std::int32_t>(3000, 1));
  for (int rank = 0; rank < 4; ++rank)
    if (rank != kHostile) cluster.submit(own, rank, sum_of(data[static_cast<std::size_t>(rank)]), 0, job.completion());
  Job other;
  std::uint64_t round = 0;
  const auto check_other = [&] {
    std::array<std::vector<std::int32_t>, 2> sums{std::vector<std::int32_t>(2000, 5),
                                                  std::vector<std::int32_t>(2000, 6)};
    const int before = other.done;
    for (int i = 0; i < 2; ++i)
      cluster.submit(others, 2 + i, sum_of(sums[static_cast<std::size_t>(i)]), round, other.completion());
    ++round;
    REQUIRE(cluster.run_until([&] { return other.done == before + 2; }));
    INFO((other.errors.empty() ? "" : other.errors[0]));
    REQUIRE(other.errors.empty());
    for (const auto& sum : sums) REQUIRE(std::all_of(sum.begin(), sum.end(), [](std::int32_t v) { return v == 11; }));
  };
  check_other();
  const std::size_t before = bytes_in_use();
  std::size_t most = before;
  std::size_t arrived = 0;
  for (std::size_t sent = 0; sent < messages; ++sent) {
    int to = static_cast<int>(cluster.random()() % 4);
    if (to >= kHostile) ++to;
    transport::Buffer payload;
    if (cluster.random()() % 3 == 0) payload = cluster.at(kHostile).pool().allocate(kChunkBytes);
    const std::size_t payload_bytes = payload ? cluster.random()() % (kChunkBytes + 1) : 0;
    const wire::HeaderBytes bytes = forger.next(payload_bytes);
    const auto endpoint = cluster.at(kHostile).connect(cluster.id(to));
    if (endpoint.is_ok() && endpoint.value()->send(bytes, payload, payload_bytes, {}).is_ok()) ++arrived;
    if (sent % 16 == 0) (void)cluster.run_until([] { return false; }, 4);
    if (sent % 1024 == 0) {
      most = std::max(most, bytes_in_use());
      check_other();
    }
  }
  (void)cluster.run_until([] { return false; }, 2000);
  most = std::max(most, bytes_in_use());
  check_other();
  CHECK(arrived > messages / 2);
  // Its group: all calls have ended, and what they say names it.
  REQUIRE(cluster.run_until([&] { return job.done == 3; }));
  for (const std::string& text : job.errors) CHECK_THAT(text, Catch::Contains("rank 1"));
  CHECK(job.errors.size() == 3);
  return most - before;
}

}  // namespace

TEST_CASE("engine: a hostile member costs bounded memory, is named, and harms no other job", "[engine]") {
  const std::uint64_t seed = GENERATE(1, 2, 3);
  test::CapturedStderr log;
  const std::size_t grown = grows(seed, 20'000);
  const std::string said = log.finish();
  CHECK(grown < (std::size_t{4} << 20));  // a fifth of what it has sent
  CHECK(std::count(said.begin(), said.end(), '\n') < 50);
}

TEST_CASE("engine: a hostile member costs bounded memory, is named, and harms no other job: a million messages",
          "[engine][.long]") {
  CHECK(grows(4, 1'000'000) < (std::size_t{64} << 20));
}
