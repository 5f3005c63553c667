// hybridps/pg/process_group_hybrid.h: torch's view of one group.
//
// Model    Each collective becomes one or several worker::Operations that name the tensors' memory, submitted to the
//          engine's group; the call returns a Work at once. Nothing here moves bytes.
// Threads  every method from any thread, without the interpreter's lock except where torch holds it (supports*, getters,
//          the destructor). Those that wait for the network: wait_ready(), eagerConnectSingleDevice(), shutdown(), abort(), reconfigure(),
//          shrink(), leave_for_next(), monitoredBarrier(), allreduce of sparse tensors (their sizes), the destructor when shutdown() was not called.
// Errors   bad arguments throw in the call; everything else surfaces in the Work (errors.h).
// Fork     in a forked child every operation throws and the destructor does nothing.
// Versions overrides carry the names that torch 2.11 to 2.15 share; newer ones are guarded.
// Lives    reconfigure() ends one life of the group and begins the next, with other members; rank and size change then. No other
//          thread issues operations meanwhile; abort() and getters may come.
// Files    process_group_hybrid.cpp life and options; reconfigure.cpp the next life, shrinking; issue.cpp the way into the engine, issue_on_stream.cpp for CUDA
//          tensors; aggregate.cpp reductions; deliver.cpp the rest.
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

/// For a member whose start has failed, whatever failed: the others of its group raise `why`, with who it is, instead
/// of waiting for it. `incarnation` as they count it. Takes 0.3 s on rank 0, which may be the host of the Store: others
/// must have read it before the process ends; 2 s at most where the Store stands still. Not with the interpreter's lock.
void tell_of_failed_start(std::shared_ptr<bootstrap::KeyValueStore> store, const std::string& group_name,
                          const std::string& incarnation, int rank, int size, std::string_view why);

class ProcessGroupHybrid final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout_of_operations = kBackendDefaultTimeout)
        : c10d::Backend::Options(kBackendName, timeout_of_operations) {}
    bool dedicated_servers = true;  // whether the group may use those of HYBRIDPS_SERVERS; group rank 0's counts
    /// What gradients become between nodes (compress/spec.h); empty: HYBRIDPS_COMPRESS.
    std::string compress;
    /// The name of this life of the group, the same on all members and used once; empty: run id, restart count and how often
    /// the process has made the group.
    std::string incarnation;
    /// worker/priority.h: which of what waits goes first. Not of groups that are split off: these say their own.
    std::string priority;
    /// ValueError (c10::ValueError) where it is none.
    void set_priority(const std::string& text);
#if HYBRIDPS_TORCH_AT_LEAST(14)
    c10::intrusive_ptr<c10d::Backend::Options> clone() const override { return c10::make_intrusive<Options>(*this); }
#endif
  };

  /// Publishes this member and returns; operations queue until all members have come. options->group_name names the
  /// group; its global_ranks_in_group is empty for the world. The timeout counts from `called_at`. Connects to the Store
  /// (StoreUse::kBorrowed: the caller goes on to wait_ready() at once, and lends its connection): not with the interpreter's lock.
  ProcessGroupHybrid(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                     c10::intrusive_ptr<Options> options, core::TimePoint called_at = core::Clock::now(),
                     StoreUse store_use = StoreUse::kOwn);
  ~ProcessGroupHybrid() override;

  /// Waits until all members have come, or throws, naming those that have not. Ctrl-C aborts the group.
  void wait_ready();
  /// Leaves as shutdown() does, for a group that the caller makes next: nobody is waited for who says no goodbye within the linger
  /// time, but told `reason`, as is at once who has part in what is under way here.
  void leave_for_next(const std::string& reason);
  /// Group ranks by node; empty until all members have come.
  std::vector<int> node_of() const;
  /// What compression remembers on this rank, between two steps; and the reverse, before the first. Any thread.
  std::vector<Compression::Saved> compression_state();
  void load_compression_state(std::vector<Compression::Saved> saved, std::uint64_t steps);
  std::uint64_t compression_steps();
  std::vector<Compression::SizeDecision> compression_classes();
  /// Tensors of a loaded state that none here has asked for yet.
  std::size_t compression_unclaimed();
  /// compress::text_of() what is in effect: "none", "int8:...".
  std::string compression() const;
  engine::Group::RememberedSummary remembered_summary();
  /// What the roster comes to; no nodes until all members have come.
  engine::GroupSummary summary() const;

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  const c10::intrusive_ptr<Options>& options() const noexcept { return options_; }

  /// Of operations that this thread issues from now on, in whatever group, instead of their groups' own; none: as those
  /// say. Returns what was before. Ranks may differ: each orders what it sends.
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

  /// An allreduce after which the owner of each part of the tensor steps (outer/state.h): in place, of contiguous fp32 on the
  /// CPU. "momentum", "nesterov": the ranks' average is replaced by what the step subtracts from the weights; compressed where the
  /// group compresses. "load": what is kept becomes the ranks' sum. "read": the tensor becomes what is kept. `slot`: 1 to 65535,
  /// one for each tensor, always of the same size.
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

  // Coalescing: operations start at once, endCoalescing() returns one Work for all that this thread issued since.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  // Membership (reconfigure.cpp) ------------------------------------------------------------------------------------
  bool supportsShrinking() const override { return true; }
  /// A group of those that are not in `ranks`, in their order; called by them alone, and waits for them. `flags` 1: fails what is
  /// under way in this one, first. This one is left then: who says no goodbye to it is not waited for.
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks, int flags,
                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;

  // Groups, life ----------------------------------------------------------------------------------------------------
  bool supportsSplitting() const override { return true; }
  /// Null on ranks that are not in `ranks`. Called again with the same name and ranks: the same child.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  /// Of a group that is to work on this GPU (`device_id`): makes its channel, and agrees with the other ranks about the
  /// GPUs of their nodes, so that the first collective need not. Waits for all members. Groups split off do it, too.
  void eagerConnectSingleDevice(at::Device device) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  uint64_t getSequenceNumberForGroup() override;
  void setSequenceNumberForGroup() override {}
  /// Works have durations in any case.
  void enableCollectivesTiming() override {}
  /// Fails what is under way, here and on the other ranks, and leaves as shutdown() does.
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
  /// The same for as long as this process group lives. Takes hold of the engine.
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  /// Begins the group's next life, with those whose handles are given. What is under way in the life before fails; what the
  /// members of a healthy one have issued is still served. The Work completes when all members have come; until then, and
  /// after a failure, the process group has the rank and size that it asked for, and another call may follow at once.
  /// Throws: bad handles, a uuid that it had before.
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& opts) override;
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t hook_id) override;
#endif

 private:
  /// One call on its way into the engine (issue.cpp).
  struct Call {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    const char* name = "";                  // in messages and in torch's record_param_comms: "all_reduce"
    const char* title = "";                 // in torch's profiler: "hybridps:all_reduce"
    std::chrono::milliseconds timeout{-1};  // negative: the group's
    bool asynchronous = true;
    std::vector<worker::Operation> operations;  // one Work completes when all have
    std::vector<at::Tensor> inputs;             // for the profiler
    std::vector<at::Tensor> outputs;            // Work::result(), the future's value
    Buffers buffers;
    std::function<void()> finish;       // before the Work counts as complete, not on the engine's thread
    std::vector<int64_t> input_splits;  // for the profiler
    std::vector<int64_t> output_splits;

    /// With what each of c10d's calls has.
    template <typename C10dOptions>
    Call&& of(c10d::OpType what, const char* called, const char* profiled, const C10dOptions& options,
              std::vector<at::Tensor> in, std::vector<at::Tensor> out) && {
      type = what;
      name = called;
      title = profiled;
      timeout = options.timeout;
      asynchronous = options.asyncOp;
      inputs = std::move(in);
      outputs = std::move(out);
      return std::move(*this);
    }
  };
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  WorkPtr issue(Call call);
  struct Life;
  std::shared_ptr<Life> life() const;
  static std::int8_t priority_of(const Life& life, const worker::Operation& operation) noexcept;
  /// The same for CUDA tensors (issue_on_stream.cpp).
  WorkPtr issue_on_stream(Call call, c10::Device device);
  struct ChannelKey;
  core::Result<std::shared_ptr<staging::Channel>> channel_for(Life& life, const ChannelKey& key, c10::Device device,
                                                              const std::shared_ptr<engine::Group>& group);
  std::vector<std::shared_ptr<staging::Channel>> channels_of(Life& life, const std::vector<worker::Operation>& operations,
                                                             c10::Device device, const std::shared_ptr<engine::Group>& group,
                                                             const std::string& what);
  /// Memory of the device that `buffers` hold, where the channel wants any; else null.
  std::byte* scratch_for(const std::shared_ptr<staging::Channel>& channel, const worker::Operation& operation,
                         c10::Device device, const std::shared_ptr<engine::Group>& group, Buffers& buffers,
                         const std::string& what) const;
  bool choose_coding(Life& life, const std::shared_ptr<engine::Group>& group, core::ReduceOp asked,
                     worker::Operation& slice, const std::byte* at) const;
  /// Where CUDA tensors were last used in this group.
  std::optional<c10::Device> last_device() const;
  WorkPtr combine_all(std::vector<WorkPtr> works);
  c10::intrusive_ptr<ProcessGroupHybrid> make_child(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks, c10::intrusive_ptr<Options> options);
  /// `call`, which cannot be interrupted, on a thread of its own. Ctrl-C aborts the group meanwhile, which must end `call`.
  core::Status wait_for(const std::shared_ptr<engine::Group>& group, const std::function<core::Status()>& call) const;
  void submit(Life& life, const std::shared_ptr<engine::Group>& group, const WorkHybrid::Ptr& work,
              std::vector<worker::Operation> operations);
  /// Locks issue_mutex_ by `lock` for a collective, which has the next place then. Not null: it has none, for it was issued in a
  /// callback of this work, and the program has issued more since then. Nothing is locked.
  static const WorkHybrid* lock_order(std::unique_lock<std::mutex>& lock, const Life& life);
  /// Fails the group, so that no peer waits for it, and throws.
  [[noreturn]] void refuse_without_order(const std::shared_ptr<engine::Group>& group, const std::string& work,
                                         const WorkHybrid& parent) const;
  /// Runs `submit` in the scope of torch's record of the call.
  void recorded(const engine::Group& group, const Call& call, const std::function<void()>& submit);
  bool is_coalescing() const;  // on this thread
  void coalesce(const WorkPtr& work);
  std::shared_ptr<engine::Group> group_or_throw(const Life& life, const char* name) const;
  std::shared_ptr<engine::Group> group_or_throw(const char* name) const { return group_or_throw(*life(), name); }
  /// Publishes this member of a new life and returns it. Throws; the others are told.
  std::shared_ptr<Life> open(engine::GroupOptions group_options);
  std::shared_ptr<Life> closed(std::string why);
  /// Ends the work of the life on all members; as leave(), but never the engine.
  void supersede(Life& life, const std::string& reason);
  bool is_reconfigurable() const noexcept;  // made with enable_reconfigure
  std::shared_ptr<Stay> stay() const;
  Handle own_handle(core::EngineId engine) const;
  /// As the last group of the process it waits, bounded, for the members' goodbyes, and ends the engine.
  void leave();
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds asked) const;
  std::vector<std::shared_ptr<TimeExtension>> take_extensions(std::chrono::milliseconds& timeout);
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

  // Device, and for messages peer and direction; collectives share one channel of a device.
  struct ChannelKey {
    c10::DeviceType type = c10::DeviceType::CUDA;
    int device = 0;
    int peer = -1;
    int direction = 0;  // 0 collectives, 1 sends, 2 receives
    auto operator<=>(const ChannelKey&) const = default;
  };
  /// From the constructor or a reconfigure() to the next, or the end. A call works with one from its beginning to its end.
  struct Life {
    std::shared_ptr<WorkContext> context;
    worker::Priorities priorities;
    std::shared_ptr<Membership> membership;  // null: nobody is in it
    std::string why_none;                    // in that case
    std::string incarnation;
    core::TimePoint connected_at{};  // for the log
    core::TimePoint started_at{};
    // issue_mutex_
    std::vector<std::shared_ptr<InOrder>> orders;  // by the lane they are issued from
    std::unique_ptr<Compression> compression;
    // channels_mutex_
    std::map<ChannelKey, std::shared_ptr<staging::Channel>> channels;
  };
  mutable std::mutex life_mutex_;
  std::shared_ptr<Life> life_;
  std::mutex reconfigure_mutex_;  // one at a time
  std::set<std::int64_t> uuids_;  // that reconfigure() had
  mutable std::shared_ptr<Stay> stay_;  // life_mutex_

  // Collectives take their sequence number and their place on the lane together.
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
