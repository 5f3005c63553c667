// tests/support/captured_stderr.h: what is written to stderr while one lives; as much as a pipe holds.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <string>

#include "tests/support/catch.h"

namespace hybridps::test {

/// What is written to stderr meanwhile.
class CapturedStderr {
 public:
  CapturedStderr() {
    if (pipe(pipe_) != 0 || fcntl(pipe_[1], F_SETFL, O_NONBLOCK) != 0) FAIL("pipe");
    saved_ = dup(STDERR_FILENO);
    dup2(pipe_[1], STDERR_FILENO);
    close(pipe_[1]);
  }
  std::string finish() {
    dup2(saved_, STDERR_FILENO);  // closes the last writing end
    close(saved_);
    std::string text;
    char bytes[4096];
    for (ssize_t got = 0; (got = read(pipe_[0], bytes, sizeof bytes)) > 0;) {
      text.append(bytes, static_cast<std::size_t>(got));
    }
    close(pipe_[0]);
    return text;
  }

 private:
  int pipe_[2] = {-1, -1};
  int saved_ = -1;
};

}  // namespace hybridps::test
