#include "storage/storage.h"

#include "base/check.h"

namespace sluice {

std::string_view Name(StorageOutcome o) {
  switch (o) {
    case StorageOutcome::kOk:
      return "ok";
    case StorageOutcome::kMiss:
      return "miss";
    case StorageOutcome::kCorrupt:
      return "corrupt";
    case StorageOutcome::kError:
      return "error";
    case StorageOutcome::kFull:
      return "full";
    case StorageOutcome::kTimeout:
      return "timeout";
    case StorageOutcome::kCancelled:
      return "cancelled";
  }
  return "?";
}

Status CheckBatch(const StorageFormat& format, const StorageBatch& batch) {
  if (batch.items.empty()) return Invalid("storage batch: no items; send at least one");
  if (batch.op != StorageOp::kPut && batch.op != StorageOp::kGet) return OkStatus();
  const int64_t want = format.object_bytes();
  for (size_t i = 0; i < batch.items.size(); ++i) {
    int64_t have = 0;
    for (const auto& s : batch.items[i].spans) have += int64_t(s.size());
    if (have != want)
      return Invalid("storage batch: item {} has {} bytes, an object has {}; pass every piece of the page", i,
                     have, want);
  }
  return OkStatus();
}

}  // namespace sluice
