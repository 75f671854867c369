// Planted bugs: classic mistakes that a test-only build (SLUICE_PLANTS=ON) makes on request, to measure what
// would find them.
//
// Each sits in the product's code as `if (Planted(Plant::kX))` beside the right way. In every other build
// Planted is constant false and the branch is gone.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace sluice {

enum class Plant : uint8_t {
  kNone,
  kEarlyPublish,       // a page enters the tree before its last rows are computed
  kMissedLayerWait,    // a layer is read before its load has ended
  kDoubleFree,         // a page is given back twice
  kLostLease,          // a page's lease is dropped while a submitted step still reads it
  kGlobalPageInverse,  // a position is looked up through one batch-wide page table instead of its sequence's
  kStaleGeneration,    // storage delivers what a clear has made void
  kKeyWithoutDtype,    // the storage key leaves out what the bytes are
  kSplitLosesLock,     // a node that is split keeps no lock on its upper part
  kWriteBackFreed,     // a device page is free before its write-back has been acknowledged
  kWrongLane,          // a host page goes to a device page of another lane
  kDuplicateAlias,  // a page that the tree has already is swapped although its tokens differ in the last page
  kStaleCursor,     // a sequence's cursor is used after its node was evicted
};

struct PlantName {
  Plant plant;
  std::string_view name;
  std::string_view what;
};
inline constexpr std::array<PlantName, 12> kPlants = {{
    {Plant::kEarlyPublish, "early_publish", "a page enters the tree before all its rows are computed"},
    {Plant::kMissedLayerWait, "missed_layer_wait",
     "a layer is read before its load from the host tier has ended"},
    {Plant::kDoubleFree, "double_free", "a page is given back twice"},
    {Plant::kLostLease, "lost_lease", "a page is free while a submitted step still uses it"},
    {Plant::kGlobalPageInverse, "global_page_inverse", "one page table is used for all sequences of a batch"},
    {Plant::kStaleGeneration, "stale_generation", "storage delivers objects that were cleared"},
    {Plant::kKeyWithoutDtype, "key_without_dtype", "the storage key does not cover what the bytes are"},
    {Plant::kSplitLosesLock, "split_loses_lock", "a split leaves the upper part of a locked path unlocked"},
    {Plant::kWriteBackFreed, "write_back_freed",
     "a device page is free before its write-back is acknowledged"},
    {Plant::kWrongLane, "wrong_lane", "a page is taken from another lane than its position's"},
    {Plant::kDuplicateAlias, "duplicate_alias", "insertion of duplicate pages keeps both owners of one page"},
    {Plant::kStaleCursor, "stale_cursor", "a cursor outlives the eviction of its node"},
}};

#ifdef SLUICE_PLANTS
constexpr bool kPlantsBuilt = true;
extern Plant planted;  // set once before anything runs
inline bool Planted(Plant p) { return planted == p; }
#else
constexpr bool kPlantsBuilt = false;
constexpr bool Planted(Plant) { return false; }
#endif

}  // namespace sluice
