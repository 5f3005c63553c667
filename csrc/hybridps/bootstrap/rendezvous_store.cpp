// What a rendezvous reads from the store and writes to it.
#include <utility>

#include "hybridps/bootstrap/rendezvous.h"
#include "hybridps/core/text.h"

namespace hybridps::bootstrap {

using core::Code;
using core::Status;

namespace {

std::string hex(std::uint64_t value) { return core::to_string(core::EngineId{value}); }

}  // namespace

std::string Rendezvous::key(std::string_view suffix) const { return options_.key_prefix + "/" + std::string(suffix); }
std::string Rendezvous::record_key(int rank) const { return key("rec/" + std::to_string(rank)); }
std::string Rendezvous::life_key(int rank) const { return options_.lives_prefix + "/life/" + std::to_string(rank); }
std::string Rendezvous::roster_key(std::uint64_t nonce, int part) const {
  return key("roster/" + hex(nonce) + "/" + std::to_string(part));
}
std::string Rendezvous::ack_key(std::uint64_t nonce, int rank) const {
  return key("ack/" + hex(nonce) + "/" + std::to_string(rank));
}

void Rendezvous::put(const std::string& name, std::span<const std::uint8_t> value) {
  put_each(std::vector<KeyAndValue>{{name, Bytes(value.begin(), value.end())}});
}

void Rendezvous::put_each(const std::vector<KeyAndValue>& values) {
  for (const KeyAndValue& value : values) fetched_.erase(value.key);
  const Status status =
      values.size() == 1 ? store_->set(values.front().key, values.front().value) : store_->set_each(values);
  if (!status.is_ok()) end_refused(values.front().key, status);
}

void Rendezvous::end_refused(const std::string& name, const Status& status) {
  // kMismatch: the value's writer belongs to another job, or has other settings.
  if (status.code() == Code::kMismatch) return end(status, true);
  end(Status(status.code(), "the store refused " + core::quoted(name) + ": " + std::string(status.message()) +
                                "; see whether the process that hosts the store (often rank 0) is alive"),
      false);
}

std::optional<Bytes> Rendezvous::get(const std::string& name) {
  // Whoever asks again wants to know what is there now.
  if (auto found = fetched_.extract(name)) return std::move(found.mapped());
  core::Result<std::optional<Bytes>> value = store_->try_get(name);
  if (value.is_ok()) return std::move(value).value();
  end_refused(name, value.status());
  return std::nullopt;
}

std::optional<Bytes> Rendezvous::get_roster(const Head& head) {
  std::vector<std::string> names;
  for (int part = 0; part < head.parts; ++part) names.push_back(roster_key(head.nonce, part));
  if (names.size() > 1) fetch(names);
  Bytes bytes;
  for (const std::string& name : names) {
    const std::optional<Bytes> part = phase_ == RendezvousPhase::kPending ? get(name) : std::nullopt;
    if (!part) return std::nullopt;
    bytes.insert(bytes.end(), part->begin(), part->end());
  }
  return bytes;
}

void Rendezvous::fetch(const std::vector<std::string>& names) {
  core::Result<std::vector<std::optional<Bytes>>> values = store_->try_get_each(names);
  if (!values.is_ok()) return end_refused(names.front(), values.status());
  for (std::size_t i = 0; i < names.size(); ++i) fetched_.insert_or_assign(names[i], std::move(values.value()[i]));
}

}  // namespace hybridps::bootstrap
