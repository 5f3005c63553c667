#include "hybridps/tls/libssl.h"

#include <memory>
#include <mutex>
#include <string>

#include "hybridps/core/shared_library.h"

namespace hybridps::tls {
namespace {

#ifndef HYBRIDPS_LIBSSL_IS_LINKED
// Headers and library of one version: between versions structures and names differ.
constexpr bool kIsOld = OPENSSL_VERSION_NUMBER < 0x30000000L;
constexpr const char* kSoname = kIsOld ? "libssl.so.1.1" : "libssl.so.3";
#endif

core::Result<std::unique_ptr<LibSsl>> open_library() {
#ifdef HYBRIDPS_LIBSSL_IS_LINKED
  auto linked = std::make_unique<LibSsl>();
#define HYBRIDPS_TAKE(member, name) linked->member = &name;
  HYBRIDPS_LIBSSL(HYBRIDPS_TAKE)
#undef HYBRIDPS_TAKE
  linked->get_peer_certificate = &SSL_get_peer_certificate;  // a macro in OpenSSL 3
  return linked;
#else
  const auto bad = [](const std::string& what) {
    return core::Status(core::Code::kUnsupported, "HYBRIDPS_SECURITY=tls needs OpenSSL's " + std::string(kSoname) +
                                                      ", and " + what + "; install OpenSSL " +
                                                      (kIsOld ? "1.1.1" : "3") +
                                                      " (Debian and Ubuntu: apt-get install libssl-dev)");
  };
  core::SharedLibrary loaded(kSoname);
  if (!loaded.is_open()) return bad("it cannot be loaded: " + loaded.error());
  auto library = std::make_unique<LibSsl>();
#define HYBRIDPS_FIND(member, name) loaded.find(library->member, #name);
  HYBRIDPS_LIBSSL(HYBRIDPS_FIND)
#undef HYBRIDPS_FIND
  loaded.find(library->get_peer_certificate, kIsOld ? "SSL_get_peer_certificate" : "SSL_get1_peer_certificate");
  if (!loaded.missing().empty()) return bad("it has no " + loaded.missing());
  return library;
#endif
}

}  // namespace

core::Result<const LibSsl*> load_libssl() {
  static std::mutex mutex;
  static const LibSsl* library = nullptr;  // never freed: channels may outlive static destructors
  const std::lock_guard lock(mutex);
  if (library == nullptr) {
    auto opened = open_library();
    if (!opened.is_ok()) return opened.status();
    library = std::move(opened).value().release();
  }
  return library;
}

}  // namespace hybridps::tls
