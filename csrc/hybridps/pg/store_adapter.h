// hybridps/pg/store_adapter.h: torch's Store as bootstrap's key-value interface.
#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hybridps/bootstrap/key_value.h"

namespace hybridps::pg {

/// Uses a clone of `store`, so that a caller who waits on the original delays nobody; groups over one store share the
/// clone, which is one connection and stays until the store is gone and the next one is adapted. Only check(), get()
/// and set() are called. Connects, and lets go of the interpreter's lock meanwhile.
std::shared_ptr<bootstrap::KeyValueStore> adapt_store(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace hybridps::pg
