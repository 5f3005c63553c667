// The next life of a process group with other members, and groups of the members that are left (shrinking).
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/version.h>

#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/core/protocol.h"
#include "hybridps/core/text.h"
#include "hybridps/pg/errors.h"
#include "hybridps/pg/gil.h"
#include "hybridps/pg/process_group_hybrid.h"

namespace hybridps::pg {
namespace {

using namespace std::chrono_literals;

constexpr int kShrinkAbort = 1;  // torch.distributed.distributed_c10d.SHRINK_ABORT
/// The rendezvous has the timeout. The members' barrier after the rendezvous may take this much longer.
constexpr std::chrono::milliseconds kOnTop = 2s;

std::string where() { return bootstrap::host_name() + " pid " + std::to_string(getpid()); }

}  // namespace

void ProcessGroupHybrid::supersede(Life& life, const std::string& reason) {
  if (!life.membership) return;
  const auto group = life.membership->group();
  if (!group) return;
  std::map<ChannelKey, std::shared_ptr<staging::Channel>> channels;
  {
    const std::lock_guard lock(channels_mutex_);
    channels.swap(life.channels);
  }
  group->supersede(reason);
  for (const auto& [key, channel] : channels) channel->abort(core::Status(core::Code::kAborted, reason));
}

void ProcessGroupHybrid::leave_for_next(const std::string& reason) {
  if (generation_ != core::fork_generation()) return;
  const InterpreterReleased released;
  supersede(*life(), reason);
  leave();
}

std::shared_ptr<Stay> ProcessGroupHybrid::stay() const {
  {
    const std::lock_guard lock(life_mutex_);
    if (stay_) return stay_;
  }
  const Process::Arrival arrival(Process::instance());
  auto engine = engine::Engine::acquire();
  check_status(engine.status(), "starting the engine for group " + options_->group_name);
  const std::lock_guard lock(life_mutex_);
  if (!stay_) stay_ = Process::instance().stay(std::move(engine).value());
  return stay_;
}

Handle ProcessGroupHybrid::own_handle(core::EngineId engine) const {
  Handle handle;
  handle.made_as_rank = made_as_rank_;
  handle.engine = engine;
  handle.instance = instance_;
  handle.protocol_version = core::kProtocolVersion;
  handle.torch = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  handle.where = where();
  handle.group = options_->group_name;
  return handle;
}

#if HYBRIDPS_TORCH_AT_LEAST(15)
c10d::ReconfigureHandle ProcessGroupHybrid::get_reconfigure_handle() const {
  const InterpreterReleased released;
  const auto engine = stay()->engine();
  TORCH_CHECK(engine, "hybridps: get_reconfigure_handle of group ", options_->group_name,
              ": the group was shut down, or this process was forked");
  return to_text(own_handle(engine->id()));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHybrid::reconfigure(const c10d::ReconfigureOptions& opts) {
  const InterpreterReleased released;
  const std::string uuid = "uuid " + std::to_string(opts.uuid);
  const std::string what = "hybridps: reconfigure of group " + options_->group_name + ", " + uuid + ": ";
  const auto engine = stay()->engine();
  TORCH_CHECK(engine, what, "the group was shut down, or this process was forked");
  std::vector<std::string> texts;
  if (const auto* in_order = std::get_if<std::vector<c10d::ReconfigureHandle>>(&opts.handles)) {
    texts = *in_order;
  } else {
    const auto& any_order = std::get<std::unordered_set<c10d::ReconfigureHandle>>(opts.handles);
    texts.assign(any_order.begin(), any_order.end());
    std::sort(texts.begin(), texts.end());
  }
  const Handle ours = own_handle(engine->id());
  const auto members = parse_members(texts, ours);
  TORCH_CHECK_VALUE(members.is_ok(), what, members.status().message());
  const auto at = std::find(texts.begin(), texts.end(), to_text(ours));
  TORCH_CHECK_VALUE(at != texts.end(), what, "this process (", ours.where,
                    ") is not among the handles; who is left out does not call it");
  const std::chrono::milliseconds timeout =
      opts.timeout ? *opts.timeout : std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  TORCH_CHECK_VALUE(timeout.count() > 0, what, "the timeout must be more than 0");

  const std::lock_guard lock(reconfigure_mutex_);
  TORCH_CHECK(uuids_.insert(opts.uuid).second, what,
              "already used by this group; every attempt needs a uuid of its own");
  supersede(*life(),
            "rank " + std::to_string(rank_) + " (" + ours.where + ") has left for the group's next life, " + uuid +
                ", with " + std::to_string(texts.size()) +
                " members. reconfigure() ends what is under way. If this process is not a member of that life, it may "
                "end, or take part in a later reconfigure()");
  engine::GroupOptions group_options;
  group_options.life = uuid;
  group_options.incarnation = uuid + " of " + digest(texts);
  group_options.timeout = timeout;
  for (const Handle& member : members.value()) group_options.expected.push_back({member.engine, member.where});
  rank_ = static_cast<int>(at - texts.begin());
  size_ = static_cast<int>(texts.size());
  aborted_.store(false);
  monitored_barriers_.store(0);
  {
    const std::lock_guard of_children(children_mutex_);
    children_.clear();  // children of the old life; the new life may have other members
  }
  const auto begin = [this](std::shared_ptr<Life> next) {
    std::shared_ptr<Life> last;
    {
      const std::lock_guard of_life(life_mutex_);
      last = std::exchange(life_, std::move(next));
    }
    if (last->membership) Process::instance().leave(*last->membership);
  };
  try {
    begin(open(std::move(group_options)));
  } catch (const std::exception& error) {
    begin(closed("reconfigure() failed (" + uuid + "): " + message_of(error)));
    throw;
  }

  // The Work completes when all members have the roster and have told each other so.
  Call call;
  call.operations.resize(1);
  call.operations.front().kind = schedule::Kind::kBarrier;
  call.type = c10d::OpType::BARRIER;
  call.name = "reconfigure";
  call.title = "hybridps:reconfigure";
  call.timeout = timeout + kOnTop;
  return issue(std::move(call));
}
#endif

c10::intrusive_ptr<c10d::Backend> ProcessGroupHybrid::shrink(const std::vector<int64_t>& ranks, int flags,
                                                             const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const InterpreterReleased released;
  const auto life = this->life();
  const auto group = group_or_throw(*life, "shrink_group");
  const std::string what = "hybridps: shrink_group of group " + options_->group_name + ": ";
  std::vector<int> excluded;
  for (const int64_t rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, what, "rank ", rank, " is not in a group of ", size_);
    TORCH_CHECK_VALUE(rank != rank_, what, "this is rank ", rank, ", which is to be left out: it does not call it");
    excluded.push_back(static_cast<int>(rank));
  }
  std::sort(excluded.begin(), excluded.end());
  excluded.erase(std::unique(excluded.begin(), excluded.end()), excluded.end());
  std::vector<int> left;
  for (int rank = 0; rank < size_; ++rank)
    if (!std::binary_search(excluded.begin(), excluded.end(), rank)) left.push_back(rank);
  const std::string without = core::format_ranks(excluded, excluded.size());
  const std::string reason = "rank " + std::to_string(rank_) + " (" + where() +
                             ") has shrunk the group to what it is without ranks " + without +
                             " (shrink_group), and left this one";
  // A rank without operations under way does not abort: other ranks may be about to complete theirs.
  const bool idle = group->status().is_ok() && group->sequence_completed() == group->sequence_submitted();
  if ((flags & kShrinkAbort) != 0 && !idle) {
    group->abort(reason);
    const std::lock_guard lock(channels_mutex_);
    for (const auto& [key, channel] : life->channels) channel->abort(core::Status(core::Code::kAborted, reason));
  }

  auto child_options = c10::make_intrusive<Options>(opts ? opts->timeout : options_->timeout);
  const auto* own = dynamic_cast<const Options*>(opts.get());
  child_options->dedicated_servers = (own != nullptr ? *own : *options_).dedicated_servers;
  child_options->compress = own != nullptr && !own->compress.empty() ? own->compress : options_->compress;
  child_options->priority = (own != nullptr ? *own : *options_).priority;
  child_options->group_name = options_->group_name + ":shrunk";
  // All members have made the same number of groups of this name, whatever other groups they have made.
  child_options->incarnation =
      Process::instance().incarnations().next(child_options->group_name, life->incarnation + ".without " + without);
  const auto child = make_child(torch_store_, left, std::move(child_options));
  child->wait_ready();
  supersede(*life, reason);
  return child;
}

}  // namespace hybridps::pg
