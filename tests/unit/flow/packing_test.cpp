// Whether bulk goes packed: from the bytes that left while streams waited, and the time in which this thread worked.
#include <cmath>
#include <random>

#include "hybridps/core/dtype.h"
#include "tests/support/catch.h"
#include "tests/unit/flow/rig.h"

namespace {

using namespace hybridps;
using namespace std::chrono_literals;
using flow::Packing;
using flow::Path;
using flow::PathRate;
using flow::PathState;

constexpr std::size_t kChunk = 64 << 10;

/// A path that was full all the time: a sample or more at `rate` bytes a second, with this thread busy for a part of
/// it. `gain`: elements for a byte on the wire while packing is on.
void fill(Path& path, const Packing& packing, double rate, double busy_part, int samples = 1, double gain = 4.0 / 3,
          std::optional<double> idle = 0.5) {
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

/// A codec of 2 GB/s each way that saves a quarter: packing pays up to kCostPart * 0.75 GB/s.
Packing codec() {
  Packing packing;
  for (int i = 0; i < 100; ++i) {
    packing.note_packed(1'000'000, 750'000, 500us);
    packing.note_unpacked(1'000'000, 500us);
  }
  return packing;
}

}  // namespace

TEST_CASE("flow/packing: bulk goes packed where the path is slower than the codec by enough", "[flow][fast]") {
  const Packing packing = codec();
  CHECK(packing.rate_limit() == Approx(0.75e9 * Packing::kCostPart));
  Path slow;
  CHECK(slow.state() == PathState::kUnknown);
  fill(slow, packing, 60e6, 0.05);
  CHECK(slow.rate().value() == Approx(60e6).epsilon(0.1));
  CHECK(slow.packs());
  Path fast;
  fill(fast, packing, 2e9, 0.05);
  CHECK(fast.state() == PathState::kFast);
}

TEST_CASE("flow/packing: a path that looked fast once counts as fast for a while", "[flow][fast]") {
  const Packing packing = codec();
  Path path;
  fill(path, packing, 2e9, 0.05);
  fill(path, packing, 10e6, 0.05, PathRate::kSamples - 1);  // the peer waited for others
  CHECK(path.state() == PathState::kFast);
  fill(path, packing, 10e6, 0.05);
  CHECK(path.packs());
}

TEST_CASE("flow/packing: nothing goes packed while this thread is busy, with hysteresis", "[flow][fast]") {
  const Packing packing = codec();
  Path path;
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
  Path path;
  const auto take = [&](std::optional<double> idle) { fill(path, packing, 60e6, 0.05, 1, 4.0 / 3, idle); };
  take({});
  CHECK(path.state() == PathState::kBusy);
  take(0.2);
  CHECK(path.state() == PathState::kBusy);
  take(0.3);
  CHECK(path.packs());
  take(0.15);
  CHECK(path.packs());
  take(0.05);
  CHECK(path.state() == PathState::kBusy);
}

TEST_CASE("flow/packing: slow paths share the codec", "[flow][fast]") {
  const Packing packing = codec();
  Path path;
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
  Path path;
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
  Path path;
  fill(path, packing, 60e6, 0.05);
  const auto rest_after = [&](double rate) {
    fill(path, packing, rate, 0.05, PathRate::kSamples, 1.3);
    int rest = 0;
    for (; !path.packs() && rest < 10000; ++rest) fill(path, packing, 60e6, 0.05);
    return rest;
  };
  for (int i = 0; i < 8; ++i) rest_after(45e6);
  CHECK(rest_after(45e6) == Path::kRestMax);
  CHECK(rest_after(60e6) == 0);
  fill(path, packing, 60e6, 0.9);  // the cores are busy for a while: then a new trial begins
  REQUIRE(path.state() == PathState::kBusy);
  fill(path, packing, 60e6, 0.05);
  REQUIRE(path.packs());
  CHECK(rest_after(45e6) == Path::kRest);
}

TEST_CASE("flow/packing: what does not go packed says nothing of packing", "[flow][fast]") {
  const Packing packing = codec();
  Path path;
  fill(path, packing, 60e6, 0.05);
  fill(path, packing, 60e6, 0.05, 10 * PathRate::kSamples, 1.0);  // of a group that packs nothing, or of whole numbers
  CHECK(path.packs());
}

TEST_CASE("flow/packing: a path without waits is not known any more", "[flow][fast]") {
  const Packing packing = codec();
  Path path;
  fill(path, packing, 60e6, 0.05);
  REQUIRE(path.packs());
  for (std::uint64_t bytes = 0; bytes <= Path::kForgetBytes; bytes += kChunk) {
    CHECK(path.packs());
    path.add(kChunk, kChunk, {}, {});
  }
  CHECK(path.state() == PathState::kUnknown);
}

TEST_CASE("flow/packing: the codec is measured before the first chunk", "[flow][fast]") {
  const Packing packing;
  CHECK(packing.rate_limit() > 1e6);
  Path path;
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
  // Sources that pack widened bf16: 12 bits of 32 for each.
  struct Widened final : flow::Source {
    flow::Outbox* outbox = nullptr;
    std::vector<std::uint32_t> bits = std::vector<std::uint32_t>(test::kSlot);
    flow::Payload payload(flow::Stream& stream, std::uint32_t, std::size_t bytes) override {
      transport::Buffer buffer = outbox->pool().allocate(bytes);
      if (!buffer) return {};
      REQUIRE(outbox->packs(stream, bytes));
      return outbox->pack(stream, reinterpret_cast<const std::byte*>(bits.data()), bytes, std::move(buffer));
    }
    void on_sent(flow::Stream&, std::uint32_t) override { ++sent; }
    void on_permitted(flow::Stream&, std::uint32_t) override {}
    int sent = 0;
  } source;
  source.outbox = rig.outbox.get();
  std::mt19937 random(1);
  for (std::uint32_t& bits : source.bits) bits = (0x3f80U + random() % 256U) << 16;
  flow::Stream stream;
  stream.peer = test::kPeer;
  stream.source = &source;
  stream.bytes = 16 * test::kLargeSlot;
  stream.chunk_bytes = test::kLargeSlot;
  stream.chunks = 16;
  stream.may_pack = flow::MayPack::kAlways;
  stream.dtype = core::DType::kFloat32;
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
