// One object on its way to or from a file, as a sequence of chunk I/Os that a worker performs blocking or
// through a ring.
//
//   Start > [ io() > Advance(result) ]* > outcome()
//
// A chunk is small enough to be hashed while it is in the cache of the core that copied it. With direct I/O
// it goes through an aligned buffer of the worker's. Used by one thread at a time.
#pragma once

#include <sys/uio.h>

#include <string>
#include <vector>

#include "storage/file_place.h"
#include "storage/object_format.h"

namespace sluice {

constexpr int64_t kFileAlign = 4096;            // header, file size, and direct I/O
constexpr int64_t kFileChunkBytes = 256 << 10;  // a quarter of a 1 MiB L2: copied, then hashed from there

struct FileIo {
  bool write = false;
  int fd = -1;
  const iovec* iov = nullptr;
  int iov_count = 0;
  int64_t offset = 0;
};

class FileTransfer {
 public:
  struct Context {
    const ObjectFormat* format = nullptr;
    FilePlace* place = nullptr;
    bool direct = false;
  };
  explicit FileTransfer(const Context& context);
  ~FileTransfer();
  FileTransfer(const FileTransfer&) = delete;
  FileTransfer& operator=(const FileTransfer&) = delete;

  // Opens the file of a get or put. True: an I/O is wanted. False: over, see outcome().
  bool Start(StorageOp op, const StorageItem& item);
  const FileIo& io() const { return io_; }
  // Bytes moved or -errno. True: another I/O is wanted.
  bool Advance(int64_t result);
  // Ends it before its end; REQUIRES no I/O in flight.
  void Abandon(StorageOutcome why) { End(why); }

  StorageOutcome outcome() const { return outcome_; }
  bool found_present() const { return present_; }
  bool hit_full_disk() const { return full_disk_; }
  int64_t evicted_objects() const { return evicted_objects_; }
  int64_t evicted_bytes() const { return evicted_bytes_; }

  // Whether an object with an intact header of this generation lies there. `exists`: something lies there.
  static StorageOutcome Probe(const Context& context, const Digest256& key, bool* exists = nullptr);
  static ObjectName NameOf(const Context& context, const Digest256& key);
  static int64_t FileBytes(const ObjectFormat& format);

 private:
  bool StartGet();
  bool StartPut();
  bool NextChunk();  // plans io_ for [done_, done_ + chunk)
  bool PlanHeaderWrite();
  bool PlanIo(int64_t offset);
  void GatherSpans(int64_t bytes, bool into_bounce);
  bool TakeChunk();  // a chunk has been read or written in full
  void ScatterBounce(int64_t from, int64_t payload);
  bool End(StorageOutcome outcome);
  bool Fail(int error);  // by errno
  int Fault(FileCall call, const std::string& path) const;
  StorageOutcome Verify();

  Context c_;
  StorageOp op_{};
  const StorageItem* item_ = nullptr;
  ObjectName name_;
  std::string path_, temp_;
  int fd_ = -1;
  uint64_t generation_ = 0;
  int64_t file_bytes_ = 0;
  int64_t reserved_ = 0;
  FileIo io_;
  std::vector<iovec> iov_;                    // of the chunk
  std::vector<iovec> todo_;                   // what short results have left of it
  int64_t chunk_from_ = 0, chunk_bytes_ = 0;  // of the file, without padding
  int64_t chunk_left_ = 0;                    // still to be moved
  size_t span_ = 0;                           // cursor of GatherSpans
  size_t span_at_ = 0;
  bool header_done_ = false;
  std::byte* header_ = nullptr;  // aligned, header_bytes
  std::byte* bounce_ = nullptr;  // aligned, a chunk
  ChecksumStream sum_;
  StorageOutcome outcome_ = StorageOutcome::kError;
  bool present_ = false, full_disk_ = false;
  int64_t evicted_objects_ = 0, evicted_bytes_ = 0;
};

}  // namespace sluice
