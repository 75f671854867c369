#include "storage/redis_connections.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <random>

namespace sluice {
namespace {

constexpr Nanos kGenerationAge = 50'000'000;

timeval ToTimeval(Nanos n) { return {time_t(n / 1'000'000'000), suseconds_t(n % 1'000'000'000 / 1000)}; }

bool IsError(const redisReply* r) { return r->type == REDIS_REPLY_ERROR; }
std::string_view Text(const redisReply* r) { return {r->str, size_t(r->len)}; }
std::string WhyBroken(const redisContext& c) {
  return c.err == REDIS_ERR_IO && (errno == EAGAIN || errno == EWOULDBLOCK) ? "no answer in time" : c.errstr;
}

}  // namespace

RedisStorage::Connections::Connections(const RedisStorageOptions& options, const Clock* clock)
    : options_(options), clock_(clock) {}

RedisStorage::Connections::Waiting::Waiting(Connections* owner, int fd) : owner_(owner) {
  std::lock_guard lock(owner_->interrupt_mutex_);
  owner_->waiting_fd_ = fd;
  if (owner_->interrupted_) ::shutdown(fd, SHUT_RDWR);
}

RedisStorage::Connections::Waiting::~Waiting() {
  std::lock_guard lock(owner_->interrupt_mutex_);
  owner_->waiting_fd_ = -1;
}

void RedisStorage::Connections::Interrupt() {
  std::lock_guard lock(interrupt_mutex_);
  interrupted_ = true;
  if (waiting_fd_ >= 0) ::shutdown(waiting_fd_, SHUT_RDWR);
}

// CRC16 (XMODEM) of the hash tag, modulo 16384: the cluster's rule.
uint32_t RedisStorage::Connections::SlotOf(std::string_view key) {
  const size_t open = key.find('{');
  if (open != std::string_view::npos) {
    const size_t close = key.find('}', open);
    if (close != std::string_view::npos && close != open + 1) key = key.substr(open + 1, close - open - 1);
  }
  uint32_t crc = 0;
  for (const char c : key) {
    crc ^= uint32_t(uint8_t(c)) << 8;
    for (int i = 0; i < 8; ++i) crc = (crc << 1 ^ (crc & 0x8000 ? 0x1021 : 0)) & 0xffff;
  }
  return crc & 16383;
}

redisContext* RedisStorage::Connections::Connect(const std::string& node, Nanos deadline) {
  if (interrupted_) return nullptr;
  Node& n = nodes_[node];
  if (n.context != nullptr) return n.context.get();
  const Nanos now = clock_->Now();
  if (n.failed_at != 0 && now - n.failed_at < options_.reconnect_pause) return nullptr;
  const timeval timeout = ToTimeval(std::clamp<Nanos>(deadline - now, 1'000'000, options_.connect_timeout));
  redisContext* c;
  if (node.empty() && !options_.unix_socket.empty()) {
    c = redisConnectUnixWithTimeout(options_.unix_socket.c_str(), timeout);
  } else {
    std::string host = options_.host;
    int port = options_.port;
    if (!node.empty()) {
      const size_t colon = node.rfind(':');
      if (colon != 0) host = node.substr(0, colon);  // an empty host means: the one we know
      port = std::atoi(node.c_str() + colon + 1);
    }
    c = redisConnectWithTimeout(host.c_str(), port, timeout);
  }
  n.context.reset(c);
  n.failed_at = 0;
  const auto failed = [&](std::string why) {
    last_error_ = std::move(why);
    n.context.reset();
    n.failed_at = clock_->Now();
    return nullptr;
  };
  if (c == nullptr || c->err != 0) return failed(c == nullptr ? "no memory" : c->errstr);
  redisSetTimeout(c, timeout);
  const auto expect_ok = [&](std::vector<const char*> argv) {
    const Waiting waiting(this, c->fd);
    RedisReply r(static_cast<redisReply*>(redisCommandArgv(c, int(argv.size()), argv.data(), nullptr)));
    if (r != nullptr && !IsError(r.get())) return true;
    last_error_ = r == nullptr ? WhyBroken(*c) : std::string(Text(r.get()));
    return false;
  };
  if (!options_.password.empty()) {
    std::vector<const char*> auth = {"AUTH"};
    if (!options_.username.empty()) auth.push_back(options_.username.c_str());
    auth.push_back(options_.password.c_str());
    if (!expect_ok(auth)) return failed(last_error_);
  }
  const std::string database = std::to_string(options_.database);
  if (options_.database != 0 && !expect_ok({"SELECT", database.c_str()})) return failed(last_error_);
  return c;
}

RedisReply RedisStorage::Connections::Call(const std::string& node,
                                           const std::vector<std::string_view>& arguments, Nanos deadline) {
  redisContext* c = Connect(node, deadline);
  if (c == nullptr) return nullptr;
  const Nanos now = clock_->Now();
  if (now >= deadline) return nullptr;
  redisSetTimeout(c, ToTimeval(std::clamp<Nanos>(deadline - now, 1'000'000, options_.io_timeout)));
  std::vector<const char*> argv;
  std::vector<size_t> lengths;
  for (std::string_view a : arguments) {
    argv.push_back(a.data());
    lengths.push_back(a.size());
  }
  RedisReply r;
  {
    const Waiting waiting(this, c->fd);
    r.reset(static_cast<redisReply*>(redisCommandArgv(c, int(argv.size()), argv.data(), lengths.data())));
    if (r == nullptr) last_error_ = WhyBroken(*c);
  }
  if (r == nullptr) {  // broken, or a reply that would come late and be taken for another's: this connection
                       // is spent
    Node& n = nodes_[node];
    n.context.reset();
    n.failed_at = 0;
  }
  return r;
}

RedisReply RedisStorage::Connections::Command(std::vector<std::string_view> arguments, Nanos deadline) {
  const uint32_t slot = arguments.size() > 1 ? SlotOf(arguments[1]) : 0;
  std::string node;
  if (auto it = slot_node_.find(slot); it != slot_node_.end()) node = it->second;
  bool retried = false;
  for (int hop = 0; hop < 5; ++hop) {
    const bool fresh = nodes_[node].context == nullptr;
    RedisReply r = Call(node, arguments, deadline);
    if (r == nullptr) {
      // A connection that had been idle may have been closed long ago: once more on a new one. A node that is
      // gone: ask the configured one where the slot is now.
      if (retried || clock_->Now() >= deadline || (fresh && node.empty())) return nullptr;
      retried = true;
      if (!node.empty()) {
        slot_node_.erase(slot);
        node.clear();
      }
      continue;
    }
    if (!IsError(r.get())) return r;
    const std::string text(Text(r.get()));
    const bool moved = text.starts_with("MOVED "), ask = text.starts_with("ASK ");
    if (!moved && !ask) return r;
    node = text.substr(text.rfind(' ') + 1);
    if (moved) {
      slot_node_[slot] = node;
    } else if (Call(node, {"ASKING"}, deadline) == nullptr) {
      return nullptr;
    }
  }
  last_error_ = "redirected too often";
  return nullptr;
}

uint64_t RedisStorage::Connections::Generation(Nanos deadline) {
  const Nanos now = clock_->Now();
  if (generation_at_ != 0 && now - generation_at_ < kGenerationAge) return generation_;
  const std::string key = options_.prefix + ":generation";
  for (int attempt = 0; attempt < 2; ++attempt) {
    RedisReply r = Command({"GET", key}, deadline);
    if (r == nullptr) return 0;
    uint64_t g = 0;
    if (r->type == REDIS_REPLY_STRING && std::from_chars(r->str, r->str + r->len, g).ec == std::errc() &&
        g != 0) {
      generation_ = g;
      generation_at_ = now;
      return g;
    }
    if (IsError(r.get())) {
      last_error_ = std::string(Text(r.get()));
      return 0;
    }
    if (r->type != REDIS_REPLY_NIL) break;
    std::random_device random;  // INCR needs a signed 64-bit number with room above
    const std::string fresh = std::to_string((uint64_t(random()) << 30 ^ random()) | 1);
    Command({"SET", key, fresh, "NX"}, deadline);
  }
  last_error_ = key + " is not a number; delete it";
  return 0;
}

Status RedisStorage::Connections::DeleteAll(Nanos deadline) {
  std::vector<std::string> nodes = {""};
  for (const auto& [slot, node] : slot_node_)
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
  const std::string pattern = options_.prefix + ":{*";
  for (const std::string& node : nodes) {
    std::string cursor = "0";
    do {
      RedisReply r = Call(node, {"SCAN", cursor, "MATCH", pattern, "COUNT", "1000"}, deadline);
      if (r == nullptr || r->type != REDIS_REPLY_ARRAY || r->elements != 2)
        return Unavailable("redis SCAN: {}; the objects left over are misses until they are evicted",
                           last_error_);
      cursor = std::string(Text(r->element[0]));
      for (size_t i = 0; i < r->element[1]->elements; ++i)
        Command({"UNLINK", Text(r->element[1]->element[i])}, deadline);
    } while (cursor != "0");
  }
  return OkStatus();
}

}  // namespace sluice
