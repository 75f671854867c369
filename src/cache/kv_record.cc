#include "cache/kv_record.h"

#include <algorithm>
#include <random>
#include <utility>

namespace sluice {
namespace {
uint64_t KeyedHash(std::span<const int32_t> values, uint64_t key) {
  uint64_t h = key ^ (values.size() * 0x9E3779B97F4A7C15ull);
  for (const int32_t v : values) {
    h = (h ^ uint32_t(v)) * 0xE7037ED1A0B428DBull;
    h ^= h >> 29;
  }
  return h;
}
}  // namespace

KvRecorder::KvRecorder(const Clock* clock, std::function<void(const std::string&)> write,
                       KvRecordLimits limits)
    : clock_(clock),
      write_(std::move(write)),
      limits_(limits),
      seed_((uint64_t(std::random_device()()) << 32) | std::random_device()()),
      allowance_(double(limits.burst)),
      last_(clock->Now()) {}

bool KvRecorder::Admit() {
  const Nanos now = clock_->Now();
  allowance_ = std::min(double(limits_.burst), allowance_ + double(now - last_) * 1e-9 * limits_.per_second);
  last_ = now;
  if (allowance_ < 1) {
    ++left_out_;
    ++left_out_total_;
    return false;
  }
  allowance_ -= 1;
  return true;
}

void KvRecorder::Write(std::string_view label, std::string text) {
  std::string name(label.substr(0, limits_.label_bytes));
  for (char& c : name)
    if (c <= ' ' || c > '~') c = '?';  // a client's name must not make lines or colours of its own
  std::string line = fmt::format("kv {} {}", name.empty() ? "-" : name, text);
  if (left_out_ > 0) line += fmt::format(" ({} records left out before)", std::exchange(left_out_, 0));
  write_(line);
}

std::string_view KvRecorder::OwnerOf(uint64_t node) const {
  const auto it = owner_.find(node);
  return it == owner_.end() ? std::string_view() : std::string_view(it->second);
}

std::string KvRecorder::TokensText(std::span<const int32_t> tokens) const {
  return fmt::format("{} tokens #{:016x}", tokens.size(), KeyedHash(tokens, seed_));
}

std::string KvRecorder::PagesText(std::span<const int32_t> pages) const {
  if (pages.empty()) return "0 pages";
  return fmt::format("{} pages {}..{} #{:016x}", pages.size(), pages.front(), pages.back(),
                     KeyedHash(pages, seed_));
}

void KvRecorder::Match(std::string_view label, std::span<const int32_t> tokens, const CachedTokens& hit) {
  if (!Admit()) return;
  Write(label, fmt::format("match: {}; l1 {}, l2 {}, l3 {}, to compute {}", TokensText(tokens), hit.device,
                           hit.host, hit.storage, int64_t(tokens.size()) - hit.total()));
}

void KvRecorder::Load(std::string_view label, int64_t op, std::span<const int32_t> device,
                      std::span<const int32_t> host) {
  if (!Admit()) return;
  Write(label, fmt::format("load {}: host {} to device {}", op, PagesText(host), PagesText(device)));
}

void KvRecorder::Prefetch(std::string_view label, std::span<const int32_t> tokens, int64_t from_page,
                          int64_t pages) {
  if (!Admit()) return;
  Write(label, fmt::format("prefetch: {}, pages {}..{} asked", TokensText(tokens), from_page,
                           from_page + pages - 1));
}

void KvRecorder::Insert(std::string_view label, uint64_t node, std::span<const int32_t> tokens,
                        int64_t from_page, std::span<const int32_t> pages, int64_t swapped) {
  if (owner_.size() >= limits_.owners_kept) owner_.clear();
  owner_[node] = std::string(label.substr(0, limits_.label_bytes));
  if (!Admit()) return;
  Write(label, fmt::format("insert: {} from page {} on: {}, {} were there", TokensText(tokens), from_page,
                           PagesText(pages), swapped));
}

void KvRecorder::BackupAttach(uint64_t node, int64_t op, std::span<const int32_t> device,
                              std::span<const int32_t> host) {
  if (!Admit()) return;
  Write(OwnerOf(node),
        fmt::format("backup {} attach: device {} to host {}", op, PagesText(device), PagesText(host)));
}

void KvRecorder::BackupCommit(uint64_t node, int64_t op, bool ok, int64_t pages) {
  if (!Admit()) return;
  Write(OwnerOf(node), fmt::format("backup {} {}: {} pages", op, ok ? "commit" : "failed", pages));
}

void KvRecorder::Evict(uint64_t node, std::string_view tier, std::span<const int32_t> pages) {
  if (!Admit()) return;
  Write(OwnerOf(node), fmt::format("evict {}: {}", tier, PagesText(pages)));
}

void KvRecorder::SendChunk(std::string_view label, int64_t start, int64_t end, int32_t from_page,
                           int32_t end_page, int32_t lane, std::span<const int32_t> kept,
                           std::span<const int32_t> destination) {
  if (!Admit()) return;
  Write(label,
        fmt::format("send: tokens [{}, {}) register pages [{}, {}) of the prompt; rank {} owns {}, to {}",
                    start, end, from_page, end_page, lane, PagesText(kept), PagesText(destination)));
}

void KvRecorder::Reserve(std::string_view label, int32_t from_page, std::span<const int32_t> pages) {
  if (!Admit()) return;
  Write(label, fmt::format("reserve: from page {} of the prompt on: {}", from_page, PagesText(pages)));
}

}  // namespace sluice
