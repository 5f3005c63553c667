// The adapter over each of torch's Stores.
#include "hybridps/pg/store_adapter.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "hybridps/bootstrap/key_value.h"
#include "tests/support/catch.h"

using namespace hybridps;
using bootstrap::Bytes;
using bootstrap::KeyAndValue;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

namespace {

c10::intrusive_ptr<c10d::TCPStore> host() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

c10::intrusive_ptr<c10d::TCPStore> client_of(const c10d::TCPStore& server) {
  c10d::TCPStoreOptions options;
  options.port = server.getPort();
  options.timeout = std::chrono::seconds(10);
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

/// A Store that cannot do more than a Store must.
class PlainStore final : public c10d::Store {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this); }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override { values_[key] = value; }
  std::vector<std::uint8_t> get(const std::string& key) override { return values_.at(key); }
  std::int64_t add(const std::string& /*key*/, std::int64_t value) override { return value; }
  bool deleteKey(const std::string& key) override { return values_.erase(key) > 0; }
  bool check(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys)
      if (!values_.contains(key)) return false;
    return true;
  }
  std::int64_t getNumKeys() override { return static_cast<std::int64_t>(values_.size()); }
  void wait(const std::vector<std::string>& /*keys*/) override { std::abort(); }
  void wait(const std::vector<std::string>& /*keys*/, const std::chrono::milliseconds& /*timeout*/) override {
    std::abort();
  }
  bool hasExtendedApi() const override { return false; }

 private:
  std::map<std::string, std::vector<std::uint8_t>> values_;
};

void check_several(const StorePtr& store, pg::StoreUse use) {
  const auto adapter = pg::adapt_store(store, use);
  std::vector<KeyAndValue> values;
  std::vector<std::string> keys;
  std::vector<std::optional<Bytes>> expected;
  for (int i = 0; i < 100; ++i) {
    keys.push_back("several/" + std::to_string(i));
    expected.emplace_back();
    if (i % 7 == 0 || (i > 20 && i < 40) || i == 99) {
      expected.back() = Bytes(static_cast<std::size_t>(1 + 997 * i), static_cast<std::uint8_t>(i));
      values.push_back({keys.back(), *expected.back()});
    }
  }
  // Absent keys are told at once: nothing waits for them.
  const auto begin = std::chrono::steady_clock::now();
  // In brackets: torch has an operator<< for vectors, which Catch would use.
  CHECK((adapter->try_get_each(keys).value() == std::vector<std::optional<Bytes>>(100)));
  REQUIRE(adapter->set_each(values).is_ok());
  CHECK((adapter->try_get_each(keys).value() == expected));
  CHECK((adapter->try_get("several/7").value() == expected[7]));
  CHECK(adapter->set_each({}).is_ok());
  CHECK(adapter->try_get_each({}).value().empty());
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

}  // namespace

TEST_CASE("pg/store_adapter: several values at a time go through each of torch's Stores", "[pg][fast]") {
  for (const pg::StoreUse use : {pg::StoreUse::kOwn, pg::StoreUse::kBorrowed}) {
    const auto server = host();
    check_several(server, use);
    const auto other = host();
    check_several(client_of(*other), use);
    check_several(c10::make_intrusive<c10d::PrefixStore>("a", c10::make_intrusive<c10d::PrefixStore>("b", server)),
                  use);
    CHECK(server->check({"b/a/several/0"}));
    check_several(c10::make_intrusive<c10d::HashStore>(), use);
    check_several(c10::make_intrusive<PlainStore>(), use);
    const auto file = std::filesystem::temp_directory_path() / ("hybridps-store-" + std::to_string(getpid()));
    check_several(c10::make_intrusive<c10d::FileStore>(file.string(), 1), use);
    std::filesystem::remove(file);
  }
}

TEST_CASE("pg/store_adapter: a Store whose host is gone is said with the key", "[pg][fast]") {
  auto server = host();
  const auto adapter = pg::adapt_store(client_of(*server), pg::StoreUse::kBorrowed);
  REQUIRE(adapter->set("here", Bytes{1}).is_ok());
  server.reset();
  const std::vector<std::string> keys{"here", "there"};
  const auto refused = [](const core::Status& status, const char* call) {
    INFO(status.to_string());
    CHECK(status.code() == core::Code::kPeerDead);
    CHECK(status.message().find(std::string("failed in ") + call + "(\"here\")") != std::string_view::npos);
    CHECK(status.message().find("see whether the process that hosts it") != std::string_view::npos);
  };
  refused(adapter->try_get_each(keys).status(), "multi_get");
  refused(adapter->set_each(std::vector<KeyAndValue>{{"here", {1}}, {"there", {2}}}), "multi_set");
}
