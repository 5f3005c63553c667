// The contract of a codec, for every codec, instruction set and element type.
#include "hybridps/compress/codec.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <set>

#include "hybridps/compress/kernels.h"
#include "hybridps/reduce/convert.h"
#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using compress::ChunkOrigin;
using core::DType;

const std::vector<std::string> kSpecs = {
    "bf16",
    "fp16",
    "int8",
    "int4",
    "onebit",
    "topk:k=0.02",
    "randomk:k=0.05",
    "dithering",
    "dithering:levels=127",
    "dithering:kind=natural",
};
const std::vector<std::size_t> kCounts = {1,  2,   3,   7,   8,   15,   16,   17,   31,   32,  33,
                                          63, 255, 256, 257, 999, 1023, 1024, 1025, 2100, 5000};

compress::Spec spec_of(const std::string& text) { return compress::parse_spec(text).value(); }

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

Floats gaussian(std::size_t count, unsigned seed, float scale = 1.0F) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  Floats values(count);
  for (float& value : values) value = normal(random);
  return values;
}

struct Encoded {
  Bytes wire;
  Floats residual;
  std::uint32_t not_finite = 0;
};

Encoded encode(const compress::Codec& codec, const void* values, std::size_t bytes, const Floats& residual,
               std::uint64_t first = 0, std::uint32_t speaker = 1) {
  Encoded out;
  out.residual = residual;
  out.wire.resize(codec.bytes_max(bytes));
  ChunkOrigin place;
  place.seed = 77;
  place.first = first;
  place.speaker = speaker;
  place.residual = residual.empty() ? nullptr : out.residual.data();
  out.wire.resize(codec.encode(static_cast<const std::byte*>(values), bytes, place, out.wire.data()));
  out.not_finite = place.not_finite;
  return out;
}

Floats decode(const compress::Codec& codec, const Bytes& wire, std::size_t count) {
  Floats out(count, -7.0F);
  codec.expand(wire.data(), 0, count, reinterpret_cast<std::byte*>(out.data()));
  return out;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// Inputs of every kind that a gradient has been seen to be.
std::vector<Floats> inputs(std::size_t count) {
  std::vector<Floats> all = {gaussian(count, 1), gaussian(count, 2, 1e-20F), gaussian(count, 3, 1e-42F),
                             gaussian(count, 4, 1e36F), Floats(count, 0.0F)};
  Floats mixed = gaussian(count, 5);
  for (std::size_t i = 0; i < count; i += 3) mixed[i] = i % 2 == 0 ? 0.0F : -0.0F;
  all.push_back(mixed);
  Floats wild = gaussian(count, 6);
  for (std::size_t i = 0; i < count; ++i) wild[i] = std::ldexp(wild[i], static_cast<int>(i * 37 % 200) - 100);
  all.push_back(wild);
  Floats largest(count, std::numeric_limits<float>::max());
  for (std::size_t i = 1; i < count; i += 2) largest[i] = -largest[i];
  all.push_back(largest);
  all.push_back(Floats(count, std::numeric_limits<float>::denorm_min()));
  return all;
}

bool casts(const std::string& spec) { return spec == "bf16" || spec == "fp16"; }

}  // namespace

TEST_CASE("compress/codec: all instruction sets make the same bits", "[compress][fast]") {
  for (const std::string& text : kSpecs)
    for (const DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
      const auto reference = compress::make_codec_with(*compress::available_tables().front(), spec_of(text), dtype);
      REQUIRE((reference == nullptr) == (casts(text) && dtype != DType::kFloat32));
      if (!reference) continue;
      for (const compress::KernelTable* table : compress::available_tables()) {
        const auto codec = compress::make_codec_with(*table, spec_of(text), dtype);
        for (const std::size_t count : kCounts)
          for (const Floats& values : inputs(count)) {
            std::vector<std::uint16_t> narrow(count);
            for (std::size_t i = 0; i < count; ++i)
              narrow[i] = dtype == DType::kBfloat16
                              ? reduce::narrow_bf16(values[i])
                              : static_cast<std::uint16_t>(reduce::narrow<reduce::kFp16Format>(values[i]));
            const bool wide = dtype == DType::kFloat32;
            const void* const data = wide ? static_cast<const void*>(values.data()) : narrow.data();
            const std::size_t bytes = count * core::size_of(dtype);
            for (const bool feedback : {false, true}) {
              INFO(text << " " << table->name << " " << core::name_of(dtype) << " " << count << " " << feedback);
              const Floats left = feedback ? gaussian(count, 9, 0.25F) : Floats();
              const Encoded ours = encode(*codec, data, bytes, left);
              const Encoded theirs = encode(*reference, data, bytes, left);
              REQUIRE(ours.wire == theirs.wire);
              REQUIRE(same_bits(ours.residual, theirs.residual));
              REQUIRE(ours.not_finite == theirs.not_finite);
              REQUIRE(ours.wire.size() <= codec->bytes_max(bytes));
              REQUIRE(ours.wire.size() <= compress::wire_bytes_limit(bytes));
              REQUIRE(codec->fits(ours.wire.data(), ours.wire.size(), bytes));
              Bytes a(bytes, std::byte{1});
              Bytes b(bytes, std::byte{2});
              codec->expand(ours.wire.data(), 0, count, a.data());
              reference->expand(ours.wire.data(), 0, count, b.data());
              REQUIRE(a == b);
            }
          }
      }
    }
}

TEST_CASE("compress/codec: what is sent and what is left out are the value", "[compress][fast]") {
  for (const std::string& text : kSpecs) {
    const auto codec = compress::make_codec(spec_of(text), DType::kFloat32);
    for (const std::size_t count : kCounts) {
      const Floats values = gaussian(count, 11);
      const Floats left = gaussian(count, 12, 0.1F);
      const Encoded out = encode(*codec, values.data(), count * 4, left);
      const Floats sent = decode(*codec, out.wire, count);
      for (std::size_t i = 0; i < count; ++i) {
        INFO(text << " " << count << " " << i);
        REQUIRE(out.residual[i] == (values[i] + left[i]) - sent[i]);
      }
    }
  }
}

TEST_CASE("compress/codec: where chunks end changes no value", "[compress][fast]") {
  for (const std::string& text : kSpecs) {
    const auto codec = compress::make_codec(spec_of(text), DType::kFloat32);
    const std::size_t count = 3 * 1024 + 77;
    Floats values = gaussian(count, 13);
    for (std::size_t i = 2000; i < 2100; ++i) values[i] = 0.0F;
    const Floats left = gaussian(count, 14, 0.1F);
    const Encoded whole = encode(*codec, values.data(), count * 4, left, 4096);
    const Floats expected = decode(*codec, whole.wire, count);
    for (const std::size_t cut : {codec->block_elements(), std::size_t{1024}, std::size_t{2048}}) {
      INFO(text << " " << cut);
      const Encoded a = encode(*codec, values.data(), cut * 4, Floats(left.begin(), left.begin() + long(cut)), 4096);
      const Encoded b = encode(*codec, values.data() + cut, (count - cut) * 4,
                               Floats(left.begin() + long(cut), left.end()), 4096 + cut);
      Floats both = decode(*codec, a.wire, cut);
      const Floats second = decode(*codec, b.wire, count - cut);
      both.insert(both.end(), second.begin(), second.end());
      CHECK(same_bits(both, expected));
      // Parts of a chunk, as a sum takes them.
      Floats parts(count);
      for (std::size_t at = 0; at < count; at += 2048)
        codec->expand(whole.wire.data(), at, std::min<std::size_t>(2048, count - at),
                      reinterpret_cast<std::byte*>(parts.data() + at));
      CHECK(same_bits(parts, expected));
    }
  }
}

TEST_CASE("compress/codec: a value that is not finite makes its block NaN, and no other", "[compress][fast]") {
  const std::size_t count = 2048 + 33;
  for (const std::string& text : kSpecs) {
    if (casts(text)) continue;
    for (const compress::KernelTable* table : compress::available_tables()) {
      const auto codec = compress::make_codec_with(*table, spec_of(text), DType::kFloat32);
      const std::size_t block = codec->block_elements();
      const Floats clean = gaussian(count, 15);
      const Floats left(count, 0.5F);
      const Encoded fine = encode(*codec, clean.data(), count * 4, left);
      const Floats expected = decode(*codec, fine.wire, count);
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()})
        for (const std::size_t at : {std::size_t{0}, std::size_t{1}, block - 1, block, 2 * block - 1, count - 33,
                                     count - 32, count - 2, count - 1}) {
          Floats values = clean;
          values[at] = bad;
          const Encoded out = encode(*codec, values.data(), count * 4, left);
          REQUIRE(codec->fits(out.wire.data(), out.wire.size(), count * 4));
          REQUIRE(out.not_finite == 1);
          const Floats sent = decode(*codec, out.wire, count);
          for (std::size_t i = 0; i < count; ++i) {
            INFO(text << " " << table->name << " bad at " << at << ", looked at " << i);
            if (i / block == at / block) {
              REQUIRE(std::isnan(sent[i]));
              REQUIRE(out.residual[i] == 0.5F);
            } else {
              REQUIRE(sent[i] == expected[i]);
            }
          }
        }
    }
  }
}

TEST_CASE("compress/codec: bf16 and fp16 pass what is not finite", "[compress][fast]") {
  for (const std::string text : {"bf16", "fp16"}) {
    const auto codec = compress::make_codec(spec_of(text), DType::kFloat32);
    const Floats values = {1.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(),
                           -2.0F};
    const Encoded out = encode(*codec, values.data(), 16, Floats(4, 0.0F));
    const Floats sent = decode(*codec, out.wire, 4);
    CHECK(sent[0] == 1.0F);
    CHECK(std::isinf(sent[1]));
    CHECK(std::isnan(sent[2]));
    CHECK(sent[3] == -2.0F);
    for (const float left : out.residual) CHECK(left == 0.0F);
  }
}

TEST_CASE("compress/codec: zeros stay zeros, and leave nothing", "[compress][fast]") {
  for (const std::string& text : kSpecs) {
    const auto codec = compress::make_codec(spec_of(text), DType::kFloat32);
    for (const std::size_t count : {std::size_t{1}, std::size_t{33}, std::size_t{5000}}) {
      Floats residual(count, 0.0F);
      for (int step = 0; step < 3; ++step) {
        const Encoded out = encode(*codec, Floats(count, 0.0F).data(), count * 4, residual);
        residual = out.residual;
        for (const float value : decode(*codec, out.wire, count)) REQUIRE(value == 0.0F);
        for (const float left : residual) REQUIRE(left == 0.0F);
      }
    }
    // A row of zeros among values, as of an embedding that was not used.
    if (casts(text)) continue;
    Floats values = gaussian(4096, 16);
    std::fill(values.begin() + 1024, values.begin() + 2048, 0.0F);
    const Encoded out = encode(*codec, values.data(), 4096 * 4, Floats(4096, 0.0F));
    const Floats sent = decode(*codec, out.wire, 4096);
    for (std::size_t i = 1024; i < 2048; ++i) REQUIRE((sent[i] == 0.0F && out.residual[i] == 0.0F));
  }
}

TEST_CASE("compress/codec: one sum's error is small, and does not grow with the nodes", "[compress][fast]") {
  // Contributions are encoded once, the sum once: facts as in docs/compression.md.
  const std::size_t count = 16 * 1024;
  const auto nmse = [&](const std::string& text, int nodes) {
    const auto codec = compress::make_codec(spec_of(text), DType::kFloat32);
    std::vector<double> exact(count, 0.0);
    Floats sum(count, 0.0F);
    for (int node = 0; node < nodes; ++node) {
      const Floats values = gaussian(count, 100 + static_cast<unsigned>(node));
      const Floats sent = decode(*codec, encode(*codec, values.data(), count * 4, {}).wire, count);
      for (std::size_t i = 0; i < count; ++i) {
        exact[i] += static_cast<double>(values[i]);
        sum[i] += sent[i];
      }
    }
    const Floats result = decode(*codec, encode(*codec, sum.data(), count * 4, {}).wire, count);
    double error = 0.0;
    double size = 0.0;
    for (std::size_t i = 0; i < count; ++i) {
      error += std::pow(static_cast<double>(result[i]) - exact[i], 2);
      size += exact[i] * exact[i];
    }
    return error / size;
  };
  for (const int nodes : {2, 3, 8, 64}) {
    INFO(nodes);
    CHECK(nmse("bf16", nodes) <= 1e-5);
    CHECK(nmse("fp16", nodes) <= 1e-6);
    CHECK(nmse("int8", nodes) <= 1e-4);
    CHECK(nmse("int4", nodes) <= 2.5e-2);
    CHECK(nmse("int8", nodes) <= 1.1 * nmse("int8", 2));
  }
}

TEST_CASE("compress/codec: dithering is right in the mean", "[compress][fast]") {
  for (const std::string text : {"dithering", "dithering:levels=127", "dithering:kind=natural"}) {
    const auto codec = compress::make_codec(spec_of(text), DType::kFloat32);
    const std::size_t count = 64;
    const Floats values = gaussian(count, 17);
    std::vector<double> mean(count, 0.0);
    constexpr int kTimes = 4000;
    float largest = 0.0F;
    for (const float value : values) largest = std::max(largest, std::fabs(value));
    for (int time = 0; time < kTimes; ++time) {
      const Encoded out = encode(*codec, values.data(), count * 4, {}, static_cast<std::uint64_t>(time) * 1024);
      const Floats sent = decode(*codec, out.wire, count);
      for (std::size_t i = 0; i < count; ++i) mean[i] += static_cast<double>(sent[i]) / kTimes;
    }
    // A level is at most half of the largest value wide: five standard deviations of the mean.
    for (std::size_t i = 0; i < count; ++i)
      CHECK(std::fabs(mean[i] - static_cast<double>(values[i])) <=
            5.0 * 0.25 * static_cast<double>(largest) / std::sqrt(kTimes));
    // Nodes have lots of their own.
    CHECK(encode(*codec, values.data(), count * 4, {}, 0, 1).wire !=
          encode(*codec, values.data(), count * 4, {}, 0, 2).wire);
  }
}

TEST_CASE("compress/codec: random-k sends the same places of all nodes, each as often as it is due",
          "[compress][fast]") {
  const auto codec = compress::make_codec(spec_of("randomk:k=0.1"), DType::kFloat32);
  const std::size_t count = 1024;
  std::vector<int> sent_times(count, 0);
  constexpr int kTimes = 2000;
  for (int time = 0; time < kTimes; ++time) {
    const auto first = static_cast<std::uint64_t>(time) * 1024;
    const Floats a = decode(*codec, encode(*codec, Floats(count, 1.0F).data(), count * 4, {}, first, 1).wire, count);
    const Floats b = decode(*codec, encode(*codec, Floats(count, 1.0F).data(), count * 4, {}, first, 0).wire, count);
    REQUIRE(a == b);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < count; ++i) {
      kept += a[i] == 1.0F;
      sent_times[i] += a[i] == 1.0F;
    }
    REQUIRE(kept == 102);
  }
  for (const int times : sent_times) CHECK(std::abs(times - kTimes / 10) < 80);  // 6 standard deviations
}

TEST_CASE("compress/codec: bytes that no peer makes are refused", "[compress][fast]") {
  std::mt19937 random(18);
  for (const std::string& text : kSpecs) {
    const auto codec = compress::make_codec(spec_of(text), DType::kFloat32);
    for (const std::size_t count : {std::size_t{1}, std::size_t{100}, std::size_t{3000}}) {
      const Encoded out = encode(*codec, gaussian(count, 19).data(), count * 4, {});
      Bytes wire = out.wire;
      wire.resize(wire.size() + 3);
      for (std::size_t bytes = out.wire.size() < 40 ? 0 : out.wire.size() - 40; bytes <= wire.size(); ++bytes)
        if (bytes != out.wire.size()) CHECK_FALSE(codec->fits(wire.data(), bytes, count * 4));
    }
    // Whatever fits can be expanded: address sanitizer looks.
    const std::size_t count = 1500;
    for (int time = 0; time < 200; ++time) {
      Bytes wire = encode(*codec, gaussian(count, 20).data(), count * 4, {}).wire;
      for (int flip = 0; flip < 20; ++flip) wire[random() % wire.size()] = static_cast<std::byte>(random());
      if (codec->fits(wire.data(), wire.size(), count * 4)) (void)decode(*codec, wire, count);
    }
  }
  const auto topk = compress::make_codec(spec_of("topk:k=0.02"), DType::kFloat32);
  Bytes wire = encode(*topk, gaussian(1024, 21).data(), 4096, {}).wire;
  const std::uint32_t outside = 1024;
  std::memcpy(wire.data() + 4, &outside, 4);
  CHECK_FALSE(topk->fits(wire.data(), wire.size(), 4096));
}

TEST_CASE("compress/codec: momentum is Nesterov's", "[compress][fast]") {
  const auto codec = compress::make_codec(spec_of("int8:momentum=0.9"), DType::kFloat32);
  Floats momentum(100, 0.0F);
  double m = 0.0;
  for (int step = 0; step < 5; ++step) {
    Floats values(100, 2.0F);
    codec->accelerate(reinterpret_cast<std::byte*>(values.data()), 400, momentum.data());
    m = 0.9 * m + 2.0;
    for (const float value : values) CHECK(static_cast<double>(value) == Approx(2.0 + 0.9 * m));
  }
}

TEST_CASE("compress/codec: what can be cut is the same as a whole and in parts, and says what was not finite",
          "[compress][fast]") {
  int can = 0;
  for (const std::string& spec : kSpecs) {
    const auto codec = compress::make_codec(spec_of(spec), DType::kFloat32);
    if (!codec->can_be_cut()) continue;
    ++can;
    INFO(spec);
    const std::size_t block = codec->block_elements();
    for (const std::size_t count : {std::size_t{1}, block, 3 * block + 5, 40 * block + 31}) {
      Floats values = gaussian(count, 5);
      values[count / 2] = std::numeric_limits<float>::quiet_NaN();
      if (count > 30 * block) values[0] = std::numeric_limits<float>::infinity();
      const Encoded whole = encode(*codec, values.data(), 4 * count, {});
      CHECK(whole.wire.size() == codec->bytes_full(4 * count));
      CHECK(codec->blocks_not_finite(whole.wire.data(), 4 * count) == whole.not_finite);
      CHECK(whole.not_finite == (count > 30 * block ? 2 : 1));
      Bytes parts;
      for (std::size_t at = 0; at < count; at += 2 * block) {
        CHECK(codec->bytes_full(4 * at) == parts.size());
        const std::size_t n = std::min(2 * block, count - at);
        // By another speaker, of another place: neither may matter.
        const Encoded part = encode(*codec, values.data() + at, 4 * n, {}, at + 7, 3);
        parts.insert(parts.end(), part.wire.begin(), part.wire.end());
      }
      CHECK((parts == whole.wire));
    }
  }
  CHECK(can == 2);  // int8, int4
}

TEST_CASE("compress/spec: what is asked for is understood, or refused with what there is", "[compress][fast]") {
  for (const std::string& text : kSpecs) {
    const auto spec = compress::parse_spec(text);
    REQUIRE(spec.is_ok());
    CHECK(compress::parse_spec(compress::text_of(spec.value())).value() == spec.value());
  }
  CHECK_FALSE(compress::parse_spec("").value());
  CHECK_FALSE(compress::parse_spec("none").value());
  CHECK(compress::parse_spec("int4").value().feedback);
  CHECK_FALSE(compress::parse_spec("int4:ef=0").value().feedback);
  CHECK(compress::parse_spec("int4").value() == compress::parse_spec("int4:scope=regions").value());
  const auto between_nodes = compress::parse_spec("int4:scope=nodes").value();
  CHECK_FALSE(between_nodes == compress::parse_spec("int4").value());
  CHECK(compress::parse_spec(compress::text_of(between_nodes)).value() == between_nodes);
  for (const std::string bad : {"int9",
                                "int8:",
                                "int8:ef=2",
                                "int8:k=0.1",
                                "topk:k=0",
                                "topk:k=0.5",
                                "topk:k=-1",
                                "topk:k=nan",
                                "topk:k",
                                "onebit:levels=7",
                                "dithering:levels=5",
                                "none:ef=1",
                                "dithering:kind=natural,levels=127",
                                "int8:momentum=1",
                                "int8:when=never",
                                "int8:scope=racks",
                                "exact:scope=nodes",
                                "int8,ef=1",
                                "int8:warmup=-1",
                                "INT8"}) {
    INFO(bad);
    const auto spec = compress::parse_spec(bad);
    REQUIRE_FALSE(spec.is_ok());
    CHECK(spec.status().message().find("'" + bad + "'") != std::string::npos);
    CHECK(spec.status().message().find("topk:k=0.05") != std::string::npos);
  }
}

TEST_CASE("compress/codec: what bytes become where nothing is zero is known before", "[compress][fast]") {
  for (const std::string& text : kSpecs) {
    const auto codec = compress::make_codec(spec_of(text), DType::kFloat32);
    for (const std::size_t count : kCounts) {
      INFO(text << " " << count);
      const Floats values = gaussian(count, 5);
      const std::size_t bytes = count * sizeof(float);
      CHECK(encode(*codec, values.data(), bytes, {}).wire.size() == codec->bytes_full(bytes));
      CHECK(codec->bytes_full(bytes) <= codec->bytes_max(bytes));
    }
  }
}

TEST_CASE("compress/codec: one bit says where zeros are for the blocks that have some", "[compress][fast]") {
  const auto codec = compress::make_codec(spec_of("onebit"), DType::kFloat32);
  constexpr std::size_t kCount = 2100;
  for (const std::size_t zero : {std::size_t{0}, std::size_t{255}, std::size_t{256}, std::size_t{700}, kCount - 1}) {
    INFO(zero);
    Floats values = gaussian(kCount, 6);
    const Floats residual = gaussian(kCount, 7, 0.5F);
    values[zero] = -residual[zero];
    const Encoded got = encode(*codec, values.data(), kCount * sizeof(float), residual);
    const std::size_t block = std::min(kCount - zero / 256 * 256, std::size_t{256});
    CHECK(got.wire.size() == codec->bytes_full(kCount * sizeof(float)) + (block + 7) / 8);
    CHECK(codec->fits(got.wire.data(), got.wire.size(), kCount * sizeof(float)));
    const Floats decoded = decode(*codec, got.wire, kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      const float sum = values[i] + residual[i];
      CHECK((decoded[i] == 0.0F) == (i == zero));
      if (i != zero) CHECK(std::signbit(decoded[i]) == std::signbit(sum));
      CHECK(got.residual[i] == sum - decoded[i]);
    }
    // From the middle on, as sums take it part by part.
    for (std::size_t first = 0; first < kCount; first += 256) {
      Floats part(kCount - first);
      codec->expand(got.wire.data(), first, part.size(), reinterpret_cast<std::byte*>(part.data()));
      CHECK(std::equal(part.begin(), part.end(), decoded.begin() + static_cast<std::ptrdiff_t>(first)));
    }
  }
}

TEST_CASE("compress/codec: one bit of nothing but zeros, some of them, and none", "[compress][fast]") {
  const auto codec = compress::make_codec(spec_of("onebit"), DType::kFloat32);
  constexpr std::size_t kCount = 7 * 256 + 19;
  const std::size_t bytes = kCount * sizeof(float);
  Floats values = gaussian(kCount, 9);
  std::fill(values.begin() + 256, values.begin() + 512, -0.0F);
  Encoded got = encode(*codec, values.data(), bytes, {});
  CHECK(got.wire.size() == codec->bytes_full(bytes));  // a block of zeros needs no more than its scale
  Floats decoded = decode(*codec, got.wire, kCount);
  for (std::size_t i = 0; i < kCount; ++i) CHECK((decoded[i] == 0.0F) == (i / 256 == 1));
  for (std::size_t i = 256; i < 512; ++i) CHECK_FALSE(std::signbit(decoded[i]));

  values.assign(kCount, 0.0F);
  for (std::size_t i = 5; i < kCount; i += 256) values[i] = 2.0F;
  got = encode(*codec, values.data(), bytes, {});
  CHECK(got.wire.size() == codec->bytes_max(bytes));
  CHECK(decode(*codec, got.wire, kCount) == values);
  // What does not say the same twice is refused: the count, its mark, a block's mark, a byte less and one more.
  CHECK(codec->fits(got.wire.data(), got.wire.size(), bytes));
  CHECK_FALSE(codec->fits(got.wire.data(), got.wire.size(), bytes - sizeof(float)));
  CHECK_FALSE(codec->fits(got.wire.data(), got.wire.size() - 1, bytes));
  CHECK_FALSE(codec->fits(got.wire.data(), got.wire.size() + 1, bytes));
  CHECK_FALSE(codec->fits(got.wire.data(), 3, bytes));
  for (const std::size_t at : {std::size_t{0}, std::size_t{3}, std::size_t{5}}) {
    Bytes other = got.wire;
    other[at] ^= std::byte{0x80};
    CHECK_FALSE(codec->fits(other.data(), other.size(), bytes));
  }
}

// unit_compress "[.rates]": rates of the kernels. In parts of 64 KiB, as chunks are; of one part
// again and again, which stays in the cache, and of 64 MiB, which does not.
TEST_CASE("compress/codec: rates", "[.rates]") {
  constexpr std::size_t kPart = 16384;
  constexpr std::size_t kBytes = kPart * sizeof(float);
  for (const std::size_t parts : {std::size_t{1}, std::size_t{1024}}) {
    const Floats values = gaussian(parts * kPart, 8);
    Floats other(parts * kPart);
    Floats residual(parts * kPart);
    const auto from = [&](std::size_t part) {
      return reinterpret_cast<const std::byte*>(values.data() + part * kPart);
    };
    const auto to = [&](std::size_t part) { return reinterpret_cast<std::byte*>(other.data() + part * kPart); };
    const auto gb_per_second = [&](const std::function<void(std::size_t part)>& work) {
      const int repeats = parts == 1 ? 200 : 1;
      double best = 0.0;
      for (int round = 0; round < (parts == 1 ? 20 : 5); ++round) {
        const auto began = std::chrono::steady_clock::now();
        for (int i = 0; i < repeats; ++i)
          for (std::size_t part = 0; part < parts; ++part) work(part);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        best = std::max(best, static_cast<double>(repeats * parts * kBytes) / took.count() / 1e9);
      }
      return best;
    };
    const double copied = gb_per_second([&](std::size_t part) { std::memcpy(to(part), from(part), kBytes); });
    std::printf(
        "%zu KiB: memcpy %.1f GB/s; encode, with feedback, decode, decode and add: GB/s of fp32 and part of memcpy\n",
        parts * kBytes / 1024, copied);
    for (const compress::KernelTable* table : compress::available_tables())
      for (const char* text : {"bf16", "int8", "int4", "onebit"}) {
        const auto codec = compress::make_codec_with(*table, spec_of(text), DType::kFloat32);
        const std::size_t wire_bytes = codec->bytes_max(kBytes);
        Bytes wire(parts * wire_bytes);
        const auto encoding = [&](bool feeds) {
          return gb_per_second([&](std::size_t part) {
            ChunkOrigin place;
            place.residual = feeds ? residual.data() + part * kPart : nullptr;
            codec->encode(from(part), kBytes, place, wire.data() + part * wire_bytes);
          });
        };
        const double fed = encoding(true);
        const double plain = encoding(false);
        const double decoded = gb_per_second(
            [&](std::size_t part) { codec->expand(wire.data() + part * wire_bytes, 0, kPart, to(part)); });
        const double added = gb_per_second([&](std::size_t part) {
          const reduce::Input inputs[] = {{from(part)}, {wire.data() + part * wire_bytes, 1.0, codec.get()}};
          reduce::combine(inputs, to(part), kPart, DType::kFloat32, core::ReduceOp::kSum, {});
        });
        std::printf("%-8s %-7s %5.1f %3.0f %%  %5.1f %3.0f %%  %5.1f %3.0f %%  %5.1f %3.0f %%\n", table->name, text,
                    plain, 100 * plain / copied, fed, 100 * fed / copied, decoded, 100 * decoded / copied, added,
                    100 * added / copied);
      }
  }
}
