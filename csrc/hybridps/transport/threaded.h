// hybridps/transport/threaded.h: a Transport that a thread of its own drives, alone or with others.
//
// Why      Over TCP the system calls and copies of a fast card fill a core: the engine's thread has only one, and sums
//          besides (docs/decisions/0015).
// Model    send() and close() put down what is to be done for the TransportThread, which does it on the inner transport
//          and puts down what came of it: messages, completions, failures. progress() hands these out. Each side wakes the
//          other only where that one sleeps, or has armed: once, for however much lies there.
//          What has to be done at once (connect(), way(), attach(), paths(), and send_now() where something lies there to be
//          sent) the caller does itself while the thread is between two rounds, or else the thread at the end of its round.
//          send_now() waits for that for `patience` at most, then warns and leaves it to the thread.
//
//            engine: send, close, payloads given back --commands--> thread: inner.send, close, progress, arm, epoll_wait
//            engine: progress() -> Receiver, done     <--events---
//
// Or both  With a Handover (handover.h), which may be of several transports of one engine, the inner transport begins in the engine's thread, which then does both sides' work;
//          it goes to its own thread and back between two calls of progress(), as these find worth it.
// Memory   A Buffer's references are counted on the engine's side alone; the inner transport gets one that is lent
//          (BufferPool::lend). A payload received stays where the inner transport has it, and goes back through the thread.
// Threads  The Transport as every one. Its inner one belongs to the TransportThread in that one's rounds, and to a caller
//          between two, until the destructor has taken it back, which then closes it in its caller's thread.
// Counts   stats() are of this side: a message counts as sent when it was accepted here, as received when it is delivered.
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

/// `inner`: nobody has used it, and it can be waited for (kInvalidArgument otherwise). Driven by the thread from the start,
/// or with `handover` when that says so; if there can be no thread then, that is a warning, and nothing changes.
core::Result<std::unique_ptr<Transport>> make_threaded(std::unique_ptr<Transport> inner,
                                                       std::shared_ptr<TransportThread> thread,
                                                       std::shared_ptr<Handover> handover = nullptr);

}  // namespace hybridps::transport
