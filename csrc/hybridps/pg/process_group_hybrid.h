// hybridps/pg/process_group_hybrid.h: torch's view of one group.
//
// Model    Each collective becomes one or several worker::Operations on the tensors' memory. The call submits these
//          operations to the engine's group and returns a Work at once. This class moves no bytes.
// Threads  every method is thread-safe. Call methods without the interpreter's lock, except where torch holds the lock
//          (supports*, getters, the destructor). These methods wait for the network: wait_ready(),
//          eagerConnectSingleDevice(), shutdown(), abort(), reconfigure(), shrink(), leave_for_next(),
//          monitoredBarrier(), allreduce of sparse tensors (their sizes), the destructor without shutdown().
// Errors   bad arguments throw in the call; the Work reports every other error (errors.h).
// Fork     in a forked child every operation throws and the destructor does nothing.
// Versions overrides have the names that torch 2.11 to 2.15 share; newer overrides are guarded.
// Lives    reconfigure() ends one life of the group and begins the next life, with other members. Rank and size change
//          then. During reconfigure() no other thread may issue operations; abort() and getters are allowed.
// Files    process_group_hybrid.cpp: life and options. reconfigure.cpp: the next life, shrinking. issue.cpp: into the
//          engine. issue_on_stream.cpp: for CUDA tensors. aggregate.cpp: reductions. deliver.cpp: the rest.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "hybridps/bootstrap/key_value.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/fork.h"
#include "hybridps/core/ids.h"
#include "hybridps/engine/engine.h"
#include "hybridps/engine/group.h"
#include "hybridps/pg/call.h"
#include "hybridps/pg/compression.h"
#include "hybridps/pg/handle.h"
#include "hybridps/pg/hooks.h"
#include "hybridps/pg/lanes.h"
#include "hybridps/pg/process.h"
#include "hybridps/pg/store_adapter.h"
#include "hybridps/pg/tensors.h"
#include "hybridps/pg/work.h"
#include "hybridps/staging/stager.h"
#include "hybridps/worker/operation.h"
#include "hybridps/worker/priority.h"

namespace hybridps::pg {

inline constexpr char kBackendName[] = "hybridps";

/// Tells the other members of the group that this member could not start. The other members then raise `why`, with the
/// name of this member, instead of waiting. `incarnation`: the group's incarnation as the other members count it. Rank
/// 0 waits 0.3 s more: rank 0 may host the Store, and the other members must read the text before the process ends.
/// Gives up with a warning if the Store does not answer in 2 s (no limit if no thread can be made). Call without the
/// interpreter's lock.
void tell_of_failed_start(std::shared_ptr<bootstrap::KeyValueStore> store, const std::string& group_name,
                          const std::string& incarnation, int rank, int size, std::string_view why);

class ProcessGroupHybrid final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout_of_operations = kBackendDefaultTimeout)
        : c10d::Backend::Options(kBackendName, timeout_of_operations) {}
    bool dedicated_servers = true;  // whether the group may use the servers of HYBRIDPS_SERVERS; group rank 0 decides
    /// The codec for gradients between nodes (compress/spec.h); empty: HYBRIDPS_COMPRESS.
    std::string compress;
    /// The name of this life of the group: the same on all members, used only once. Empty: the name is made of the run
    /// id and how often the process has made the group.
    std::string incarnation;
    /// The order of waiting operations (worker/priority.h). A group made by split() without Options inherits the value.
    std::string priority;
    /// Throws c10::ValueError (ValueError in Python) if `text` is not a valid priority.
    void set_priority(const std::string& text);
#if HYBRIDPS_TORCH_AT_LEAST(14)
    c10::intrusive_ptr<c10d::Backend::Options> clone() const override { return c10::make_intrusive<Options>(*this); }
#endif
  };

  /// Publishes this member and returns. Operations queue until all members have come. options->group_name names the
  /// group; options->global_ranks_in_group is empty for the world. The timeout counts from `called_at`. The constructor
  /// connects to the Store, so call it without the interpreter's lock. StoreUse::kBorrowed: the caller lends its
  /// connection to the Store and calls wait_ready() at once.
  ProcessGroupHybrid(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                     c10::intrusive_ptr<Options> options, core::TimePoint called_at = core::Clock::now(),
                     StoreUse store_use = StoreUse::kOwn);
  ~ProcessGroupHybrid() override;

  /// Waits until all members have come, or throws and names the absent members. Ctrl-C aborts the group.
  void wait_ready();
  /// Leaves as shutdown() does, because the caller makes another group next. If operations are under way here, they
  /// fail at once on all members with `reason`. Nobody waits for a member that says no goodbye within the linger time:
  /// such a member gets `reason`.
  void leave_for_next(const std::string& reason);
  /// The node of each group rank; empty until all members have come.
  std::vector<int> node_of() const;
  /// Reads or sets what compression remembers on this rank. Read between two steps; set before the first. Any thread.
  std::vector<Compression::Saved> compression_state();
  void load_compression_state(std::vector<Compression::Saved> saved, std::uint64_t steps);
  std::uint64_t compression_steps();
  std::vector<Compression::SizeDecision> compression_classes();
  /// The number of tensors in a loaded state that no tensor of this group has claimed yet.
  std::size_t compression_unclaimed();
  /// The lossy codec in effect, as text of compress::text_of(): "none", "int8:...".
  std::string compression() const;
  engine::Group::RememberedSummary remembered_summary();
  /// The name of this life of the group, the same on all members; empty: nobody is in it.
  std::string incarnation() const;
  /// A summary of the roster; no nodes until all members have come.
  engine::GroupSummary summary() const;

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  const c10::intrusive_ptr<Options>& options() const noexcept { return options_; }

  /// Sets the priority of operations that this thread issues from now on, in all groups. Empty: each group's own
  /// priority. Returns the previous value. Ranks may use different values: each rank orders only what it sends.
  static std::optional<std::int8_t> exchange_thread_priority(std::optional<std::int8_t> priority) noexcept;

  // Reductions (aggregate.cpp) --------------------------------------------------------------------------------------
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts = c10d::AllreduceOptions()) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts = c10d::AllreduceOptions()) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceCoalescedOptions& opts = c10d::AllreduceCoalescedOptions()) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts = c10d::ReduceOptions()) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts = c10d::BarrierOptions()) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts = c10d::BarrierOptions(),
                        bool wait_all_ranks = false) override;

  /// An allreduce after which the owner of each part of the tensor makes a step (outer/state.h). The tensor is
  /// contiguous fp32 on the CPU and is changed in place. `slot`: 1 to 65535, one for each tensor, always of the same
  /// size.
  /// `what` "momentum", "nesterov": the ranks' average becomes the value that the step subtracts from the weights;
  /// compressed if the group compresses. "load": the ranks' sum becomes the kept state. "read": the tensor becomes the
  /// kept state.
  c10::intrusive_ptr<c10d::Work> outer_step(at::Tensor tensor, const std::string& what, std::int64_t slot, double rate,
                                            double momentum);

  // Movement (deliver.cpp) ------------------------------------------------------------------------------------------
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts = c10d::BroadcastOptions()) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts = c10d::GatherOptions()) override;
#if HYBRIDPS_TORCH_AT_LEAST(14)
  c10::intrusive_ptr<c10d::Work> gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                    const c10d::GatherOptions& opts = c10d::GatherOptions()) override;
#endif
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts = c10d::ScatterOptions()) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts = c10d::AllToAllOptions()) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts = c10d::AllToAllOptions()) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  // Coalescing: operations start at once. endCoalescing() returns one Work for all operations that this thread has
  // issued since startCoalescing().
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  // Membership (reconfigure.cpp) ------------------------------------------------------------------------------------
  bool supportsShrinking() const override { return true; }
  /// Makes a group of the members that are not in `ranks`, in the order of their ranks. Only these members call
  /// shrink(); the call waits for all of them. `flags` 1: first, operations under way in this group fail. At the end
  /// the call leaves this group and does not wait for members that say no goodbye.
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks, int flags,
                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;

  // Groups, life ----------------------------------------------------------------------------------------------------
  bool supportsSplitting() const override { return true; }
  /// Null on ranks that are not in `ranks`. A second call with the same name and ranks returns the same child.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  /// Prepares the group for work on this GPU (`device_id`), so that the first collective need not do so: makes the
  /// GPU's channel, and agrees with the other ranks about the GPUs of their nodes. Waits for all members. Groups that
  /// are split off later do the same.
  void eagerConnectSingleDevice(at::Device device) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  uint64_t getSequenceNumberForGroup() override;
  void setSequenceNumberForGroup() override {}
  /// Nothing to enable: Works always have durations.
  void enableCollectivesTiming() override {}
  /// Fails the operations under way, here and on the other ranks, and leaves as shutdown() does.
  void abort() override;
  void shutdown() override;
#if HYBRIDPS_TORCH_AT_LEAST(14)
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;
#endif
#if HYBRIDPS_TORCH_AT_LEAST(15)
  bool isInitialized() override { return life()->membership != nullptr; }
  bool supportsReconfigure() const override { return true; }
  /// The same handle as long as this process group lives. From the first call on, the process group keeps the engine.
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  /// Begins the group's next life, with the processes that made the given handles. Operations under way in the old life
  /// fail. If the old life is healthy, what its members have issued is still served. The Work completes when all
  /// members have come. Until then, and after a failure, the process group has the rank and size of this call, and the
  /// next call may follow at once. Throws: bad handles, a uuid that this process group has used before.
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& opts) override;
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t hook_id) override;
#endif

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  WorkPtr issue(Call call);
  struct Life;
  std::shared_ptr<Life> life() const;
  static std::int8_t priority_of(const Life& life, const worker::Operation& operation) noexcept;
  /// issue() for CUDA tensors (issue_on_stream.cpp).
  WorkPtr issue_on_stream(Call call, c10::Device device);
  struct ChannelKey;
  core::Result<std::shared_ptr<staging::Channel>> channel_for(Life& life, const ChannelKey& key, c10::Device device,
                                                              const std::shared_ptr<engine::Group>& group);
  std::vector<std::shared_ptr<staging::Channel>> channels_of(Life& life,
                                                             const std::vector<worker::Operation>& operations,
                                                             c10::Device device,
                                                             const std::shared_ptr<engine::Group>& group,
                                                             const std::string& what);
  /// Scratch memory on the device for the channel, held by `buffers`. Null: the channel needs none.
  std::byte* scratch_for(const std::shared_ptr<staging::Channel>& channel, const worker::Operation& operation,
                         c10::Device device, const std::shared_ptr<engine::Group>& group, Buffers& buffers,
                         const std::string& what) const;
  bool choose_coding(Life& life, const std::shared_ptr<engine::Group>& group, core::ReduceOp asked,
                     worker::Operation& slice, const std::byte* at) const;
  /// The device of the last CUDA tensors in this group; empty: none yet.
  std::optional<c10::Device> last_device() const;
  WorkPtr combine_all(std::vector<WorkPtr> works);
  c10::intrusive_ptr<ProcessGroupHybrid> make_child(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks, c10::intrusive_ptr<Options> options);
  /// Runs `call` on a thread of its own and waits. Ctrl-C aborts the group, which must end `call`.
  core::Status wait_for(const std::shared_ptr<engine::Group>& group, const std::function<core::Status()>& call) const;
  void submit(Life& life, const std::shared_ptr<engine::Group>& group, const WorkHybrid::Ptr& work,
              std::vector<worker::Operation> operations);
  /// Locks issue_mutex_ through `lock` and returns null: the collective has the next place in the order. Not null: the
  /// collective has no place, and nothing is locked. The collective was issued in a callback of the returned work, and
  /// the program has issued more operations since then.
  static const WorkHybrid* lock_order(std::unique_lock<std::mutex>& lock, const Life& life);
  /// Fails the group, so that no peer waits for the refused operation, and throws.
  [[noreturn]] void refuse_without_order(const std::shared_ptr<engine::Group>& group, const std::string& work,
                                         const WorkHybrid& parent) const;
  /// Runs `submit` in the scope of torch's record of the call.
  void recorded(const engine::Group& group, const Call& call, const std::function<void()>& submit);
  bool is_coalescing() const;  // on this thread
  void coalesce(const WorkPtr& work);
  std::shared_ptr<engine::Group> group_or_throw(const Life& life, const char* name) const;
  std::shared_ptr<engine::Group> group_or_throw(const char* name) const { return group_or_throw(*life(), name); }
  /// Publishes this member in a new life and returns the life. On a failure tells the other members and throws.
  std::shared_ptr<Life> open(engine::GroupOptions group_options);
  std::shared_ptr<Life> closed(std::string why);
  /// Ends the operations of the life on all members. Like leave(), but never ends the engine.
  void supersede(Life& life, const std::string& reason);
  bool is_reconfigurable() const noexcept;  // made with enable_reconfigure
  std::shared_ptr<Stay> stay() const;
  Handle own_handle(core::EngineId engine) const;
  /// Leaves the group. The last group of the process waits, bounded, for its members' goodbyes, and ends the engine.
  void leave();
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds asked) const;
  /// Sets the timeout of the call and its operations, with the running extensions. Returns the extensions that end with
  /// this work.
  std::vector<std::shared_ptr<TimeExtension>> set_timeout(Call& call);
  std::shared_ptr<InOrder> order_of_this_lane(Life& life);  // issue_mutex_ held

  WorkPtr sparse_allreduce(const std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts);
  WorkPtr point_to_point(c10d::OpType type, const char* name, const char* title, std::vector<at::Tensor>& tensors,
                         int peer, int tag);
  WorkPtr point_to_point(c10d::OpType type, const char* name, const char* title, const at::Tensor& tensor, int peer,
                         std::uint32_t tag, std::chrono::milliseconds timeout);

  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();
  const core::TimePoint entered_at_;  // before the Store is connected
  const c10::intrusive_ptr<c10d::Store> torch_store_;
  const std::shared_ptr<bootstrap::KeyValueStore> store_;
  const std::uint64_t generation_ = core::fork_generation();
  const int made_as_rank_;
  const std::uint64_t instance_ = core::random_u64();
  core::TimePoint opened_at_{};  // for the log
  std::atomic<std::int64_t> timeout_ms_;
  std::atomic<bool> aborted_{false};
  int global_rank_start_ = 0;
  int global_rank_stride_ = 1;

  // A device, and for messages the peer and the direction. All collectives of a device share one channel.
  struct ChannelKey {
    c10::DeviceType type = c10::DeviceType::CUDA;
    int device = 0;
    int peer = -1;
    int direction = 0;  // 0 collectives, 1 sends, 2 receives
    auto operator<=>(const ChannelKey&) const = default;
  };
  /// One life: from the constructor or a reconfigure() to the next, or to the end. A call uses one Life throughout.
  struct Life {
    std::shared_ptr<WorkContext> context;
    worker::Priorities priorities;
    std::shared_ptr<Membership> membership;  // null: nobody is in this life
    std::string why_none;                    // why membership is null
    std::string incarnation;
    core::TimePoint connected_at{};  // for the log
    core::TimePoint started_at{};
    // Guarded by issue_mutex_:
    std::vector<std::shared_ptr<InOrder>> orders;  // indexed by the lane that issues
    std::unique_ptr<Compression> compression;
    // Guarded by channels_mutex_:
    std::map<ChannelKey, std::shared_ptr<staging::Channel>> channels;
  };
  mutable std::mutex life_mutex_;
  std::shared_ptr<Life> life_;
  std::mutex reconfigure_mutex_;        // one reconfigure() at a time
  std::set<std::int64_t> uuids_;        // used by reconfigure() before
  mutable std::shared_ptr<Stay> stay_;  // guarded by life_mutex_

  // Held so that a collective takes its sequence number and its place on the lane together.
  std::mutex issue_mutex_;

  mutable std::mutex coalescing_mutex_;
  std::map<std::thread::id, std::vector<WorkPtr>> coalescing_;
  std::atomic<int> coalescing_threads_{0};

  std::mutex extensions_mutex_;
  std::vector<std::shared_ptr<TimeExtension>> extensions_;

  std::mutex children_mutex_;
  std::map<std::pair<std::string, std::vector<int>>, c10::weak_intrusive_ptr<ProcessGroupHybrid>> children_;
  std::uint64_t unnamed_children_ = 0;
  std::atomic<std::uint32_t> monitored_barriers_{0};

  mutable std::mutex channels_mutex_;
  std::optional<staging::ChannelOptions> channel_options_;
  bool blocking_wait_ = false;
  bool device_codecs_ = true;
  bool local_library_wanted_ = true;
  bool local_library_asked_for_ = false;
  std::optional<c10::Device> last_device_;
  std::optional<c10::Device> eager_device_;
};

}  // namespace hybridps::pg
