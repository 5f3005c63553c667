// hybridps/observe/json.h: writes JSON text, piece by piece.
//
// Model    Json json; json.object().key("rank").value(3).key("pending").array()....end().end(); json.text()
//          Json adds the commas; everything that is opened must be ended. In texts, bytes that are not UTF-8 and
//          control characters are escaped.
// Threads  a plain value.
#pragma once

#include <cmath>
#include <concepts>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "hybridps/core/text.h"

namespace hybridps::observe {

class Json {
 public:
  Json& object() { return open('{', '}'); }
  Json& array() { return open('[', ']'); }
  Json& end() {
    text_ += closers_.back();
    closers_.pop_back();
    comma_ = true;
    return *this;
  }
  Json& key(std::string_view name) {
    separate();
    write_text(name);
    text_ += ':';
    comma_ = false;
    return *this;
  }
  Json& value(std::string_view text) {
    separate();
    write_text(text);
    return *this;
  }
  Json& value(const char* text) { return value(std::string_view(text)); }
  Json& value(const std::string& text) { return value(std::string_view(text)); }
  Json& value(bool yes) {
    separate();
    text_ += yes ? "true" : "false";
    return *this;
  }
  Json& value(std::integral auto number) {
    separate();
    text_ += std::to_string(number);
    return *this;
  }
  /// A number that is not finite becomes null.
  Json& value(double number) {
    separate();
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", number);
    text_ += std::isfinite(number) ? text : "null";
    return *this;
  }
  template <typename T>
  Json& field(std::string_view name, const T& what) {
    return key(name).value(what);
  }

  const std::string& text() const noexcept { return text_; }

 private:
  Json& open(char begin, char end) {
    separate();
    text_ += begin;
    closers_ += end;
    comma_ = false;
    return *this;
  }
  void separate() {
    if (std::exchange(comma_, true)) text_ += ',';
  }
  void write_text(std::string_view text) {
    text_ += '"';
    for (const char c : core::printable(text)) {
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
        text_ += escaped;
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  std::string text_;
  std::string closers_;
  bool comma_ = false;
};

}  // namespace hybridps::observe
