#include "storage/file_place.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <functional>
#include <vector>

#include "base/check.h"

namespace sluice {

// In a file mapped by all processes. Lock-free atomics of one host; the file system need not be coherent
// between hosts: generation is then seen late and used_bytes is repaired by scans.
struct FilePlace::Control {
  uint64_t magic;
  std::atomic<uint64_t> generation;
  std::atomic<int64_t> used_bytes;
};

namespace {

constexpr uint64_t kControlMagic = 0x31454341'4c504c53ull;
constexpr size_t kControlBytes = 4096;

int64_t WallSeconds() { return int64_t(::time(nullptr)); }

uint64_t RandomWord() {
  uint64_t v = 0;
  const int fd = ::open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  const bool ok = fd >= 0 && ::read(fd, &v, sizeof(v)) == ssize_t(sizeof(v));
  if (fd >= 0) ::close(fd);
  return ok ? v : uint64_t(::getpid()) << 32 ^ uint64_t(::time(nullptr));
}

bool ParseHex(const char* s, size_t digits, uint8_t* out) {
  for (size_t i = 0; i < digits; ++i) {
    const char c = s[i];
    int v;
    if (c >= '0' && c <= '9')
      v = c - '0';
    else if (c >= 'a' && c <= 'f')
      v = c - 'a' + 10;
    else
      return false;
    out[i / 2] = uint8_t(i % 2 == 0 ? v << 4 : out[i / 2] | v);
  }
  return s[digits] == 0;
}

void ForEachEntry(const std::string& dir, const std::function<void(const char*)>& f) {
  DIR* d = ::opendir(dir.c_str());
  if (d == nullptr) return;
  while (dirent* e = ::readdir(d))
    if (e->d_name[0] != '.') f(e->d_name);
  ::closedir(d);
}

Status MakeDirectory(const std::string& path) {
  if (::mkdir(path.c_str(), 0755) == 0 || errno == EEXIST) return OkStatus();
  return Unavailable("storage directory {}: {}; name a directory that can be written", path,
                     std::strerror(errno));
}

}  // namespace

size_t FilePlace::NameHash::operator()(const ObjectName& n) const {
  uint64_t v;
  std::memcpy(&v, n.key.data(), sizeof(v));
  return size_t(v ^ n.fingerprint);
}

StatusOr<std::unique_ptr<FilePlace>> FilePlace::Open(const Options& options) {
  auto place = std::unique_ptr<FilePlace>(new FilePlace(options));
  if (Status s = place->Init(); !s.ok()) return s;
  return place;
}

Status FilePlace::Init() {
  std::string& dir = options_.directory;
  while (dir.size() > 1 && dir.back() == '/') dir.pop_back();
  if (dir.empty()) return Invalid("storage directory: empty; name one");
  for (size_t at = 1; at != std::string::npos;) {  // mkdir -p
    at = dir.find('/', at + 1);
    if (Status s = MakeDirectory(dir.substr(0, at)); !s.ok()) return s;
  }
  if (Status s = MakeDirectory(dir + "/tmp"); !s.ok()) return s;

  users_fd_ = ::open((dir + "/users.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (users_fd_ < 0) return Unavailable("{}/users.lock: {}", dir, std::strerror(errno));
  const bool alone = ::flock(users_fd_, LOCK_EX | LOCK_NB) == 0;
  if (Status s = OpenControl(); !s.ok()) return s;
  RemoveDeadTemps(alone);
  const int64_t found = Scan();
  if (alone) control_->used_bytes = found;
  if (::flock(users_fd_, LOCK_SH) != 0) return Unavailable("{}/users.lock: {}", dir, std::strerror(errno));

  owner_ = fmt::format("{:016x}", RandomWord());
  const std::string owner_path = dir + "/tmp/" + owner_ + ".owner";
  owner_fd_ = ::open(owner_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (owner_fd_ < 0 || ::flock(owner_fd_, LOCK_EX) != 0)
    return Unavailable("{}: {}", owner_path, std::strerror(errno));
  return OkStatus();
}

Status FilePlace::OpenControl() {
  const std::string path = options_.directory + "/control";
  control_fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (control_fd_ < 0) return Unavailable("{}: {}", path, std::strerror(errno));
  ::flock(control_fd_, LOCK_EX);
  struct stat st {};
  const bool sized = ::fstat(control_fd_, &st) == 0 && st.st_size == off_t(kControlBytes);
  if (!sized) {
    if (::ftruncate(control_fd_, 0) != 0) return Unavailable("{}: {}", path, std::strerror(errno));
    if (const int e = ::posix_fallocate(control_fd_, 0, off_t(kControlBytes)); e != 0)
      return Unavailable("{}: {}", path, std::strerror(e));
  }
  void* p = ::mmap(nullptr, kControlBytes, PROT_READ | PROT_WRITE, MAP_SHARED, control_fd_, 0);
  if (p == MAP_FAILED) return Unavailable("{}: {}", path, std::strerror(errno));
  control_ = static_cast<Control*>(p);
  if (control_->magic != kControlMagic) {
    // New or damaged. A random generation makes whatever lies here a miss, so nothing that was cleared comes
    // back.
    control_->generation = RandomWord();
    control_->used_bytes = 0;
    control_->magic = kControlMagic;
  }
  ::flock(control_fd_, LOCK_UN);
  return OkStatus();
}

FilePlace::~FilePlace() {
  if (owner_fd_ >= 0) {
    ::unlink((options_.directory + "/tmp/" + owner_ + ".owner").c_str());
    ::close(owner_fd_);
  }
  if (control_ != nullptr) ::munmap(control_, kControlBytes);
  if (control_fd_ >= 0) ::close(control_fd_);
  if (users_fd_ >= 0) ::close(users_fd_);
}

void FilePlace::RemoveDeadTemps(bool alone) {
  const std::string tmp = options_.directory + "/tmp";
  std::vector<std::string> names, dead;
  ForEachEntry(tmp, [&](const char* name) { names.emplace_back(name); });
  for (const std::string& name : names) {
    if (!name.ends_with(".owner")) continue;
    const int fd = ::open((tmp + "/" + name).c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) continue;
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) dead.push_back(name.substr(0, name.size() - 6));
    ::close(fd);
  }
  for (const std::string& name : names) {
    const std::string owner = name.substr(0, name.find_first_of("-."));
    if (alone || std::find(dead.begin(), dead.end(), owner) != dead.end())
      ::unlink((tmp + "/" + name).c_str());
  }
}

int64_t FilePlace::Scan() {
  std::vector<Entry> found;
  ForEachEntry(options_.directory, [&](const char* fp_name) {
    uint8_t fp[8];
    if (std::strlen(fp_name) != 16 || !ParseHex(fp_name, 16, fp)) return;
    uint64_t fingerprint = 0;
    for (uint8_t b : fp) fingerprint = fingerprint << 8 | b;
    const std::string fp_dir = options_.directory + "/" + fp_name;
    ForEachEntry(fp_dir, [&](const char* fan) {
      const std::string fan_dir = fp_dir + "/" + fan;
      const int dir_fd = ::open(fan_dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      if (dir_fd < 0) return;
      ForEachEntry(fan_dir, [&](const char* key) {
        Entry e{{fingerprint, {}}, 0, 0};
        struct stat st {};
        if (std::strlen(key) != 64 || !ParseHex(key, 64, e.name.key.data())) return;
        if (::fstatat(dir_fd, key, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode)) return;
        e.bytes = st.st_size;
        e.time_s = st.st_mtim.tv_sec;
        found.push_back(e);
      });
      ::close(dir_fd);
    });
  });
  std::stable_sort(found.begin(), found.end(),
                   [](const Entry& a, const Entry& b) { return a.time_s < b.time_s; });
  std::lock_guard lock(mutex_);
  by_age_.clear();
  index_.clear();
  int64_t sum = 0;
  for (const Entry& e : found) {
    AddLocked(e.name, e.bytes, e.time_s);
    sum += e.bytes;
  }
  scanned_objects_ = int64_t(found.size());
  return sum;
}

void FilePlace::AddLocked(const ObjectName& name, int64_t bytes, int64_t time_s) {
  if (auto it = index_.find(name); it != index_.end()) by_age_.erase(it->second);
  by_age_.push_back({name, bytes, time_s});
  index_[name] = std::prev(by_age_.end());
}

std::string FilePlace::ObjectPath(const ObjectName& name) const {
  const std::string key = Hex(name.key);
  return fmt::format("{}/{:016x}/{}/{}", options_.directory, name.fingerprint,
                     std::string_view(key).substr(0, 3), key);
}

std::string FilePlace::NewTempPath() {
  return fmt::format("{}/tmp/{}-{}", options_.directory, owner_, next_temp_++);
}

uint64_t FilePlace::generation() const { return control_->generation.load(std::memory_order_acquire); }
int64_t FilePlace::used_bytes() const { return std::max<int64_t>(0, control_->used_bytes.load()); }
int64_t FilePlace::objects() const {
  std::lock_guard lock(mutex_);
  return int64_t(index_.size());
}

int FilePlace::Unlink(const ObjectName& name) {
  const std::string path = ObjectPath(name);
  if (options_.faults != nullptr)
    if (const int e = options_.faults->Before(FileCall::kUnlink, path); e != 0) return e;
  return ::unlink(path.c_str()) == 0 ? 0 : errno;
}

bool FilePlace::Reserve(int64_t bytes, int64_t* evicted_objects, int64_t* evicted_bytes) {
  const int64_t capacity = options_.capacity_bytes;
  if (capacity == 0) {
    control_->used_bytes += bytes;
    return true;
  }
  if (bytes > capacity) return false;
  control_->used_bytes += bytes;
  while (control_->used_bytes.load() > capacity) {
    int64_t freed = 0;
    if (!EvictOldest(bytes, &freed)) {
      control_->used_bytes -= bytes;
      return false;
    }
    if (freed != 0) {
      ++*evicted_objects;
      *evicted_bytes += freed;
    }
  }
  return true;
}

// Removes one object, or learns that one is gone or younger than thought; false when nothing is left to
// remove.
bool FilePlace::EvictOldest(int64_t reserved, int64_t* bytes) {
  Entry victim;
  {
    std::unique_lock lock(mutex_);
    if (by_age_.empty()) {
      lock.unlock();
      ::flock(control_fd_, LOCK_EX);
      control_->used_bytes = Scan() + reserved;  // the caller's object is no file yet
      ::flock(control_fd_, LOCK_UN);
      lock.lock();
      if (by_age_.empty()) return false;  // full of what others are writing at this moment
    }
    victim = by_age_.front();
    struct stat st {};
    if (::stat(ObjectPath(victim.name).c_str(), &st) == 0 && st.st_mtim.tv_sec > victim.time_s) {
      AddLocked(victim.name, victim.bytes, st.st_mtim.tv_sec);  // another process used it since
      return true;
    }
    index_.erase(victim.name);
    by_age_.pop_front();
  }
  const int e = Unlink(victim.name);
  if (e == 0) {
    control_->used_bytes -= victim.bytes;
    *bytes = victim.bytes;
  }
  return e == 0 || e == ENOENT;  // ENOENT: whoever removed it has counted it
}

void FilePlace::Unreserve(int64_t bytes) { control_->used_bytes -= bytes; }

int FilePlace::Publish(const std::string& temp, const ObjectName& name, int64_t bytes) {
  const std::string path = ObjectPath(name);
  int e = options_.faults != nullptr ? options_.faults->Before(FileCall::kRename, path) : 0;
  for (int attempt = 0; e == 0 && attempt < 2; ++attempt) {
    if (::renameat2(AT_FDCWD, temp.c_str(), AT_FDCWD, path.c_str(), RENAME_NOREPLACE) == 0) {
      std::lock_guard lock(mutex_);
      AddLocked(name, bytes, WallSeconds());
      return 0;
    }
    if (errno == ENOENT && attempt == 0) {
      const std::string fan = path.substr(0, path.rfind('/'));
      ::mkdir(fan.substr(0, fan.rfind('/')).c_str(), 0755);
      if (::mkdir(fan.c_str(), 0755) != 0 && errno != EEXIST) e = errno;
    } else if (errno == EINVAL && attempt == 0) {  // a file system without RENAME_NOREPLACE
      if (::rename(temp.c_str(), path.c_str()) == 0) {
        std::lock_guard lock(mutex_);
        AddLocked(name, bytes, WallSeconds());
        return 0;
      }
      e = errno;
    } else {
      e = errno;
    }
  }
  ::unlink(temp.c_str());
  Unreserve(bytes);
  return e == 0 ? EIO : e;
}

void FilePlace::Touch(const ObjectName& name, int fd, int64_t bytes) {
  const int64_t now = WallSeconds();
  bool renew;
  {
    std::lock_guard lock(mutex_);
    auto it = index_.find(name);
    const int64_t known = it == index_.end() ? 0 : it->second->time_s;
    renew = now - known >= options_.touch_interval_s;
    AddLocked(name, bytes, renew ? now : known);
  }
  if (renew) {
    const timespec times[2] = {{0, UTIME_NOW}, {0, UTIME_NOW}};
    ::futimens(fd, times);
  }
}

bool FilePlace::Knows(const ObjectName& name) const {
  std::lock_guard lock(mutex_);
  return index_.contains(name);
}

void FilePlace::Remove(const ObjectName& name) {
  struct stat st {};
  const std::string path = ObjectPath(name);
  const bool there = ::lstat(path.c_str(), &st) == 0;
  if (there && S_ISDIR(st.st_mode)) {
    ::rmdir(path.c_str());  // not ours; only if empty
    return;
  }
  if (Unlink(name) == 0 && there) control_->used_bytes -= st.st_size;
  std::lock_guard lock(mutex_);
  if (auto it = index_.find(name); it != index_.end()) {
    by_age_.erase(it->second);
    index_.erase(it);
  }
}

Status FilePlace::Clear() {
  ++control_->generation;
  Scan();
  std::vector<ObjectName> names;
  {
    std::lock_guard lock(mutex_);
    for (const Entry& e : by_age_) names.push_back(e.name);
  }
  for (const ObjectName& n : names) Remove(n);
  return OkStatus();
}

}  // namespace sluice
