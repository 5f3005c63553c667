// hybridps/pg/stream_work.h: the handle of an operation on CUDA tensors.
//
// Model    As with NCCL, everything is on the streams when the call returns. wait() makes the current stream wait for
//          the operation's end. wait() blocks the host only for a barrier, with a timeout, or with
//          HYBRIDPS_BLOCKING_WAIT. The future is completed at once, on the channel's out stream: a reader of the
//          future's value waits on the device.
// Owner    the caller, who may drop the handle at once. Held keeps what the operation reads and writes until the
//          caller's stream waits for the end, or the operation is over. In the second case a lane drops the memory,
//          because dropping a tensor may take the interpreter's lock.
// Threads  every method is thread-safe. Call methods that block without the interpreter's lock.
// Errors   an error that is known at wait() is thrown there. The next call on the group throws a later error, once.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "hybridps/core/status.h"
#include "hybridps/pg/tensors.h"
#include "hybridps/pg/work.h"
#include "hybridps/staging/stager.h"

namespace hybridps::pg {

class StreamWork final : public c10d::Work {
 public:
  using Ptr = c10::intrusive_ptr<StreamWork>;
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  /// The data that outlives the handle, until the device has finished.
  class Held {
   public:
    Held(std::shared_ptr<WorkContext> context, std::size_t parts) : context_(std::move(context)), parts_left_(parts) {}
    Buffers& buffers() noexcept { return buffers_; }
    void set_extensions(std::vector<std::shared_ptr<TimeExtension>> extensions) { extensions_ = std::move(extensions); }
    std::uint64_t completion_key() const noexcept { return completion_key_; }
    /// Drops the tensors.
    void let_go();
    /// One of `parts` is over. Called on the Stager's thread.
    static void part_over(const std::shared_ptr<Held>& held, const core::Status& status);
    /// The future that completes when all parts are over.
    FuturePtr future_result();
    float duration_ms() const;

   private:
    void complete();  // on a lane

    const std::shared_ptr<WorkContext> context_;
    const std::uint64_t completion_key_ = next_completion_key();
    const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
    std::vector<std::shared_ptr<TimeExtension>> extensions_;
    mutable std::mutex mutex_;
    Buffers buffers_;
    std::size_t parts_left_;
    core::Status status_;
    float duration_ms_ = -1;
    FuturePtr future_result_;
  };

  StreamWork(std::shared_ptr<WorkContext> context, const Call& call, c10::Device device, bool blocks_host,
             std::shared_ptr<Held> held);

  // For the process group -------------------------------------------------------------------------------------------
  /// Call before any other thread has this work.
  void add(std::shared_ptr<staging::Staged> staged, std::shared_ptr<staging::Channel> channel);
  /// Call when everything is enqueued: ends the profiler's span.
  void enqueued();
  /// Makes this work stand for `works` too; StreamWorks and WorkHybrids are allowed.
  void join(const std::vector<c10::intrusive_ptr<c10d::Work>>& works);
  /// Puts the ways back (from the host to the device) on the streams, if enqueue() left them open.
  void complete_enqueue();
  const std::vector<at::Tensor>& outputs() const noexcept { return outputs_; }
  c10::Device device() const noexcept { return device_; }
  std::string describe() const;

  // c10d::Work ------------------------------------------------------------------------------------------------------
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  FuturePtr getFuture() override;
  FuturePtr getFutureResult() override;
  uint64_t getSequencenumber() const override { return held_->completion_key(); }
  float getDuration() const override;
#if HYBRIDPS_TORCH_AT_LEAST(14)
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif
#if HYBRIDPS_TORCH_AT_LEAST(15)
  uint64_t getCompletionKey() const override { return held_->completion_key(); }
#endif

 private:
  core::Status failure() const;
  void throw_failure() const;

  const std::shared_ptr<WorkContext> context_;
  const char* const name_;
  std::vector<at::Tensor> outputs_;
  const c10::Device device_;
  const device::DeviceStream issued_on_;
  const std::chrono::milliseconds timeout_;
  const bool blocks_host_;
  const std::shared_ptr<Held> held_;
  std::vector<std::shared_ptr<staging::Staged>> staged_;
  std::vector<std::shared_ptr<staging::Channel>> channels_;  // the channel of each entry of staged_
  std::vector<Ptr> joined_;
  std::vector<c10::intrusive_ptr<c10d::Work>> on_host_;
  std::mutex future_mutex_;
  FuturePtr future_;
};

}  // namespace hybridps::pg
