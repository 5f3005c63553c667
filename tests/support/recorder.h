// tests/support/recorder.h: a Transport that shows what is sent through it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "hybridps/transport/transport.h"
#include "hybridps/wire/message.h"

namespace hybridps::test {

class Recorder final : public transport::Transport {
 public:
  using Seen = std::function<void(const wire::Message&, core::EngineId to)>;  // on its way out
  using Paths = std::function<std::vector<transport::PathInfo>()>;

  /// `seen`: called with the message, and with its receiver if the function takes one.
  template <typename F>
  Recorder(std::unique_ptr<transport::Transport> inner, F seen, Paths paths = {})
      : inner_(std::move(inner)), seen_(with_receiver(std::move(seen))), paths_(std::move(paths)) {}
  std::string_view name() const noexcept override { return inner_->name(); }
  core::Status attach(std::span<std::byte> memory) override { return inner_->attach(memory); }
  std::vector<std::byte> address() const override { return inner_->address(); }
  core::Result<transport::Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override {
    core::Result<transport::Endpoint*> endpoint = inner_->connect(peer, address);
    if (!endpoint.is_ok()) return endpoint;
    auto& noted = endpoints_[peer];
    if (!noted) noted = std::make_unique<Noted>(*endpoint.value(), seen_);
    return static_cast<transport::Endpoint*>(noted.get());
  }
  transport::Endpoint* find(core::EngineId peer) noexcept override { return inner_->find(peer); }
  transport::Way way(core::EngineId peer, std::span<const std::byte> address) noexcept override {
    return inner_->way(peer, address);
  }
  std::size_t progress() override { return inner_->progress(); }
  int event_fd() const noexcept override { return inner_->event_fd(); }
  bool arm() override { return inner_->arm(); }
  bool has_unsent() const noexcept override { return inner_->has_unsent(); }
  void set_receiver(transport::Receiver* receiver) noexcept override { inner_->set_receiver(receiver); }
  transport::TransportStats stats() const noexcept override { return inner_->stats(); }
  std::vector<transport::PathInfo> paths() const override { return paths_ ? paths_() : inner_->paths(); }

 private:
  struct Noted final : transport::Endpoint {
    Noted(transport::Endpoint& to, const Seen& s) : inner(to), seen(s) {}
    core::Status send(std::span<const std::byte> bytes, const transport::Buffer& payload, std::size_t payload_bytes,
                      transport::SendDone done) override {
      if (const core::Result<wire::Message> message = wire::decode(bytes); message.is_ok())
        seen(message.value(), inner.peer());
      return inner.send(bytes, payload, payload_bytes, std::move(done));
    }
    core::EngineId peer() const noexcept override { return inner.peer(); }
    void close(core::Status cause) noexcept override { inner.close(std::move(cause)); }
    transport::Endpoint& inner;
    const Seen& seen;
  };
  template <typename F>
  static Seen with_receiver(F seen) {
    if constexpr (std::is_invocable_v<F, const wire::Message&, core::EngineId>)
      return Seen(std::move(seen));
    else
      return [seen = std::move(seen)](const wire::Message& message, core::EngineId) { seen(message); };
  }
  std::unique_ptr<transport::Transport> inner_;
  const Seen seen_;
  const Paths paths_;
  std::map<core::EngineId, std::unique_ptr<Noted>> endpoints_;
};

}  // namespace hybridps::test
