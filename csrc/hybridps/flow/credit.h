// hybridps/flow/credit.h: the book of permits: how many bytes each sender may have under way to each receiver.
//
// Words    permit     the right to send one chunk: paid from the allowance, or granted by the receiver
//          allowance  bytes that a peer lets us send it unasked
//          window     how much of a peer's allowance we use, so that many senders do not flood one card
//          credit     returns allowance: the receiver has consumed a number of bytes
//          grant      a receiver's permit, for one chunk or for all chunks of a stream
//          budget     how many granted chunks of a receiver may be unfinished at a time
// Model    A sender has a SendBook for each peer. A receiver has a ReturnBook for each sender and account. Messages and
//          credits between the two may be late but are not lost. A receiver has one GrantBudget over all senders.
// Invariants  outstanding bytes are never negative. They exceed the allowance only while a single message is under way.
//          Paid bytes come back once, by credit or unpay(). Less than one batch of the receiver may never come back:
//          where this could stop a sender, the sender may send.
// Threads  plain values without a clock: pure functions of their arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "hybridps/schedule/window_tuner.h"

namespace hybridps::flow {

/// Size of one credit under "all chunks" grants, in bytes: a constant, since both sides must know the size.
inline constexpr std::int64_t kWholeBatchBytes = 8 * 1024;

class SendBook {
 public:
  using Duration = schedule::WindowTuner::Duration;
  using Rounds = schedule::WindowTuner::Rounds;

  SendBook() = default;
  /// `local`: the peer is reached through shared memory, and `whole_max` bytes may be in flight under "all chunks"
  /// grants. Otherwise the window limits these bytes too, and the window follows round trips.
  SendBook(std::int64_t allowance, bool local, std::int64_t whole_max) noexcept
      : local_(local),
        given_(allowance),
        allowance_(allowance),
        base_(allowance),
        window_(allowance),
        whole_max_(whole_max) {
    tuner_.reset(base_, allowance_);
  }

  std::int64_t window() const noexcept { return window_; }
  std::int64_t outstanding() const noexcept { return outstanding_; }
  std::int64_t whole_outstanding() const noexcept { return whole_outstanding_; }

  /// Uses `bytes` of the allowance from now on. True: the window has grown.
  bool set_window(std::int64_t bytes, const Rounds& rounds) noexcept {
    if (bytes == base_ && rounds == tuner_.rounds()) return false;
    base_ = bytes;
    allowance_ = std::max(given_, bytes);
    tuner_.reset(bytes, allowance_, rounds);
    return bytes > std::exchange(window_, bytes);
  }

  /// Pays for a permit. The window limits bulk; urgent messages may use the whole allowance. One message may always be
  /// under way, so that an allowance below one chunk still works.
  bool pay(std::int64_t cost, bool urgent) noexcept {
    if (cost > (urgent ? allowance_ : window_) - outstanding_ && outstanding_ > 0) return false;
    outstanding_ += cost;
    paid_ += static_cast<std::uint64_t>(cost);
    return true;
  }
  /// Asked when bulk was refused: more than the window waits to be sent. Only then is a round trip worth measuring,
  /// because credit for the end of an operation may come back only during the next operation.
  bool wants_round() const noexcept { return !local_ && !tuner_.is_measuring(); }
  void begin_round(Duration now) noexcept { tuner_.on_spent(paid_, now); }
  /// A chunk that was paid for takes `bytes` less.
  void lower(std::int64_t bytes) noexcept {
    outstanding_ -= bytes;
    paid_ -= static_cast<std::uint64_t>(bytes);
    tuner_.lower(static_cast<std::uint64_t>(bytes));
  }
  /// Gives back the cost of a permit that was not used.
  void unpay(std::int64_t cost) noexcept { give_back(cost); }
  /// Credit came. Counts never get negative, even if the peer returns too much, or bytes that were unpaid meanwhile.
  void on_credit(std::uint64_t bytes, Duration now) noexcept {
    give_back(at_most(bytes, outstanding_));
    if (!local_ && tuner_.on_returned(returned_, now)) window_ = tuner_.window();
  }

  /// pay() under an "all chunks" grant. A peer can have consumed almost a batch without returning it. So a payment is
  /// always allowed while less than a batch is outstanding, however small the window is: no credit would come.
  bool pay_whole(std::int64_t cost) noexcept {
    const bool fits = local_ ? whole_outstanding_ == 0 || whole_outstanding_ + cost <= whole_max_
                             : whole_outstanding_ < kWholeBatchBytes || whole_outstanding_ + cost <= window_;
    if (fits) whole_outstanding_ += cost;
    return fits;
  }
  /// The chunk was not sent, or (local) the send is done. The book that paid may have been forgotten since.
  void unpay_whole(std::int64_t cost) noexcept { whole_outstanding_ -= std::min(cost, whole_outstanding_); }
  void on_whole_credit(std::uint64_t bytes) noexcept { whole_outstanding_ -= at_most(bytes, whole_outstanding_); }

  /// The peer is far, and data is under way: credit and grants would come late behind it.
  bool delays_permits() const noexcept {
    return tuner_.rounds() == schedule::WindowTuner::kFixed && outstanding_ + whole_outstanding_ > kWholeBatchBytes;
  }
  /// Whether outstanding bytes may still wait in front of the card. A quarter of the window and a batch may stay
  /// outstanding without a backlog, because credit comes in such parts.
  bool has_backlog() const noexcept {
    return !local_ && outstanding_ + whole_outstanding_ > window_ / 2 + kWholeBatchBytes;
  }

 private:
  static std::int64_t at_most(std::uint64_t bytes, std::int64_t limit) noexcept {
    return static_cast<std::int64_t>(std::min(bytes, static_cast<std::uint64_t>(limit)));
  }
  void give_back(std::int64_t bytes) noexcept {
    outstanding_ -= bytes;
    returned_ += static_cast<std::uint64_t>(bytes);
  }

  bool local_ = false;
  std::int64_t given_ = 0;      // the peer's allowance near by
  std::int64_t allowance_ = 0;  // that, or the window to a far peer
  std::int64_t base_ = 0;       // as set by set_window()
  std::int64_t window_ = 0;     // as tuned
  std::int64_t whole_max_ = 0;
  std::int64_t outstanding_ = 0;  // paid from the allowance and not returned
  std::int64_t whole_outstanding_ = 0;
  std::uint64_t paid_ = 0;  // total since the beginning
  std::uint64_t returned_ = 0;
  schedule::WindowTuner tuner_;
};

class ReturnBook {
 public:
  ReturnBook() = default;
  explicit ReturnBook(std::int64_t batch_max) noexcept : batch_max_(batch_max), batch_(batch_max) {}

  /// The sender uses `bytes` of its allowance. Credit returns a quarter at a time, so the sender still has most of its
  /// window while credit is on the way.
  void note_window(std::int64_t bytes) noexcept { batch_ = std::clamp<std::int64_t>(bytes / 4, 1, batch_max_); }
  /// `cost` bytes were consumed. True: a batch is due.
  bool consumed(std::int64_t cost) noexcept { return (due_ += cost) >= batch_; }
  /// Takes all bytes that are due, for one credit message; 0: none.
  std::int64_t take_due() noexcept { return std::exchange(due_, 0); }
  std::int64_t due() const noexcept { return due_; }

 private:
  std::int64_t batch_max_ = kWholeBatchBytes;
  std::int64_t batch_ = kWholeBatchBytes;
  std::int64_t due_ = 0;
};

class GrantBudget {
 public:
  /// Allows at least one chunk. Allows further chunks up to `chunks`, while all together have at most `bytes`.
  explicit GrantBudget(std::uint32_t chunks, std::uint64_t bytes = ~std::uint64_t{0}) noexcept
      : chunks_max_(std::max(1U, chunks)), bytes_max_(bytes) {}

  bool has_unit() const noexcept { return chunks_ < chunks_max_; }
  bool fits(std::uint64_t bytes) const noexcept { return has_unit() && (chunks_ == 0 || bytes_ + bytes <= bytes_max_); }
  void take(std::uint64_t bytes = 0) noexcept {
    ++chunks_;
    bytes_ += bytes;
  }
  void give_back(std::uint64_t bytes = 0) noexcept {
    --chunks_;
    bytes_ -= bytes;
  }
  std::uint32_t chunks() const noexcept { return chunks_; }

 private:
  std::uint32_t chunks_max_;
  std::uint64_t bytes_max_;
  std::uint32_t chunks_ = 0;  // granted and unfinished
  std::uint64_t bytes_ = 0;
};

}  // namespace hybridps::flow
