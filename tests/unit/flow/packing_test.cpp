// Whether bulk goes packed: from the bytes that left while streams waited, and the time in which this thread worked.
#include <cmath>
#include <random>
#include <thread>

#include "hybridps/core/dtype.h"
#include "tests/support/catch.h"
#include "tests/unit/flow/rig.h"

namespace {

using namespace hybridps;
using namespace std::chrono_literals;
using flow::Packing;
using flow::PackingPath;
using flow::PathRate;
using flow::PathState;

constexpr std::size_t kChunk = 64 << 10;

/// A path that was full all the time: a sample or more at `rate` bytes a second, with this thread busy for a part of
/// it. `gain`: elements for a byte on the wire while packing is on.
void fill(PackingPath& path, const Packing& packing, double rate, double busy_part, int samples = 1,
          double gain = 4.0 / 3, std::optional<double> idle = 0.5) {
  static core::TimePoint now = core::TimePoint(1h);
  static core::Duration busy{};
  path.rate().begin_wait();
  for (int made = 0; made < samples;) {
    const auto took = core::from_seconds(static_cast<double>(kChunk) / rate);
    now += took;
    busy += std::chrono::duration_cast<core::Duration>(took * busy_part);
    const bool packs = path.packs();
    const auto elements = static_cast<std::size_t>(static_cast<double>(kChunk) * (packs ? gain : 1.0));
    if (!path.add(elements, kChunk, now, busy)) continue;
    packing.decide(path, path.rate().value(), idle);
    ++made;
  }
  path.rate().end_wait(now, busy);
}

/// A codec that takes so long for a megabyte each way, and saves a quarter. 500 us: packing pays up to kCostPart GB/s.
Packing codec(core::Duration of_megabyte = 500us) {
  Packing packing;
  for (int i = 0; i < 100; ++i) {
    packing.note_packed(1'000'000, 750'000, of_megabyte);
    packing.note_unpacked(1'000'000, of_megabyte);
  }
  return packing;
}

/// Packs where the Outbox says so: widened bf16, or random bits.
struct Packed final : flow::Source {
  explicit Packed(flow::Outbox& to, bool shrinks) : outbox(to) {
    std::mt19937 random(1);
    for (std::uint32_t& value : bits) value = shrinks ? (0x3f80U + random() % 256U) << 16 : random();
  }
  flow::Payload payload(flow::Stream& stream, std::uint32_t, std::size_t bytes) override {
    transport::Buffer buffer = outbox.pool().allocate(bytes);
    if (!buffer) return {};
    if (!outbox.packs(stream, bytes)) return {std::move(buffer), bytes};
    return outbox.pack(stream, reinterpret_cast<const std::byte*>(bits.data()), bytes, std::move(buffer));
  }
  void on_sent(flow::Stream&, std::uint32_t) override { ++sent; }
  void on_permitted(flow::Stream&, std::uint32_t) override {}
  flow::Outbox& outbox;
  std::vector<std::uint32_t> bits = std::vector<std::uint32_t>(test::kSlot);
  int sent = 0;
};

/// Large chunks of fp32.
void fill_in(flow::Stream& stream, Packed& source, std::uint32_t chunks, flow::MayPack may_pack) {
  stream.peer = test::kPeer;
  stream.source = &source;
  stream.bytes = std::uint64_t{chunks} * test::kLargeSlot;
  stream.chunk_bytes = test::kLargeSlot;
  stream.chunks = chunks;
  stream.may_pack = may_pack;
  stream.dtype = core::DType::kFloat32;
}

}  // namespace

TEST_CASE("flow/packing: bulk goes packed where the path is slower than the codec by enough", "[flow][fast]") {
  const Packing packing = codec();
  CHECK(packing.rate_limit() == Approx(1e9 * Packing::kCostPart));
  PackingPath slow;
  CHECK(slow.state() == PathState::kUnknown);
  fill(slow, packing, 60e6, 0.05);
  CHECK(slow.rate().value() == Approx(60e6).epsilon(0.1));
  CHECK(slow.packs());
  PackingPath fast;
  fill(fast, packing, 2e9, 0.05);
  CHECK(fast.state() == PathState::kFast);
}

TEST_CASE("flow/packing: a path that looked fast once counts as fast for a while", "[flow][fast]") {
  const Packing packing = codec();
  PackingPath path;
  fill(path, packing, 2e9, 0.05);
  fill(path, packing, 10e6, 0.05, PathRate::kSamples - 1);  // the peer waited for others
  CHECK(path.state() == PathState::kFast);
  fill(path, packing, 10e6, 0.05);
  CHECK(path.packs());
}

TEST_CASE("flow/packing: nothing goes packed while this thread is busy, with hysteresis", "[flow][fast]") {
  const Packing packing = codec();
  PackingPath path;
  fill(path, packing, 60e6, 0.6);
  CHECK(path.state() == PathState::kBusy);
  fill(path, packing, 60e6, 0.3);
  CHECK(path.packs());
  fill(path, packing, 60e6, 0.7);  // packing is part of that
  CHECK(path.packs());
  fill(path, packing, 60e6, 0.9);
  CHECK(path.state() == PathState::kBusy);
  fill(path, packing, 60e6, 0.6);
  CHECK(path.state() == PathState::kBusy);
}

TEST_CASE("flow/packing: nothing goes packed while all CPUs are busy, or before that is known", "[flow][fast]") {
  const Packing packing = codec();
  PackingPath path;
  const auto take = [&](std::optional<double> idle) { fill(path, packing, 60e6, 0.05, 1, 4.0 / 3, idle); };
  take({});
  CHECK(path.state() == PathState::kBusy);
  take(0.1);
  CHECK(path.state() == PathState::kBusy);
  take(0.2);
  CHECK(path.packs());
  take(0.1);
  CHECK(path.packs());
  take(0.03);
  CHECK(path.state() == PathState::kBusy);
}

TEST_CASE("flow/packing: while the cores are busy, only what costs no core time goes packed", "[flow][fast]") {
  CHECK(codec().worth_while_busy() <= 0.0);  // 1 ns for a byte: more than the kernel's TCP
  CHECK(codec(225us).worth_while_busy() == Approx(0.4));
  CHECK(codec(150us).worth_while_busy() == Approx(0.5));
}

TEST_CASE("flow/packing: data that shrinks to nearly nothing does not make the codec look slow", "[flow][fast]") {
  Packing packing = codec();
  const double limit = packing.rate_limit();
  for (int i = 0; i < 100; ++i) packing.note_packed(1'000'000, 5'000, 500us);  // zeros
  CHECK(packing.rate_limit() == Approx(limit));
}

TEST_CASE("flow/packing: slow paths share the codec", "[flow][fast]") {
  const Packing packing = codec();
  PackingPath path;
  fill(path, packing, 60e6, 0.05);
  packing.decide(path, 0.9 * packing.rate_limit(), 0.5);
  CHECK(path.packs());
  packing.decide(path, 1.1 * packing.rate_limit(), 0.5);
  CHECK(path.state() == PathState::kFast);
}

TEST_CASE("flow/packing: only time in which bytes leave while streams wait counts", "[flow][fast]") {
  constexpr std::size_t kHalf = PathRate::kSampleBytes / 2;
  PathRate path;
  core::TimePoint now = core::TimePoint(1h);
  path.begin_wait();
  now += 10s;  // the peer waits for others, and sends no credit
  CHECK_FALSE(path.add(kHalf, kHalf, now, 5s));
  now += 5ms;
  CHECK_FALSE(path.add(kHalf, kHalf, now, 5s + 1ms));
  path.end_wait(now, 5s + 1ms);
  now += 10s;
  path.begin_wait();
  CHECK_FALSE(path.add(1, 1, now, 8s));
  now += 5ms;
  CHECK(path.add(kHalf, kHalf, now, 8s + 1ms));
  CHECK(path.value() == Approx(static_cast<double>(PathRate::kSampleBytes) / 10e-3));
  CHECK(path.busy() == Approx(0.2));
}

TEST_CASE("flow/packing: packing that does not make a path faster rests, for longer each time", "[flow][fast]") {
  const Packing packing = codec();
  PackingPath path;
  fill(path, packing, 60e6, 0.05);
  REQUIRE(path.packs());
  fill(path, packing, 45e6, 0.05, PathRate::kSamples - 1, 1.3);  // a busy peer: as many elements as before
  CHECK(path.packs());
  fill(path, packing, 45e6, 0.05, 1, 1.3);
  CHECK(path.state() == PathState::kNoGain);
  int rest = 0;
  for (; !path.packs() && rest < 1000; ++rest) fill(path, packing, 60e6, 0.05);
  CHECK(rest == 64);
  fill(path, packing, 45e6, 0.05, PathRate::kSamples, 1.3);
  rest = 0;
  for (; !path.packs() && rest < 1000; ++rest) fill(path, packing, 60e6, 0.05);
  CHECK(rest == 128);
  fill(path, packing, 60e6, 0.05, 10 * PathRate::kSamples, 1.3);
  CHECK(path.packs());
}

TEST_CASE("flow/packing: rests have a longest, and a gain makes the next one short", "[flow][fast]") {
  const Packing packing = codec();
  PackingPath path;
  fill(path, packing, 60e6, 0.05);
  const auto rest_after = [&](double rate) {
    fill(path, packing, rate, 0.05, PathRate::kSamples, 1.3);
    int rest = 0;
    for (; !path.packs() && rest < 10000; ++rest) fill(path, packing, 60e6, 0.05);
    return rest;
  };
  for (int i = 0; i < 8; ++i) rest_after(45e6);
  CHECK(rest_after(45e6) == PackingPath::kRestMax);
  CHECK(rest_after(60e6) == 0);
  fill(path, packing, 60e6, 0.9);  // the cores are busy for a while: then a new trial begins
  REQUIRE(path.state() == PathState::kBusy);
  fill(path, packing, 60e6, 0.05);
  REQUIRE(path.packs());
  CHECK(rest_after(45e6) == PackingPath::kRest);
}

TEST_CASE("flow/packing: what does not go packed says nothing of packing", "[flow][fast]") {
  const Packing packing = codec();
  PackingPath path;
  fill(path, packing, 60e6, 0.05);
  fill(path, packing, 60e6, 0.05, 10 * PathRate::kSamples, 1.0);  // of a group that packs nothing, or of whole numbers
  CHECK(path.packs());
}

TEST_CASE("flow/packing: a path without waits is not known any more", "[flow][fast]") {
  const Packing packing = codec();
  PackingPath path;
  fill(path, packing, 60e6, 0.05);
  REQUIRE(path.packs());
  for (std::uint64_t bytes = 0; bytes <= PackingPath::kForgetBytes; bytes += kChunk) {
    CHECK(path.packs());
    path.add(kChunk, kChunk, {}, {});
  }
  CHECK(path.state() == PathState::kUnknown);
}

TEST_CASE("flow/packing: the codec is measured before the first chunk", "[flow][fast]") {
  const Packing packing;
  CHECK(packing.rate_limit() > 1e6);
  PackingPath path;
  fill(path, packing, packing.rate_limit() / 2, 0.05);
  CHECK(path.packs());
}

TEST_CASE("flow/packing: a preempted chunk does not make the codec look slow", "[flow][fast]") {
  Packing packing = codec();
  const double limit = packing.rate_limit();
  packing.note_packed(1'000'000, 750'000, 50ms);
  packing.note_unpacked(1'000'000, 50ms);
  CHECK(packing.rate_limit() == Approx(limit));
}

TEST_CASE("flow/packing: the permit of a packed chunk costs what goes on the wire", "[flow][fast]") {
  test::Setup setup;
  setup.eager_bytes = 8 * test::kSlot;
  setup.large_slots = 32;
  test::Rig rig(setup);
  Packed source(*rig.outbox, true);
  flow::Stream stream;
  fill_in(stream, source, 16, flow::MayPack::kAlways);
  for (std::uint32_t chunk = 0; chunk < 16; ++chunk) rig.outbox->offer(stream, chunk);
  // Unpacked, the allowance is enough for two chunks.
  CHECK(source.sent >= 3);
  const auto flow = rig.outbox->flow_of(test::kPeer);
  REQUIRE(flow);
  std::int64_t costs = 0;
  for (const auto& sent : rig.to(test::kPeer).sent) {
    const auto* data = sent.message.as<wire::Data>();
    if (data == nullptr) continue;
    CHECK(data->packed == wire::packed_as(core::DType::kFloat32));
    CHECK(sent.message.payload_bytes < test::kLargeSlot / 2);
    CHECK(data->cost == std::max<std::uint32_t>(sent.message.payload_bytes, test::kSlot));
    costs += data->cost;
  }
  CHECK(flow->in_flight_bytes == costs);
  rig.outbox->cancel(stream);
}

TEST_CASE("flow/packing: while the cores are busy, streams that do not halve are looked at now and then",
          "[flow][fast]") {
  test::Setup setup;
  setup.eager_bytes = 4 * test::kLargeSlot;
  setup.large_slots = 32;
  test::Rig rig(setup);
  if (rig.outbox->packing().worth_while_busy() < 0.4) {
    WARN("not tested: this machine's codec costs as much core time as the kernel's TCP");
    return;
  }
  std::size_t packed = 0;
  // Sends all chunks of `source`, as a peer that gives credit slowly lets them go.
  const auto send = [&](Packed& source, std::uint32_t chunks) {
    flow::Stream stream;
    fill_in(stream, source, chunks, flow::MayPack::kWhereItPays);
    for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) rig.outbox->offer(stream, chunk);
    for (;;) {
      std::uint64_t costs = 0;
      std::vector<test::Sent>& sent = rig.to(test::kPeer).sent;
      for (std::size_t i = 0; i < sent.size(); ++i) {
        const auto* data = sent[i].message.as<wire::Data>();
        if (data == nullptr) continue;
        costs += data->cost;
        packed += data->packed != wire::kNotPacked ? 1 : 0;
        rig.to(test::kPeer).complete(i);
      }
      sent.clear();
      if (stream.all_sent() && costs == 0) break;
      std::this_thread::sleep_for(200us);
      rig.outbox->on_credit(test::kPeer, {costs, wire::Permit::kAllowance});
      rig.progress();
    }
    rig.outbox->cancel(stream);
  };
  Packed shrinks(*rig.outbox, true);
  Packed random(*rig.outbox, false);
  send(random,
       2 * PathRate::kSampleBytes / test::kLargeSlot);  // how busy the CPUs are is not known yet: as if they were
  REQUIRE(rig.outbox->flow_of(test::kPeer)->packing == PathState::kBusy);
  REQUIRE(packed == 0);
  send(shrinks, 32);
  CHECK(packed == 32);
  const std::uint64_t refused = rig.outbox->packing().counts().refused;
  send(random, 32);
  CHECK(packed == 32);
  CHECK(rig.outbox->packing().counts().refused == refused + 2);
}

TEST_CASE("flow/packing: a payload counts as packed only if it is sound", "[flow][fast]") {
  std::vector<std::uint32_t> bits(1000);
  std::mt19937 random(2);
  for (std::uint32_t& value : bits) value = (0x3f80U + random() % 256U) << 16;
  const auto bytes = static_cast<std::uint32_t>(bits.size() * 4);
  const compress::Exact& exact = *compress::Exact::of(core::DType::kFloat32);
  std::vector<std::byte> packed(wire::kPackedFrontBytes + exact.bytes_max(bytes));
  std::memcpy(packed.data(), &bytes, sizeof bytes);
  packed.resize(wire::kPackedFrontBytes + exact.encode(reinterpret_cast<const std::byte*>(bits.data()), bytes,
                                                       packed.data() + wire::kPackedFrontBytes));
  const auto delivery = [](std::vector<std::byte>& payload, std::uint8_t as) {
    flow::Delivery made(transport::RxPayload(payload.data(), payload.size(), nullptr, nullptr, nullptr), nullptr,
                        test::kPeer, 0);
    made.set_packed(as);
    return made;
  };
  const std::uint8_t right = wire::packed_as(core::DType::kFloat32);
  {
    const flow::Delivery sound = delivery(packed, right);
    REQUIRE(sound.format() == &exact);
    CHECK(sound.bytes() == bytes);
    CHECK(sound.dtype() == core::DType::kFloat32);
    std::vector<std::uint32_t> out(bits.size());
    sound.format()->expand(sound.data(), 0, out.size(), reinterpret_cast<std::byte*>(out.data()));
    CHECK(out == bits);
  }
  CHECK(delivery(packed, wire::kNotPacked).format() == nullptr);
  CHECK(delivery(packed, wire::packed_as(core::DType::kInt32)).format() == nullptr);
  for (std::size_t size : {std::size_t{0}, std::size_t{3}, std::size_t{4}, packed.size() - 1}) {
    std::vector<std::byte> cut(packed.begin(), packed.begin() + static_cast<std::ptrdiff_t>(size));
    const flow::Delivery spoiled = delivery(cut, right);
    CHECK(spoiled.format() == nullptr);
    CHECK(spoiled.bytes() == size);
  }
  std::vector<std::byte> other = packed;
  other[0] ^= std::byte{4};  // one element more or less
  CHECK(delivery(other, right).format() == nullptr);
}
