#include "hybridps/tls/sealed_store.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "hybridps/core/text.h"

namespace hybridps::tls {
namespace {

using bootstrap::Bytes;
using core::Code;
using core::Status;

constexpr std::array<std::uint8_t, 4> kMark = {'H', 'P', 'S', 's'};
constexpr std::size_t kSealBytes = kMark.size() + std::tuple_size_v<Mac>;

/// The longest text in a value that cannot be trusted: perhaps its writer says what is wrong. Empty: there is none.
std::string readable(const Bytes& value) {
  constexpr std::size_t kBytesMin = 16;
  constexpr std::size_t kBytesMax = 500;
  std::string longest;
  std::string run;
  for (const std::uint8_t byte : value) {
    const bool is_text = byte >= ' ' && byte < 0x7f;
    if (is_text && run.size() < kBytesMax) run.push_back(static_cast<char>(byte));
    if (run.size() > longest.size()) longest = run;
    if (!is_text) run.clear();
  }
  return longest.size() < kBytesMin ? std::string() : longest;
}

class SealedStore final : public bootstrap::KeyValueStore {
 public:
  SealedStore(std::shared_ptr<KeyValueStore> store, std::shared_ptr<const Authority> authority)
      : store_(std::move(store)), authority_(std::move(authority)) {}

  Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    return authority_ ? store_->set(key, sealed(key, value)) : store_->set(key, value);
  }

  Status set_each(std::span<const bootstrap::KeyAndValue> values) override {
    if (!authority_) return store_->set_each(values);
    std::vector<bootstrap::KeyAndValue> all;
    all.reserve(values.size());
    for (const auto& [key, value] : values) all.push_back({key, sealed(key, value)});
    return store_->set_each(all);
  }

  core::Result<std::optional<Bytes>> try_get(std::string_view key) override {
    return opened(key, store_->try_get(key));
  }

  core::Result<std::vector<std::optional<Bytes>>> try_get_each(std::span<const std::string> keys) override {
    core::Result<std::vector<std::optional<Bytes>>> found = store_->try_get_each(keys);
    if (!found.is_ok()) return found;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      core::Result<std::optional<Bytes>> value = opened(keys[i], std::move(found.value()[i]));
      if (!value.is_ok()) return value.status();
      found.value()[i] = std::move(value).value();
    }
    return found;
  }

  void settle() override { store_->settle(); }

 private:
  Bytes sealed(std::string_view key, std::span<const std::uint8_t> value) const {
    const Mac mac = authority_->seal(key, value);
    Bytes sealed(kSealBytes + value.size());
    auto to = std::copy(kMark.begin(), kMark.end(), sealed.begin());
    to = std::copy(mac.begin(), mac.end(), to);
    std::copy(value.begin(), value.end(), to);
    return sealed;
  }

  /// What was sealed, if `found` is a value that somebody may write under this key.
  core::Result<std::optional<Bytes>> opened(std::string_view key, core::Result<std::optional<Bytes>> found) const {
    if (!found.is_ok() || !found.value()) return found;
    Bytes& value = *found.value();
    const bool is_sealed = value.size() >= kSealBytes && std::equal(kMark.begin(), kMark.end(), value.begin());
    const auto bad = [&](const char* what) {
      return Status(Code::kMismatch, "the value \"" + std::string(key) + "\" in the c10d Store " + what);
    };
    if (!authority_)
      return is_sealed ? core::Result<std::optional<Bytes>>(bad(
                             "is sealed: its writer has HYBRIDPS_SECURITY=tls and a token, and this rank has not both; "
                             "give all ranks the same setting, and the same HYBRIDPS_TOKEN_FILE"))
                       : found;
    if (!is_sealed) {
      const Status status =
          bad("has no seal: its writer has not HYBRIDPS_SECURITY=tls, or could not read its token, or somebody else "
              "writes to this Store, or it is left from an earlier run; give all ranks the same setting and token, and "
              "each run a new Store");
      const std::string text = readable(value);
      return text.empty()
                 ? status
                 : Status(status.code(), std::string(status.message()) + ". It reads: " + core::quoted(text, 500));
    }
    Bytes plain(value.begin() + kSealBytes, value.end());
    const Mac mac = authority_->seal(key, plain);
    if (CRYPTO_memcmp(mac.data(), value.data() + kMark.size(), mac.size()) != 0)
      return bad(
          "has a seal of another token: HYBRIDPS_TOKEN or HYBRIDPS_TOKEN_FILE is not the same on all ranks, or "
          "somebody else writes to this Store, or it is left from an earlier run: give each run a new Store");
    return std::optional<Bytes>(std::move(plain));
  }

  const std::shared_ptr<KeyValueStore> store_;
  const std::shared_ptr<const Authority> authority_;
};

}  // namespace

std::shared_ptr<bootstrap::KeyValueStore> seal(std::shared_ptr<bootstrap::KeyValueStore> store,
                                               std::shared_ptr<const Authority> authority) {
  if (authority && !authority->can_seal()) authority.reset();
  return std::make_shared<SealedStore>(std::move(store), std::move(authority));
}

}  // namespace hybridps::tls
