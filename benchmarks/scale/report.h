// benchmarks/scale/report.h: tables that go to the screen as Markdown, and to a folder as Markdown and JSON.
#pragma once

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/observe/json.h"

namespace hybridps::scale {

struct Table {
  std::string title;
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows{};
};

/// 3 digits that count, or all digits of a whole number: "0.0123", "12.3", "1234".
inline std::string number(double value) {
  char text[32];
  const int decimals = value >= 100 || value == 0 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : value >= 0.1 ? 3 : 4;
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}
inline std::string bytes_text(std::uint64_t bytes) {
  for (const auto& [name, size] : std::vector<std::pair<const char*, std::uint64_t>>{
           {" GiB", std::uint64_t{1} << 30}, {" MiB", 1 << 20}, {" KiB", 1 << 10}})
    if (bytes >= size && bytes % size == 0) return std::to_string(bytes / size) + name;
  return std::to_string(bytes) + " B";
}

class Report {
 public:
  Report(std::string name, std::string what) : name_(std::move(name)), what_(std::move(what)) {}

  void add(Table table) {
    const std::string text = markdown(table);
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
    tables_.push_back(std::move(table));
  }
  /// NAME.md and NAME.json.
  void write(const std::string& folder) const {
    std::filesystem::create_directories(folder);
    std::ofstream page(folder + "/" + name_ + ".md");
    page << "# " << what_ << "\n";
    observe::Json json;
    json.object().field("what", what_).key("tables").array();
    for (const Table& table : tables_) {
      page << markdown(table);
      json.object().field("title", table.title).key("columns").array();
      for (const std::string& column : table.columns) json.value(column);
      json.end().key("rows").array();
      for (const auto& row : table.rows) {
        json.array();
        for (const std::string& cell : row) json.value(cell);
        json.end();
      }
      json.end().end();
    }
    json.end().end();
    std::ofstream raw(folder + "/" + name_ + ".json");
    raw << json.text() << "\n";
    if (!page.flush() || !raw.flush()) throw std::runtime_error("cannot write to " + folder);
  }

 private:
  static std::string line(const std::vector<std::string>& cells) {
    std::string text = "|";
    for (const std::string& cell : cells) text += " " + cell + " |";
    return text + "\n";
  }
  static std::string markdown(const Table& table) {
    std::string text = "\n" + table.title + ":\n\n" + line(table.columns);
    text += "|";
    for (std::size_t i = 0; i < table.columns.size(); ++i) text += "---|";
    text += "\n";
    for (const auto& row : table.rows) text += line(row);
    return text;
  }

  const std::string name_;
  const std::string what_;
  std::vector<Table> tables_;
};

}  // namespace hybridps::scale
