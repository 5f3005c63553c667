#include "hybridps/engine/status_relay.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

namespace hybridps::engine {
namespace {

constexpr std::size_t kRoutesKept = 4096;

}  // namespace

void StatusRelay::send(core::EngineId to, core::GroupUid uid, wire::Body body, std::string_view text) {
  wire::Message message{{}, 0, std::move(body)};
  message.from.uid = uid;
  if (const schedule::Members* members = runtime_.members_of(uid))
    message.from.sender_rank = static_cast<std::uint32_t>(members->find(self_).value_or(0));
  runtime_.send_control(to, std::move(message), text);
}

void StatusRelay::ask(std::uint64_t number, std::uint64_t now_ns, const std::vector<core::EngineId>& engines) {
  const wire::StatusAsk ask{number, now_ns, self_};
  const worker::GroupState* const group = engines.size() > kDirectMax ? runtime_.largest_group() : nullptr;
  for (const core::EngineId engine : engines) {
    const std::optional<int> member = group != nullptr ? group->info.members.find(engine) : std::nullopt;
    if (!member || group->servers.is_gone(*member)) send(engine, {}, ask, {});
  }
  if (group != nullptr) pass_on(*group, ask, self_);
}

void StatusRelay::ask_again(std::uint64_t number, std::uint64_t now_ns, const std::vector<core::EngineId>& engines) {
  const worker::GroupState* const group = runtime_.largest_group();
  for (const core::EngineId engine : engines)
    send(engine, group != nullptr ? group->info.uid : core::GroupUid{}, wire::StatusAsk{number, now_ns, self_}, {});
}

std::vector<core::EngineId> StatusRelay::pick(const std::vector<core::EngineId>& silent,
                                              std::set<core::EngineId>& picked) {
  std::vector<core::EngineId> left;
  std::copy_if(silent.begin(), silent.end(), std::back_inserter(left),
               [&](core::EngineId engine) { return picked.count(engine) == 0; });
  const std::size_t step = (left.size() + kDirectMax - 1) / kDirectMax;
  std::vector<core::EngineId> some;
  for (std::size_t i = 0; i < left.size(); i += step) some.push_back(left[i]);
  picked.insert(some.begin(), some.end());
  return some;
}

void StatusRelay::pass_on(const worker::GroupState& group, const wire::StatusAsk& ask, core::EngineId from) {
  const membership::Tree& tree = group.plans->tree();
  const schedule::Topology& topology = group.info.topology;
  std::vector<int> to = tree.children();
  if (!tree.is_root()) to.push_back(tree.parent());
  for (int server = topology.rank(); server < topology.servers(); server += topology.size())
    if (!group.servers.is_gone(topology.size() + server)) to.push_back(topology.size() + server);
  for (const int member : to)
    if (const core::EngineId engine = group.info.members.engine(member); engine != from && engine != ask.asker)
      send(engine, group.info.uid, ask, {});
}

bool StatusRelay::on_asked(const wire::Message& message) {
  const wire::StatusAsk& ask = *message.as<wire::StatusAsk>();
  const core::EngineId from = message.from.source;
  const core::GroupUid uid = message.from.uid;
  if (ask.asker == self_ || ask.asker == core::EngineId{}) return false;  // servers do not know all engines of a group
  const schedule::Members* const members = runtime_.members_of(uid);
  if (members == nullptr) return ask.asker == from;  // the asker itself asks, or the group is not open here
  if (!members->find(from) || !members->find(ask.asker)) return false;
  const Asked asked{ask.asker, ask.number};
  const auto [route, is_new] = routes_.try_emplace(asked, Route{from, uid, ask.sent_ns});
  if (!is_new) {  // routes lead to engines that were asked earlier, or to the asker: so they lead nowhere in a circle
    const bool is_again = from == ask.asker && ask.sent_ns != route->second.sent_ns;
    if (is_again) route->second = {from, uid, ask.sent_ns};
    return is_again;
  }
  order_.push_back(asked);
  if (order_.size() > kRoutesKept) {
    routes_.erase(order_.front());
    order_.pop_front();
  }
  if (const worker::GroupState* group = runtime_.worker().find(uid)) pass_on(*group, ask, from);
  return true;
}

void StatusRelay::send_answer(const wire::Message& question, const wire::StatusAnswer& answer, std::string_view part) {
  send(question.from.source, question.from.uid, answer, part);
}

bool StatusRelay::on_answered(const wire::Message& message, std::string_view part) {
  const wire::StatusAnswer& answer = *message.as<wire::StatusAnswer>();
  const core::EngineId from = message.from.source;
  const core::GroupUid uid = message.from.uid;
  const schedule::Members* const members = runtime_.members_of(uid);
  const bool may_be_of_others = members != nullptr && members->find(from) && members->find(answer.author);
  if (answer.asker == self_) return may_be_of_others || answer.author == from;
  const auto route = routes_.find({answer.asker, answer.number});
  if (!may_be_of_others || route == routes_.end() || route->second.uid != uid || runtime_.worker().find(uid) == nullptr)
    return false;
  // Without room, the part would arrive empty, and the asker would not ask again.
  if (part.empty() || (part.size() <= runtime_.pool().slot_bytes_max() && runtime_.pool().allocate(part.size())))
    send(route->second.to, uid, answer, part);
  return false;
}

}  // namespace hybridps::engine
