// hybridps/transport/threaded.h: a Transport that a separate thread drives.
//
// Why      Over TCP, the system calls and copies of a fast card fill a core. The engine's thread has only one core, and
//          also sums (decision 15: docs/decisions/threads.md).
// Model    One TransportThread may drive several transports. send() and close() queue commands for the thread. The
//          thread runs the commands on the inner transport and queues the results as events: messages, completions,
//          failures. progress() hands out the events. Each side wakes the other only if the other sleeps or has armed.
//          One wake-up covers everything that is queued.
//          connect(), way(), attach() and paths() must run at once, and so must send_now() if commands are still
//          unsent. The caller runs them itself while the thread is between two rounds. Otherwise the thread runs them
//          at the end of its round. send_now() waits for the thread for `patience` at most. Then send_now() warns and
//          leaves the messages to the thread.
//
//           engine: send, close, payloads given back --commands--> thread: inner.send, close, progress, arm, epoll_wait
//           engine: progress() -> Receiver, done     <--events---
//
// Or both  With a Handover (handover.h), the inner transport begins in the engine's thread, which then does the work of
//          both sides. The inner transport moves to its own thread and back between two calls of progress(), when the
//          Handover finds that the move pays. Several transports of one engine may share a Handover.
// Memory   A Buffer's references are counted on the engine's side only. The inner transport gets a lent Buffer
//          (BufferPool::lend). A received payload stays where it is, and goes back through the thread.
// Threads  As for every Transport. The inner transport belongs to the TransportThread during a round, and to a caller
//          between two rounds. The destructor takes the inner transport back and closes it in its caller's thread.
// Counts   stats() counts on the engine's side: a message is sent when send() accepts it, and received when progress()
//          delivers it.
// Fork     in a forked child every method does nothing or returns kClosed, and destruction leaks on purpose.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/core/status.h"
#include "hybridps/transport/handover.h"
#include "hybridps/transport/transport.h"
#include "hybridps/transport/transport_thread.h"

namespace hybridps::transport {

/// `inner` must be unused and must have an event_fd() (kInvalidArgument otherwise). The thread drives `inner` from the
/// start or, with `handover`, when the handover says so. If the thread cannot start at a later handover, a warning is
/// logged and the engine's thread goes on driving. kOutOfResources: no descriptor or thread.
core::Result<std::unique_ptr<Transport>> make_threaded(std::unique_ptr<Transport> inner,
                                                       std::shared_ptr<TransportThread> thread,
                                                       std::shared_ptr<Handover> handover = nullptr);

}  // namespace hybridps::transport
