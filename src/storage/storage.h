// The storage tier behind one interface: objects of one page each, put and got in batches, completed by
// polling.
//
// An object is named by (content fingerprint, page digest) and nothing else: no rank, host, process or port,
// so whoever computes the same page finds it. Its value is the page's bytes in canonical order
// (KvLayout::pieces(), 64 rows each), given as a scatter/gather list, so the host tier may hold them in any
// layout. A backend stores a header beside the bytes: magic, version, key, fingerprint, generation, piece
// table and a checksum that covers all of them.
//
// Storage that fails, stalls, or returns other bytes than were put is a miss; no call ends a request.
//
// Thread: Submit, Cancel, Poll, Stats and Clear are called by one thread (the engine's). Backends do I/O on
// their own threads.
//
// Buffers: from Submit until the batch's completion comes out of Poll, the caller keeps every span alive and
// mapped, does not change the bytes of a put and does not read the bytes of a get. After the completion the
// backend never touches them again, also when the outcome is kTimeout or kCancelled. A read that hangs in the
// kernel therefore holds its spans (and its completion) until the kernel lets go; the caller bounds its own
// waiting with its clock and keeps the pages leased meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/digest.h"
#include "base/status.h"

namespace sluice {

// What every object of one engine has in common.
struct StorageFormat {
  Digest256 content_fingerprint{};    // KvLayout::content_fingerprint(); another one is another object
  std::vector<uint32_t> piece_bytes;  // canonical piece table of a page
  int64_t object_bytes() const {
    int64_t n = 0;
    for (uint32_t b : piece_bytes) n += b;
    return n;
  }
};

enum class StorageOp : uint8_t { kPut, kGet, kExists, kDelete };

enum class StorageOutcome : uint8_t {
  kOk,         // put: stored (or already there); get: all bytes are the ones put; exists: there; delete: gone
  kMiss,       // get, exists: not there
  kCorrupt,    // get: present but not this object (size, header, checksum); it is removed. Spans hold garbage
  kError,      // the medium failed (EIO, EACCES, connection); spans of a get hold garbage
  kFull,       // put: no room, writing is suspended; serving goes on
  kTimeout,    // the deadline passed first
  kCancelled,  // Cancel came first
};
std::string_view Name(StorageOutcome o);

struct StorageItem {
  Digest256 key{};  // page digest
  std::vector<std::span<std::byte>>
      spans;  // put: source, get: target; empty otherwise. Concatenated = the object's
              // bytes in canonical order; the sizes add up to object_bytes()
};

struct StorageBatch {
  StorageOp op = StorageOp::kGet;
  std::vector<StorageItem> items;  // at least one; items are worked on in this order, completed in any
  Nanos deadline = 0;              // on the backend's clock; 0: the backend's own timeout only
};

using StorageTicket = uint64_t;  // 0 is never given

// Exactly one per accepted batch.
struct StorageCompletion {
  StorageTicket ticket = 0;
  StorageOp op = StorageOp::kGet;
  std::vector<StorageOutcome>
      outcomes;  // one per item; after Cancel or a timeout, items done before stay kOk
};

struct StorageStats {
  int64_t puts = 0,
          put_bytes = 0;     // stored objects and their payload bytes (already present ones not counted)
  int64_t puts_present = 0;  // put of an object that was there
  int64_t gets = 0, hits = 0, get_bytes = 0;  // objects asked for, delivered, payload bytes delivered
  int64_t misses = 0, corrupt = 0, errors = 0, full = 0, timeouts = 0, cancelled = 0;
  int64_t evicted_objects = 0, evicted_bytes = 0;
  int64_t objects = 0, bytes = 0;  // stored now, as far as this process knows
  int64_t capacity_bytes = 0;      // 0: unbounded
  int64_t in_flight = 0;           // accepted batches without a completion
  bool writes_suspended = false;
};

// The check that every backend makes in Submit: items present, spans adding up to object_bytes().
Status CheckBatch(const StorageFormat& format, const StorageBatch& batch);

class StorageBackend {
 public:
  virtual ~StorageBackend() = default;  // cancels, then waits until no span is in use any more

  virtual const StorageFormat& format() const = 0;
  // One line for the log and /server_info: kind, place, engine ("file /kv io_uring"), why a fallback was
  // taken.
  virtual std::string Describe() const = 0;

  // Exhausted when too many batches are in flight: treat as a miss (get) or skip (put). Invalid when spans do
  // not add up.
  virtual StatusOr<StorageTicket> Submit(StorageBatch batch) = 0;
  // Best effort, returns at once; the completion still comes, when no span is in use any more. Unknown
  // tickets are ignored.
  virtual void Cancel(StorageTicket ticket) = 0;
  // Appends at most `max` completions; never blocks.
  virtual size_t Poll(std::vector<StorageCompletion>* out, size_t max) = 0;
  // Called from a backend thread after a completion became available; must only wake the engine thread. Set
  // before Submit.
  virtual void SetWakeup(std::function<void()> wakeup) = 0;

  // Makes every object now stored a miss, for all processes that share the place (the generation moves on).
  // Blocks.
  virtual Status Clear() = 0;
  virtual StorageStats Stats() const = 0;
};

}  // namespace sluice
