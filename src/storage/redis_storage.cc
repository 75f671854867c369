#include "storage/redis_storage.h"

#include <signal.h>

#include <cstring>

#include "storage/redis_connections.h"

namespace sluice {
namespace {
std::string_view Text(const redisReply& r) { return {r.str, size_t(r.len)}; }
std::span<const std::byte> Bytes(const redisReply& r) {
  return {reinterpret_cast<const std::byte*>(r.str), size_t(r.len)};
}
}  // namespace

RedisStorage::RedisStorage(StorageFormat format, const RedisStorageOptions& options)
    : object_(std::move(format), 64),
      options_(options),
      clock_(options.clock != nullptr ? options.clock : &steady_),
      fingerprint_hex_(Hex(object_.format().content_fingerprint).substr(0, 16)),
      ledger_(options.max_batches, object_.payload_bytes()) {}

StatusOr<std::unique_ptr<RedisStorage>> RedisStorage::Open(StorageFormat format,
                                                           const RedisStorageOptions& options) {
  if (format.piece_bytes.empty() || format.object_bytes() <= 0 || format.object_bytes() > (500 << 20))
    return Invalid("storage format: an object of {} bytes; redis holds 1 byte to 500 MiB",
                   format.object_bytes());
  auto s = std::unique_ptr<RedisStorage>(new RedisStorage(std::move(format), options));
  for (int i = 0; i < std::max(1, options.threads); ++i)
    s->connections_.push_back(std::make_unique<Connections>(s->options_, s->clock_));
  if (s->connections_[0]->Generation(s->clock_->Now() + options.connect_timeout + options.io_timeout) == 0)
    return Unavailable(
        "redis at {}: {}; start the server, or correct host, port or password",
        options.unix_socket.empty() ? fmt::format("{}:{}", options.host, options.port) : options.unix_socket,
        s->connections_[0]->last_error());
  for (auto& c : s->connections_) s->threads_.emplace_back([r = s.get(), c = c.get()] { r->Run(c); });
  return s;
}

RedisStorage::~RedisStorage() {
  ledger_.CancelAll();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  queued_.notify_all();
  for (auto& c : connections_) c->Interrupt();  // a server that hangs must not hold the end up
  for (auto& t : threads_) t.join();
}

std::string RedisStorage::Describe() const {
  return fmt::format("redis {} ({} threads), objects of {} bytes",
                     options_.unix_socket.empty() ? fmt::format("{}:{}", options_.host, options_.port)
                                                  : options_.unix_socket,
                     threads_.size(), object_.payload_bytes());
}

std::string RedisStorage::KeyOf(const Digest256& key) const {
  return fmt::format("{}:{{{}}}:{}", options_.prefix, Hex(key), fingerprint_hex_);
}

StatusOr<StorageTicket> RedisStorage::Submit(StorageBatch batch) {
  if (Status s = CheckBatch(format(), batch); !s.ok()) return s;
  const Nanos limit = clock_->Now() + options_.io_timeout * Nanos(batch.items.size());
  batch.deadline = batch.deadline == 0 ? limit : std::min(batch.deadline, limit);
  auto accepted = ledger_.Accept(std::move(batch));
  if (!accepted.ok()) return accepted.status();
  const StorageTicket ticket = (*accepted)->ticket;
  const size_t n = (*accepted)->batch.items.size();
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < n; ++i) queue_.push_back({*accepted, i});
  }
  queued_.notify_all();
  return ticket;
}

void RedisStorage::Run(Connections* connections) {
  sigset_t
      broken_pipe;  // a write to a server that is gone fails by its result; hiredis does not ask for that
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr);
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      queued_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    ledger_.Finish(task.batch.get(), task.item, Perform(connections, task));
  }
}

StorageOutcome RedisStorage::Perform(Connections* connections, const Task& task) {
  InFlightBatch& b = *task.batch;
  if (const StorageOutcome stop = b.StopReason(clock_->Now()); stop != StorageOutcome::kOk) return stop;
  const StorageItem& item = b.batch.items[task.item];
  const Nanos deadline = b.batch.deadline;
  StorageOutcome outcome = StorageOutcome::kError;
  bool present = false;
  switch (b.batch.op) {
    case StorageOp::kPut:
      outcome = Put(connections, item, deadline, &present);
      break;
    case StorageOp::kGet:
      outcome = Get(connections, item, deadline);
      break;
    case StorageOp::kExists:
      outcome = Exists(connections, item.key, deadline);
      break;
    case StorageOp::kDelete:
      if (RedisReply r = connections->Command({"UNLINK", KeyOf(item.key)}, deadline))
        outcome = r->type == REDIS_REPLY_INTEGER ? StorageOutcome::kOk : StorageOutcome::kError;
      break;
  }
  if (present) ledger_.CountPresent();
  if (outcome == StorageOutcome::kError) {
    if (const StorageOutcome stop = b.StopReason(clock_->Now()); stop != StorageOutcome::kOk) return stop;
  }
  return outcome;
}

StorageOutcome RedisStorage::Exists(Connections* connections, const Digest256& key, Nanos deadline) {
  const uint64_t generation = connections->Generation(deadline);
  if (generation == 0) return StorageOutcome::kError;
  const std::string last = std::to_string(object_.header_bytes() - 1);
  RedisReply r = connections->Command({"GETRANGE", KeyOf(key), "0", last}, deadline);
  if (r == nullptr) return StorageOutcome::kError;
  if (r->type != REDIS_REPLY_STRING) return StorageOutcome::kCorrupt;
  if (r->len == 0) return StorageOutcome::kMiss;
  return object_.CheckHeader(Bytes(*r), key, generation);
}

StorageOutcome RedisStorage::Put(Connections* connections, const StorageItem& item, Nanos deadline,
                                 bool* present) {
  if (clock_->Now() < full_until_.load()) return StorageOutcome::kFull;
  const StorageOutcome there = Exists(connections, item.key, deadline);
  if (there == StorageOutcome::kOk) *present = true;
  if (there == StorageOutcome::kOk || there == StorageOutcome::kError) return there;
  const uint64_t generation = connections->Generation(deadline);
  if (generation == 0) return StorageOutcome::kError;
  const size_t header = size_t(object_.header_bytes());
  std::string value(header + size_t(object_.payload_bytes()), '\0');
  std::byte* out = reinterpret_cast<std::byte*>(value.data());
  object_.Encode(item.key, generation, {out, header});
  size_t at = header;
  for (const auto& s : item.spans) {
    std::memcpy(out + at, s.data(), s.size());
    at += s.size();
  }
  ChecksumStream sum;
  sum.Add({out, value.size()});
  ObjectFormat::PutChecksum(sum.Finish(), {out, header});
  const std::string key = KeyOf(item.key), ttl = std::to_string(options_.ttl_s);
  std::vector<std::string_view> command = {"SET", key, value};
  if (options_.ttl_s > 0) command.insert(command.end(), {"EX", ttl});
  RedisReply r = connections->Command(std::move(command), deadline);
  if (r == nullptr) return StorageOutcome::kError;
  if (r->type == REDIS_REPLY_STATUS) return StorageOutcome::kOk;
  if (Text(*r).starts_with("OOM") || Text(*r).starts_with("MISCONF") || Text(*r).starts_with("READONLY")) {
    full_until_ = clock_->Now() + options_.full_pause;
    return StorageOutcome::kFull;
  }
  return StorageOutcome::kError;
}

StorageOutcome RedisStorage::Get(Connections* connections, const StorageItem& item, Nanos deadline) {
  const uint64_t generation = connections->Generation(deadline);
  if (generation == 0) return StorageOutcome::kError;
  const std::string key = KeyOf(item.key);
  RedisReply r = connections->Command({"GET", key}, deadline);
  if (r == nullptr) return StorageOutcome::kError;
  if (r->type == REDIS_REPLY_NIL) return StorageOutcome::kMiss;
  const size_t header = size_t(object_.header_bytes());
  StorageOutcome outcome = StorageOutcome::kCorrupt;
  if (r->type == REDIS_REPLY_STRING && size_t(r->len) == header + size_t(object_.payload_bytes())) {
    const std::span<const std::byte> value = Bytes(*r);
    outcome = object_.CheckHeader(value.first(header), item.key, generation);
    if (outcome == StorageOutcome::kOk) {
      std::vector<std::byte> clean(value.begin(), value.begin() + long(header));
      ObjectFormat::PutChecksum(Checksum128{}, clean);
      ChecksumStream sum;
      sum.Add(clean);
      size_t at = header;
      for (const auto& s : item.spans) {
        std::memcpy(s.data(), value.data() + at, s.size());
        sum.Add(s);
        at += s.size();
      }
      if (sum.Finish() != ObjectFormat::ChecksumOf(value)) outcome = StorageOutcome::kCorrupt;
    }
  } else if (r->type == REDIS_REPLY_ERROR && !Text(*r).starts_with("WRONGTYPE")) {
    return StorageOutcome::kError;
  }
  if (outcome == StorageOutcome::kCorrupt) connections->Command({"UNLINK", key}, deadline);
  return outcome;
}

Status RedisStorage::Clear() {
  Connections own(options_, clock_);
  const Nanos deadline = clock_->Now() + 60'000'000'000;
  if (own.Generation(deadline) == 0) return Unavailable("redis: {}", own.last_error());
  RedisReply r = own.Command({"INCR", options_.prefix + ":generation"}, deadline);
  if (r == nullptr || r->type != REDIS_REPLY_INTEGER)
    return Unavailable("redis INCR {}:generation: {}; nothing was cleared", options_.prefix,
                       r == nullptr ? own.last_error() : std::string(Text(*r)));
  return own.DeleteAll(deadline);
}

StorageStats RedisStorage::Stats() const {
  StorageStats s = ledger_.Stats();
  s.writes_suspended = clock_->Now() < full_until_.load();
  return s;
}

}  // namespace sluice
