#include "request/request.h"

namespace sluice {

RequestId NextRequestId() {
  static std::atomic<int64_t> next{1};
  return RequestId(next.fetch_add(1, std::memory_order_relaxed));
}

}  // namespace sluice
