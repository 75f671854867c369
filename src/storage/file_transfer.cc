#include "storage/file_transfer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "base/ids.h"
#include "base/stream_copy.h"

namespace sluice {
namespace {

constexpr size_t kStreamBytes = 4096;
constexpr size_t kMaxIov = 512;  // per system call; IOV_MAX is 1024

std::byte* AlignedBytes(int64_t n) {
  void* p = std::aligned_alloc(size_t(kFileAlign), size_t(AlignUp(n, kFileAlign)));
  SLUICE_CHECK(p != nullptr, "no memory for an I/O buffer of {} bytes", n);
  return static_cast<std::byte*>(p);
}

}  // namespace

FileTransfer::FileTransfer(const Context& context) : c_(context) {
  header_ = AlignedBytes(c_.format->header_bytes());
  bounce_ = AlignedBytes(kFileChunkBytes);
}

FileTransfer::~FileTransfer() {
  if (fd_ >= 0) End(StorageOutcome::kCancelled);
  std::free(header_);
  std::free(bounce_);
}

ObjectName FileTransfer::NameOf(const Context& context, const Digest256& key) {
  ObjectName n;
  const Digest256& fp = context.format->format().content_fingerprint;
  for (int i = 0; i < 8; ++i) n.fingerprint = n.fingerprint << 8 | fp[size_t(i)];
  n.key = key;
  return n;
}

int64_t FileTransfer::FileBytes(const ObjectFormat& format) {
  return AlignUp(format.header_bytes() + format.payload_bytes(), kFileAlign);
}

int FileTransfer::Fault(FileCall call, const std::string& path) const {
  return c_.place->faults() != nullptr ? c_.place->faults()->Before(call, path) : 0;
}

bool FileTransfer::Start(StorageOp op, const StorageItem& item) {
  op_ = op;
  item_ = &item;
  name_ = NameOf(c_, item.key);
  path_ = c_.place->ObjectPath(name_);
  generation_ = c_.place->generation();
  file_bytes_ = FileBytes(*c_.format);
  reserved_ = 0;
  span_ = span_at_ = 0;
  header_done_ = present_ = full_disk_ = false;
  evicted_objects_ = evicted_bytes_ = 0;
  outcome_ = StorageOutcome::kError;
  sum_.Reset();
  return op == StorageOp::kGet ? StartGet() : StartPut();
}

bool FileTransfer::StartGet() {
  if (const int e = Fault(FileCall::kOpenRead, path_); e != 0) return Fail(e);
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | (c_.direct ? O_DIRECT : 0));
  if (fd_ < 0) return Fail(errno);
  struct stat st {};
  if (const int e = Fault(FileCall::kStat, path_); e != 0) return Fail(e);
  if (::fstat(fd_, &st) != 0) return Fail(errno);
  if (!S_ISREG(st.st_mode) || st.st_size != file_bytes_) return End(StorageOutcome::kCorrupt);
  chunk_from_ = 0;
  chunk_bytes_ = 0;
  return NextChunk();
}

bool FileTransfer::StartPut() {
  bool exists = false;
  if (Probe(c_, item_->key, &exists) == StorageOutcome::kOk) {
    present_ = true;
    return End(StorageOutcome::kOk);
  }
  if (exists) c_.place->Remove(name_);  // damaged, of another generation, or not a file
  if (!c_.place->Reserve(file_bytes_, &evicted_objects_, &evicted_bytes_)) return End(StorageOutcome::kFull);
  reserved_ = file_bytes_;
  temp_ = c_.place->NewTempPath();
  if (const int e = Fault(FileCall::kOpenWrite, temp_); e != 0) return Fail(e);
  fd_ = ::open(temp_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | (c_.direct ? O_DIRECT : 0), 0644);
  if (fd_ < 0) return Fail(errno);
  if (::ftruncate(fd_, file_bytes_) != 0) return Fail(errno);
  const std::span<std::byte> header(header_, size_t(c_.format->header_bytes()));
  c_.format->Encode(item_->key, generation_, header);
  sum_.Add(header);
  chunk_from_ = c_.format->header_bytes();
  chunk_bytes_ = 0;
  return NextChunk();
}

// A chunk is [chunk_from_, + chunk_bytes_) of the file. A get's first chunk begins with the header; a put
// writes it last. A get's chunks come into the target itself and are hashed while they are still in the cache
// of this core; a bounce buffer in between was a third slower, though its copy could pass the caches by.
bool FileTransfer::NextChunk() {
  chunk_from_ += chunk_bytes_;
  const int64_t end = c_.format->header_bytes() + c_.format->payload_bytes();
  if (chunk_from_ == end) return op_ == StorageOp::kGet ? End(Verify()) : PlanHeaderWrite();
  iov_.clear();
  chunk_bytes_ = std::min(kFileChunkBytes, end - chunk_from_);
  int64_t payload = chunk_bytes_;
  const int64_t header = chunk_from_ == 0 ? c_.format->header_bytes() : 0;
  payload -= header;
  if (c_.direct) {
    iov_.push_back({bounce_, size_t(AlignUp(chunk_bytes_, kFileAlign))});
    if (op_ == StorageOp::kPut) {
      GatherSpans(payload, true);
      sum_.Add({bounce_, size_t(payload)});
      std::memset(bounce_ + payload, 0, size_t(AlignUp(payload, kFileAlign) - payload));
    }
    chunk_left_ = int64_t(iov_[0].iov_len);
  } else {
    if (header != 0) iov_.push_back({header_, size_t(header)});
    GatherSpans(payload, false);
    if (op_ == StorageOp::kPut)
      for (const iovec& v : iov_) sum_.Add({static_cast<const std::byte*>(v.iov_base), v.iov_len});
    chunk_left_ = chunk_bytes_;
  }
  return PlanIo(chunk_from_);
}

// Appends the next `bytes` of the item's spans to iov_ (neighbours merged), or copies them into the bounce
// buffer. May shorten the chunk when the list gets too long for one call.
void FileTransfer::GatherSpans(int64_t bytes, bool into_bounce) {
  int64_t at = 0;
  while (at < bytes) {
    const auto& s = item_->spans[span_];
    const size_t n = std::min(s.size() - span_at_, size_t(bytes - at));
    std::byte* p = s.data() + span_at_;
    if (into_bounce) {
      std::memcpy(bounce_ + at, p, n);
    } else if (!iov_.empty() && iov_.back().iov_base != header_ &&
               static_cast<std::byte*>(iov_.back().iov_base) + iov_.back().iov_len == p) {
      iov_.back().iov_len += n;
    } else if (iov_.size() == kMaxIov) {
      chunk_bytes_ -= bytes - at;
      return;
    } else if (n != 0) {
      iov_.push_back({p, n});
    }
    at += int64_t(n);
    span_at_ += n;
    if (span_at_ == s.size()) {
      ++span_;
      span_at_ = 0;
    }
  }
}

bool FileTransfer::PlanHeaderWrite() {
  ObjectFormat::PutChecksum(sum_.Finish(), {header_, size_t(c_.format->header_bytes())});
  header_done_ = true;
  chunk_from_ = 0;
  chunk_bytes_ = 0;
  iov_.assign(1, {header_, size_t(c_.format->header_bytes())});
  chunk_left_ = c_.format->header_bytes();
  return PlanIo(0);
}

bool FileTransfer::PlanIo(int64_t offset) {
  todo_ = iov_;
  io_ = {op_ == StorageOp::kPut, fd_, todo_.data(), int(todo_.size()), offset};
  return true;
}

bool FileTransfer::Advance(int64_t result) {
  if (const int e = Fault(io_.write ? FileCall::kWrite : FileCall::kRead, path_); e != 0) result = -e;
  if (result < 0) return Fail(int(-result));
  if (result == 0) return io_.write ? Fail(EIO) : End(StorageOutcome::kCorrupt);  // the file shrank under us
  chunk_left_ -= result;
  if (chunk_left_ > 0) {  // short: go on behind it
    size_t first = 0;
    int64_t skip = result;
    while (skip >= int64_t(todo_[first].iov_len)) skip -= int64_t(todo_[first++].iov_len);
    todo_.erase(todo_.begin(), todo_.begin() + long(first));
    todo_[0].iov_base = static_cast<std::byte*>(todo_[0].iov_base) + skip;
    todo_[0].iov_len -= size_t(skip);
    io_.iov = todo_.data();
    io_.iov_count = int(todo_.size());
    io_.offset += result;
    return true;
  }
  return TakeChunk();
}

bool FileTransfer::TakeChunk() {
  if (op_ == StorageOp::kGet) {
    const int64_t header = chunk_from_ == 0 ? c_.format->header_bytes() : 0;
    if (header != 0) {
      if (c_.direct) std::memcpy(header_, bounce_, size_t(header));
      const std::span<std::byte> h(header_, size_t(header));
      if (const StorageOutcome o = c_.format->CheckHeader(h, item_->key, generation_);
          o != StorageOutcome::kOk)
        return End(o);
      std::vector<std::byte> clean(h.begin(), h.end());
      ObjectFormat::PutChecksum(Checksum128{}, clean);
      sum_.Add(clean);
    }
    if (c_.direct) {
      ScatterBounce(header, chunk_bytes_ - header);
    } else {
      for (size_t i = header != 0 ? 1 : 0; i < iov_.size(); ++i)
        sum_.Add({static_cast<const std::byte*>(iov_[i].iov_base), iov_[i].iov_len});
    }
  } else if (header_done_) {
    const int e = [&] {
      if (::close(std::exchange(fd_, -1)) != 0) return errno;
      return c_.place->Publish(temp_, name_, std::exchange(reserved_, 0));
    }();
    temp_.clear();
    if (e == EEXIST) {
      present_ = true;
      return End(StorageOutcome::kOk);
    }
    return e == 0 ? End(StorageOutcome::kOk) : Fail(e);
  }
  return NextChunk();
}

void FileTransfer::ScatterBounce(int64_t from, int64_t payload) {
  const std::byte* p = bounce_ + from;
  sum_.Add({p, size_t(payload)});
  while (payload > 0) {
    const auto& s = item_->spans[span_];
    const size_t n = std::min(s.size() - span_at_, size_t(payload));
    if (n >= kStreamBytes) {
      StreamCopy(s.data() + span_at_, p, n);
    } else {
      std::memcpy(s.data() + span_at_, p, n);
    }
    p += n;
    payload -= int64_t(n);
    span_at_ += n;
    if (span_at_ == s.size()) {
      ++span_;
      span_at_ = 0;
    }
  }
}

StorageOutcome FileTransfer::Verify() {
  if (sum_.Finish() != ObjectFormat::ChecksumOf({header_, size_t(c_.format->header_bytes())}))
    return StorageOutcome::kCorrupt;
  c_.place->Touch(name_, fd_, file_bytes_);
  return StorageOutcome::kOk;
}

bool FileTransfer::Fail(int error) {
  if (op_ == StorageOp::kPut) {
    full_disk_ = error == ENOSPC || error == EDQUOT || error == EROFS || error == EFBIG;
    return End(full_disk_ ? StorageOutcome::kFull : StorageOutcome::kError);
  }
  return End(error == ENOENT  ? StorageOutcome::kMiss
             : error == ELOOP ? StorageOutcome::kCorrupt  // a symbolic link is none of our objects
                              : StorageOutcome::kError);
}

bool FileTransfer::End(StorageOutcome outcome) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  if (!temp_.empty()) ::unlink(temp_.c_str());
  temp_.clear();
  if (reserved_ != 0) c_.place->Unreserve(reserved_);
  reserved_ = 0;
  if (outcome == StorageOutcome::kCorrupt) c_.place->Remove(name_);
  outcome_ = outcome;
  return false;
}

StorageOutcome FileTransfer::Probe(const Context& context, const Digest256& key, bool* exists) {
  const ObjectName name = NameOf(context, key);
  const std::string path = context.place->ObjectPath(name);
  if (FileFaults* f = context.place->faults(); f != nullptr)
    if (f->Before(FileCall::kStat, path) != 0) return StorageOutcome::kError;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (exists != nullptr) *exists = fd >= 0 || errno != ENOENT;
  if (fd < 0) return errno == ENOENT ? StorageOutcome::kMiss : StorageOutcome::kError;
  struct stat st {};
  StorageOutcome outcome = StorageOutcome::kCorrupt;
  if (::fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == FileBytes(*context.format)) {
    std::vector<std::byte> header(size_t(context.format->header_bytes()));
    const ssize_t n = ::pread(fd, header.data(), header.size(), 0);
    outcome = n < 0
                  ? StorageOutcome::kError
                  : context.format->CheckHeader({header.data(), size_t(n)}, key, context.place->generation());
  }
  ::close(fd);
  return outcome;
}

}  // namespace sluice
