// hybridps/pg/work_cast.h: casts a Work to a kind of Work.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace hybridps::pg {

/// `work` as a T; null if it is no T. torch's dynamic_intrusive_pointer_cast keeps its reference when the cast fails:
/// the work and its tensors would live for ever.
template <class T>
c10::intrusive_ptr<T> work_cast(const c10::intrusive_ptr<c10d::Work>& work) {
  auto* const as = dynamic_cast<T*>(work.get());
  return as != nullptr ? c10::intrusive_ptr<T>::reclaim_copy(as) : c10::intrusive_ptr<T>();
}

}  // namespace hybridps::pg
