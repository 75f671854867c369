// Planted bugs: classic mistakes that one test program (target sluice_planted) makes on request, to measure
// what would find them.
//
// Each sits in the product's code as `if (Planted(Plant::kX))` beside the right way. That program compiles
// the files that include this header once more, with SLUICE_PLANTS defined; everywhere else Planted is
// constant false and the branch is gone.
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
  // Of ranks that share one request's pages.
  kBatchInverse,        // which request a page belongs to is asked of one table of the batch
  kPaddingAsSuffix,     // dummy rows are taken to lie behind a rank's valid rows
  kValidSourceOffset,   // a rank's place in gathered rows counts valid rows instead of computed ones
  kWrongOwnerSpace,     // the owner is taken from a page's index in its request instead of the pool
  kDummyRowWritten,     // dummy rows are stored like others
  kLaneDeficitIgnored,  // room is judged by all lanes together
  // Of transfers between instances.
  kRelativeChunk,     // a chunk's destination is counted from its own first page
  kCountedLayers,     // a forward is complete when enough hooks have fired, whichever they were
  kRepeatedHooks,     // a hook that fires again sends its layer again
  kAckBeforeDrain,    // ABORT is answered while writes are under way
  kAckLost,           // ABORT for a room that is over is not answered
  kLateFailed,        // a late Failed brings an ended room back
  kFreeWithoutFence,  // pages are given back at a deadline although the writer may live
  kSharedContext,     // two rooms of one forward share a context
  kPositionalLayers,  // index layers are reported by their place instead of their number
  kMixedAux,          // two aux fields change places
  kEpochIgnored,      // a reservation for an instance that has restarted is taken
  kNoTombstone,       // an ended room's number is free at once
};

struct PlantName {
  Plant plant;
  std::string_view name;
  std::string_view what;
};
inline constexpr std::array<PlantName, 30> kPlants = {{
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
    {Plant::kBatchInverse, "batch_inverse", "one inverse page table serves all requests of a batch"},
    {Plant::kPaddingAsSuffix, "padding_as_suffix", "padding is taken to follow a rank's valid rows"},
    {Plant::kValidSourceOffset, "valid_source_offset",
     "valid lengths are used as offsets into computed rows"},
    {Plant::kWrongOwnerSpace, "wrong_owner_space", "a page's owner is taken from the wrong index space"},
    {Plant::kDummyRowWritten, "dummy_row_written", "dummy rows reach the cache"},
    {Plant::kLaneDeficitIgnored, "lane_deficit_ignored", "room is judged by the sum over the lanes"},
    {Plant::kRelativeChunk, "relative_chunk", "a chunk's destination is counted from its own first page"},
    {Plant::kCountedLayers, "counted_layers", "a forward is complete by the number of hooks that fired"},
    {Plant::kRepeatedHooks, "repeated_hooks", "a hook that fires again sends its layer again"},
    {Plant::kAckBeforeDrain, "ack_before_drain", "an abort is answered while writes are under way"},
    {Plant::kAckLost, "ack_lost", "an abort of a room that is over is not answered"},
    {Plant::kLateFailed, "late_failed", "a late failure brings an ended room back"},
    {Plant::kFreeWithoutFence, "free_without_fence", "pages are given back at a deadline without a fence"},
    {Plant::kSharedContext, "shared_context", "two rooms of one forward share a context"},
    {Plant::kPositionalLayers, "positional_layers", "index layers are reported by place instead of number"},
    {Plant::kMixedAux, "mixed_aux", "two aux fields change places"},
    {Plant::kEpochIgnored, "epoch_ignored", "a reservation for an earlier instance is taken"},
    {Plant::kNoTombstone, "no_tombstone", "an ended room's number is free at once"},
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
