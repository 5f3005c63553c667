// hybridps/tls/sealed_store.h: a key-value store whose values only holders of the token can write.
//
// Format   a value of a sealed store := "HPSs" | mac 32 bytes (Authority::seal of key and value) | value
// Trust    A stranger who may write to the store can stop a group, by removing or spoiling values. The group's error
//          names a spoiled value. A stranger cannot join the group, and cannot move a value to another key. A key has
//          the name of the group and the run id (bootstrap/incarnation.h). Without torchrun, all runs have the same run
//          id. Then a value of another run with the same token fits, and leads to a process of that run, or to one that
//          has ended.
// Threads  as the store's.
#pragma once

#include <memory>

#include "hybridps/bootstrap/key_value.h"
#include "hybridps/tls/authority.h"

namespace hybridps::tls {

/// `authority` null, or without a token: values go through as they are, and a value that is sealed is an error that
/// says so. Errors, beside those of the store: kMismatch, a value without a seal, with a wrong one, or with one that
/// nobody here asked for.
std::shared_ptr<bootstrap::KeyValueStore> seal(std::shared_ptr<bootstrap::KeyValueStore> store,
                                               std::shared_ptr<const Authority> authority);

}  // namespace hybridps::tls
