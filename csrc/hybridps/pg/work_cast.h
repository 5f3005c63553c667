// hybridps/pg/work_cast.h: which kind of Work it is.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace hybridps::pg {

/// The same work as a T, or null where it is none. torch's dynamic_intrusive_pointer_cast never drops its reference
/// when the cast fails: the work would live for ever, and its tensors with it.
template <class T>
c10::intrusive_ptr<T> work_cast(const c10::intrusive_ptr<c10d::Work>& work) {
  auto* const as = dynamic_cast<T*>(work.get());
  return as != nullptr ? c10::intrusive_ptr<T>::reclaim_copy(as) : c10::intrusive_ptr<T>();
}

}  // namespace hybridps::pg
