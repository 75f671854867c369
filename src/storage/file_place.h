// A directory that holds stored objects and may be shared by several processes: names, generation, capacity,
// eviction.
//
//   DIR/control                       shared memory: generation, bytes used (all processes see changes at
//   once) DIR/users.lock                    held shared by every user; who gets it exclusively is alone and
//   repairs the counts DIR/tmp/OWNER.owner               locked by its process; an unlocked one is a dead
//   process's, its OWNER-N files are removed DIR/tmp/OWNER-N                   an object being written;
//   renamed into place when whole DIR/FFFFFFFFFFFFFFFF/HHH/KEY      an object: 16 hex digits of the
//   fingerprint, 3 of the key, 64 of the key
//
// Objects are not synced to the medium: after a power cut some are damaged, which their checksums tell, and a
// cache may lose. Least recently used goes first; file times carry the order over restarts. A process evicts
// by what it knows (its scan at start, its own puts and hits), looks at the file's time before it removes it,
// and scans anew when it knows too little.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/digest.h"
#include "base/status.h"

namespace sluice {

// Lets a test put an errno in the place of a system call, or hang it. Null in production.
enum class FileCall : uint8_t { kOpenRead, kOpenWrite, kRead, kWrite, kRename, kUnlink, kStat };
class FileFaults {
 public:
  virtual ~FileFaults() = default;
  virtual int Before(FileCall call,
                     const std::string& path) = 0;  // errno instead of the call, or 0; may block
  virtual int ReadFd() {
    return -1;
  }  // >= 0: reads go to this descriptor (a pipe: a read that hangs in the kernel)
};

struct ObjectName {
  uint64_t fingerprint = 0;  // its first 8 bytes, big endian, as in the directory name
  Digest256 key{};
  friend bool operator==(const ObjectName&, const ObjectName&) = default;
};

class FilePlace {
 public:
  struct Options {
    std::string directory;
    int64_t capacity_bytes = 0;     // 0: unbounded
    int64_t touch_interval_s = 60;  // a hit renews a file's time when it is older than this
    FileFaults* faults = nullptr;
  };
  static StatusOr<std::unique_ptr<FilePlace>> Open(const Options& options);
  ~FilePlace();

  std::string ObjectPath(const ObjectName& name) const;
  std::string NewTempPath();
  uint64_t generation() const;
  FileFaults* faults() const { return options_.faults; }
  const std::string& directory() const { return options_.directory; }
  int64_t capacity_bytes() const { return options_.capacity_bytes; }
  int64_t used_bytes() const;
  int64_t objects() const;
  int64_t scanned_objects() const { return scanned_objects_; }

  // Room for one object before it is written, evicting others; false: there is none to be had.
  bool Reserve(int64_t bytes, int64_t* evicted_objects, int64_t* evicted_bytes);
  void Unreserve(int64_t bytes);
  // Temp file into place. kOk, or the errno. EEXIST: another process was first. The reservation becomes the
  // object's, or on failure is given back; the temp file is gone in any case.
  int Publish(const std::string& temp, const ObjectName& name, int64_t bytes);
  void Touch(const ObjectName& name, int fd, int64_t bytes);
  bool Knows(const ObjectName& name) const;
  void Remove(const ObjectName& name);
  Status Clear();

 private:
  struct Control;
  struct Entry {
    ObjectName name;
    int64_t bytes;
    int64_t time_s;  // as on disk, as far as we know
  };
  struct NameHash {
    size_t operator()(const ObjectName& n) const;
  };
  explicit FilePlace(Options options) : options_(std::move(options)) {}
  Status Init();
  Status OpenControl();
  void RemoveDeadTemps(bool alone);
  int64_t Scan();  // rebuilds the index; the sum of bytes
  bool EvictOldest(int64_t reserved, int64_t* bytes);
  void AddLocked(const ObjectName& name, int64_t bytes, int64_t time_s);
  int Unlink(const ObjectName& name);

  Options options_;
  Control* control_ = nullptr;
  int control_fd_ = -1, users_fd_ = -1, owner_fd_ = -1;
  std::string owner_;
  std::atomic<uint64_t> next_temp_{0};
  int64_t scanned_objects_ = 0;
  mutable std::mutex mutex_;  // the index
  std::list<Entry> by_age_;   // oldest first
  std::unordered_map<ObjectName, std::list<Entry>::iterator, NameHash> index_;
};

}  // namespace sluice
