// hybridps/pg/store_adapter.h: torch's Store as bootstrap's key-value interface.
#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hybridps/bootstrap/key_value.h"

namespace hybridps::pg {

enum class StoreUse {
  kOwn,       // connects in the first call, which is not the caller's: its Store may stand still
  kBorrowed,  // the caller's own connection until settle(), for one who waits for the group meanwhile, and not on the store
};

/// Uses a clone of `store`, so that a caller who waits on the original delays nobody; groups over one store share the
/// clone, which is one connection and stays until the store is gone and the next one is adapted. To make it costs both sides
/// look-ups of names, seconds where a name service does not answer: so a caller who waits anyhow lends the original. Only
/// check(), get() and set() are called. None of that happens here, and whoever waits for a thread that does it waits with a
/// bound: a call into a Store whose process is stopped never comes back.
std::shared_ptr<bootstrap::KeyValueStore> adapt_store(const c10::intrusive_ptr<c10d::Store>& store,
                                                      StoreUse use = StoreUse::kOwn);

}  // namespace hybridps::pg
