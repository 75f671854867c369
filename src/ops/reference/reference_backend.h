// Every op of backend.h in slow, obvious code that sums in double: the oracle of the op tests, and a way to
// run a whole model that depends on no kernel. Rounds to Act (and to the pool's row format) at the same
// places as a fast backend, nowhere else.
#pragma once

#include <memory>

#include "ops/backend.h"

namespace sluice::ops {

// act: kF32 or kBF16. MakeQueue(threads) gives a queue whose ops cut their rows over that many threads.
std::unique_ptr<Backend> MakeReferenceBackend(DType act = DType::kF32);

}  // namespace sluice::ops
