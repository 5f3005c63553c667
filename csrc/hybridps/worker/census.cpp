#include "hybridps/worker/census.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace hybridps::worker {
namespace {

/// News waits so long for more of it.
constexpr auto kTellAfter = std::chrono::milliseconds(20);
/// So many times in a row; then it waits longer.
constexpr std::size_t kTellsInARow = 12;
constexpr auto kRowEndsAfter = std::chrono::milliseconds(250);
/// Ranks that ask at about the same time ask the same question.
constexpr auto kRoundLasts = std::chrono::seconds(1);

struct CensusHead {
  std::uint64_t sequence;
  std::uint64_t round;
};
/// `count` ranks from `first` on.
struct CensusRow {
  std::uint32_t first;
  std::uint32_t count;
  std::uint64_t submitted;
  std::uint64_t finished;
};

template <typename T>
void append(std::string& text, const T& value) {
  std::array<char, sizeof value> bytes;
  std::memcpy(bytes.data(), &value, sizeof value);
  text.append(bytes.data(), bytes.size());
}

template <typename T>
T read(std::string_view text) {
  T value;
  std::memcpy(&value, text.data(), sizeof value);
  return value;
}

}  // namespace

Census::Census(const schedule::Topology& topology) : me_(topology.rank()) {
  const int nodes = topology.nodes();
  const int my_node = topology.my_node();
  const std::vector<int>& here = topology.ranks_of(my_node);
  std::size_t smallest = here.size();  // the same decision on all ranks, whatever the size of their nodes
  for (int node = 0; node < nodes; ++node) smallest = std::min(smallest, topology.ranks_of(node).size());
  is_partial_ = static_cast<std::size_t>(topology.size()) - smallest > kAllAskedMax;
  if (!is_partial_) {
    for (int rank = 0; rank < topology.size(); ++rank)
      if (rank != me_) asked_.push_back(rank);
    neighbours_ = asked_;
    return;
  }
  const auto index = static_cast<std::size_t>(topology.local_index(me_));
  const auto add = [&](std::vector<int>& ranks, int rank) {
    if (std::find(neighbours_.begin(), neighbours_.end(), rank) != neighbours_.end()) return;
    ranks.push_back(rank);
    neighbours_.push_back(rank);
  };
  for (const int rank : here)
    if (rank != me_) add(asked_, rank);
  for (int step = 1; step < nodes; step *= 2) {
    const std::vector<int>& there = topology.ranks_of((my_node + step) % nodes);
    add(asked_, there[index % there.size()]);
  }
  for (int step = 1; step < nodes; step *= 2) {
    const std::vector<int>& there = topology.ranks_of((my_node + nodes - step) % nodes);
    for (std::size_t of_it = index; of_it < there.size(); of_it += here.size()) add(askers_, there[of_it]);
  }
}

void Census::begin(std::uint64_t sequence, core::TimePoint now) {
  sequence_ = std::max(sequence_, sequence);
  if (round_ > 0 && now - round_at_ < kRoundLasts) return;
  ++round_;
  round_at_ = now;
}

std::string Census::told(const std::vector<RankWord>& words, std::size_t bytes_max) {
  std::string text;
  append(text, CensusHead{sequence_, round_});
  const std::size_t rows_max =
      bytes_max < sizeof(CensusHead) ? 0 : (bytes_max - sizeof(CensusHead)) / sizeof(CensusRow);
  std::size_t at = first_told_ % words.size();
  CensusRow row{};
  for (std::size_t i = 0, rows = 0; i < words.size(); ++i, at = (at + 1) % words.size()) {
    const RankWord& word = words[at];
    if (!word.is_known) continue;
    if (row.count > 0 && row.first + row.count == at && row.submitted == word.submitted &&
        row.finished == word.finished) {
      ++row.count;
      continue;
    }
    if (rows == rows_max) {
      first_told_ = at;
      break;
    }
    if (row.count > 0) append(text, row);
    row = {static_cast<std::uint32_t>(at), 1, word.submitted, word.finished};
    ++rows;
  }
  if (row.count > 0) append(text, row);
  return text;
}

bool Census::learn(std::string_view told, std::vector<RankWord>& words, core::TimePoint now) {
  if (told.size() < sizeof(CensusHead) || (told.size() - sizeof(CensusHead)) % sizeof(CensusRow) != 0) return false;
  const CensusHead head = read<CensusHead>(told);
  const std::string_view rows = told.substr(sizeof(CensusHead));
  for (std::size_t i = 0; i < rows.size(); i += sizeof(CensusRow))
    if (const CensusRow row = read<CensusRow>(rows.substr(i));
        row.first >= words.size() || row.count > words.size() - row.first)
      return false;
  if (head.round > round_) round_at_ = now;
  has_news_ |= is_partial_ && (head.round > round_ || head.sequence > sequence_);
  round_ = std::max(round_, head.round);
  sequence_ = std::max(sequence_, head.sequence);
  for (std::size_t i = 0; i < rows.size(); i += sizeof(CensusRow)) {
    const CensusRow row = read<CensusRow>(rows.substr(i));
    for (std::uint32_t n = 0; n < row.count; ++n) {
      const std::size_t rank = row.first + n;
      learn(static_cast<int>(rank), row.submitted, row.finished, words[rank]);
    }
  }
  return true;
}

void Census::learn(int rank, std::uint64_t submitted, std::uint64_t finished, RankWord& word) {
  if (rank == me_ || (word.is_known && submitted <= word.submitted && finished <= word.finished)) return;
  // Nobody asks for more than that, and a job that works would have news without end.
  const auto counts = [&](std::uint64_t issued) { return std::min(issued, sequence_ + 1); };
  has_news_ |= is_partial_ && (!word.is_known || counts(submitted) > counts(word.submitted));
  word.is_known = true;
  word.submitted = std::max(word.submitted, submitted);
  word.finished = std::max(word.finished, finished);
  word.last.reset();
}

void Census::on_told(core::TimePoint now) {
  told_in_a_row_ = now - told_at_ < kRowEndsAfter ? told_in_a_row_ + 1 : 1;
  told_at_ = now;
  tell_at_ = now + (told_in_a_row_ < kTellsInARow ? core::Duration(kTellAfter) : core::Duration(kRowEndsAfter));
  has_news_ = false;
}

}  // namespace hybridps::worker
