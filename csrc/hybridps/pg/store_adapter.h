// hybridps/pg/store_adapter.h: torch's Store as bootstrap's key-value interface.
#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hybridps/bootstrap/key_value.h"

namespace hybridps::pg {

enum class StoreUse {
  kOwn,       // connects in the first call, on another thread than the caller's: the Store may not answer
  kBorrowed,  // uses the caller's connection until settle(); the caller waits for the group, not on the Store
};

/// Uses a clone of `store`, so that a caller that waits on the original delays nobody. Groups over one Store share the
/// clone. The clone is one connection, and stays until the Store is gone and the next Store is adapted. Making a clone
/// costs both sides name look-ups: seconds if a name service does not answer. So a caller that waits anyway lends the
/// original (kBorrowed).
/// The adapter calls only check(), get() and set(), and multi_get() and multi_set() where the Store has them. It never
/// calls wait(): each wait that ends without the key makes torch print two warnings. adapt_store() itself calls none of
/// these and makes no clone. A thread that waits for another thread's call into the Store needs a bound: a call into a
/// Store of a stopped process never returns.
std::shared_ptr<bootstrap::KeyValueStore> adapt_store(const c10::intrusive_ptr<c10d::Store>& store,
                                                      StoreUse use = StoreUse::kOwn);

}  // namespace hybridps::pg
