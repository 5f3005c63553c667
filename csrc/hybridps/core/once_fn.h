// hybridps/core/once_fn.h: a move-only callable that runs at most once.
//
// Why not std::function: completions own move-only buffers. Calling an empty or used OnceFn does nothing.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace hybridps::core {

template <typename Signature>
class OnceFn;

template <typename R, typename... Args>
class OnceFn<R(Args...)> {
  static_assert(std::is_void_v<R>, "a completion returns nothing");

 public:
  OnceFn() = default;

  template <typename F,
            typename = std::enable_if_t<!std::is_same_v<std::decay_t<F>, OnceFn> && std::is_invocable_v<F&, Args...>>>
  OnceFn(F&& callable)  // NOLINT(google-explicit-constructor): lambdas are passed as they stand
      : callable_(std::make_unique<Holder<std::decay_t<F>>>(std::forward<F>(callable))) {}

  explicit operator bool() const noexcept { return callable_ != nullptr; }

  void operator()(Args... args) {
    if (auto callable = std::move(callable_)) callable->call(std::forward<Args>(args)...);
  }

 private:
  struct Base {
    virtual ~Base() = default;
    virtual void call(Args... args) = 0;
  };
  template <typename F>
  struct Holder final : Base {
    explicit Holder(F&& f) : callable(std::move(f)) {}
    explicit Holder(const F& f) : callable(f) {}
    void call(Args... args) override { callable(std::forward<Args>(args)...); }
    F callable;
  };
  std::unique_ptr<Base> callable_;
};

}  // namespace hybridps::core
