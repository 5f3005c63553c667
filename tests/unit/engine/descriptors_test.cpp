// How many file descriptors a rank needs, and what happens where it may not have as many.
#include "hybridps/engine/descriptors.h"

#include <sys/resource.h>

#include <string>

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using engine::DescriptorUse;

/// The soft limit while it lives.
struct SoftLimit {
  explicit SoftLimit(rlim_t soft) {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    const rlimit lower{soft, before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &lower) == 0);
  }
  ~SoftLimit() { (void)::setrlimit(RLIMIT_NOFILE, &before); }
  SoftLimit(const SoftLimit&) = delete;
  SoftLimit& operator=(const SoftLimit&) = delete;
  static rlim_t now() {
    rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
    return limit.rlim_cur;
  }
  rlimit before{};
};

}  // namespace

TEST_CASE("engine/descriptors: both sides of a pair may dial, for control and for data", "[engine][fast]") {
  CHECK(engine::descriptors_needed({.own = 40}) == 40);
  CHECK(engine::descriptors_needed({.own = 40, .remote = 11}) == 40 + 11 * 4);
  CHECK(engine::descriptors_needed({.own = 40, .remote = 424, .local = 7, .ways = 2}) == 40 + 424 * 6 + 7 * 2);
  CHECK(engine::descriptors_needed({.own = 40, .remote = 10, .ways = 0}) == 40 + 10 * 2);  // RDMA

  core::Config config;
  engine::Interfaces interfaces;
  interfaces.nics.resize(2);
  CHECK(engine::data_ways(config, interfaces, 1) == 2);
  CHECK(engine::data_ways(config, interfaces, 3) == 3);
  config.data_sockets = 4;
  CHECK(engine::data_ways(config, interfaces, 1) == 8);
  interfaces.rdma = true;
  CHECK(engine::data_ways(config, interfaces, 1) == 0);
}

TEST_CASE("engine/descriptors: the soft limit is raised where it is too low, and only there", "[engine][fast]") {
  const SoftLimit soft(100);
  CHECK(engine::allow_descriptors({.own = 60, .remote = 10}).is_ok());
  CHECK(SoftLimit::now() == 100);
  REQUIRE(soft.before.rlim_max > 101);
  CHECK(engine::allow_descriptors({.own = 61, .remote = 10}).is_ok());
  CHECK(SoftLimit::now() == soft.before.rlim_max);
}

TEST_CASE("engine/descriptors: too few are an error that says how many are needed, and how many there are",
          "[engine][fast]") {
  const SoftLimit soft(100);
  const DescriptorUse use{.own = soft.before.rlim_max, .remote = 11, .local = 3};
  const core::Status status = engine::allow_descriptors(use);
  CHECK(SoftLimit::now() == 100);
  CHECK(status.code() == core::Code::kOutOfResources);
  const std::string text(status.message());
  INFO(text);
  CHECK(text.find("too few file descriptors: " + std::to_string(soft.before.rlim_max + 50) + " are needed") == 0);
  CHECK(text.find("4 for each of 11 ranks and servers on other nodes, 2 for each of 3 other ranks") !=
        std::string::npos);
  CHECK(text.find("may have " + std::to_string(soft.before.rlim_max) + "; raise the hard limit") != std::string::npos);
}
